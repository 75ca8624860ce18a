"""Batches under a loss that is given as a function: confirmed where the update is theirs under it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.function_losses import (
    LOSSES,
    SHAPE,
    Function,
    Mixed,
    claimed,
    convolutional,
    entropy,
    focal,
    labels_of,
    network,
    own_output,
    pictures,
    seen,
    smoothed,
    weighted,
)
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.spear import Spear
from attacks.base import NotApplicable, Reconstruction, Remark, build
from attacks.labels.assignment import assign_labels
from attacks.update.label_gradients import LabelGradients
from attacks.verification.words import UNDER_ANOTHER_LOSS
from fl.seeds import stream
from fl.view import ServerView


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("make", "count"), [(network, 8), (convolutional, 2)])
def test_a_batch_is_confirmed_in_whatever_order_it_is_found(
    make: Callable[[], nn.Module], count: int, name: str
) -> None:
    images, labels = pictures(count), labels_of(count)
    view = seen(make(), LOSSES[name], LOSSES[name], images, labels)
    order = torch.arange(count).flip(0)
    found = assign_labels(view, view.update, images[order])
    assert found is not None
    assert torch.equal(found, labels[order])
    assert claimed(view, images[order]).verified is True


@pytest.mark.parametrize("name", ["smoothed", "focal", "module"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_attack_finds_and_confirms_pictures_and_labels(count: int, name: str) -> None:
    images, labels = pictures(count), labels_of(count)
    result = Spear(samples=20_000)(seen(network(), LOSSES[name], LOSSES[name], images, labels))
    assert isinstance(result, Reconstruction)
    assert result.verified is True, result.note
    assert result.inputs is not None
    assert result.labels is not None
    off = (result.inputs[:, None] - images).abs().flatten(2).amax(-1)
    assert float(off.amin(1).max()) < 1e-3
    assert torch.equal(result.labels, labels[off.argmin(1)])


WRONG: dict[str, tuple[Function, object]] = {
    "smoothing stated": (entropy, smoothed(0.1)),
    "smoothing not stated": (smoothed(0.1), "cross-entropy"),
    "more smoothing": (smoothed(0.1), smoothed(0.12)),
    "focal stated": (entropy, focal),
    "another gamma": (focal, partial(focal, gamma=1.9)),
    "weights stated": (entropy, weighted),
    "weights not stated": (weighted, entropy),
    "margin": (functional.multi_margin_loss, focal),
}


@pytest.mark.parametrize("name", WRONG)
def test_under_a_loss_stated_wrongly_nothing_is_verified(name: str) -> None:
    made, stated = WRONG[name]
    images, labels = pictures(3), labels_of(3)
    view = seen(network(), made, stated, images, labels)
    for told in (None, labels):
        found = claimed(view, images, told)
        assert (bool(found.verified), found.approximate) == (False, False)
    result = Spear(samples=2_000)(view)
    assert not isinstance(result, Reconstruction) or not (result.verified or result.approximate)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("told", [True, False])
def test_a_batch_that_another_loss_explains_is_said_to_be_of_another(name: str, told: bool) -> None:
    made, stated = WRONG[name]
    images, labels = pictures(3), labels_of(3)
    found = claimed(seen(network(), made, stated, images, labels), images, labels if told else None)
    assert not found.verified
    assert not found.approximate
    assert Remark.OTHER_LOSS in found.remarks
    assert UNDER_ANOTHER_LOSS in found.note
    for wrong in (pictures(4)[1:], 1.1 * images):  # some of the batch, or brighter
        other = claimed(seen(network(), made, stated, images, labels), wrong, labels if told else None)
        assert not other.verified
        assert Remark.OTHER_LOSS not in other.remarks or torch.equal(wrong, 1.1 * images)


def test_analytic_finds_a_batch_under_another_loss_and_confirms_none() -> None:
    for made, stated in ((smoothed(0.1), "cross-entropy"), (entropy, weighted)):
        images, labels = pictures(3), labels_of(3)
        result = build("analytic")(seen(network(), made, stated, images, labels))
        assert isinstance(result, Reconstruction)
        assert result.inputs is not None
        assert float((result.inputs[:, None] - images).abs().flatten(2).amax(-1).amin(1).max()) < 1e-3
        assert (bool(result.verified), result.approximate) == (False, False)
        assert Remark.OTHER_LOSS in result.remarks
        fewer = seen(network(), made, stated, images, labels, 2)  # more were fed than stated
        assert isinstance(build("analytic")(fewer), NotApplicable)


def test_a_loss_of_which_no_class_fits_is_said_to_be_another() -> None:
    """In place of asking for labels that could not help."""
    images, labels = pictures(3), labels_of(3)
    found = claimed(seen(network(), own_output, "cross-entropy", images, labels), images)
    assert (found.verified, found.note) == (None, f"not confirmed: {UNDER_ANOTHER_LOSS}")
    assert found.remarks == {Remark.UNASKED, Remark.OTHER_LOSS}


@pytest.mark.parametrize("name", ["of one tensor", "end", "bce"])
def test_another_loss_is_not_blamed_for_what_is_none_or_what_nobody_asked(name: str) -> None:
    images, labels = pictures(3), labels_of(3)
    if name == "of one tensor":  # a step size of its own
        view = seen(network(), focal, focal, images, labels)
        view = replace(view, update={n: v * (2.0 if n == "1.bias" else 1.0) for n, v in view.update.items()})  # type: ignore[operator]
    elif name == "end":
        view = seen(network(end=Mixed()), focal, focal, images, labels)
    else:
        view = seen(
            network(1), functional.binary_cross_entropy_with_logits, "bce", images, (labels[:, None] % 2).float()
        )
    found = claimed(view, images)
    assert not found.verified
    assert Remark.OTHER_LOSS not in found.remarks


@pytest.mark.parametrize("name", ["smoothed", "focal", "weighted", "margin"])
def test_other_pictures_than_those_of_the_batch_are_not_verified(name: str) -> None:
    """Mixtures, brighter ones, one in place of another, one twice, and some of the batch stated as all of it."""
    images, labels = pictures(4), labels_of(4)
    view = seen(network(), LOSSES[name], LOSSES[name], images, labels)
    mixed, brighter, other, twice = (images.clone() for _ in range(4))
    mixed[0], mixed[1] = 0.9 * images[0] + 0.1 * images[1], 0.9 * images[1] + 0.1 * images[0]
    brighter[2] = 1.02 * brighter[2]
    other[3] = torch.rand(SHAPE, generator=stream(1, "other"))
    twice[1] = images[0]
    for wrong in (mixed, brighter, other, twice, images.mean(0, keepdim=True).expand_as(images)):
        found = claimed(view, wrong, labels)
        assert (bool(found.verified), found.approximate) == (False, False)
    assert not claimed(replace(view, batch_size=3, schedule=(((3,),),)), images[:3], labels[:3]).verified


@pytest.mark.parametrize("name", ["smoothed", "focal", "weighted"])
def test_pictures_nearly_alike_stated_as_fewer_are_not_verified(name: str) -> None:
    images, labels = pictures(3), labels_of(3)
    drawn = torch.randn(SHAPE, generator=stream(2, "alike"))
    pair = torch.stack([images[0] + 0.015 * drawn, images[0] - 0.015 * drawn])  # about 30 dB
    whole, own = torch.cat([pair, images[1:]]), torch.cat([labels[:1], labels])
    view = seen(network(), LOSSES[name], LOSSES[name], whole, own, 3)
    assert not claimed(view, images).verified
    one = seen(network(), LOSSES[name], LOSSES[name], pair, labels[:1].expand(2), 1)
    assert not claimed(one, images[:1]).verified


@pytest.mark.parametrize("alike", [True, False])
def test_a_picture_that_is_there_twice_is_verified_as_two_and_only_with_labels_that_are_told(alike: bool) -> None:
    images, labels = pictures(2), labels_of(2)
    whole, own = torch.cat([images, images[:1]]), torch.cat([labels, labels[:1] + (not alike)])
    view = seen(network(), focal, focal, whole, own)
    told = assign_labels(view, view.update, whole)
    assert (None if told is None else told.tolist()) == (own.tolist() if alike else None)
    assert bool(claimed(view, whole).verified) is alike
    assert claimed(view, whole, own).verified is True
    for wrong in (replace(view, batch_size=2, schedule=(((2,),),)), seen(network(), focal, focal, images, labels, 3)):
        assert not claimed(wrong, images if wrong.batch_size == 2 else whole).verified
    result = Spear(samples=20_000)(view)  # which hands out each picture once
    assert not isinstance(result, Reconstruction) or not result.verified


def by_pairs_of_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of three classes that each have two labels."""
    return entropy(outputs, torch.tensor([0, 0, 1, 1, 2, 2])[labels])


