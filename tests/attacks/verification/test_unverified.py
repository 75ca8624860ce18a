"""What an exact attack does not verify says why, and what is open."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.pictures import photograph
from torch import Tensor, nn

import attacks
from attacks.base import Reconstruction
from attacks.verification.unverified import say_why_unverified
from fl.capture import from_batch
from fl.view import ServerView, ThreatModel


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return make()


def strided() -> nn.Module:
    """The second convolution does not see the last row and column of what the first returned."""
    first, second = nn.Conv2d(1, 8, 3, stride=2), nn.Conv2d(8, 12, 2, stride=2)
    return nn.Sequential(first, nn.ELU(), second, nn.ELU(), nn.Flatten(), nn.Linear(48, 20), nn.ELU(), nn.Linear(20, 4))


def saturated() -> nn.Module:
    """Sigmoids in a row, between which averages are taken."""
    below = nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 3), nn.Sigmoid()
    return nn.Sequential(*below, nn.Flatten(), nn.Linear(128, 20), nn.Sigmoid(), nn.Linear(20, 4))


def view_of(model: nn.Module, size: int) -> tuple[ServerView, Tensor]:
    image = photograph(size).float()
    return from_batch(model, image, torch.tensor([1]))[0], image


def test_pixels_that_are_not_fixed_are_counted() -> None:
    view, image = view_of(seeded(strided), 12)
    found = attacks.build("cascade")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is False
    assert found.fixed is not None
    assert found.inputs is not None
    assert torch.allclose(found.inputs[found.fixed], image[found.fixed], atol=0.25 / 255)
    said = re.search(r"not verified: (\d+) of the 144 numbers of the picture are open", found.note)
    assert said is not None, found.note
    assert int(said[1]) == int((~found.fixed).sum()) > 0


@pytest.mark.parametrize("attack", ["rgap", "rconv"])
def test_inputs_that_equations_leave_open_are_counted_by_layer(attack: str) -> None:
    view, _ = view_of(seeded(strided), 12)
    found = attacks.build(attack)(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is False
    assert re.search(r"not verified: .*\d+ of the \d+ numbers that 2 is given are open", found.note), found.note


def test_levels_that_do_not_explain_equations_solved_together_are_told() -> None:
    view, _ = view_of(seeded(saturated), 12)
    found = attacks.build("cascade")(view)
    assert isinstance(found, Reconstruction)
    assert found.verified is False
    assert "not verified: at whole levels of 8 bits the picture leaves more than rounding" in found.note


def test_a_result_without_words_of_its_own_is_given_some() -> None:
    view, image = view_of(seeded(strided), 12)
    silent = Reconstruction(inputs=image, objective=1e-3, verified=False)
    assert "1.0e-03 of the equations that it was read from is left unexplained" in say_why_unverified(view, silent).note
    assert "not verified: the equations" in say_why_unverified(view, replace(silent, objective=float("nan"))).note
    unknown = replace(view, threat=ThreatModel(knows_defense=False))
    assert "the defense is unknown" in say_why_unverified(unknown, silent).note
    for known in (replace(silent, verified=True), replace(silent, verified=None), replace(silent, note="said before")):
        assert say_why_unverified(view, known) is known
    fixed = torch.zeros_like(image, dtype=torch.bool)
    partly = say_why_unverified(view, replace(silent, verified=None, fixed=fixed, note="said before"))
    assert partly.note.startswith("said before; not verified: 144 of the 144 numbers")
    assert say_why_unverified(view, partly) is partly
