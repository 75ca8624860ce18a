"""A registered method, a model of the user's own and a captured update go one way through an audit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.audit_command import PERCEPTRON, audit, written
from support.scripts import script
from support.tiny import Registered
from typer.testing import CliRunner

from eval import cli
from eval.audit.request import AuditRequest
from eval.commands import terminal
from eval.io.jsonl import read_rows
from eval.run import attack_cell, training_cell
from fl.capture import from_batch
from fl.tensors import dense

METHOD = {"method": "{name: fedavg, lr: 0.1}", "dataset": "{name: faces, size: 8}", "count": 3, "device": "cpu"}
NETWORK = "{name: linear, input_shape: [1, 8, 8], normalize: false}"
MODULE = """
import torch
from pathlib import Path

def linear():
    saved = torch.load(Path(__file__).with_name("observed.pt"), weights_only=True)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, saved["classes"]))
    model.load_state_dict({"1.weight": saved["weight"], "1.bias": saved["bias"]})
    return model, saved["images"], saved["labels"]
"""
SLOW = f"""{PERCEPTRON}
def whole():
    inputs = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return build(), inputs, torch.tensor([0, 1, 2, 0])
"""
SEARCH = "{name: ig, iterations: %d, stack: 1}"


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "one", SLOW)
    with Registered():
        yield name


def files(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_the_same_case_gives_the_same_figures_from_every_source(mine, tmp_path, monkeypatch):
    """A linear network, one image an update: the analytic attack draws nothing, so all figures have to agree."""
    plan = AuditRequest(model=NETWORK, attack=("analytic",), **METHOD).plan()
    (training,) = plan.trainings
    with training_cell.federation_of(training) as federation:
        seen = attack_cell.observe_targets(federation, training, training.attack_tasks[0].observation_spec)
    first = seen.updates[0]
    images, labels = (torch.cat([getattr(one.truth, key) for one in seen.updates]) for key in ("inputs", "labels"))
    weight, bias = (dense(first.view.shared[f"head.{key}"]) for key in ("weight", "bias"))
    saved = {"weight": weight, "bias": bias, "images": images, "labels": labels, "classes": len(bias)}
    torch.save(saved, tmp_path / "observed.pt")
    (tmp_path / f"fixed{mine}.py").write_text(MODULE)
    own = json.loads(audit(f"fixed{mine}:linear", "--attack", "analytic", "--json").stdout)
    method = json.loads(
        audit(
            "--method", METHOD["method"], "--dataset", METHOD["dataset"], "--model", NETWORK,
            "--count", 3, "--attack", "analytic", "--json",
        ).stdout
    )  # fmt: skip
    view, _ = from_batch(__import__(f"fixed{mine}").linear()[0], images[:1], labels[:1])
    np.savez("update.npz", **{name: dense(value).numpy() for name, value in view.update.items()})
    update = json.loads(
        audit("--update", "update.npz", "--model", f"fixed{mine}:linear", "--attack", "analytic", "--json").stdout
    )
    by_source = {"method": method, "own": own, "update": update}
    rows = {source: found["findings"][0]["images"] for source, found in by_source.items()}
    assert [len(found) for found in rows.values()] == [3, 3, 1]
    for figure in ("psnr", "exact8", "label", "label_correct", "floor_mean_psnr", "floor_grey_psnr"):
        values = {source: [row[figure] for row in found] for source, found in rows.items()}
        assert values["own"] == pytest.approx(values["method"], rel=1e-4), figure
        assert values["update"] == pytest.approx(values["own"][:1], rel=1e-6), figure
    for found in by_source.values():
        assert set(found) == set(own)
        assert set(found["findings"][0]) == set(own["findings"][0])
        assert set(found["findings"][0]["images"][0]) >= {
            "psnr",
            "update",
            "picture",
            "attack",
            "knowledge",
            "verified",
        }


@pytest.mark.parametrize("source", ["own", "update"])
def test_an_audit_without_a_training_leaves_what_one_of_a_method_does(mine, tmp_path, source):
    words = [f"{mine}:whole"]
    if source == "update":
        model, images, labels = __import__(mine).whole()
        view, _ = from_batch(model, images[:1], labels[:1])
        np.savez("update.npz", **{name: dense(value).numpy() for name, value in view.update.items()})
        (tmp_path / f"bare{mine}.py").write_text(SLOW + "\ndef bare():\n    return build()\n")
        words = ["--update", "update.npz", "--model", f"bare{mine}:bare", "--input-shape", "1,8,8"]
    found = audit(*words, "--attack", "analytic", "--attack", SEARCH % 50, "--out", "kept", "--json")
    assert found.exit_code in {0, terminal.UNDECIDED}, found.output
    kept = tmp_path / "kept"
    assert {path.name for path in kept.iterdir()} >= {
        *("report.html", "report.md", "table.md", "audit.json", "images.jsonl", "run.json", "config.yaml", "env.json")
    }
    said, written = json.loads(found.stdout), json.loads((kept / "audit.json").read_text())
    assert written["findings"] == said["findings"]
    report = (kept / "report.md").read_text()
    assert "communication cost" not in report
    assert "accuracy over rounds" not in report.lower()
    if source == "update":
        assert "not judged, as the true images are not known" in report
        assert "picture-1-1-reconstruction.png" in report
        assert "riginal" not in report + (kept / "report.html").read_text()
        assert all(row["psnr"] is None and row["unjudged"] for row in read_rows(kept / "images.jsonl") if "psnr" in row)
        assert said["findings"][1]["images"] == []
        assert said["findings"][0]["labels"] == [[0]]
    else:
        assert "PSNR" in report
    again = CliRunner().invoke(cli.app, ["report", "kept"])
    assert again.exit_code == 0, again.output
    assert (kept / "report.md").read_text() == report


def test_two_workers_give_the_same_bytes(mine, monkeypatch, tmp_path):
    monkeypatch.setattr("attacks.parallel.AttackPool.__init__.__defaults__", (1, 0.0))
    for workers in (1, 2):
        words = ("--attack", SEARCH % 60, "--workers", workers, "--out", f"kept{workers}")
        assert audit(f"{mine}:whole", *words).exit_code in {0, terminal.UNDECIDED}
    names = ("images.jsonl", "table.md", "images/fedavg-none-ig-round0-seed0.npz", "config.yaml")
    assert files(tmp_path / "kept1", *names) == files(tmp_path / "kept2", *names)


def test_an_audit_of_ones_own_model_goes_on_where_it_was_killed(mine, tmp_path):
    """Killed after one attack and in the middle of the next, it computes only what is left, to the same bytes."""
    first, second = SEARCH % 10, "{name: ig, iterations: 30, max_parallel_trials: 1, restarts: 3}"
    words = [f"{mine}:whole", "--attack", first, "--attack", second, "--device", "cpu", "--workers", "1"]
    told = script("killed_audit", tmp_path, *words)
    assert told["finished"] == told["kept"] == 1
    assert told["codes"][0] == told["codes"][1] in {0, terminal.UNDECIDED}
    names = ("images.jsonl", "table.md", "images/fedavg-none-ig-2-round0-seed0.npz")
    assert files(tmp_path / "killed", *names) == files(tmp_path / "whole", *names)
