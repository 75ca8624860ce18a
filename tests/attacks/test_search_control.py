"""Searches end in time with the best they have, say how far they are, and cost what they estimated."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from support import pictures, worlds
from support.chains import initialized
from torch import Tensor, nn

import attacks
from attacks.base import Attack, NotApplicable, Reconstruction, Result, run_checked
from attacks.gradient_matching.engine import fit_check
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import Variables
from attacks.gradient_matching.ig import InvertingGradients
from attacks.parallel import AttackPool
from attacks.search_control import (
    SearchControl,
    SearchMonitor,
    SearchProgress,
    StoppedError,
    check_time_for,
    check_time_limit,
    limited_by,
)
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.view import ServerView

NOT_ATTACKED = "not attacked before the time limit"


def views(count: int) -> list[ServerView]:
    run = worlds.federation(FedAvg(lr=0.1, steps=1, batch_size=None), rounds=0)
    return [run.observe(0, data=worlds.images(1, "control", i))[0] for i in range(count)]


class Clock:
    """Seconds that pass only where an evaluation says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_evaluation: float = 1.0) -> None:
        self.now, self.evaluations = 0.0, 0
        evaluate = ProblemBatch.evaluate

        def slow(batch: ProblemBatch, variables: Variables) -> tuple[Tensor, Variables]:
            self.now += per_evaluation
            self.evaluations += 1
            return evaluate(batch, variables)

        monkeypatch.setattr(ProblemBatch, "evaluate", slow)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_a_control_without_limits_changes_no_bit() -> None:
    attack = attacks.build({"name": "ig", "iterations": 20, "restarts": 2})
    (view,) = views(1)
    plain, controlled = attack(view), attack(view, control=SearchControl())
    assert isinstance(plain, Reconstruction)
    assert repr(plain) == repr(controlled)
    assert torch.equal(plain.inputs, controlled.inputs)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("name", ["ig", "headless+ig", "first-step+ig"])
def test_a_search_ends_at_its_time_limit_with_its_best_iterate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (view,) = views(1)
    attack = attacks.build({"name": name, "iterations": 1000, "schedule": "none"})
    clock = Clock(monkeypatch)
    monkeypatch.setattr(fit_check, "EXPLAINED_BELOW", 0.0)  # the tiny network explains much at once
    result = attack(view, control=SearchControl(time_limit=4))
    assert clock.evaluations == 4
    assert isinstance(result, Reconstruction)
    assert "cut short by the time limit after 3 of 1000 iterations" in result.note
    assert "cut short" in result.given_up
    assert result.objective < 1


def test_the_time_is_shared_out_among_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = attacks.build({"name": "ig", "iterations": 1000, "max_parallel_trials": 1})
    clock = Clock(monkeypatch)
    results = attack.run_controlled(views(3), [0, 1, 2], SearchControl(time_limit=60))
    assert clock.evaluations == 60
    assert all(isinstance(result, Reconstruction) and "cut short" in result.note for result in results)
    assert ["after 19 of 1000" in result.note for result in results] == [True] * 3  # type: ignore[union-attr]


def test_a_search_that_ends_by_itself_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    (view,) = views(1)
    for settings in ({"iterations": 10}, {"iterations": 1000, "tolerance": 0.99}):
        result = attacks.build({"name": "ig", **settings})(view, control=SearchControl(time_limit=900))
        assert isinstance(result, Reconstruction)
        assert "cut short" not in result.note


def test_nothing_begins_after_the_time_limit() -> None:
    for name in ("ig", "headless+ig"):
        result = attacks.build(name)(views(1)[0], control=SearchControl(time_limit=0))
        assert isinstance(result, NotApplicable)
        assert result.limit
        assert result.reason == "no trial was run before the time limit"


@pytest.mark.parametrize("keep", [True, False])
def test_an_interrupt_keeps_the_best_where_that_is_asked_for(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = attacks.build({"name": "ig", "iterations": 100})
    evaluate, calls = ProblemBatch.evaluate, []

    def interrupted(batch: ProblemBatch, variables: Variables) -> tuple[Tensor, Variables]:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return evaluate(batch, variables)

    monkeypatch.setattr(ProblemBatch, "evaluate", interrupted)
    control = SearchControl(keep_best_on_interrupt=keep)
    if not keep:
        with pytest.raises(KeyboardInterrupt):
            attack(views(1)[0], control=control)
        return
    result = attack(views(1)[0], control=control)
    assert isinstance(result, Reconstruction)
    assert "cut short by an interrupt after 7 of 100 iterations" in result.note
    assert control.interrupted
    assert "before an interrupt" in attack(views(1)[0], control=control).reason  # type: ignore[union-attr]


def test_progress_is_told_in_iterations_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[SearchProgress] = []
    clock = Clock(monkeypatch)
    attack = attacks.build({"name": "ig", "iterations": 50, "max_parallel_trials": 1, "restarts": 2})
    attack(views(1)[0], control=SearchControl(on_progress=told.append, interval=10))
    assert clock.evaluations == 102
    assert {progress.iterations for progress in told} == {100}
    assert [progress.iteration for progress in told] == sorted(progress.iteration for progress in told)
    assert len(told) == 10
    assert told[0].seconds_left is None
    for progress in told[1:]:
        assert progress.seconds_left == pytest.approx(100 - progress.iteration, rel=0.3)


def test_a_search_takes_as_long_as_it_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, per_evaluation=2.0)
    given = views(2)
    for name in ("ig", "headless+ig"):
        attack = attacks.build({"name": name, "iterations": 40, "max_parallel_trials": 1, "restarts": 3})
        estimate = attack.estimate_seconds(given)
        begun = clock.now
        attack.run(given, [0, 1])
        assert estimate == pytest.approx(clock.now - begun)
    silent = replace(given[0], update={})
    assert attacks.build("ig").estimate_seconds([silent]) == 0
    assert attacks.build("analytic").estimate_seconds(given) is None


