"""Attacks pool over processes: the same bits, and none of the processes outlives its use."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import tensors
from support.forkserver import use_spawn
from support.spreading import TOLD, Telling, leaving

import attacks
from attacks import parallel
from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.gradient_matching.engine.memory_estimate import trials_in_cache
from attacks.parallel import AttackPool
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.methods.local import Local
from fl.runtime.workers import Workers
from fl.view import ServerView


@pytest.fixture(scope="module")
def pool() -> Iterator[AttackPool]:
    """Two processes, and both are there; they are spawned, as users' are."""
    with pytest.MonkeyPatch.context() as patch:
        use_spawn(patch)
        pool = AttackPool(2, patience=0.0)
        pool._ready_pool().result()
    yield pool
    pool.close()


@pytest.fixture
def children() -> Callable[[], set[Any]]:
    """The processes that are there and were not before."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def views(count: int, method: Any = None) -> list[ServerView]:
    """Of one step on one image each, of different images."""
    run = worlds.federation(worlds.one_step(method or FedAvg.example()), rounds=0)
    return [run.observe(0, data=worlds.images(1, "victim", i))[0] for i in range(count)]


def telling(**settings: Any) -> Telling:
    return Telling(home=os.getpid(), **settings)


def told(result: object) -> list[int]:
    """Process, threads, views together, seed."""
    assert isinstance(result, Reconstruction)
    return [int(x) for x in result.private[TOLD]]


@pytest.mark.parametrize(
    ("attack", "method"),
    [
        ({"name": "ig", "iterations": 4, "max_parallel_trials": 2}, None),
        ({"name": "gradinversion", "iterations": 4, "restarts": 2, "max_parallel_trials": 4}, None),
        ("analytic", None),
        ({"name": "peel+ig", "iterations": 4, "max_parallel_trials": 2}, HyperFL.example()),
    ],
)
def test_the_number_of_processes_changes_no_bit(
    pool: AttackPool, attack: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, built, here = views(7, method), attacks.build(attack), []
    alone = AttackPool().run(built, given, range(7))
    assert all(isinstance(one, Reconstruction) for one in alone)

    run_here = parallel._run_here

    def slowly(attack: Attack, views: list[ServerView], seeds: list[int], control: Any) -> list[Result]:
        here.extend(seeds)
        time.sleep(1.0)
        return run_here(attack, views, seeds, control)

    monkeypatch.setattr(parallel, "_run_here", slowly)
    away = pool.run(built, given, range(7))
    assert 0 < len(here) < 7
    for one, other in zip(alone, away, strict=True):
        pairs = list(zip(tensors(one), tensors(other), strict=True))
        assert pairs
        assert all(torch.equal(x, y) for x, y in pairs)
        assert repr(one) == repr(other)


def test_both_processes_work_each_with_one_thread(pool: AttackPool) -> None:
    ticks: list[int] = []
    torch.set_num_threads(2)
    try:
        attack = telling(seconds=(0.3, 0.0), together=2)
        found = [told(x) for x in pool.run(attack, views(9), range(10, 19), ticks.append)]
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(1)
    assert after == 2
    assert {process == os.getpid() for process, *_ in found} == {True, False}
    assert {threads for _, threads, *_ in found} == {1}
    assert [together for *_, together, _ in found] == [2] * 8 + [1]
    assert [seed for *_, seed in found] == list(range(10, 19))
    assert sum(ticks) == 9


def test_what_is_known_is_not_attacked_and_what_is_found_is_handed_on(pool: AttackPool) -> None:
    kept: dict[int, Result] = {}
    given = views(6)
    known: dict[int, Result] = {1: NotApplicable("known"), 4: NotApplicable("known")}
    results = pool.run(
        telling(seconds=(0.3, 0.0)), given, range(6), known=known, keep=lambda i, r: kept.update(zip(i, r, strict=True))
    )
    assert {i for i, result in enumerate(results) if isinstance(result, NotApplicable)} == {1, 4}
    assert sorted(kept) == [0, 2, 3, 5]
    assert all(kept[i] is results[i] for i in kept)
    assert len({told(result)[0] for result in kept.values()}) == 2  # of both processes


def test_short_work_starts_no_process(children: Callable[[], set[Any]]) -> None:
    pool = AttackPool(2, patience=60.0)
    found = pool.run(telling(seconds=(0.05, 0.0)), views(4), range(4))
    assert {told(one)[0] for one in found} == {os.getpid()}
    assert pool.patience < 60.0
    assert not children()


def test_patience_runs_out_over_several_calls() -> None:
    pool = AttackPool(2, patience=0.15)
    for _ in range(4):
        pool.run(telling(seconds=(0.1, 0.0)), views(1), range(1))
    assert pool.patience < 0
    pool.close()


def test_what_goes_wrong_in_a_worker_is_raised_here_and_the_next_call_goes_on(
    children: Callable[[], set[Any]],
) -> None:
    pool = AttackPool(2, patience=0.0)
    slow = telling(seconds=(0.5, 0.0))
    for abroad, error, words in (("raise", ValueError, "no good"), ("die", RuntimeError, "died.*use fewer workers")):
        pool._ready_pool().result()
        with pytest.raises(error, match=words):
            pool.run(replace(slow, abroad=abroad), views(9), range(9))
    assert [told(one)[-1] for one in pool.run(telling(), views(3), range(3))] == [0, 1, 2]
    pool.close()
    assert not children()


def test_what_goes_wrong_here_ends_work_elsewhere_at_once(children: Callable[[], set[Any]]) -> None:
    pool = AttackPool(2, patience=0.0)
    pool._ready_pool().result()
    began = time.monotonic()
    with pytest.raises(ValueError, match="no good"):
        pool.run(telling(seconds=(1.0, 60.0), at_home="raise"), views(4), range(4))
    assert time.monotonic() - began < 30
    assert not children()


def test_workers_that_are_done_leave_by_themselves(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what they hold is given back; told to leave at once they could not."""
    use_spawn(monkeypatch)
    pool = Workers(1)
    pool.result(pool.submit(leaving))
    pool.close()
    assert "left" in capfd.readouterr().err


