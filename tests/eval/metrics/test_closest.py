"""The reference images closest to any victim's: found once for all attacks, and as good a floor as the whole set."""

from __future__ import annotations

import pytest
import torch
from support.worlds import images
from torch import Tensor

from attacks.result import NotApplicable
from eval.metrics.baselines import baseline_images, nearest_reference
from eval.run import attack_cell
from eval.run.observation import Observation, WatchedUpdate
from fl.types import Batch, Trace, Truth


def truth(inputs: Tensor) -> Truth:
    """Of images alone."""
    count = torch.arange(len(inputs))
    return Truth(Trace((), inputs, count, count, {}), {})


def seen(*truths: Truth | None, reference: Batch | None = None) -> Observation:
    updates = (WatchedUpdate(i, 0, NotApplicable("not looked at"), truth) for i, truth in enumerate(truths))
    return Observation(tuple(updates), 0, reference)


def test_the_floor_is_that_of_the_whole_reference() -> None:
    pool = images(40).inputs
    victims = [truth(images(n, "victim", n).inputs) for n in (1, 3, 2)]
    pool[11], pool[17] = 90 / 255, 110 / 255
    tied = torch.tensor([112.0, 100.0], dtype=torch.float64).div(255).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    found = attack_cell._closest(seen(*victims, None, truth(tied), reference=Batch(pool, torch.zeros(40))))
    assert sorted(found) == [0, 1, 2, 4]
    for number, one in ((0, victims[0]), (1, victims[1]), (2, victims[2]), (4, truth(tied))):
        whole = baseline_images(one.inputs, reference=pool)["nearest"]
        assert torch.equal(baseline_images(one.inputs, reference=found[number])["nearest"], whole)
        assert len(found[number]) <= len(one.inputs)
    second = baseline_images(tied, reference=found[4])["nearest"][1]  # as far from the one as from the other
    assert torch.equal(second, pool[11])


def test_one_pass_serves_all_victims_and_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def counted(inputs: Tensor, reference: Tensor) -> Tensor:
        passes.append(len(inputs))
        return nearest_reference(inputs, reference)

    monkeypatch.setattr(attack_cell, "nearest_reference", counted)
    looked = seen(truth(images(1).inputs), truth(images(2).inputs), reference=images(9, "pool"))
    first = attack_cell._closest(looked)
    assert attack_cell._closest(looked) is first
    assert passes == [3]


def test_without_a_reference_there_is_no_such_floor() -> None:
    assert attack_cell._closest(seen(truth(images(1).inputs))) == {}
