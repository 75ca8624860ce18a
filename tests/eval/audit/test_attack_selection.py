"""What an audit tries by default: attacks that solve before those that search, and nothing that could add nothing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.audit_command import audit, written
from support.runs import tiny
from support.tiny import Registered

import attacks
from eval.audit import attack_selection, execution
from eval.audit import user_model as audited
from eval.audit.image_sources import load_images
from eval.audit.request import AuditRequest
from eval.audit.user_model import Subject
from eval.commands import terminal
from eval.metrics import self_verification
from eval.run import runner
from eval.run import training_cell as training
from eval.run.run_directory import RunDir
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL

MODULE = """
import torch
from torch import nn

def pooled():
    torch.manual_seed(0)
    one = nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    two = nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*one, *two, nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))

def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 10))
"""
FACES = ("--images", "{name: faces, size: 12}", "--count", 2)
LINEAR = ("--method", "fedavg", "--dataset", "{name: faces, size: 12}", "--count", 2)
LINEAR += ("--model", "{name: linear, input_shape: [1, 12, 12]}")
EARLY = execution.Execution(options=runner.Options(), early_stop=True)


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "tried", MODULE)
    with Registered(), torch.random.fork_rng():
        yield name


def test_a_network_with_max_pooling_is_solved_and_not_only_searched(mine):
    result = audit(f"{mine}:pooled", *FACES, "--max-psnr", 20)
    assert result.exit_code == terminal.LEAKED, result.output
    assert "analytic: the attack recovered no images, only features" in result.stdout
    assert "2 of 2 label(s) recovered\n  confirmed by the attack\nrconv: not applicable: 2 (MaxPool2d)" in result.stdout
    assert "cascade: image content leaked: 2 of 2 image(s) came back at 20 dB or more" in result.stdout
    for number in range(2):
        assert f"  image {number}: PSNR 100.0 dB (best guess" in result.stdout
    assert result.stdout.count(", exact to 8 bits, confirmed by the attack\n") == 2
    assert result.stdout.endswith(f"ig: not needed: cascade {self_verification.SETTLED_WORDS}\n")
    assert "above the limit: PSNR 100 > 20" in result.stderr


def test_what_was_asked_for_is_tried_whatever_came_before(mine):
    result = audit(f"{mine}:flat", *FACES, "--attack", "analytic", "--attack", "guess", "--json")
    first, second = json.loads(result.stdout)["findings"]
    assert first["verified"]
    assert (second["spared"], len(second["images"])) == (None, 2)


def test_the_first_attack_that_confirms_its_pictures_is_the_last(mine, tmp_path):
    own = audit(f"{mine}:flat", *FACES)
    assert "image 1: PSNR 100.0 dB" in own.stdout
    for label in ("rconv", "cascade", "april", "ig"):
        assert f"\n{label}: not needed: analytic {self_verification.SETTLED_WORDS}\n" in own.stdout
    assert ": rconv (" not in own.stderr
    folder = tmp_path / "kept"
    for _ in range(2):  # the second time everything is there
        method = audit(*LINEAR, "--json", "--out", folder)
        found = json.loads(method.stdout)["findings"]
        assert [one["attack"] for one in found] == ["analytic", "rconv", "cascade", "april", "ig"]
        assert [one["spared"] is None for one in found] == [True, False, False, False, False]
        assert found[0]["verified"]
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    assert {row["attack"] for row in rows} == {"analytic"}
    assert all("ig" not in cell["name"] for cell in json.loads((folder / "run.json").read_text())["cells"])
    assert "ig" not in (folder / "config.yaml").read_text().split("attack:")[1].split("observe:")[0].split()
    assert "Not finished" not in (folder / "report.md").read_text()


def test_what_was_left_out_keeps_no_checkpoint_and_is_not_prepared_for_again(mine, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    words = (*LINEAR, "--rounds", 1, "--out", folder, "--json")
    first = audit(*words)
    assert first.exit_code == 0, first.output
    assert all(finding["spared"] for finding in json.loads(first.stdout)["findings"][1:])
    assert not [*folder.rglob("*checkpoint*")]
    monkeypatch.setattr(training, "federation_of", lambda one: pytest.fail("nothing is left to attack"))
    assert json.loads(audit(*words).stdout) == json.loads(first.stdout)


def test_a_hypernetwork_is_peeled_first():
    words = {"dataset": "{name: faces, size: 8}", "model": "tiny", "device": "cpu"}
    for method in ("hyperfl", "dp-hyperfl"):
        assert [*AuditRequest(method=method, **words).attacks] == ["peel+cascade", "peel+ig", "ig"]
    for method in ("fedper", "pfedhn"):  # the latter sends the update of what its hypernetwork made
        assert [*AuditRequest(method=method, **words).attacks] == ["analytic", "rconv", "cascade", "april", "ig"]
    (training,) = AuditRequest(method="hyperfl", **words).plan().trainings
    assert [watch.attack.label for watch in training.attack_tasks] == ["peel+cascade", "peel+ig", "ig"]


def test_what_one_training_spares_is_still_part_of_another(tmp_path):
    with Registered():
        plan = runner.prepare(tiny("attack=guess"), device="cpu")
    one, two = (trained.attack_tasks[0].cell.id for trained in plan.trainings)
    stopping = attack_selection.EarlyStopping(RunDir(tmp_path), {one: "settled"})
    assert stopping.left_out(plan) == {}
    assert [len(trained.attack_tasks) for trained in stopping.remaining(plan).trainings] == [0, 1]
    assert [entry.label for entry in stopping.remaining(plan).experiment.attack] == ["guess"]
    stopping.reasons[two] = "settled"
    assert stopping.left_out(plan) == {"guess": "settled"}
    assert stopping.remaining(plan).experiment.attack == ()


def test_batches_are_told_apart_by_what_can():
    assert attack_selection.default_attacks(FedAvg(), 2) == ("analytic", "spear", "cascade", "april", "ig")
    adam = FedAvg(optimizer="adam", lr=1e-3, steps=1)
    assert attack_selection.default_attacks(adam, 1) == ("adaptive-step", "adaptive-step+ig", "ig")
    assert attack_selection.default_attacks(adam, 2) == ("adaptive-step+ig", "ig")
    assert attack_selection.default_attacks(HyperFL(), 2) == attack_selection.default_attacks(HyperFL(), 1)


def row(update, **more):
    return {"update": update, "images": 1, "candidates": 1, "verified": False, **more}


def test_an_attack_is_needed_unless_every_image_is_confirmed_or_it_has_been_peeled():
    exact = [row("a", verified=True), row("b", fixed=0.95)]
    assert (
        attack_selection.redundant_reason("ig", {"cascade": exact})
        == f"not needed: cascade {self_verification.SETTLED_WORDS}"
    )
    assert attack_selection.redundant_reason("ig", {"rconv": [*exact[:1], row("b")], "cascade": exact[1:]}) == (
        f"not needed: rconv and cascade {self_verification.SETTLED_WORDS}"
    )
    for other in (
        row("b"),
        row("b", fixed=0.5),
        row("b", verified=None),
        row("b", verified=True, candidates=0),
        row("b", verified=True, images=2),
    ):
        assert attack_selection.redundant_reason("ig", {"cascade": [exact[0], other]}) == ""
    refused = {"update": "b", "not_applicable": "no"}
    assert attack_selection.redundant_reason("ig", {"cascade": [exact[0], refused]}) == ""
    assert attack_selection.redundant_reason("ig", {"peel+ig": [row("a", verified=True, candidates=0)]}).startswith(
        "not needed: peel+ig"
    )
    for doubtful in (None, False):  # a peel that is off knows less than the update does
        assert attack_selection.redundant_reason("ig", {"peel+ig": [row("a", verified=doubtful)]}) == ""
    assert attack_selection.redundant_reason("peel+ig", {"peel+cascade": [row("a")]}) == ""
    assert attack_selection.redundant_reason("ig", {"peel+ig": [refused]}) == ""
    assert attack_selection.redundant_reason("ig", {"adaptive-step+ig": [refused]}) == ""
    searched = {"adaptive-step+ig": [row("a", misfit=0.3)]}
    assert attack_selection.redundant_reason("ig", searched).startswith("not needed: adaptive-step+ig searched")
    assert attack_selection.redundant_reason("ig", {}) == ""


def test_only_updates_that_are_open_are_attacked_again(mine):
    model = __import__(mine).flat()
    faces = audited.take_first(load_images("{name: faces, size: 12}"), 2, "faces")
    pairs = [from_batch(model, faces.inputs[i : i + 1], faces.labels[i : i + 1]) for i in range(2)]
    view, truth = pairs[1]
    noise = torch.randn(16, 144, generator=torch.Generator().manual_seed(0))
    weight = view.update["1.weight"]
    noisy = replace(view, update={**view.update, "1.weight": weight + 0.1 * weight.norm() * noise / noise.norm()})
    subjects = [Subject(*pairs[0]), Subject(noisy, truth)]
    named = {name: attacks.build(name) for name in ("analytic", "guess")}
    first, second = execution.audit_updates("x", subjects, named, execution=EARLY).findings
    assert [one["verified"] for one in first.rows] == [True, False]
    assert [one["update"] for one in second.rows] == [1]
    assert second.verdict.startswith("of the 1 update(s) that no attack before it settled: ")
    whole = execution.audit_updates("x", subjects, named).findings[1]
    assert second.rows[0] == whole.rows[1]  # the same numbers, whatever is left out


def test_what_an_attack_says_of_a_captured_update_is_said_without_the_images(mine):
    face = audited.take_first(load_images("{name: faces, size: 12}"), 1, "faces")
    view, _ = from_batch(__import__(mine).pooled(), face.inputs, face.labels)
    np.savez("update.npz", **{name: value.numpy() for name, value in view.update.items()})
    result = audit("--update", "update.npz", "--model", f"{mine}:pooled", "--input-shape", "1,12,12")
    said = "only features (the input of a layer behind the first), of which there is no true value to compare with; "
    assert (
        f"analytic: the attack recovered no images, {said}the attack confirms that what it recovered is right"
        in result.stdout
    )
    assert "cascade: the attack confirms that what it recovered is right; give the true images" in result.stdout
    assert "ig: not needed: cascade" in result.stdout


def test_an_update_of_adam_settles_nothing_and_is_named(mine):
    face = audited.take_first(load_images("{name: faces, size: 12}"), 1, "faces")
    model = __import__(mine).flat()
    method = FedAvg(optimizer="adam", lr=1e-3, steps=1, batch_size=None)
    view, truth = from_batch(model, face.inputs, face.labels, method=method)
    captured = from_update(model, dict(view.update), input_shape=(1, 12, 12), num_classes=view.task.num_classes)
    named = {name: attacks.build(name) for name in ("analytic", "cascade", "guess")}
    findings = execution.audit_updates("x", [Subject(captured, truth)], named, execution=EARLY).findings
    assert not any(found.spared for found in findings)
    assert not any(found.verified for found in findings)
    np.savez("update.npz", **{name: value.numpy() for name, value in view.update.items()})
    given = ("--update", "update.npz", "--model", f"{mine}:flat", "--input-shape", "1,12,12", "--attack", "analytic")
    result = audit(*given)
    assert result.exit_code == 4
    assert "the first step of an adaptive optimizer" in " ".join(result.stdout.split())
    stated = audit(*given, "--method", "{name: fedavg, optimizer: adam, lr: 0.001}")
    assert "adam rescales every number apart" in " ".join(stated.stdout.split())
    assert "contradiction" not in stated.stdout
