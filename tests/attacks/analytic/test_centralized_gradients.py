"""Centralized gradients: the picture behind them, and what is no such gradient though its rows sum to zero."""

from __future__ import annotations

import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.analytic import Analytic
from attacks.analytic.centralized_gradients import centralized
from attacks.analytic.rconv import RConv
from attacks.analytic.spear import Spear
from attacks.base import NotApplicable, Reconstruction, Remark
from attacks.update.update_rule import RuleKind, guess_update_rule, kind_of_update_rule
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.view import ServerView

LABEL = torch.tensor([1])


class Centering(nn.Module):
    """Standardizes each picture."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


def perceptron() -> nn.Module:
    return initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))).float()


def picture() -> Tensor:
    return (100 * torch.rand(1, 3, 8, 8, generator=stream(0, "picture")) + 30).round() / 255


def view_of(model: nn.Module, *, turned: bool = False) -> ServerView:
    functional.cross_entropy(model(picture()), LABEL).backward()
    update = {name: 0.1 * centralized(value.grad) for name, value in model.named_parameters()}
    if turned:
        update["3.weight"] = update["3.weight"].roll(1, 1)
    return from_update(model, update, input_shape=(3, 8, 8), num_classes=10)


def test_the_picture_and_its_brightness_follow_from_the_whole_update() -> None:
    found = Analytic()(view_of(perceptron()))
    assert isinstance(found, Reconstruction)
    assert (found.verified, found.approximate) == (None, True)
    assert "centralized" in found.note
    torch.testing.assert_close(found.inputs, picture(), atol=1e-3, rtol=0)


def test_brightness_is_left_open_where_the_rest_contradicts_each() -> None:
    found = Analytic()(view_of(perceptron(), turned=True))
    assert isinstance(found, Reconstruction)
    assert (found.verified, found.approximate) == (None, False)
    assert Remark.SCALE_TAKEN_OFF in found.remarks
    assert "known up to its brightness" in found.note


def test_attacks_that_go_layer_by_layer_say_that_they_do_not_apply() -> None:
    found = RConv()(view_of(perceptron()))
    assert isinstance(found, NotApplicable)
    assert "centralized gradients" in found.reason
    assert "analytic reads what a first linear layer is given, less its mean" in found.reason


def test_of_a_batch_no_pictures_less_their_means_are_handed_out() -> None:
    model = perceptron()
    images = torch.rand(3, *picture().shape[1:], generator=stream(1, "picture"))
    functional.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
    update = {name: 0.1 * centralized(value.grad) for name, value in model.named_parameters()}
    shape, how = tuple(images.shape[1:]), FedAvg(lr=0.1, steps=1, batch_size=None)
    view = from_update(model, update, input_shape=shape, num_classes=10, batch_size=3, method=how)
    found = Spear()(view)
    assert isinstance(found, NotApplicable)
    assert found.limit
    assert "centralized gradients" in found.reason
    assert "no attack here takes those of several examples" in found.reason


def test_rows_that_sum_to_zero_for_what_they_are_given_are_no_centralized_gradients() -> None:
    model = initialized(nn.Sequential(Centering(), nn.Flatten(), nn.Linear(192, 10))).float()
    view, _ = from_batch(model, picture(), LABEL)
    assert guess_update_rule(view) == ""
    assert kind_of_update_rule(view_of(perceptron())) == RuleKind.CENTRALIZED
    for attack in (Analytic(), RConv()):
        found = attack(view)
        assert isinstance(found, Reconstruction)
        assert found.approximate
        assert Remark.SCALE_TAKEN_OFF in found.remarks


def test_a_brightness_that_the_update_does_not_tell_is_not_borne_out() -> None:
    """Scores that start at zero, or rows that sum to it, are the same however bright a picture is."""
    zero, centered = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), perceptron()
    for parameter in zero.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        next(centered.parameters()).sub_(next(centered.parameters()).mean(1, keepdim=True))
    for model in (zero, centered):
        found = Analytic()(view_of(model))
        assert isinstance(found, Reconstruction)
        assert (found.verified, found.approximate) == (None, False)
        assert Remark.SCALE_TAKEN_OFF in found.remarks
