"""Batches under a loss that is given as a function: confirmed where the update is theirs under it, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.spear import Spear
from attacks.base import Attack, NotApplicable, Reconstruction, Remark, build
from attacks.labels.assignment import assign_labels
from attacks.update.label_gradients import LabelGradients
from attacks.update.observed_update import ObservedUpdate
from attacks.update.update_comparison import UpdateComparison
from attacks.verification import (
    MEAN_OF_UNLIKE,
    TARGETS_REFUSED,
    UNDER_ANOTHER_LOSS,
    UNLIKE_HIDDEN,
    UNLIKE_HIDDEN_BY,
    UNLIKE_NEARLY_HIDDEN,
    confirm,
)
from fl.capture import from_update
from fl.losses.function import GivenFunction, build_loss, known_loss
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.tensors import Value
from fl.tensors import dense as as_dense
from fl.view import ServerView

SHAPE, CLASSES, LR = (3, 8, 8), 6, 0.1
Function = Callable[[Tensor, Tensor], Tensor]
entropy = functional.cross_entropy


def focal(outputs: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Lin et al., ICCV 2017, equation 4."""
    each = entropy(outputs, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** gamma * each).mean()


def smoothed(share: float) -> Function:
    return partial(entropy, label_smoothing=share)


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return entropy(outputs, labels, weight=torch.linspace(0.5, 2, outputs.shape[1]).to(outputs))


LOSSES: dict[str, Function] = {
    "smoothed": smoothed(0.1),
    "focal": focal,
    "weighted": weighted,
    "module": nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES), label_smoothing=0.05),
    "sum": partial(entropy, reduction="sum"),
    "margin": functional.multi_margin_loss,
}


def network(classes: int = CLASSES, *, end: nn.Module | None = None) -> nn.Module:
    ends = [] if end is None else [end]
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, classes), *ends)
    initialize(model, stream(0, "network"))
    return model


def convolutional(classes: int = CLASSES) -> nn.Module:
    body = nn.Conv2d(3, 24, 3, padding=1, stride=2), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(384, 32), nn.ReLU()
    model = nn.Sequential(*body, nn.Linear(32, classes))
    initialize(model, stream(0, "network"))
    return model


def pictures(count: int) -> Tensor:
    return torch.rand(count, *SHAPE, generator=stream(0, "pictures")).mul(255).round() / 255


def labels_of(count: int, classes: int = CLASSES) -> Tensor:
    """With one label twice where there are more than two pictures."""
    return torch.tensor([1, 0, 4, 1, 5, 2, 2, 3])[:count] % classes


def seen(
    model: nn.Module, made: Function, stated: object, images: Tensor, labels: Tensor, count: int = 0
) -> ServerView:
    """The view of a step under one loss, of which another or the same is stated, and so many pictures."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(made(model(images), labels), list(named.values()))
    update = {n: (p - (p - LR * grad)).detach() for (n, p), grad in zip(named.items(), grads, strict=True)}
    method = FedAvg(lr=LR, steps=1, batch_size=None, train_mode=False)
    return from_update(model, update, input_shape=SHAPE, method=method, batch_size=count or len(images), loss=stated)


def claimed(view: ServerView, images: Tensor, labels: Tensor | None = None) -> Reconstruction:
    """What is left of a claim that these pictures are verified."""
    found = confirm(view, Reconstruction(inputs=images, labels=labels, verified=True))
    assert isinstance(found, Reconstruction)
    return found


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


def own_output(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of the label's own output alone, so that what flows back has one direction for each label."""
    return functional.softplus(-outputs[range(len(labels)), labels]).mean()


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


def linear(*, bias: float = 0.0) -> nn.Module:
    """With a bias by which all classes but two are far from likely, if one is given."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES))
    initialize(model, stream(0, "network"))
    model[1].bias.data[2:] += bias
    return model


def unbent(bias: float) -> nn.Module:
    """Whose activations are all open."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    initialize(model, stream(0, "network"))
    model[1].bias.data.fill_(3.0)
    model[3].bias.data[2:] = bias
    return model


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


class Mixed(nn.Module):
    """Mixes outputs, so that what flows back into the last layer is not what flows back into them."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs @ torch.randn(CLASSES, CLASSES, generator=stream(4, "mixed")).to(outputs)


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

    def counted(*given: Any) -> LabelGradients:
        made.append(evaluate(*given))
        return made[-1]

    monkeypatch.setattr(LabelGradients, "of", counted)
    images, labels = pictures(3), labels_of(3)
    found = claimed(seen(network(), focal, focal, images, labels), images)
    assert found.verified is True
    assert Remark.LABELS_CONFIRMED in found.remarks
    assert len(made) == 1


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


def test_a_picture_of_a_class_without_weight_is_not_verified_beside_others() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1, 0, 1, 1, 1]))
    images, labels = pictures(3), torch.tensor([0, 1, 2])
    view = seen(network(), loss, loss, images, labels)
    junk = torch.cat([images[:2], torch.rand(1, *SHAPE, generator=stream(6, "junk")).mul(255).round() / 255])
    for batch in (junk, images):
        found = claimed(view, batch, labels)
        assert (found.verified, found.approximate) == (None, False)
    assert claimed(view, images[[0, 1, 1]], torch.tensor([0, 1, 1])).verified is False


class _RefusedError(Exception):
    """What a user's own code raises."""


def two_classes_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    if len(labels.unique()) < 2:
        raise _RefusedError("needs two classes")
    return smoothed(0.1)(outputs, labels)


def own_batch_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    if sorted(labels.tolist()) != [0, 1, 4]:
        raise _RefusedError("needs its own batch")
    return smoothed(0.1)(outputs, labels)


def now_and_then(calls: Iterator[int]) -> Function:
    def raising(outputs: Tensor, labels: Tensor) -> Tensor:
        if next(calls) % 5 == 4:
            raise _RefusedError("not now")
        return smoothed(0.1)(outputs, labels)

    return raising


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
    assert refused.reason.startswith("the loss function raised _RefusedError: needs two classes")


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
        assert found.note.endswith("the loss function raised _RefusedError: not now")


def test_targets_that_a_loss_refuses_leave_a_batch_unasked() -> None:
    loss = GivenFunction(call=own_batch_alone, targets="classes")
    found = claimed(seen(network(), smoothed(0.1), loss, pictures(2), labels_of(2)), pictures(2), labels_of(2))
    assert (found.verified, found.note) == (None, TARGETS_REFUSED)
    assert Remark.UNASKED in found.remarks


def test_whether_what_flows_back_has_one_direction_is_asked_beside_other_classes() -> None:
    def refusing(outputs: Tensor, labels: Tensor) -> Tensor:
        if len(labels.unique()) < 2:
            raise _RefusedError("needs two classes")
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
