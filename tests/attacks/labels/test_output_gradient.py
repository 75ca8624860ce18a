"""A picture is held against an update under whatever loss made it, and another rule of steps is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, build
from attacks.labels.output_gradient import read_smoothing, view_of_any_loss
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

SHAPE, LABEL = (1, 14, 14), 3
PLAIN = FedAvg(lr=0.1, steps=1, batch_size=None)
Criterion = Callable[[Tensor, Tensor], Tensor]


def softer(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy at a temperature that nobody stated."""
    return functional.cross_entropy(outputs / 2, labels)


def one_of_many(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        outputs, functional.one_hot(labels, outputs.shape[1]).to(outputs)
    )


SMOOTHED = partial(functional.cross_entropy, label_smoothing=0.1)
LOSSES: dict[str, Criterion] = {"smoothed": SMOOTHED, "softer": softer, "one of many": one_of_many}


def network(*, hidden: int = 24, classes: int = 10, biases: float = 0.1) -> nn.Module:
    layers = [nn.Linear(196, hidden), nn.ReLU(), nn.Linear(hidden, classes)] if hidden else [nn.Linear(196, classes)]
    model = nn.Sequential(nn.Flatten(), *layers)
    initialize(model, stream(0, "any loss"))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            value.data.uniform_(-biases, biases, generator=stream(1, "any loss"))
    return model


def picture() -> Tensor:
    return torch.rand(1, *SHAPE, generator=stream(2, "any loss")).mul(255).round() / 255


def seen(model: nn.Module, loss: Criterion, *, of_biases: float = 1.0, stated: FedAvg = PLAIN) -> ServerView:
    """The view of one step on the picture, that of biases longer by a factor."""
    trained = copy.deepcopy(model)
    loss(trained(picture()), torch.tensor([LABEL])).backward()
    update = {}
    for (name, start), moved in zip(model.named_parameters(), trained.parameters(), strict=True):
        step = 0.1 * (of_biases if name.endswith("bias") else 1.0)
        assert moved.grad is not None
        update[name] = (start - (start - step * moved.grad)).detach()
    return from_update(model, update, input_shape=SHAPE, method=stated, batch_size=1)


def attacked(view: ServerView) -> Reconstruction:
    found = build("analytic")(view)
    assert isinstance(found, Reconstruction)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_picture_is_verified_under_a_loss_that_nobody_stated(name: str) -> None:
    found = attacked(seen(network(), LOSSES[name]))
    assert found.verified is True
    assert found.inputs is not None
    assert torch.allclose(found.inputs, picture(), atol=1e-5)
    assert (None if found.labels is None else found.labels.tolist()) == ([LABEL] if name == "smoothed" else None)
    assert ("label smoothing 0.1," in found.note) == (name == "smoothed")
    assert ("the label is not told" in found.note) == (name != "smoothed")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("settings", [{}, {"biases": 0.0}, {"hidden": 0}])
@pytest.mark.parametrize("of_biases", [0.95, 1.3])
def test_biases_that_move_further_confirm_no_darker_picture(
    name: str, settings: dict[str, float], of_biases: float
) -> None:
    """The layer's equations hold for a picture that is off by that factor, and of no loss must the rest."""
    assert not attacked(seen(network(**settings), LOSSES[name], of_biases=of_biases)).verified  # type: ignore[arg-type]


def test_where_size_and_loss_can_stand_for_each_other_nothing_is_verified() -> None:
    """Of one layer any target makes up for another brightness; only what label smoothing allows does not."""
    single = network(hidden=0)
    assert attacked(seen(single, SMOOTHED)).verified is True
    assert attacked(seen(single, softer)).verified is not True
    assert attacked(seen(network(hidden=0, classes=4), SMOOTHED)).verified is not True
    assert attacked(seen(network(biases=0.0), softer)).verified is not True


def test_a_smoothing_is_read_to_its_digits_and_only_where_there_is_one() -> None:
    for share in (0.02, 0.3):
        view = seen(network(), partial(functional.cross_entropy, label_smoothing=share))
        found = read_smoothing(view, picture())
        assert found is not None
        assert (found.label, found.share) == (LABEL, pytest.approx(share, abs=1e-3))
        assert found.targets()[0, LABEL] == pytest.approx(1 - 0.9 * share, abs=1e-3)
    for loss in (functional.cross_entropy, one_of_many):
        assert read_smoothing(seen(network(), loss), picture()) is None
    assert read_smoothing(seen(network(classes=4), SMOOTHED), picture()) is None


@pytest.mark.parametrize("sure_of", [LABEL, LABEL + 1])
def test_a_network_that_is_sure_of_a_class_makes_no_other_label_of_it(sure_of: int) -> None:
    """Beyond its smoothed target the label's own gradient is positive, and next to others of one size."""
    for size in (3.0, 6.0, 12.0, 24.0):
        model = network()
        model[3].bias.data[sure_of] += size
        found = read_smoothing(seen(model, SMOOTHED), picture())
        assert found is None or (found.label, found.share) == (LABEL, pytest.approx(0.1, abs=5e-3))
        assert found is not None or size > 3


def test_what_flows_back_is_not_taken_where_the_update_hides_it() -> None:
    view = seen(network(), softer)
    assert view_of_any_loss(view) is not None
    assert view_of_any_loss(replace(view, batch_size=2, schedule=(((2,),),))) is None
    for stated in (replace(PLAIN, steps=2), replace(PLAIN, optimizer="adam")):
        assert view_of_any_loss(seen(network(), softer, stated=stated)) is None
    scaled = nn.Sequential(network(), nn.Softplus())  # behind the bias: what flows into it is no gradient of outputs
    assert view_of_any_loss(seen(scaled, softer)) is None


@pytest.mark.parametrize("hidden", [0, 24])
@pytest.mark.parametrize("sure", [15.5, 20.0])
def test_the_class_that_a_network_is_certain_of_is_told_where_its_own_gradient_is_rounded(
    hidden: int, sure: float
) -> None:
    """Softmax - 1 is a multiple of the spacing of numbers below 1: of few digits, or zero."""
    model = network(hidden=hidden, biases=0.0)
    model[-1].bias.data[LABEL] = sure
    functional.cross_entropy(model(picture()), torch.tensor([LABEL])).backward()
    gradient = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    view = from_update(model, gradient, input_shape=SHAPE, kind="gradient", method=PLAIN)
    found = build("analytic")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert found.labels is not None
    assert found.labels.tolist() == [LABEL]
    assert "so certain of its class that rounding left few digits" in found.note
    gradient["1.bias" if not hidden else "3.bias"] = gradient["1.bias" if not hidden else "3.bias"].roll(1)
    other = build("analytic")(from_update(model, gradient, input_shape=SHAPE, kind="gradient", method=PLAIN))
    assert isinstance(other, Reconstruction)
    assert not other.verified


@pytest.mark.parametrize("sure", [40.0, 50.0])
def test_what_moves_by_no_more_than_rounding_bears_no_picture_out(sure: float) -> None:
    """A bias that starts at zero keeps digits that no weight does: the black picture makes the weights' zero update."""
    model = network(hidden=0, biases=0.0)
    model[-1].bias.data.zero_()
    model[-1].bias.data[LABEL] = sure
    found = build("analytic")(seen(model, functional.cross_entropy))
    assert isinstance(found, Reconstruction)
    assert not found.verified
    assert not found.approximate
