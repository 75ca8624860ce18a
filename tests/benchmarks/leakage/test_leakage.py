"""`leakage`: starts are compared by the objective itself, and a further one has to earn its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attacks
import fl.models
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.base import GradientMatching
from benchmarks.leakage import leakage
from benchmarks.leakage.leakage import Measured, Seen
from fl.methods.fedavg import FedAvg
from fl.types import Batch

CLOSE = Reconstruction(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), objective=0.0)


@pytest.fixture
def victim() -> Seen:
    task = fl.models.build("tiny", num_classes=3, seed=0)
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return leakage.observe_images(task, FedAvg(lr=1.0, steps=1, batch_size=None), Batch(image, torch.tensor([1])), 0)[0]


def test_starts_are_compared_as_restarts_are(victim: Seen) -> None:
    view, _ = victim
    results = Measured(iterations=5).run([view, view], [0, 1])
    own = Measured(iterations=5, restarts=2).build_problem(view)
    assert all(isinstance(one, Reconstruction) and 0 < one.objective < 2 + own.tv_weight * 10 for one in results)
    relative = attacks.build({"name": "ig", "iterations": 5}).run([view, view], [0, 1])
    for one, other in zip(results, relative, strict=True):
        assert isinstance(one, Reconstruction)
        assert isinstance(other, Reconstruction)
        assert one.inputs is not None
        assert other.inputs is not None
        assert one.inputs.equal(other.inputs)
        assert one.objective != other.objective


def test_the_best_start_is_that_of_the_least_objective() -> None:
    rows = [[{"psnr": p, "objective": o, "floor_mean_psnr": 9.0}] for p, o in ((20.0, 0.2), (22.0, 0.1), (30.0, 0.3))]
    lines = leakage._photographs("what", rows, [21.0], 7.0)
    assert [line[2] for line in lines] == ["24.0 (20.0 to 30.0)", "22.0", "21.0", "9.0"]


def test_further_starts_are_made_where_the_first_missed(victim: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def timed(attack: GradientMatching, victims: list[Seen], seed: int) -> tuple[list[Reconstruction], float]:
        asked.append(len(victims))
        return [replace(CLOSE, objective=0.5) for _ in victims], 1.0

    monkeypatch.setattr(leakage, "timed", timed)
    settings: dict[str, Any] = {"name": "dlg", "restarts": 3}
    one = [CLOSE, replace(CLOSE, objective=0.9), replace(CLOSE, objective=0.1)]
    best, _ = leakage._restarted(settings, one, [victim] * 3, 0)
    assert asked == [2]
    assert [result.objective for result in best if isinstance(result, Reconstruction)] == [0.0, 0.5, 0.1]