def test_what_was_cut_short_says_so_apart_from_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    (view,) = views(1)
    attack = attacks.build({"name": "ig", "iterations": 100, "restarts": 2, "max_parallel_trials": 1})
    cut, never, whole = (attack(view, control=SearchControl(time_limit=seconds)) for seconds in (40, 0, 1000))
    assert cut.cut_short == "the search was cut short by the time limit after 19 of 100 iterations"
    assert never.cut_short == "no trial was run before the time limit"
    assert whole.cut_short == ""


def test_a_restart_that_was_cut_short_is_told_of_where_another_was_better(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    (view,) = views(1)
    control = SearchControl()
    attack = attacks.build({"name": "ig", "iterations": 20, "restarts": 2, "max_parallel_trials": 1})

    def interrupt_late(progress: SearchProgress) -> None:
        if progress.iteration == 21:  # the first of the second trial
            control.interrupt()

    control.on_progress = interrupt_late
    result = attack(view, control=control)
    assert isinstance(result, Reconstruction)
    assert result.cut_short == "of another trial the search was cut short by an interrupt after 1 of 20 iterations"
    assert result.cut_short in result.note


def test_shares_are_of_the_time_left_and_interrupted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    whole = SearchControl(time_limit=90)
    clock.now = 30
    first, second = whole.share(3), whole.share(1)
    assert (first.seconds_left, second.seconds_left) == (20, 60)
    assert first.share(2).seconds_left == 10
    assert not second.interrupted
    first.interrupt()
    assert whole.interrupted
    assert second.stop_reason() == "an interrupt"
    assert (second.cut_short_by, first.cut_short_by) == ("an interrupt", "")


def test_an_attack_with_a_run_of_its_own_is_not_passed_over() -> None:
    class Own(InvertingGradients):
        def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
            return [NotApplicable("my own")] * len(views)

    (view,) = views(1)
    assert attacks.build("ig").is_controllable
    assert attacks.build("peel+ig").is_controllable
    assert not attacks.build("analytic").is_controllable
    assert not attacks.build("peel+cascade").is_controllable
    assert Own(iterations=1)(view, control=SearchControl()) == NotApplicable("my own")


def test_batches_of_a_pool_share_the_time_and_only_whole_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = attacks.build({"name": "ig", "iterations": 100, "max_parallel_trials": 1})
    clock = Clock(monkeypatch)
    kept: list[int] = []
    heard: list[SearchProgress] = []

    def keep(numbers: Sequence[int], results: Sequence[Result]) -> None:
        kept.extend(numbers)
        clock.now = 570  # the rest is short of time

    control = SearchControl(time_limit=600, on_progress=heard.append, interval=10)
    results = AttackPool().run(attack, views(4), range(4), keep=keep, control=control)
    assert kept == [0]
    cuts = [result.cut_short for result in results]
    assert cuts[0] == ""
    assert [f"after {n} of 100" in cut for n, cut in zip((9, 9, 9), cuts[1:], strict=True)] == [True] * 3
    assert {progress.iterations for progress in heard} == {400}
    assert heard[-1].iteration > 300
    left = [progress.seconds_left for progress in heard[1:9]]
    assert left == [pytest.approx(400 - p.iteration, abs=15) for p in heard[1:9]]


def test_after_the_time_limit_a_pool_attacks_nothing_more() -> None:
    results = AttackPool().run(attacks.build("analytic"), views(2), range(2), control=SearchControl(time_limit=0))
    assert results == [NotApplicable(NOT_ATTACKED, limit=True, cut_short=NOT_ATTACKED)] * 2


def test_an_attack_that_ends_in_time_without_a_word_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Attack):
        name = "silent"

        def run_controlled(
            self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl
        ) -> list[Result]:
            control.interrupt()
            return [Reconstruction(None, note=control.stop_reason()) for _ in views]

    results = AttackPool().run(Silent(), views(2), range(2), control=SearchControl())
    assert results[0].cut_short == "the search was cut short by an interrupt"
    assert results[1].cut_short == "not attacked before an interrupt"


@pytest.fixture
def two_processes() -> Iterator[AttackPool]:
    pool = AttackPool(2, patience=0.0)
    pool._ready_pool().result()
    yield pool
    pool.close()


