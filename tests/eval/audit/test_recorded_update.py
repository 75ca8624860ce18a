"""An update recorded in a federation keeps what is known of the training, and audits read it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import recorded as support
from typer.testing import CliRunner

import hyperleak
from eval.audit.captured_files import load_update
from eval.audit.recorded_update import FACTS, RecordedUpdate, TrainingFacts, subtract, usable_facts
from eval.cli import app


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    first = support.recorded(support.network(), 2)
    first.save(tmp_path / "update.npz")
    again = RecordedUpdate.load(tmp_path / "update.npz")
    assert (again.training, again.origin) == (first.training, first.origin)
    for half in ("before", "after"):
        mine, theirs = getattr(first, half), getattr(again, half)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_numbers_of_two_bytes_are_kept(tmp_path: Path) -> None:
    first = support.recorded(support.network())
    half = {name: value.bfloat16() for name, value in first.after.items()}
    replace(first, after=half).save(tmp_path / "update.npz")
    again = RecordedUpdate.load(tmp_path / "update.npz")
    assert all(torch.equal(value.float(), again.after[name]) for name, value in half.items())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_difference_of_numbers_of_two_bytes_is_not_rounded_once_more(kind: torch.dtype) -> None:
    before, after = torch.tensor([1.0]).to(kind), torch.tensor([-(2.0**-12)]).to(kind)
    difference = RecordedUpdate(before={"w": before}, after={"w": after}).difference()["w"]
    assert torch.equal(difference, before.double().sub(after.double()).float())
    assert not torch.equal(difference, (before - after).float())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "other bytes"),
        (b"[]", "other bytes"),
        (b"[" * 100_000, "other bytes"),
        (b'{"version": 2, "training": {}, "origin": {}}', "version 1"),
        (b'{"version": 1, "training": {"speed": 3}, "origin": {}}', "'speed'"),
        (b'{"version": 1, "training": {"lr": NaN}, "origin": {}}', r"update\.npz: lr: expected a number"),
        (b'{"version": 1, "training": {"steps": "many"}, "origin": {}}', r"update\.npz: steps: expected"),
    ],
)
def test_other_facts_are_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    np.savez(tmp_path / "update.npz", **{FACTS: np.frombuffer(content, np.uint8), "before/w": np.zeros(2)})
    for read in (RecordedUpdate.load, load_update):
        with pytest.raises(ValueError, match=words):
            read(tmp_path / "update.npz")


def test_what_are_no_numbers_is_refused_by_name(tmp_path: Path) -> None:
    facts = np.frombuffer(b'{"version": 1, "training": {}, "origin": {}}', np.uint8)
    np.savez(tmp_path / "update.npz", **{FACTS: facts, "before/w": np.array(["a"])})
    with pytest.raises(ValueError, match=r"update\.npz, under 'before/w': expected numbers, got an array of <U1"):
        RecordedUpdate.load(tmp_path / "update.npz")


@pytest.mark.parametrize(
    "rate",
    [
        torch.tensor(0.25),
        torch.tensor([0.25], dtype=torch.bfloat16),
        torch.tensor(0.25, requires_grad=True),
        np.float32(0.25),
        np.array(0.25),
    ],
)
def test_a_fact_may_be_a_number_of_numpy_or_torch(rate: Any) -> None:
    facts = TrainingFacts(lr=rate, steps=torch.tensor(3), train_mode=np.bool_(True))
    assert (facts.lr, facts.steps, facts.train_mode) == (0.25, 3, True)
    assert type(facts.lr) is float
    assert usable_facts({"lr": rate}) == {"lr": 0.25}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", 0, "lr: expected a number > 0 or null, got 0; leave it out where it is not known"),
        ("lr", math.nan, "lr: expected a number > 0 .*, got nan; leave it out"),
        ("lr", -1, "lr: expected a number > 0 .*, got -1; leave it out"),
        ("lr", torch.tensor(math.nan), "lr: expected a number > 0 .*, got nan; leave it out"),
        ("lr", torch.empty((), device="meta"), "lr: .* that holds none that can be read, .* on meta; give a number"),
        ("lr", torch.tensor([0.1, 0.2]), r"lr: expected a number > 0 .*, got tensor\(\[0"),
        ("momentum", None, "momentum: .* leave the setting out for its default$"),
    ],
)
def test_a_fact_that_no_client_can_have_is_refused_with_what_to_do(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingFacts(**{name: value})
    assert usable_facts({name: value}) == {}


def test_a_file_without_facts_is_no_recorded_update(tmp_path: Path) -> None:
    np.savez(tmp_path / "update.npz", w=np.zeros(2))
    with pytest.raises(ValueError, match=FACTS):
        RecordedUpdate.load(tmp_path / "update.npz")
    with pytest.raises(ValueError, match=r"ends in \.npz"):
        support.recorded(support.network()).save(tmp_path / "update.pt")


@pytest.mark.parametrize(
    ("facts", "known"),
    [
        (TrainingFacts(), False),
        (TrainingFacts(optimizer="sgd"), False),
        (TrainingFacts(optimizer="sgd", steps=1), True),
        (TrainingFacts(optimizer="sgd", steps=2), False),
        (TrainingFacts(optimizer="sgd", steps=1, weight_decay=1e-4), False),
        (TrainingFacts(optimizer="adam", steps=1), False),
        (TrainingFacts(optimizer="adam", steps=1, lr=1e-3), True),
        (TrainingFacts(optimizer="sgd", epochs=2, lr=0.1, batch_size=8), True),
    ],
)
def test_facts_make_a_method_where_they_suffice(facts: TrainingFacts, known: bool) -> None:
    method = facts.method(support.network())
    assert (method is not None) is known
    if method is not None:
        assert method.steps == facts.steps
        assert method.batch_size == facts.batch_size


def test_an_audit_takes_the_facts_from_the_file(tmp_path: Path) -> None:
    """Where the file says that it was Adam, the closed form of SGD does not apply; else it is not confirmed."""
    model, adam = support.dense_network(), TrainingFacts(optimizer="adam", lr=1e-3, steps=1)
    found = {}
    for name, made, told in (("sgd", support.PLAIN, True), ("adam", adam, True), ("untold", adam, False)):
        update = support.recorded(model, 1, made)
        (update if told else replace(update, training=TrainingFacts())).save(tmp_path / f"{name}.npz")
        report = hyperleak.audit(model, update=tmp_path / f"{name}.npz", input_shape=support.SHAPE, attacks="analytic")
        assert any("round: 3" in note for note in report.notes)
        found[name] = report.findings[0]
    assert found["sgd"].verified is True
    assert "adam" in found["adam"].refused
    assert not found["untold"].verified


def test_the_command_takes_the_facts_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support.recorded(support.dense_network(), 3, support.PLAIN).save(tmp_path / "update.npz")
    (tmp_path / "recorded_model.py").write_text("from support.recorded import dense_network\n")
    monkeypatch.chdir(tmp_path)
    words = ["audit", "update", "update.npz", "--model", "recorded_model:dense_network", "--input-shape", "1,14,14"]
    result = CliRunner().invoke(app, [*words, "--attack", "{name: spear, samples: 100}", "--json"])
    said = json.loads(result.stdout)
    assert any("examples 3" in note for note in said["notes"])
    assert "fewer than 3 directions" in said["findings"][0]["refused"]


@pytest.mark.parametrize(
    "odd",
    [
        {"lr": math.nan}, {"lr": math.inf}, {"lr": "0.1"}, {"lr": torch.ones(2)}, {"momentum": math.nan},
        {"weight_decay": -1.0}, {"steps": 0}, {"steps": 2.5}, {"epochs": math.inf}, {"batch_size": True},
        {"examples": -3}, {"optimizer": "newton"}, {"train_mode": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_facts_that_no_client_can_have_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(odd))}: expected"):
        TrainingFacts(**odd)
    assert not usable_facts(odd)


def test_numbers_of_any_kind_are_facts() -> None:
    counts: dict[str, Any] = {"steps": np.int64(3), "examples": torch.tensor(4), "batch_size": 2.0}
    facts = TrainingFacts(lr=np.float32(0.5), **counts)  # type: ignore[arg-type]
    assert facts == TrainingFacts(lr=0.5, steps=3, examples=4, batch_size=2)
    assert json.loads(json.dumps(asdict(facts))) == asdict(facts)
    assert replace(facts, train_mode=False).in_words().endswith("train_mode False")


STEP = "{name: fedavg, steps: 1, batch_size: null}"


@pytest.mark.parametrize("method", [None, STEP], ids=["of the file", "stated"])
def test_a_step_of_unknown_size_contradicts_no_images(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (inputs, labels) = support.dense_network(), support.examples(1)
    update = support.recorded(model)
    replace(update, training=replace(update.training, lr=None)).save(tmp_path / "update.npz")
    monkeypatch.setitem(sys.modules, "whole_module", SimpleNamespace(whole=lambda: (model, inputs, labels)))
    words = ["audit", "update", str(tmp_path / "update.npz"), "--model", "whole_module:whole", "--attack", "analytic"]
    said = CliRunner().invoke(app, [*words, *(["--method", method] if method else [])]).output
    assert "confirmed by the attack" in said
    assert "contradiction" not in said
    assert "lr: " not in said
    wrong = CliRunner().invoke(app, [*words, "--method", "{name: fedavg, steps: 1, batch_size: null, lr: 0.5}"]).output
    assert "contradiction: the update is not what this model makes of these images" in wrong
    if method is None:
        images = {"inputs": inputs, "labels": labels}
        report = hyperleak.audit(model, *images.values(), update=tmp_path / "update.npz", attacks="analytic")
        assert not any("not what this model makes" in note for note in report.notes)
        assert report.findings[0].verified is True


def test_differences_are_in_a_type_that_holds_them() -> None:
    pairs = [
        (torch.tensor([True, False, True]), torch.tensor([True, True, False])),
        (torch.tensor([0, 255, 1], dtype=torch.uint8), torch.tensor([255, 0, 1], dtype=torch.uint8)),
        (torch.tensor([1.0]), torch.tensor([1 + 1e-12], dtype=torch.float64)),
        (torch.tensor([1.0], dtype=torch.float8_e4m3fn), torch.tensor([1.25], dtype=torch.float8_e5m2)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1 + 1e-6])),
    ]
    for before, after in pairs:
        assert torch.equal(subtract(before, after).double(), before.double() - after.double())


def test_coarse_weights_are_recorded_as_they_are(tmp_path: Path) -> None:
    for kind in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fnuz):
        value = torch.tensor([0.5, -1.25]).to(kind)
        RecordedUpdate(before={"w": value}, after={"w": value}).save(tmp_path / "u.npz")
        assert torch.equal(RecordedUpdate.load(tmp_path / "u.npz").before["w"], value.float())


def test_of_parts_that_came_back_the_rest_stays_as_it_was(tmp_path: Path) -> None:
    before = {"a": torch.ones(2), "b": torch.ones(3)}
    update = RecordedUpdate(before=before, after={"a": torch.zeros(2)})
    assert update.difference().keys() == {"a"}
    update.save(tmp_path / "u.npz")
    assert RecordedUpdate.load(tmp_path / "u.npz").before.keys() == {"a"}
    with pytest.raises(ValueError, match="got 'c' after it alone: give both by the names"):
        replace(update, after={"c": torch.zeros(2)}).difference()
