"""Losses under which what flows back has one direction: no mixture of pictures is verified, and no label told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.function_losses import (
    CLASSES,
    LOSSES,
    SHAPE,
    Function,
    claimed,
    entropy,
    labels_of,
    linear,
    network,
    own_output,
    pictures,
    seen,
    smoothed,
    unbent,
)
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, Remark, build
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.confirmation import confirm
from attacks.verification.update_comparison import UpdateComparison
from attacks.verification.words import MEAN_OF_UNLIKE, UNLIKE_HIDDEN, UNLIKE_HIDDEN_BY, UNLIKE_NEARLY_HIDDEN
from fl.losses.function import build_loss, known_loss
from fl.seeds import stream
from fl.tensors import Value
from fl.tensors import dense as as_dense


@pytest.mark.parametrize("name", ["smoothed", "focal"])
def test_what_flows_back_of_two_classes_in_one_direction_verifies_no_mixture(name: str) -> None:
    """Where no activation bends, a picture between several makes exactly a multiple of their update."""
    model = network(2)
    model.get_submodule("1").bias.data.fill_(3.0)  # type: ignore[operator, union-attr]
    images = torch.rand(3, *SHAPE, generator=stream(3, "mixture"))
    view = seen(model, LOSSES[name], LOSSES[name], images, torch.ones(3, dtype=torch.int64), 1)
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert not result.verified


@pytest.mark.parametrize("bends", [True, False])
def test_what_flows_back_of_a_label_in_one_direction_verifies_no_mixture_of_its_pictures(bends: bool) -> None:
    loss = known_loss(build_loss(own_output), torch.Size([CLASSES]))
    assert loss.sends_back_one_direction(torch.Size([CLASSES]))
    model = network()
    if not bends:
        model.get_submodule("1").bias.data.fill_(3.0)  # type: ignore[operator, union-attr]
    for start in range(2):
        images = torch.rand(2, *SHAPE, generator=stream(start, "own output"))
        alike = torch.stack([images[0], images[0] + 0.1 * (images[1] - images[0])])
        for pair in (images, alike):
            view = seen(model, own_output, own_output, pair, torch.ones(2, dtype=torch.int64), 1)
            result = build("analytic")(view)
            assert not isinstance(result, Reconstruction) or not result.verified
    single = build("analytic")(seen(model, own_output, own_output, pictures(1), labels_of(1)))
    assert isinstance(single, Reconstruction)
    assert single.verified is True


def hardest_rival(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of two outputs only, which ones hangs on them."""
    own = outputs.gather(1, labels[:, None])[:, 0]
    return functional.softplus(outputs.scatter(1, labels[:, None], -torch.inf).amax(1) - own).mean()


ONE_DIRECTION_HERE: dict[str, tuple[Callable[[], nn.Module], Function, list[int]]] = {
    "hardest rival": (linear, hardest_rival, [1, 1]),
    "unlikely classes": (partial(linear, bias=-12), entropy, [1, 1]),
    "unlikely classes above": (partial(unbent, -16), entropy, [1, 1]),
    "both likely ones": (partial(unbent, -16), entropy, [0, 1]),
    "unlikely classes, a function": (partial(unbent, -16), smoothed(0.0), [1, 1]),
}


@pytest.mark.parametrize("name", ONE_DIRECTION_HERE)
def test_what_flows_back_in_one_direction_for_these_outputs_alone_verifies_no_mixture(name: str) -> None:
    """Others would send back more of them, so that the loss as such says nothing."""
    make, loss, labels = ONE_DIRECTION_HERE[name]
    model, tried = make(), 0
    for start in range(4):
        images = torch.rand(2, *SHAPE, generator=stream(start, "own output"))
        for other in (images[1], images[0] + 0.1 * (images[1] - images[0])):
            pair = torch.stack([images[0], other]).mul(255).round() / 255
            result = build("analytic")(seen(model, loss, loss, pair, torch.tensor(labels), 1))
            tried += isinstance(result, Reconstruction)
            assert not isinstance(result, Reconstruction) or not result.verified
    assert tried


@pytest.mark.parametrize(
    ("make", "loss", "bits", "said"),
    [
        (partial(unbent, -6), entropy, None, UNLIKE_NEARLY_HIDDEN),
        (linear, functional.multi_margin_loss, None, UNLIKE_HIDDEN),
        (linear, functional.multi_margin_loss, 8, MEAN_OF_UNLIKE),
        (partial(linear, bias=-12), entropy, 16, UNLIKE_HIDDEN_BY.format("float16")),
    ],
)
def test_what_is_borne_out_is_said_to_be_so_of_one_picture_where_a_mixture_of_unlike_ones_would_not_show(
    make: Callable[[], nn.Module], loss: Function, bits: int | None, said: str
) -> None:
    """Whatever the update leaves of it: more than rounding, none, that of half precision, or a mean of levels."""
    images = torch.rand(2, *SHAPE, generator=stream(0, "own output"))
    images = images.mul(255).round() / 255 if bits == 8 else images
    view = seen(make(), loss, loss, images, torch.tensor([1, 1]), 1)
    if bits == 16:
        view = replace(view, update={n: _as_sent_in_half(view.shared[n], v) for n, v in view.update.items()})
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert float((result.inputs - images).flatten(1).square().mean(1).sqrt().min()) > 0.15
    assert (result.verified, result.approximate) == (None, True)
    assert Remark.MAY_BE_MIXTURE in result.remarks
    assert Remark.LABELS_CONFIRMED not in result.remarks
    assert result.note.endswith(said)
    found = confirm(view, replace(result, remarks=frozenset(), note=""))
    assert isinstance(found, Reconstruction)
    assert found.approximate is (Remark.MAY_BE_MIXTURE in found.remarks)
    assert found.approximate or said != UNLIKE_NEARLY_HIDDEN  # elsewhere nothing but the size tells the brightness


