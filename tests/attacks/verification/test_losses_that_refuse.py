"""Losses that raise for some targets, or of which targets are not told: nothing is confirmed that nobody could ask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from support.function_losses import (
    CLASSES,
    Mixed,
    RefusedError,
    claimed,
    convolutional,
    entropy,
    focal,
    labels_of,
    network,
    now_and_then,
    own_batch_alone,
    own_output,
    pictures,
    seen,
    smoothed,
    two_classes_alone,
)
from torch import Tensor
from torch.nn import functional

from attacks.analytic.spear import Spear
from attacks.base import Attack, NotApplicable, Reconstruction, Remark, build
from attacks.verification.words import TARGETS_REFUSED
from fl.losses.function import GivenFunction


def test_a_loss_that_takes_no_batch_of_one_class_is_asked_with_none() -> None:
    result = Spear(samples=2_000)(seen(network(), two_classes_alone, two_classes_alone, pictures(3), labels_of(3)))
    assert not isinstance(result, Reconstruction) or not result.verified


@pytest.mark.parametrize("attack", [build("analytic"), Spear(samples=20_000)])
def test_a_loss_that_refuses_batches_of_one_class_is_asked_with_others(attack: Attack) -> None:
    """Each picture with each class, beside pictures of others."""
    loss, images, labels = GivenFunction(call=two_classes_alone, targets="classes"), pictures(3), labels_of(3)
    result = attack(seen(network(), smoothed(0.1), loss, images, labels))
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.labels is not None
    off = (result.inputs[:, None] - images).abs().flatten(2).amax(-1)
    assert torch.equal(result.labels, labels[off.argmin(1)])
    assert result.verified is True
    assert Remark.LABELS_CONFIRMED in result.remarks
    wrong = claimed(seen(network(), entropy, loss, images, labels), images)
    assert (bool(wrong.verified), wrong.approximate) == (False, False)


@pytest.mark.parametrize("known", [True, False])
def test_one_picture_of_a_loss_that_refuses_it_is_asked_under_any_loss(known: bool) -> None:
    loss = GivenFunction(call=two_classes_alone, targets="classes")
    view = seen(network(), smoothed(0.1), loss, pictures(1), labels_of(1))
    view = replace(view, labels=labels_of(1)) if known else view
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert (result.verified, result.labels) == (True, None)
    for wrong in (pictures(2)[1:], 1.02 * pictures(1)):
        assert not claimed(view, wrong).verified
        assert not claimed(view, wrong).approximate
    without = network()
    without[1].bias = without[3].bias = None  # type: ignore[operator, index]
    refused = build("analytic")(seen(without, smoothed(0.1), loss, pictures(1), labels_of(1)))
    assert isinstance(refused, NotApplicable)
    assert refused.reason.startswith("the loss function raised RefusedError: needs two classes")


@pytest.mark.parametrize("name", ["own batch alone", "now and then"])
@pytest.mark.parametrize(
    ("attack", "count"),
    [(build("analytic"), 1), (build("cascade"), 1), (build("analytic"), 3), (Spear(samples=2_000), 3)],
)
def test_no_loss_ends_an_attack_in_an_error_or_confirms_labels_that_nobody_could_ask(
    attack: Attack, name: str, count: int
) -> None:
    call = own_batch_alone if name == "own batch alone" else now_and_then(itertools.count())
    loss, images, labels = GivenFunction(call=call, targets="classes"), pictures(count), labels_of(count)
    for model in (network(), convolutional()):
        result = attack(seen(model, smoothed(0.1), loss, images, labels))
        assert not isinstance(result, Reconstruction) or Remark.LABELS_CONFIRMED not in result.remarks
        assert not isinstance(result, Reconstruction) or count == 1 or not result.verified
    found = claimed(seen(network(), smoothed(0.1), loss, images, labels), images, labels)
    if count == 1 and name == "own batch alone":
        assert found.verified  # under any loss
    elif name != "own batch alone":
        assert found.note.endswith("the loss function raised RefusedError: not now")


def test_targets_that_a_loss_refuses_leave_a_batch_unasked() -> None:
    loss = GivenFunction(call=own_batch_alone, targets="classes")
    found = claimed(seen(network(), smoothed(0.1), loss, pictures(2), labels_of(2)), pictures(2), labels_of(2))
    assert (found.verified, found.note) == (None, TARGETS_REFUSED)
    assert Remark.UNASKED in found.remarks


def test_whether_what_flows_back_has_one_direction_is_asked_beside_other_classes() -> None:
    def refusing(outputs: Tensor, labels: Tensor) -> Tensor:
        if len(labels.unique()) < 2:
            raise RefusedError("needs two classes")
        return own_output(outputs, labels)

    for call, one in ((two_classes_alone, False), (refusing, True), (own_batch_alone, True), (focal, False)):
        loss = GivenFunction(call=call, targets="classes")
        assert loss.sends_back_one_direction(torch.Size([CLASSES])) is one


def test_labels_that_nothing_tells_leave_a_batch_unasked() -> None:
    """Where the attack did not find them, either."""
    images = pictures(3)
    for loss in (focal, "cross-entropy"):
        view = seen(network(end=Mixed()), focal if loss is focal else entropy, loss, images, labels_of(3))
        found = claimed(view, images)
        assert (found.verified, found.approximate) == (None, False)
        assert "the targets are unknown" in found.note
        assert claimed(view, images, labels_of(3)).verified is True
    asked = torch.tensor([[1.0], [0.0], [1.0]])
    view = seen(network(1), functional.binary_cross_entropy_with_logits, "bce", images, asked)
    for found, told in ((claimed(view, images), False), (claimed(view, images, asked), True)):
        assert ("the targets are unknown" in found.note, bool(found.approximate or found.verified)) == (not told, told)
