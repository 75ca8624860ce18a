"""Pictures below a linear layer whose lower layers can't be undone one by one."""

from __future__ import annotations

import pytest
from support.brief import brief_picture_searches
from support.pictures import attack, error, network, photograph, victim
from torch import nn

from attacks import NotApplicable, Reconstruction
from attacks.analytic.cascade import Cascade

ON_LEVELS = (photograph(14) * 255).round() / 255
SOLVED = {
    "activation before average pooling": (
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 3), nn.Tanh(), nn.AvgPool2d(2)),
    ),
    "an activation that rises and falls": (nn.Conv2d(1, 12, 3, padding=1), nn.SiLU()),
    "another": (nn.Conv2d(1, 12, 5), nn.GELU(), nn.AvgPool2d(2)),
    "padding that mirrors": (nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"), nn.LeakyReLU(0.01)),
}


@pytest.mark.parametrize("chain", list(SOLVED))
def test_what_is_not_undone_layer_by_layer_is_solved_together(chain: str) -> None:
    result = attack(victim(network(*SOLVED[chain]), ON_LEVELS))
    assert error(result, ON_LEVELS) < 1e-6
    assert result.verified
    assert result.objective < 1e-8
    assert not result.note


def test_too_few_equations_are_counted() -> None:
    view = victim(network(nn.Conv2d(1, 1, 3), nn.SiLU(), nn.AvgPool2d(4)), ON_LEVELS)
    result = Cascade()(view)
    assert isinstance(result, NotApplicable)
    assert "equations below body.4 for 196 pixels: too few" in result.reason
    assert result.limit


def test_the_wrong_gradient_is_not_verified() -> None:
    task = network(*SOLVED["another"])
    view, other = victim(task, ON_LEVELS), victim(task, 1 - ON_LEVELS)
    for name in ("body.0.weight", "body.0.bias"):
        view.update[name] = other.update[name]  # type: ignore[index]
    with brief_picture_searches():
        result = Cascade()(view)
    if isinstance(result, NotApplicable):
        assert "led to no picture" in result.reason
    else:
        assert isinstance(result, Reconstruction)
        assert not result.verified
        assert "unexplained" in result.note