def _as_sent_in_half(start: Value, update: Value) -> Tensor:
    """The update of weights that came back in float16."""
    before = as_dense(start)
    return before - (before - as_dense(update)).half().float()


@pytest.mark.parametrize("name", ["ignored", "smoothed, ignored", "weight 0"])
def test_a_class_that_sends_nothing_back_hides_no_other(name: str) -> None:
    weights = torch.ones(CLASSES).index_fill(0, torch.tensor([2]), 0)
    loss = {
        "ignored": nn.CrossEntropyLoss(ignore_index=0),
        "smoothed, ignored": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=5),
        "weight 0": nn.CrossEntropyLoss(weight=weights),
    }[name]
    without = network()
    without[1].bias = without[3].bias = None  # type: ignore[operator, index]
    for model in (without, network()):
        result = build("analytic")(seen(model, loss, loss, pictures(1), labels_of(1)))
        assert isinstance(result, Reconstruction)
        assert result.verified or "features/1.weight" in result.private
    assert result.verified


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("stated", [smoothed(0.1), "cross-entropy"])
def test_no_label_is_confirmed_of_what_flows_back_in_one_direction(stated: object, label: int) -> None:
    """Smoothed, either label of two may draw back what is too sure."""
    model = network(2)
    model.get_submodule("3").weight.data.mul_(20)  # type: ignore[operator, union-attr]
    for start in range(3):
        image = torch.rand(1, *SHAPE, generator=stream(start, "sure")).mul(255).round() / 255
        found = claimed(seen(model, smoothed(0.1), stated, image, torch.tensor([label])), image)
        assert Remark.LABELS_CONFIRMED not in found.remarks
        assert found.labels is None or stated == "cross-entropy" or found.labels.tolist() == [label]


@pytest.mark.parametrize("make", [linear, partial(unbent, 0.0)])
@pytest.mark.parametrize("made", [own_output, functional.multi_margin_loss])
def test_a_target_worked_out_by_size_speaks_against_no_mixture(make: Callable[[], nn.Module], made: Function) -> None:
    """Pairs that share it would be noticed, and so would another size: a mixture of unlike pictures is neither."""
    images = torch.rand(2, *SHAPE, generator=stream(0, "own output"))
    view = seen(make(), made, "mse", images, torch.tensor([1, 1]), 1)
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.labels is not None
    assert float((result.inputs - images).flatten(1).square().mean(1).sqrt().min()) > 0.15
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    guess = result.inputs, result.labels
    assert check.is_explained_to_rounding(*guess)
    assert check.has_stated_size(*guess)
    assert check.tells_pairs_apart(*guess)
    assert (result.verified, Remark.MAY_BE_MIXTURE in result.remarks) == (None, True)


@pytest.mark.parametrize(
    ("levels", "known", "hedged"), [(True, False, False), (False, True, False), (False, False, True)]
)
def test_one_picture_under_a_squared_error_is_verified_at_levels_or_with_its_target(
    levels: bool, known: bool, hedged: bool
) -> None:
    image = pictures(1) if levels else torch.rand(1, *SHAPE, generator=stream(0, "off levels"))
    target = torch.randn(1, CLASSES, generator=stream(5, "targets"))
    view = seen(unbent(0.0), functional.mse_loss, "mse", image, target)
    result = build("analytic")(replace(view, labels=target) if known else view)
    assert isinstance(result, Reconstruction)
    assert (result.verified is True, Remark.MAY_BE_MIXTURE in result.remarks) == (not hedged, hedged)


@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (4, False)])
def test_numbers_as_targets_bear_nothing_out_that_nobody_can_ask(outputs: int, bias: bool) -> None:
    """Of one example the direction that flows back is worked out, and of several nothing tells their mixtures apart."""
    model = network(outputs)
    features = torch.rand(192, generator=stream(5, "features"))
    if not bias:
        model[3].bias = None
    images, targets = pictures(3), torch.randn(3, outputs, generator=stream(5, "targets"))
    single = seen(model, functional.mse_loss, "mse", images[:1], targets[:1])
    assert claimed(single, images[:1]).verified is True
    assert (claimed(single, images[1:2]).verified, claimed(single, images[1:2]).approximate) == (False, False)
    for inputs, right in ((images[0].flatten(), True), (features, False)):
        alone = Reconstruction(inputs=None, private={"features": inputs}, verified=True)
        found = confirm(single, alone)
        assert isinstance(found, Reconstruction)
        assert (bool(found.verified), found.approximate) == (right, False)
    view = seen(model, functional.mse_loss, "mse", images, targets)
    for batch in (images, images.flip(3)):
        found = claimed(view, batch)
        assert (found.verified, found.approximate) == (None, False)
        assert "the targets are unknown" in found.note
