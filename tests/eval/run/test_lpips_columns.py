"""LPIPS of attacks that were finished without it: nothing is attacked again, and the figures are those of a new run."""

import json

import pytest
import torch
from support.runs import tiny
from support.tiny import Guess, Registered
from torch import nn

from eval.metrics.perceptual import Lpips, Unavailable
from eval.run import plan as planning
from eval.run.execute import run_and_publish
from eval.run.run_directory import RunDir

ABSENT = Unavailable("alex", "no weights found", "get some")
ONE = ("observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1, batch_size: 6}]", "score.lpips=auto")
NAME = "lpips_squeeze@64"


class Apart(nn.Module):
    """Stands for the network: mean absolute difference."""

    def forward(self, x, y):
        return (x - y).abs().mean((1, 2, 3))


@pytest.fixture(autouse=True)
def _guesses():
    with Registered():
        yield


@pytest.fixture
def attacked(monkeypatch):
    """How many updates were attacked."""
    met = []
    whole = Guess.attack_view
    monkeypatch.setattr(Guess, "attack_view", lambda self, view, seed: met.append(seed) or whole(self, view, seed))
    return met


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the tiny experiment in a folder with a backbone at hand, or none."""

    def start(name, backbone, *overrides):
        at_hand = ABSENT if backbone is None else Lpips(backbone, Apart())
        monkeypatch.setattr(planning, "load_perceptual", lambda _score: at_hand)
        folder = RunDir(tmp_path / name)
        with folder.locked():
            return run_and_publish(planning.prepare(tiny(*ONE, *overrides), device="cpu"), folder).rows

    return start


def pictured(rows):
    return [row for row in rows if row["attack"] == "guess"]


def test_finished_attacks_get_lpips_of_their_pictures(run, attacked, tmp_path):
    without = run("a", None)
    assert all(NAME not in row and row["lpips_alex@64"] is None for row in pictured(without))
    count = len(attacked)
    later, fresh = run("a", "squeeze"), run("b", "squeeze")
    assert len(attacked) == 2 * count  # those of "b"
    assert len(pictured(later)) == 4
    for row, other in zip(pictured(later), pictured(fresh), strict=True):
        nearest = {key: other.pop(key) for key in [*other] if key == f"floor_nearest_{NAME}"}
        assert nearest  # not among the pictures
        assert row == other
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert {cell["status"] for cell in about["cells"]} == {"finished"}
    assert NAME.replace("lpips_", "LPIPS ") in (tmp_path / "a" / "table.md").read_text()


def test_cells_of_another_backbone_are_taken_where_any_will_do(run, attacked):
    run("a", "squeeze")
    count = len(attacked)
    rows = run("a", "alex")
    assert len(attacked) == count
    assert all("lpips_alex@64" in row and NAME not in row for row in pictured(rows))
    run("a", "squeeze", "score.lpips=squeeze")
    assert len(attacked) == 2 * count  # by name it is another cell


def test_without_pictures_rows_stay_as_they_are(run, attacked, tmp_path):
    without = run("a", None)
    for path in (tmp_path / "a" / "cells").glob("*/pictures.npz"):
        path.unlink()
    count = len(attacked)
    assert run("a", "squeeze") == without
    assert len(attacked) == count


def test_images_that_nothing_stands_for_have_no_figure(run, monkeypatch):
    whole = Guess.attack_view

    def one_only(self, view, seed):
        found = whole(self, view, seed)
        return type(found)(found.inputs[:1], None, 0.5, (1.0, 0.5))

    monkeypatch.setattr(Guess, "attack_view", one_only)
    run("a", None)
    rows = pictured(run("a", "squeeze"))
    assert [row["matched"] is None for row in rows] == [row[NAME] is None for row in rows]
    assert sum(row[NAME] is None for row in rows) == 2
    assert all((NAME in row["missing"]) == (row[NAME] is None) for row in rows)
    assert torch.tensor([row[f"floor_mean_{NAME}"] for row in rows]).isfinite().all()
