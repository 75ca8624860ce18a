"""`benchmarks.hyperfl.several_steps`: its own arithmetic, what its servers watched, and what its page says of rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds

import fl.data
from attacks.hypernetworks.peel import HypernetPeel, SolvedHypernet
from benchmarks.hyperfl import several_steps, several_steps_read
from benchmarks.hyperfl.several_steps import page
from benchmarks.hyperfl.several_steps_cases import Case, cases
from benchmarks.hyperfl.several_steps_read import EVEN, SIZES, Recorded, flat, overlap, turned
from fl.data import Dataset
from fl.methods.hyperfl import HyperFL


def test_a_gradient_is_compared_at_its_best_factor() -> None:
    right, across = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])
    assert turned(7 * right, right) < 1e-6
    assert turned(right + 3 * across / 2, right) == pytest.approx(0.5**0.5)
    assert turned(-right, right) == turned(across, right) == 1


def test_labels_count_as_often_as_they_are_there() -> None:
    assert overlap(torch.tensor([1, 1, 1, 2]), torch.tensor([1, 1, 2, 3])) == 0.75
    assert overlap(torch.tensor([1]), torch.tensor([1, 1, 2, 2])) == 0.25


@pytest.mark.parametrize("limit", [1e9, 0.05], ids=["free", "clipped"])
def test_the_gradient_recorded_along_a_round_is_the_one_that_the_peel_reads(limit: float) -> None:
    generator = Recorded(embedding=3, hidden=6, init="scaled", limit=limit)
    method = HyperFL(lr=1e-4, momentum=0.5, head_epochs=0, epochs=2, batch_size=2, max_norm=limit)
    run = worlds.federation(replace(method, parametrization=generator), rounds=0)
    view, truth = run.observe(0)
    assert len(generator.kept) > 2
    found, names = HypernetPeel().solve(view), list(truth.extractor)
    assert isinstance(found, SolvedHypernet)
    assert turned(flat(found.gradient, names), generator.mean(0.5)) < 1e-5
    assert not generator.kept


def test_one_that_is_stopped_keeps_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Case("batches", "FedAvg", size, "ig", {}) for size in (1, 2)]
    kept = {"searches": {case.name: {"of": "before"} for case in both}, "read": {}}
    (tmp_path / "several_steps.json").write_text(json.dumps(kept))
    written: list[dict[str, Any]] = []
    answers = iter([{"of": "today"}])

    def measured(case: Case) -> dict[str, Any]:
        return next(answers)

    monkeypatch.setattr(several_steps, "RESULTS", tmp_path)
    monkeypatch.setattr(several_steps, "cases", lambda: both)
    monkeypatch.setattr(several_steps, "measure_case", measured)
    monkeypatch.setattr(several_steps, "page", lambda searches, read: [])
    monkeypatch.setattr(several_steps, "publish", lambda name, data, text: written.append(data))
    monkeypatch.setattr(several_steps_read, "QUESTIONS", {})
    monkeypatch.setattr(sys, "argv", ["several_steps", "--again"])
    with pytest.raises(StopIteration):
        several_steps.main()
    assert written[-1]["searches"] == {both[0].name: {"of": "today"}, both[1].name: {"of": "before"}}


def test_earlier_rounds_are_watched_and_the_last_one_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = worlds.images(8, "several", shape=(1, 28, 28))
    images = replace(drawn, inputs=drawn.inputs.float())
    made = Dataset(images, images, "made", tuple("0123456789"), "nowhere")
    monkeypatch.setattr(fl.data, "load", lambda name: made)
    for name, value in (("FIRST", 0), ("OTHERS", 1), ("OWN", 2)):
        monkeypatch.setattr(several_steps, name, value)
    views = {}
    for rounds in (1, 3):
        case = Case("history", "FedAvg", 2, "ig", {}, rounds=rounds, most=1)
        ((views[rounds], _),) = several_steps.victims(case)
    assert [len(views[rounds].history) for rounds in (1, 3)] == [0, 2]
    assert [past.round for past in views[3].history] == [1, 2]
    for name, value in views[1].update.items():
        assert torch.equal(value, views[3].update[name])  # type: ignore[arg-type]


def rows(*psnr: float) -> list[dict[str, Any]]:
    """A case's rows, 10 dB being the mean color's."""
    known = {"floor_mean_psnr": 10.0, "label_correct": True, "label_overlap": 0.5}
    return [{"image": i, "psnr": value, **known} for i, value in enumerate(psnr)]


def test_the_page_says_what_the_rows_say() -> None:
    every = [case for case in cases() if case.section == "steps"]
    first = [case for case in every if (case.method, case.trained) == (every[0].method, every[0].trained)]
    by_name = {case.attack.partition(",")[0]: case.name for case in first}
    searches = {
        by_name["unrolled"]: {"seconds": 32.0, "rows": rows(21, 19)},
        by_name["surrogate"]: {"seconds": 16.0, "rows": rows(18, 16)},
        by_name["first-step"]: {"seconds": 0.0, "rows": [], "reason": "too long"},
    }
    text = "\n".join(page(searches, {}))
    assert "Incomplete" in text
    assert "20.0 [7.3, 32.7] | 50% | 10.0 | 50% | 100% | 2.0 |" in text
    assert "| unrolled | +3.0 [+3.0, +3.0] |" in text
    assert "Not applicable: first-step, 1 correction (FedAvg): too long." in text


def test_rows_have_names_of_their_own() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert all(case.updates * case.images >= 8 for case in every if case.section != "exact")


def test_the_page_subtracts_one_round_and_the_even_deal() -> None:
    watched = [case for case in cases() if (case.section, case.method) == ("history", "FedAvg")]
    searches = {case.name: {"seconds": 1.0, "rows": rows(20 + case.rounds, 22 + case.rounds)} for case in watched}
    told = [
        {"rounds": 10, "accuracy": 0.5, "rule": rule, "size": size, "image": image, "known": known, "refused": False}
        for rule, known in (("counts", 0.25), (EVEN, 0.75))
        for size in SIZES
        for image in range(2)
    ]
    text = "\n".join(page(searches, {"labels": told}))
    assert "| FedAvg | 4 | +3.0 [+3.0, +3.0] |" in text
    assert "| 10 | -50 [-50, -50] |" in text
