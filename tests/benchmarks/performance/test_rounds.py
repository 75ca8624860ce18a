"""`rounds`: what its page says follows from its figures, and its clock counts other processes."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks.performance import rounds
from benchmarks.performance.rounds import AUTHORS, FACTORED, FEDAVG, Row, goals, page


def rows(**seconds: list[float]) -> list[Row]:
    """Of one network."""
    names = {"fedavg": FEDAVG, "factored": FACTORED, "authors": AUTHORS}
    return [{"network": "net", "what": names[key], "seconds_per_client": found} for key, found in seconds.items()]


def test_ratios_are_taken_turn_by_turn() -> None:
    """A turn in which the machine was slow slows both sides."""
    said = goals(rows(fedavg=[1.0, 4.0, 2.0], factored=[1.2, 4.4, 2.6]), {})
    assert "| net | 1.20 | - | - |" in said
    assert not any(line.startswith("net:") for line in said)


@pytest.mark.parametrize(
    ("authors", "said"),
    [
        (8.0, "one in 10 of the authors' seconds would be 0.80. That is less than"),
        (9.5, "one in 10 of the authors' seconds would be 0.95. That is no less than"),
        (12.0, ""),
    ],
)
def test_why_a_goal_was_missed_follows_from_the_figures(authors: float, said: str) -> None:
    lines = goals(rows(fedavg=[0.9], factored=[1.0], authors=[authors]), {"fedavg, loop, net": 0.95})
    assert f"| net | 1.11 | {authors / 0.9:.1f} | {authors:.1f} times |" in lines
    found = "".join(line for line in lines if line.startswith("net:"))
    assert said in found
    assert ("That loop runs at 95% of the machine's peak" in found) is (authors < 10)
    assert bool(found) is (authors < 10)


def test_seconds_of_the_clock_are_kept_and_said_to_be() -> None:
    on = {"cores": 3, "processor": "that", "torch": "2"}
    measured = {"on": on, "clients": 20, "rows": rows(factored=[2.0]), "kept": False}
    clock = rounds.clocked([], 5, None, {"machine": {}, "clock": measured})
    assert clock == {**measured, "kept": True}
    found: dict[str, Any] = {"images": 1, "batch": 1, "epochs": 1, "repeats": 1, "few": 1, "clock": clock}
    found |= {"hyperfl": {**measured, "clients": 7, "rows": rows(fedavg=[1.0], factored=[1.0])}, "further": rounds.NONE}
    assert any("7 clients, that:" in line for line in page(found, {}))
    assert any("There are 20 clients. Measured on" in line for line in page(found, {}))
    assert any("All 3 cores" in line and line.endswith("before what stands above:") for line in page(found, {}))
    found["clock"] = measured
    assert not any("before what stands above" in line for line in page(found, {}))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="what processes spend is read in /proc")
def test_other_processes_count() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(time.sleep, 0).result()
        before, alone = rounds.everywhere(), time.process_time()
        pool.submit(sum, range(30_000_000)).result()
        spent, mine = rounds.everywhere() - before, time.process_time() - alone
    assert spent > mine + 0.1
