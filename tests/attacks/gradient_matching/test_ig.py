"""IG's options: step sizes along the search, the units of the prior, and published settings by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support import worlds

import attacks
from attacks.base import Chain, Reconstruction
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.optimizers import Adam
from attacks.gradient_matching.engine.problem import INPUTS
from eval.commands.show import describe
from fl.client import Client
from fl.method import Download
from fl.methods.fedavg import FedAvg
from fl.models import build as build_model
from fl.registry import UnknownNameError
from fl.simulation.client_round import ClientState, observe, prepare
from fl.view import ServerView


def ig(**settings: Any) -> GradientMatching:
    built = attacks.build({"name": "ig", **settings})
    assert isinstance(built, GradientMatching)
    return built


def view(**settings: Any) -> ServerView:
    task = build_model("tiny", num_classes=3, seed=0, **settings).to(dtype=torch.float64)
    download = Download(dict(task.parameters), dict(task.buffers))
    client = Client(task, FedAvg(lr=0.1, steps=1, batch_size=None))
    return observe(prepare(client, ClientState(), download, worlds.images(1, "ig")))[0]


def factors(**settings: Any) -> list[float]:
    mover = Adam(ig(**settings), [])
    found = []
    for _ in range(mover.settings.iterations):
        found.append(mover.lr_factor())
        mover.steps += 1
    return found


def test_the_step_size_falls_by_ten_three_times() -> None:
    assert factors(iterations=8) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_the_cosine_ends_where_it_is_told() -> None:
    torch_says = torch.optim.lr_scheduler.CosineAnnealingLR
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch_says(optimizer, 10, eta_min=0.1)
    expected = []
    for _ in range(10):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert factors(iterations=10, schedule="cosine", last_lr=0.1) == pytest.approx(expected)
    assert factors(iterations=10, schedule="cosine")[-1] == pytest.approx(0.0245, abs=1e-4)


def test_a_warm_up_comes_first() -> None:
    assert factors(iterations=6, schedule="none", warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert factors(iterations=3, schedule="none") == [1, 1, 1]


def test_a_warm_up_longer_than_the_search_takes_half_of_it() -> None:
    assert factors(iterations=4, schedule="none", warmup=50) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factors(iterations=1, schedule="none", warmup=50) == [1]


def test_total_variation_in_pixels_and_in_normalized_units() -> None:
    values: dict[str, float] = {}
    given = view(normalize=True, mean=(0.2,), std=(0.25,))
    x = {INPUTS: torch.randn(1, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    for units in ("normalized", "pixels"):
        with_tv, without = (ProblemBatch([ig(tv_weight=tv, tv_units=units).build_problem(given)]) for tv in (1.0, 0.0))
        values[units] = float(with_tv.evaluate(x)[0] - without.evaluate(x)[0])
    across = (x[INPUTS][..., 1:] - x[INPUTS][..., :-1]).abs().mean()
    down = (x[INPUTS][..., 1:, :] - x[INPUTS][..., :-1, :]).abs().mean()
    assert values["normalized"] == pytest.approx(float(across + down), rel=1e-9)
    assert values["pixels"] == pytest.approx(0.25 * values["normalized"], rel=1e-9)


def test_presets_are_settings_by_name() -> None:
    assert ig(preset="hyperfl") == ig(iterations=10_000, tv_weight=1e-6)
    assert ig(preset="hyperfl", iterations=7) == ig(iterations=7, tv_weight=1e-6)
    chained = attacks.build({"name": "peel+ig", "preset": "library"})
    assert isinstance(chained, Chain)
    assert chained.then == ig(iterations=4800, tv_weight=0.1, signed=False)
    with pytest.raises(UnknownNameError, match="did you mean 'hyperfl'"):
        ig(preset="hyperf")
    with pytest.raises(UnknownNameError, match="preset of attack 'joint'"):
        attacks.build({"name": "joint", "preset": "hyperfl"})


@pytest.mark.parametrize("name", [n for n in attacks.attacks.names() if attacks.attacks.get(n).presets])
def test_every_preset_can_be_built_says_its_source_and_is_shown(name: str) -> None:
    (about,) = [x for x in describe(name) if x["kind"] == "attack"]
    json.dumps(about)
    for preset, entry in attacks.attacks.get(name).presets.items():
        built = attacks.build({"name": name, "preset": preset})
        assert all(getattr(built, key) == value for key, value in entry.settings.items())
        assert entry.source
        assert about["presets"][preset]["settings"] == entry.settings


def test_an_unknown_schedule_is_refused_and_all_known_ones_run() -> None:
    for schedule in ("step", "cosine", "none"):
        found = ig(iterations=5, schedule=schedule, warmup=2, last_lr=0.5, langevin=0.1)(view())
        assert isinstance(found, Reconstruction)
    with pytest.raises(ValueError, match="schedule"):
        ig(schedule="linear")
    said = {"warmup": "a whole number >= 0", "last_lr": r"a number in \[0, 1\]", "langevin": "a number >= 0"}
    for setting, wanted in said.items():
        with pytest.raises(ValueError, match=f"{setting}: expected {wanted}, got -1"):
            ig(**{setting: -1})
