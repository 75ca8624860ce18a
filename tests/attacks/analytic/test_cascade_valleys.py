"""Activations that fall before they rise: a value has two inputs, and the other equations say which one it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from support.pictures import attack, error, network, photograph, victim
from torch import Tensor, nn

from attacks.analytic import cascade
from attacks.analytic.cascade import Cascade
from attacks.search_control import StoppedError
from fl.types import Task

ON_LEVELS = (photograph(14) * 255).round() / 255


class Quick(nn.Module):
    """GELU's quick form, written out."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x times a sigmoid of it."""
        return x * torch.sigmoid(1.702 * x)


def pooled(activation: Callable[[], nn.Module], shift: float = 0.0) -> Task:
    """Return a network of one pooled convolution whose biases are moved by `shift`."""
    task = network(nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), activation())
    with torch.no_grad():
        task.model.get_parameter("body.0.bias").add_(shift)
    return task


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, Quick])
def test_max_pooling_below_them_is_undone(activation: Callable[[], nn.Module]) -> None:
    result = attack(victim(pooled(activation), ON_LEVELS))
    assert error(result, ON_LEVELS) < 1e-6
    assert result.verified


def test_what_lies_on_the_falling_side_is_found_out() -> None:
    task = pooled(nn.GELU, shift=-0.2)
    with torch.no_grad():
        normalized = task.model.get_submodule("normalize")(ON_LEVELS)
        given = task.model.get_submodule("body.1")(task.model.get_submodule("body.0")(normalized))
    assert 0.02 < float((given < -0.7518).float().mean()) < 0.5
    result = attack(victim(task, ON_LEVELS))
    assert error(result, ON_LEVELS) < 1e-6
    assert result.verified


def test_what_layer_by_layer_found_stays_where_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> NoReturn:
        raise StoppedError("the time limit")

    monkeypatch.setattr(cascade, "_solve_jointly", stopped)
    result = attack(victim(network(nn.Conv2d(1, 12, 3, padding=1), nn.SiLU()), ON_LEVELS))
    assert error(result, ON_LEVELS) < 1e-6
    assert not result.verified
    assert result.cut_short == "not done before the time limit: all layers together"


def test_what_lies_far_below_a_level_stretch_is_found_out() -> None:
    task = pooled(nn.Hardswish)
    with torch.no_grad():
        task.model.get_parameter("body.0.weight").mul_(4)
    result = attack(victim(task, ON_LEVELS))
    assert error(result, ON_LEVELS) < 1e-6
    assert result.verified


def test_pixels_that_layers_fix_stay_fixed_where_others_are_open() -> None:
    task = pooled(nn.GELU)
    with torch.no_grad():
        task.model.get_parameter("body.0.weight").mul_(12)
    result = attack(victim(task, ON_LEVELS))
    assert not result.verified
    assert result.inputs is not None
    assert result.fixed is not None
    assert 190 <= int(result.fixed.sum()) < 196
    assert torch.allclose(result.inputs[result.fixed], ON_LEVELS[result.fixed])


def test_a_gradient_of_another_picture_is_not_verified() -> None:
    task = pooled(nn.SiLU)
    view, other = victim(task, ON_LEVELS), victim(task, 1 - ON_LEVELS)
    for name in ("body.0.weight", "body.0.bias"):
        view.update[name] = other.update[name]  # type: ignore[index]
    result = Cascade()(view)
    assert not getattr(result, "verified", False)