@pytest.mark.parametrize("count", [1, 3])
def test_labels_are_not_told_where_others_make_the_update_as_well(count: int) -> None:
    images, labels = pictures(count), torch.tensor([5, 3, 1])[:count]
    view = seen(network(), by_pairs_of_classes, by_pairs_of_classes, images, labels)
    found = claimed(view, images)
    assert found.verified is True
    assert found.labels is None
    assert "another label makes all of the update" in found.note
    assert Remark.LABELS_CONFIRMED not in found.remarks
    other = claimed(seen(network(), focal, focal, images, labels), images)
    assert other.labels is not None
    assert torch.equal(other.labels, labels)
    assert Remark.LABELS_CONFIRMED in other.remarks


def test_pictures_and_labels_are_asked_with_one_evaluation_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LabelGradients] = []
    evaluate = LabelGradients.of

    def counted(view: ServerView, given: Tensor, names: Any) -> LabelGradients:
        found = evaluate(view, given, names)
        if view.dtype == torch.float64 and torch.equal(given.double(), images.double()):
            made.append(found)
        return found

    monkeypatch.setattr(LabelGradients, "of", counted)
    images, labels = pictures(3), labels_of(3)
    found = claimed(seen(network(), focal, focal, images, labels), images)
    assert found.verified is True
    assert Remark.LABELS_CONFIRMED in found.remarks
    assert len(made) == 1


def test_a_picture_of_a_class_without_weight_is_not_verified_beside_others() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1, 0, 1, 1, 1]))
    images, labels = pictures(3), torch.tensor([0, 1, 2])
    view = seen(network(), loss, loss, images, labels)
    junk = torch.cat([images[:2], torch.rand(1, *SHAPE, generator=stream(6, "junk")).mul(255).round() / 255])
    for batch in (junk, images):
        found = claimed(view, batch, labels)
        assert (found.verified, found.approximate) == (None, False)
    assert claimed(view, images[[0, 1, 1]], torch.tensor([0, 1, 1])).verified is False
