"""`benchmarks.exact.residual`: rows are kept one by one, goals are judged, and networks are what their names say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import NotApplicable, Reconstruction
from attacks.base import attacks
from benchmarks import common
from benchmarks.exact import residual, residual_page, residual_training, residual_victims
from benchmarks.exact.residual_networks import CifarResNet, drawn
from benchmarks.exact.residual_victims import CASES, SMOKE, Case, Goal, observe
from fl.methods.hyperfl import HyperFL
from fl.types import Batch

Row = dict[str, Any]
AT_REST = "classifier private, at rest"
IMAGES = Batch(torch.tensor([0.2, 0.6])[:, None, None, None].expand(2, 3, 4, 4).clone(), torch.tensor([3, 3]))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (residual, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(residual, "CASES", SMOKE)
    return tmp_path


def test_every_kind_of_victim_can_be_attacked(capsys: pytest.CaptureFixture[str]) -> None:
    residual.main(["--smoke", "--attack", "ig", "--iterations", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `smoke")]
    assert len(lines) == len(SMOKE)
    assert all(line.endswith("| no |") for line in lines)


def test_what_is_exact_meets_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    residual.main(["--smoke", "--attack", "analytic"])
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if "| one linear layer |" in line)
    assert "| 100% [16%, 100%] | 100% [16%, 100%] | 100 (100) | 2 of 2 | 2 | 0 | 0 |" in line
    assert line.endswith("| yes |")
    assert "False `verified` over all rows and attacks: 0, of 2 that said it." in out
    assert "is not given the image" in out


def test_a_run_goes_on_where_it_was_stopped(results: Path) -> None:
    options = ["--rows", "smoke-1", "--attack", "analytic"]
    residual.main([*options, "--limit", "1"])
    first = residual.known_rows()
    assert [residual.key(row) for row in first] == [("smoke-1", "analytic", 0)]
    residual.main(options)
    assert [residual.key(row) for row in residual.known_rows()] == [("smoke-1", "analytic", n) for n in (0, 1)]
    assert residual.known_rows()[0] == first[0]
    residual.main([*options, "--seconds", "-1", "--again"])
    assert residual.known_rows()[0] == first[0]
    assert (results / "residual.md").exists()


def test_rows_of_another_state_of_the_code_are_measured_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--rows", "smoke-1", "--attack", "analytic", "--limit", "1"]
    for state, more in (("old", []), ("new", []), ("new", ["--outdated"])):
        monkeypatch.setattr(residual, "attacks_state", lambda state=state: state)
        residual.main([*options, *more])
        (row,) = residual.known_rows()
        assert row["attacks"] == ("new" if more else "old")
    measured = []
    monkeypatch.setattr(residual, "measure", lambda *given: measured.append(given))
    residual.main([*options, "--outdated"])
    assert not measured


def test_hypernetworks_send_weights_and_keep_embedding_and_classifier() -> None:
    case = replace(SMOKE[1], batch=1, hypernetwork=HyperFL, rewriter="peel")
    victim = observe(case, 0)
    assert set(victim.view.private) == {"embedding", *(n for n in victim.view.task.parameters if "linear" in n)}
    assert all(isinstance(value, torch.Tensor) for value in victim.view.update.values())
    assert case.setting.endswith("step 0.1, 16 hidden units, heads that start at the network's own values, " + AT_REST)
    found = residual.scored(attacks.build(case.attack("backsolve"))(victim.view), victim.images)
    assert (found["exact"], found["verified"], found["labels"]) == ([True], True, None)
    with pytest.raises(ValueError, match="expected weights"):
        replace(case, sent="mean")


def test_a_failing_attack_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(victim: residual_victims.Victim, seed: int) -> Reconstruction:
        raise RuntimeError("no solution")

    row = residual.measure(SMOKE[0], 0, "mine", fail)
    assert row["error"] == "RuntimeError: no solution"
    assert "| 1 | `RuntimeError: no solution` | `smoke-1` 1 |" in residual_page.document(SMOKE, [row], "mine")


def test_what_takes_too_long_is_stopped() -> None:
    def search(victim: residual_victims.Victim, seed: int) -> Reconstruction:
        while True:
            pass

    row = residual.measure(SMOKE[0], 0, "mine", search, most=0.05)
    assert row["reason"] == "not done after 0.05 CPU seconds, at which it was stopped"
    assert "psnr" not in row


@pytest.mark.parametrize(
    ("inputs", "verified", "expected"),
    [
        (IMAGES.inputs.flip(0), True, {"exact": [True, True], "verified": True, "false": False}),
        (IMAGES.inputs[1:], True, {"exact": [True], "verified": True, "false": False}),
        (IMAGES.inputs + 0.01, True, {"exact": [False, False], "verified": True, "false": True}),
        (IMAGES.inputs + 0.01, False, {"exact": [False, False], "verified": False, "false": False}),
        (IMAGES.inputs[[0, 1, 1]], True, {"exact": [True, True], "verified": True, "false": True}),
    ],
)
def test_verified_is_false_where_a_picture_is_not_exact(inputs: Any, verified: bool, expected: Row) -> None:
    row = residual.scored(Reconstruction(inputs, verified=verified), IMAGES)
    assert {name: row[name] for name in expected} == expected


def test_what_is_no_picture_is_none_that_was_verified() -> None:
    assert residual.scored(NotApplicable("too few"), IMAGES) == {"reason": "too few"}
    row = residual.scored(Reconstruction(None, verified=True, note="stopped"), IMAGES)
    assert row == {"labels": None, "verified": False, "note": "stopped"}


@pytest.mark.parametrize(
    ("found", "right"),
    [(None, None), (torch.tensor([3, 3]), 2), (torch.tensor([3, 1]), 1), (torch.eye(4)[[3, 3]], 2)],
)
def test_labels_are_counted_in_any_order(found: torch.Tensor | None, right: int | None) -> None:
    assert residual.labels_right(found, IMAGES.labels) == right


def row(victim: int, **changes: Any) -> Row:
    return {
        "case": "two",
        "attack": residual_page.TESTED,
        "victim": victim,
        "psnr": [100.0, 50.0],
        "exact": [True, False],
        "labels": 2,
        "verified": False,
        "false": False,
        "seconds": 4.0,
        "attacks": "a",
        **changes,
    }


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal(exact=0.5, seconds=5), "yes"),
        (Goal(exact=0.6), "no"),
        (Goal(exact=0.5, seconds=3), "no"),
        (Goal(close=1.0, labels=True, median=True), "yes"),
    ],
)
def test_goals_are_judged_by_shares_and_medians(goal: Goal, met: str) -> None:
    case = Case("two", "two pictures", CASES[0].network, 2, 2, goal=goal)
    text = residual_page.document([case], [row(0), row(1)])
    (line,) = (line for line in text if line.startswith("| `two` | two pictures"))
    assert line.endswith(f"| {met} |")


def test_what_was_not_handed_out_counts_as_missed() -> None:
    case = Case("two", "two pictures", CASES[0].network, 2, 4, goal=Goal(close=1.0, labels=True, median=True))
    refused = {k: v for k, v in row(1, reason="too few").items() if k not in {"psnr", "exact", "labels"}}
    (line,) = (
        line for line in residual_page.document([case], [row(0), refused]) if line.startswith("| `two` | two pic")
    )
    assert "| 2 of 4 so far |" in line
    assert "| 25% [0%, 94%] | 50% [1%, 99%] | 25 (0) | 2 of 4 | 0 | 0 | 1 |" in line
    assert line.endswith("| no, so far |")


def test_a_goal_stands_there_before_anything_was_measured() -> None:
    case = Case("two", "two pictures", CASES[0].network, 2, 4, goal=Goal(exact=0.9))
    (line,) = (line for line in residual_page.document([case], []) if line.startswith("| `two` | two pic"))
    assert line.startswith("| `two` | two pictures | 2 | gradient, float32 | 0 of 4 so far | 90% exact | - |")
    assert line.endswith("| - |")


def test_searches_stand_beside_on_the_same_victims() -> None:
    case = Case("two", "two pictures", CASES[0].network, 2, 2)
    search = row(1, attack="ig", psnr=[10.0, 12.0], seconds=60.0)
    text = residual_page.document([case], [row(0, seconds=9.0), row(1), search])
    assert any("| ig | 1 | 11.0 (10.0 to 12.0) | 60.0 | 75 | 4.0 |" in line for line in text)
    assert not any("peer's own code" in line for line in text)
    text = residual_page.document([case], [row(1), {**search, "attack": "breaching (iterations 9)"}])
    assert any("`breaching` is the peer's own code" in line for line in text)


def test_a_row_behind_a_rewriter_stands_in_the_table() -> None:
    case = Case(
        "two", "two pictures", CASES[0].network, 2, 2, sent="weights", training={"steps": 2}, rewriter="first-step"
    )
    text = residual_page.document([case], [row(0, attack="first-step+backsolve"), row(1)])
    own, beside = (line for line in text if line.startswith("| `two` | two pic"))
    sent = "weights before minus after, step 1, steps 2"
    assert own.startswith(f"| `two` | two pictures | 2 | {sent} | 1 of 2 so far |")
    assert beside.startswith(f"| `two` | two pictures | 2 | {sent} | backsolve | 1 |")


def test_a_row_is_attacked_by_its_own_attack() -> None:
    chosen = residual._parser().parse_args([])
    steps = next(case for case in CASES if case.rewriter)
    assert residual.named(chosen, steps)[0] == f"{steps.rewriter}+backsolve"
    assert residual.named(chosen, CASES[0])[0] == "backsolve"


def test_training_of_its_own_is_sent_as_weights() -> None:
    with pytest.raises(ValueError, match="expected weights where training"):
        Case("m", "m", CASES[0].network, training={"momentum": 0.9})
    view = observe(next(case for case in SMOKE if case.training), 0).view
    assert not view.threat.knows_optimizer


def test_several_states_of_the_code_are_told_in_words() -> None:
    case = Case("two", "two pictures", CASES[0].network, 2, 2)
    same, other = (residual_page.document([case], [row(0), row(1, attacks=state)]) for state in ("a", "b"))
    said = {line for line in other if "several states" in line}
    assert len(said) == 1
    assert not said & set(same)


def test_notes_that_differ_in_figures_and_layers_alone_are_one() -> None:
    cases = [Case(name, name, CASES[0].network, 1, 2) for name in ("two", "three")]
    rows = [
        row(0, note="the equations end at 1.a.0.weight and b.bias: 9 of 2,304 numbers (ReLU) and 2.3e-02 are left"),
        row(1, note="the equations end at conv1.weight: 12 of 16 numbers and 5.0 are left", attack="ig"),
        row(0, note="the equations end at `c.weight`", case="three"),
        row(0, reason="the equations end at c.weight: 12 of 16 numbers and 0.1 are left", case="three"),
    ]
    text = residual_page.document(cases, rows)
    said = "`the equations end at ...: ... of ... numbers and ... are left`"
    assert text[text.index("|---|---|---|") + 1 :] == [
        f"| 3 | {said} | `two` 1, `two` by `ig` 1, `three` 1 |",
        "| 1 | `the equations end at '...'` | `three` 1 |",
    ]


def test_names_are_told_with_how_far_they_are(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    residual.add({**row(0), "case": "smoke-2", "attack": "ig"})
    residual.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "smoke-1: one linear layer, batch 1, gradient, float32; of 2: none"
    assert lines[1].endswith("of 1: ig 1")


def test_rows_have_names_of_their_own_and_pictures_nobody_else_has() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.first >= 2000 for case in CASES if case.pictures.startswith("cifar"))
    assert all(case.first + case.batch * case.count <= 5000 for case in CASES)


def test_statistics_come_back_in_training_mode() -> None:
    (case,) = (case for case in SMOKE if case.train_mode)
    view = observe(case, 0).view
    assert view.buffers_after is not None
    moved = [not torch.equal(view.buffers[name], value) for name, value in view.buffers_after.items()]
    assert all(moved)
    assert view.method.train_mode


def test_random_numbers_of_the_process_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = (drawn(lambda: CifarResNet(1), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first["conv1.weight"], second["conv1.weight"])
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_training_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_training, "BATCH", 2)
    monkeypatch.setattr(residual_training, "KEPT", (1,))
    images = Batch(torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4))
    assert residual_training.train(images, tmp_path / "whole", epochs=1) == 2
    monkeypatch.setattr(residual_training, "SAVED_EVERY", 1)
    clock = iter([0.0, 0.0, 2.0, *[0.0] * 9])
    monkeypatch.setattr(residual_training.time, "monotonic", lambda: next(clock))
    assert residual_training.train(images, tmp_path / "parts", seconds=1, epochs=1) == 1
    assert residual_training.train(images, tmp_path / "parts", seconds=1, epochs=1) == 2
    first, second = (torch.load(tmp_path / name / "resnet18-1.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_was_not_trained_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(residual_training.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(residual_training.NotTrainedError, match=r"resnet18-1\.pt: run"):
        residual_training.trained_resnet18(1)


def test_an_attack_that_there_is_not_is_answered_by_name() -> None:
    with pytest.raises(ValueError, match="unknown attack"):
        residual.main(["--smoke", "--attack", "nonesuch"])
    assert "ig" in attacks.names()
    assert json.dumps(row(0))