def test_an_interrupt_reaches_workers_and_their_progress_this_process(two_processes: AttackPool) -> None:
    attack = attacks.build({"name": "ig", "iterations": 10**6, "max_parallel_trials": 1})
    heard: list[SearchProgress] = []
    control = SearchControl(keep_best_on_interrupt=True)

    def listen(progress: SearchProgress) -> None:
        heard.append(progress)
        if two_processes._board.read(0).iteration and len(heard) > 3:
            control.interrupt()

    control.on_progress = listen
    results = two_processes.run(attack, views(3), range(3), control=control)
    searched = [result for result in results if "cut short by an interrupt after" in result.cut_short]
    assert len(searched) == 2
    assert all(isinstance(result, Reconstruction) for result in searched)
    assert sum(result.cut_short == "not attacked before an interrupt" for result in results) == 1
    assert {progress.iterations for progress in heard} == {3 * 10**6}


def test_workers_keep_to_the_time_limit_too() -> None:
    attack = attacks.build({"name": "ig", "iterations": 10**6})
    spread = AttackPool(2, patience=0.0)
    try:
        spread._ready_pool().result()
        begun = time.monotonic()
        results = spread.run(attack, views(20), range(20), control=SearchControl(time_limit=1))
    finally:
        spread.close()
    assert time.monotonic() - begun < 120  # of days
    assert all(isinstance(result, Reconstruction | NotApplicable) for result in results)
    assert any("time limit" in getattr(result, "note", "") for result in results)


def test_levels_share_the_time() -> None:
    control = SearchControl(time_limit=1000)
    first = SearchMonitor(control, batches=2, iterations=10, levels_left=2)
    assert first.begin_batch() == ""
    assert first._batch_deadline - time.monotonic() == pytest.approx(250, abs=5)
    assert SearchMonitor().begin_batch() == ""
    assert math.isinf(SearchControl().seconds_left)


class Patience(SearchControl):
    """A control whose time is up once it has been asked so often."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.left = asked

    def stop_reason(self) -> str:
        self.left -= 1
        return "the time limit" if self.left < 0 else ""


def convolutional_view() -> ServerView:
    task = pictures.network(
        *(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.MaxPool2d(2), pictures.LEAKY),
        *(torch.nn.Conv2d(8, 12, 3, padding=1), torch.nn.MaxPool2d(2), pictures.LEAKY),
    )
    return pictures.victim(task, pictures.photograph(14))


def test_an_attack_that_solves_ends_in_time_with_what_it_has_proved() -> None:
    view = convolutional_view()
    whole = attacks.build("cascade")(view, control=SearchControl(time_limit=600))
    assert isinstance(whole, Reconstruction)
    assert (whole.verified, whole.cut_short) == (True, "")
    ended = {}
    for asked in (0, 1, 4, 16, 64, 256, 1024):
        found = attacks.build("cascade")(view, control=Patience(asked))
        if found.cut_short:
            assert "not done before the time limit" in found.cut_short
            assert not getattr(found, "verified", False)
        ended[asked] = set(getattr(found, "private", {}))
    lowest = [len([name for name in ended[asked] if name.startswith("residual/")]) for asked in (0, 1024)]
    assert lowest[0] < lowest[1]  # of more layers where there was more time
    assert any(name.startswith("features/") for names in ended.values() for name in names)


def test_a_time_limit_of_one_view_leaves_the_others_their_results() -> None:
    view = convolutional_view()
    first, second = run_checked(attacks.build("cascade"), [view, view], [0, 0], SearchControl(time_limit=600))
    assert first.cut_short == second.cut_short == ""
    spent = run_checked(attacks.build("cascade"), [view, view], [0, 0], Patience(0))
    assert ["not done before the time limit" in result.cut_short for result in spent] == [True, True]


def test_outside_of_a_limited_attack_nothing_is_checked() -> None:
    check_time_limit()
    with limited_by(SearchControl(time_limit=0)), pytest.raises(StoppedError, match="the time limit"):
        check_time_limit()
    check_time_limit()


def test_a_solve_that_can_not_be_done_in_the_time_left_is_not_begun() -> None:
    check_time_for(math.inf)
    with limited_by(SearchControl()):
        check_time_for(1e30)
    with limited_by(control := SearchControl(time_limit=600)):
        check_time_for(1e9)
        with pytest.raises(StoppedError, match="the time limit"):
            check_time_for(1e15)
    assert control.cut_short_by


def test_large_equations_of_a_layer_are_not_begun_without_the_time_for_them() -> None:
    """Of what is shuffled below a convolution all channels are solved for together."""
    layers = (
        nn.Conv2d(3, 16, 3, 1, 1),
        nn.LeakyReLU(0.2),
        nn.PixelShuffle(2),
        nn.Conv2d(4, 12, 3, 1, 1),
        nn.LeakyReLU(0.2),
    )
    model = initialized(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 24 * 24, 10))).float()
    view, _ = from_batch(model, torch.rand(1, 3, 12, 12, generator=stream(0, "picture")), torch.tensor([1]))
    (found,) = run_checked(attacks.build("rconv"), [view], [0], SearchControl(time_limit=0.5))
    assert isinstance(found, NotApplicable)
    assert found.cut_short
