"""`benchmarks.performance.scaling`: the smallest case of each part, and what its figures rest on."""

from __future__ import annotations

import mmap
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import fl.models
from attacks.gradient_matching.engine.traced_objective import STEADY_EVALUATIONS
from benchmarks.leakage import searches
from benchmarks.performance import noise_data, profile_loops, scaling
from benchmarks.performance.scaling import page


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases run in this process: a fresh one takes seconds to load torch."""
    monkeypatch.setattr(scaling, "apart", lambda work, *settings: work(*settings))
    monkeypatch.setattr(scaling, "ITERATIONS", 4)
    monkeypatch.setattr(profile_loops, "TOGETHER", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_every_part_measures_and_is_shown() -> None:
    found: dict[str, Any] = {
        "a": scaling.part_a(["lenet-zhu"], [2]),
        "b": scaling.part_b(["hyperfl-grey"], [2], each=4),
        "c": scaling.part_c([("mlp", {"widths": (8,)})], [4], each=4, count=2),
        "d": profile_loops.loops(["lenet-zhu"], ["hyperfl-grey"], [2], iterations=4, each=4),
        "e": searches.searches(["ig", "bilevel, the image"], ["lenet-zhu"], [1, 2], work=8),
    }
    assert [row["method"] for row in found["b"]] == ["fedavg", "hyperfl"]
    assert all(row["seconds_per_client"] > 0 and row["mib_whole"] > row["mib_images"] for row in found["b"])
    assert found["a"][0]["image_iterations_per_second"] > 0
    assert found["c"]["networks"][0]["parameters"] == 8 * 785 + 10 * 9
    assert all("mib_above" in row for rows in found["c"].values() for row in rows)
    names = [loop["name"] for loop in found["d"]["loops"]]
    assert names[-3:] == [f"{way}, hyperfl-grey" for way in ("fedavg, loop", "hyperfl, loop", "hyperfl, factored")]
    for loop in found["d"]["loops"]:
        assert 0 < loop["share"] < 1
        assert sum(loop["parts"].values()) == pytest.approx(1, abs=0.01)
        assert loop["parts"]["convolutions"] > 0
    found["processors"] = {part: f"processor {part}" for part in "abcde"}
    text = "\n".join(page(found))
    assert all(f"## ({part})" in text and f"Measured on: processor {part}." in text for part in "abcde")
    assert "mlp, widths (8,)" in text


def test_an_iteration_counts_once_for_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that goes on by a second whenever it is read, and after the iterations that are set up."""
    monkeypatch.setattr(searches, "time", SimpleNamespace(process_time=count().__next__))
    views = noise_data.victims("lenet-zhu", 2)
    kinds = {kind: searches.rate(kind, views, work=8) for kind in ("ig", "gradinversion")}
    assert kinds == {"ig": 2.0, "gradinversion": 8.0}  # four searches for each image
    with searches.timed() as laps:
        searches._call({"name": "ig", "iterations": STEADY_EVALUATIONS + 3}, views)
    assert laps == [(2, 1)] * 3


def test_parts_keep_their_processors() -> None:
    old = {"machine": {"processor": "this"}, "a": [], "b": []}
    assert scaling.known_parts({}) == {"processors": {}}
    assert scaling.known_parts(old) == {"a": [], "b": [], "processors": {"a": "this", "b": "this"}}
    assert scaling.known_parts({**old, "processors": {"b": "that"}})["processors"] == {
        "a": "this",
        "b": "that",
    }


def test_a_stack_counts_as_many_operations_as_its_trials() -> None:
    """Stacked convolutions are grouped ones, of which torch's own formula counts each group's for all groups."""
    task = fl.models.build("lenet-zhu", num_classes=10, seed=0)
    one, three = (profile_loops.searching(task, count) for count in (1, 3))
    begun = [profile_loops.operations(lambda call=call: call(1)) for call in (one, three)]  # type: ignore[misc]
    going = [profile_loops.operations(lambda call=call: call(2)) for call in (one, three)]  # type: ignore[misc]
    assert going[1] - begun[1] == 3 * (going[0] - begun[0]) > 0


def test_memory_is_that_of_this_process() -> None:
    now, before = scaling.memory()
    with mmap.mmap(-1, 64 * scaling.MIB) as block:  # fresh pages, where tensors may be given some that were freed
        block.write(bytes(64 * scaling.MIB))
        assert scaling.memory()[1] >= min(before, now + 60)
        assert scaling.memory()[0] > now + 60 > 60
