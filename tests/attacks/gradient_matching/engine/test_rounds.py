"""What a search makes of an unknown order of batches, and of several rounds on the same images."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds

import attacks
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batch_order import assign_labels, rank_orders
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import INPUTS, LABELS, MatchingProblem
from attacks.rewriting.surrogate import Surrogate
from attacks.update.earlier_rounds import comparable_rounds
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Phase, Task, Truth
from fl.view import ServerView, ThreatModel

TWICE = FedAvg(lr=0.3, epochs=2, batch_size=2)


def rounds(method: Method, count: int, **threat: Any) -> tuple[ServerView, Truth]:
    """The view of a client after `count` rounds, with the earlier ones as its history."""
    images = worlds.images(4, "rounds")
    run = Federation(Client(worlds.task(), method), [ClientData(images, images)])
    seen: list[ServerView] = []
    for _ in range(count):
        known = ThreatModel(knows_labels=True, history_rounds=count - 1, **threat)
        view, truth = run.observe(0, threat=known, history=tuple(seen))
        seen.append(replace(view, history=()))
        run.run_round()
    return view, truth


def grayed(threat: ThreatModel, method: Method = TWICE) -> tuple[ServerView, Truth, MatchingProblem]:
    """The view of a client whose images are mid gray, so that labels are all there is to tell batches by."""
    images = replace(worlds.images(6, "gray"), labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    images = replace(images, inputs=torch.full_like(images.inputs, 0.5))
    run = Federation(Client(worlds.task(), method), [ClientData(images, images)])
    view, truth = run.observe(0, threat=threat)
    return view, truth, MatchingProblem(view, view.labels, "cosine")


def fed(problem: MatchingProblem) -> list[int]:
    order = problem.constants["order"]
    assert isinstance(order, torch.Tensor)
    return order.tolist()


def classes(batches: Sequence[torch.Tensor], labels: torch.Tensor) -> list[list[int]]:
    return [sorted(labels[batch].tolist()) for batch in batches]


def test_labels_tell_the_batches() -> None:
    view, truth, problem = grayed(ThreatModel(knows_labels=True))
    found = rank_orders(problem, 400, 5)
    guess = torch.tensor(fed(found[0])).split(2)
    true = [batch for steps in truth.trace.order for step in steps for batch in step]
    assert view.labels is not None
    assert classes(guess, view.labels) == classes(true, truth.labels)
    assert classes(torch.tensor(fed(problem)).split(2), view.labels) != classes(true, truth.labels)
    assert len({one.batch_contents(one.constants["order"]) for one in found}) == 5
    for one in found:
        assert all(sorted(fed(one)[i : i + 6]) == list(range(6)) for i in (0, 6))


class Halves(FedAvg):
    """Two phases, which a pass over the data does not outlast."""

    name = "halves"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        return super().phases(task, round) * 2


def test_a_pass_ends_with_its_phase() -> None:
    _, _, problem = grayed(ThreatModel(knows_labels=True), Halves(lr=0.3, steps=4, batch_size=2))
    for one in rank_orders(problem, 200, 100):
        order = fed(one)
        for phase in (order[:8], order[8:]):
            assert sorted(phase[:6]) == list(range(6))
            assert len(set(phase[6:])) == 2


def test_no_batch_holds_an_image_twice() -> None:
    view, _, _ = grayed(ThreatModel(knows_labels=True))
    schedule = (((4,), (4,), (0,), (3,)),)  # as Poisson sampling may draw
    poisson = MatchingProblem(replace(view, schedule=schedule), view.labels, "cosine")
    found = rank_orders(poisson, 200, 100)
    assert len(found) > 10
    for one in found:
        assert all(len(set(batch)) == len(batch) for batch in one.batch_contents(one.constants["order"]))


def test_where_the_order_is_known_labels_go_to_their_batches() -> None:
    _, truth, problem = grayed(ThreatModel(knows_order=True))
    searched = replace(problem, labels=None)
    assert searched.recovered_labels is not None
    assert searched.recovered_labels.tolist() == [0, 0, 1, 1, 2, 2]
    found = assign_labels(searched, 400)
    batches = [batch for steps in truth.trace.order for step in steps for batch in step]
    assert found is not None
    assert classes(batches, found) == classes(batches, truth.labels) != classes(batches, searched.recovered_labels)
    attack = attacks.build({"name": "ig", "order_candidates": 400})
    assert isinstance(attack, GradientMatching)
    begins = [attack.initial_variables(searched, 0, restart)[LABELS].argmax(1) for restart in (0, 0, 1)]
    assert torch.equal(begins[0], found)
    assert not torch.equal(begins[2], found)
    assert torch.equal(begins[1], found)


def test_labels_are_dealt_out_by_nothing_where_nothing_tells() -> None:
    view, _, problem = grayed(ThreatModel(knows_order=True))
    unknown = replace(view, order=None)
    assert assign_labels(replace(problem, labels=None), 0) is None
    assert assign_labels(MatchingProblem(unknown, None, "cosine"), 100) is None


def test_an_order_that_is_known_or_does_not_matter_is_left_alone() -> None:
    whole = FedAvg(lr=0.3, epochs=3, batch_size=None)
    for method, threat in ((TWICE, ThreatModel(knows_order=True)), (whole, ThreatModel())):
        _, _, problem = grayed(threat, method)
        assert problem.default_order is None
        (same,) = rank_orders(problem, 100, 3)
        assert same is problem


def test_images_are_fed_in_turn_where_no_label_can_tell() -> None:
    _, _, problem = grayed(ThreatModel(knows_labels=True))
    for one, tries in ((problem, 0), (replace(problem, labels=None), 100)):
        (same,) = rank_orders(one, tries, 3)
        assert fed(same) == [0, 1, 2, 3, 4, 5] * 2


def test_each_restart_begins_with_the_next_best_order(monkeypatch: pytest.MonkeyPatch) -> None:
    view, _, problem = grayed(ThreatModel(knows_labels=True))
    seen: list[list[int]] = []
    search = GradientMatching.search

    def watched(self: GradientMatching, stack: ProblemBatch, *args: Any) -> Any:
        seen.extend(fed(problem) for problem in stack.problems)
        return search(self, stack, *args)

    monkeypatch.setattr(GradientMatching, "search", watched)
    settings = {"iterations": 2, "restarts": 3, "order_candidates": 60}
    attacks.build({"name": "ig", **settings})(view)
    assert seen == [fed(one) for one in rank_orders(problem, 60, 3)]
    assert len(set(map(tuple, seen))) == 3
    seen.clear()
    attacks.build({"name": "gradinversion", **settings})(view)  # its trials look at each other
    assert len(set(map(tuple, seen))) == 1


@pytest.mark.parametrize("trials", [1, 2])
def test_rounds_count_alike(trials: int) -> None:
    view, truth = rounds(FedAvg(lr=0.3, epochs=2, batch_size=None), 3)
    attack = attacks.build({"name": "ig", "tv_weight": 0.01})
    assert isinstance(attack, GradientMatching)
    problem = attack.build_problem(view)
    assert len(problem.earlier) == 2
    images = (truth.inputs - problem.constants["offset"]) / problem.constants["scale"]
    right = {INPUTS: images.expand(trials, *images.shape)}
    assert ProblemBatch([replace(problem, tv_weight=0.0)] * trials).evaluate(right)[0].max() < 1e-12
    rows = {INPUTS: torch.randn(trials, 4, 1, 8, 8, generator=stream(0, "guess"), dtype=torch.float64)}
    together = ProblemBatch([problem] * trials).evaluate(rows)[0]
    views = (*view.history, replace(view, history=()))
    apart = [
        ProblemBatch([replace(attack.build_problem(one), tv_weight=0.0)] * trials).evaluate(rows)[0] for one in views
    ]
    prior = ProblemBatch([replace(problem, earlier=())] * trials).evaluate(rows)[0] - apart[-1]
    assert torch.allclose(together, sum(apart) / 3 + prior, rtol=1e-9)


def test_only_rounds_on_the_same_images_count() -> None:
    whole, _ = rounds(FedAvg(lr=0.3, epochs=1, batch_size=2), 2)
    some, _ = rounds(FedAvg(lr=0.3, steps=1, batch_size=2), 2)
    private, _ = rounds(FedPer(lr=0.3, epochs=1, batch_size=2), 2)
    assert [len(comparable_rounds(view)) for view in (whole, some, private)] == [1, 0, 0]
    for view, used in ((whole, True), (some, False), (private, False)):
        found = attacks.build({"name": "ig", "iterations": 2})(view)
        assert isinstance(found, Reconstruction)
        assert ("earlier rounds" in found.knowledge) is used


def test_a_round_without_information_does_not_count() -> None:
    view, _ = rounds(FedAvg(lr=0.3, epochs=2, batch_size=None), 3)
    first, second = view.history
    attack = attacks.build({"name": "ig", "iterations": 3})
    expected = attack(replace(view, history=(second,)))
    for value in (0.0, torch.nan):
        silent = replace(first, update={name: value * dense(x) for name, x in first.update.items()})
        found = attack(replace(view, history=(silent, second)))
        assert isinstance(found, Reconstruction)
        assert isinstance(expected, Reconstruction)
        assert torch.equal(found.inputs, expected.inputs)  # type: ignore[arg-type]
        assert found.objective == expected.objective < 1


def test_a_surrogate_takes_every_round_for_one_step() -> None:
    view, _ = rounds(TWICE, 3)
    made = Surrogate().rewrite(view)
    assert isinstance(made, ServerView)
    assert [past.schedule for past in made.history] == [(((4,),),)] * 2
    first, second = view.history
    lost = replace(first, update={name: torch.nan * dense(x) for name, x in first.update.items()})
    fewer = Surrogate().rewrite(replace(view, history=(lost, second)))
    assert isinstance(fewer, ServerView)
    assert len(fewer.history) == 1
    found = attacks.build({"name": "surrogate+ig", "iterations": 2})(view)
    assert isinstance(found, Reconstruction)
    assert "earlier rounds" in found.knowledge