def test_workers_are_checked() -> None:
    with pytest.raises(ValueError, match="expected workers >= 1, got 0"):
        AttackPool(0)


ATTACKS = dict(attacks.attacks.examples())


@pytest.mark.parametrize("name", ATTACKS)
def test_portions_hold_every_view_once(name: str) -> None:
    given = views(5)
    assert sorted(i for portion in ATTACKS[name].view_batches(given) for i in portion) == list(range(5))
    assert ATTACKS[name].view_batches([]) == []


@pytest.mark.parametrize("name", ATTACKS)
def test_a_client_that_sends_nothing_is_refused_and_not_a_failure(name: str) -> None:
    given = views(2, Local.example())
    assert not given[0].update
    results = AttackPool(1).run(ATTACKS[name], given, [0, 1])
    assert [type(result) for result in results] == [NotApplicable] * 2


def test_portions_fill_stacks_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(count: int, **settings: int) -> list[int]:
        attack: Attack = attacks.build({"name": "ig", **settings})
        return [len(portion) for portion in attack.view_batches([given] * count)]

    given = views(1)[0]
    assert trials_in_cache(given) > 32
    assert sizes(50, max_parallel_trials=16) == [12, 13, 12, 13]
    assert sizes(50, max_parallel_trials=32) == [12, 13, 12, 13]  # more than sixteen leave cores idle
    assert sizes(50, max_parallel_trials=10) == [10] * 5
    assert sizes(5, max_parallel_trials=32) == [5]
    assert sizes(5, max_parallel_trials=4, restarts=2) == [1, 2, 2]
    assert sizes(3, max_parallel_trials=4, restarts=9) == [1, 1, 1]
    monkeypatch.setattr(
        "attacks.gradient_matching.engine.memory_estimate.CACHE",
        3 * 8 * sum(v.numel() for v in given.client.task.parameters.values()),
    )
    assert sizes(5, max_parallel_trials=32) == [2, 3]
