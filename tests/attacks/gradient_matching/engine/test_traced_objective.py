"""Recorded evaluations: the numbers of autograd to the bit, and none where an evaluation can't be recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from support.trials import SETTINGS, problems, views
from torch import Tensor

import attacks
from attacks.base import Reconstruction
from attacks.gradient_matching.engine import batching, traced_objective
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import Evaluation
from attacks.gradient_matching.engine.traced_objective import trace


@pytest.mark.parametrize(
    ("name", "count"), [("one step", 1), ("clipped", 1), ("several steps", 3), ("labels", 3), ("structured", 3)]
)
def test_a_record_gives_the_numbers_of_autograd(name: str, count: int) -> None:
    trials, point = problems(name, count)
    replay = trace(trials._evaluate_by_autograd, point(0))
    assert replay is not None
    for seed in (1, 2):
        values, grads = trials._evaluate_by_autograd(point(seed))
        found, mine = replay(point(seed))
        assert torch.equal(found, values)
        assert list(mine) == list(grads)
        assert all(torch.equal(mine[k], grads[k]) and grads[k].any() for k in grads)
        assert not any(x.requires_grad for x in (found, *mine.values()))


def test_what_draws_decides_or_remembers_is_not_recorded() -> None:
    draw, kept = torch.Generator(), torch.zeros(3)

    def plain(x: Tensor) -> Tensor:
        return x * 2

    def drawing(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=draw)

    def deciding(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    def remembering(x: Tensor) -> Tensor:
        return kept.add_(x).clone()

    def counting(x: Tensor) -> Tensor:
        return kept.add_(1) + x

    def masking(x: Tensor) -> Tensor:
        return x[x > 0].mean() + x

    def choosing(x: Tensor) -> Tensor:
        return x[x.abs().topk(2).indices].sum() + x

    def elsewhere(x: Tensor) -> Tensor:
        return torch.add(x, 1, out=kept).clone()

    def evaluation(function: Callable[[Tensor], Tensor]) -> Evaluation:
        return lambda given: (function(given["x"]), {"x": given["x"]})

    given = {"x": torch.arange(3.0)}
    for function in (plain, choosing):
        assert trace(evaluation(function), given) is not None, function.__name__
    for function in (drawing, deciding, remembering, counting, masking, elsewhere):
        assert trace(evaluation(function), given) is None, function.__name__


def test_a_search_is_recorded_and_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, method, defense = SETTINGS["one step"]
    attack = attacks.build({"name": "ig", "iterations": 60, "restarts": 3, "patience": 12, "success_threshold": 0.0})
    made: list[int] = []

    def counted(evaluate: Evaluation, variables: dict[str, Tensor], **given: bool) -> Evaluation | None:
        made.append(len(variables["inputs"]))
        return trace(evaluate, variables, **given)

    monkeypatch.setattr(batching, "trace", counted)
    given = views(method, defense, 2)
    before = attack.run(given, [0, 1])
    assert not made  # too short to be worth it
    monkeypatch.setattr(batching, "MIN_EVALUATIONS_TO_TRACE", 5)
    monkeypatch.setattr(batching, "STEADY_EVALUATIONS", 2)
    after = attack.run(given, [0, 1])
    assert len(made) > 1  # again after trials had ended
    assert made == sorted(made, reverse=True)
    assert len(made) <= 3  # each after twice as many evaluations
    for x, y in zip(before, after, strict=True):
        assert isinstance(x, Reconstruction)
        assert isinstance(y, Reconstruction)
        assert x.inputs is not None
        assert y.inputs is not None
        assert torch.equal(x.inputs, y.inputs)
        assert x.objective == y.objective


def test_a_trial_that_runs_away_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = attacks.build({"name": "ig", "iterations": 40})
    assert isinstance(attack, GradientMatching)
    trials, point = problems("one step", 3)
    start = point(0)
    start["inputs"][1] = torch.nan
    monkeypatch.setattr(batching, "MIN_EVALUATIONS_TO_TRACE", 1)
    trials.trace_after = 1  # recorded before the search drops it
    trials.expect_iterations(40, start)
    assert trials.traced is not None
    trials.steady_evaluations = 0
    rows = attack.search(trials, start, [torch.Generator() for _ in range(3)])
    assert [row[1] < 1 for row in rows] == [True, False, True]


def test_a_refused_record_leaves_the_search_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, method, defense = SETTINGS["one step"]
    (view,) = views(method, defense, 1)
    attack = attacks.build({"name": "ig", "iterations": 20})
    before = attack(view, seed=0)
    monkeypatch.setattr(batching, "MIN_EVALUATIONS_TO_TRACE", 1)
    monkeypatch.setattr(batching, "trace", lambda *_, **__: None)
    after = attack(view, seed=0)
    assert isinstance(before, Reconstruction)
    assert isinstance(after, Reconstruction)
    assert before.inputs is not None
    assert after.inputs is not None
    assert torch.equal(before.inputs, after.inputs)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What recording warned of."""
    return [
        entry.getMessage()
        for entry in caplog.records
        if entry.name == traced_objective.__name__ and entry.levelno >= 30
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["one step", "several steps", "structured"])
def test_compiled_code_gives_the_record_s_numbers_up_to_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials, point = problems(name, 3)
    made: list[object] = []
    fast = torch.compile

    def noting(*given: object, **settings: object) -> object:
        made.append(settings)
        return fast(*given, **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", noting)
    replay = trace(trials._evaluate_by_autograd, point(0), compiled=True)
    assert made
    assert not said(caplog)
    assert replay is not None
    for seed in (1, 2):
        values, grads = trials._evaluate_by_autograd(point(seed))
        found, mine = replay(point(seed))
        torch.testing.assert_close(found, values, rtol=1e-9, atol=0)
        for k in grads:
            assert (mine[k] - grads[k]).norm() <= 1e-9 * grads[k].norm()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_search_finds_what_the_other_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    _, method, defense = SETTINGS["one step"]
    (view,) = views(method, defense, 1)
    monkeypatch.setattr(batching, "MIN_EVALUATIONS_TO_COMPILE", 0)
    one, other = (attacks.build({"name": "ig", "iterations": 400, "compile": way})(view) for way in (False, True))
    assert isinstance(one, Reconstruction)
    assert isinstance(other, Reconstruction)
    assert one.objective is not None
    assert other.objective == pytest.approx(one.objective, rel=0.05)


def test_compiled_numbers_have_to_be_the_record_s_in_each_trial() -> None:
    right = (torch.tensor([1.0, 1e-3]), {"x": torch.tensor([[1.0, 2.0], [1e-3, 2e-3]])})
    assert traced_objective._all_close((right[0] * (1 + 1e-6), {"x": right[1]["x"] * (1 - 1e-6)}), right)
    for wrong in (torch.tensor([1.0, -5e-3]), torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan])):
        assert not traced_objective._all_close((wrong, right[1]), right)
    assert not traced_objective._all_close((right[0], {"x": right[1]["x"] * torch.tensor([[1.0], [0.0]])}), right)
    endless = torch.tensor([1.0, torch.inf])
    assert traced_objective._all_close((endless, right[1]), (endless, right[1]))
    assert not traced_objective._all_close((-endless * torch.tensor([-1.0, 1.0]), right[1]), (endless, right[1]))


@pytest.mark.parametrize("failing", [RuntimeError("no compiler"), OSError("no disk"), ImportError("no module"), None])
def test_without_a_compiler_a_search_goes_on_and_says_so(
    failing: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(module: object, **_: object) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        def call(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            if failing is not None:
                raise failing
            return torch.ones(1), {name: torch.zeros_like(value) for name, value in given.items()}

        return call

    monkeypatch.setattr(torch, "compile", broken)
    trials, point = problems("one step", 1)
    replay = trace(trials._evaluate_by_autograd, point(0), compiled=True)
    assert replay is not None
    assert torch.equal(replay(point(1))[0], trials._evaluate_by_autograd(point(1))[0])
    (message,) = said(caplog)
    assert (str(failing) if failing else "differ") in message


def test_a_search_goes_on_where_compiled_code_fails_later(caplog: pytest.LogCaptureFixture) -> None:
    def failing(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        raise RuntimeError("compiled again, in vain")

    trials, point = problems("one step", 1)
    search = traced_objective._CompiledWithFallback(failing, trials._evaluate_by_autograd)
    for _ in range(2):
        assert torch.equal(search(point(1))[0], trials._evaluate_by_autograd(point(1))[0])
    assert len(said(caplog)) == 1  # tried once


def test_only_long_searches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noting(*_: object, compiled: bool) -> None:
        asked.append(compiled)

    monkeypatch.setattr(batching, "trace", noting)
    for count in (traced_objective.MIN_EVALUATIONS_TO_COMPILE - 1, traced_objective.MIN_EVALUATIONS_TO_COMPILE):
        for wanted in (False, True):
            trials = ProblemBatch(problems("one step", 1)[0].problems, compiled=wanted)
            trials.trace_after = 1
            trials.expect_iterations(count, {})
    assert asked == [False, False, False, True]


def test_what_depends_on_no_variable_is_computed_once() -> None:
    weights = torch.arange(3.0)

    def evaluate(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scale = weights.sum().exp().reshape(1) + torch.tensor(2.0)
        return given["x"] * scale, {"x": given["x"] + scale}

    replay = trace(evaluate, {"x": torch.ones(3)})
    assert replay is not None
    expected = evaluate({"x": torch.full((3,), 2.0)})
    weights.zero_()  # what was computed from them stays
    assert torch.equal(replay({"x": torch.full((3,), 2.0)})[0], expected[0])


@pytest.mark.parametrize("part", [lambda x: x.view(6)[:3], lambda x: x.split(1)[0][0], lambda x: x.unbind()[0]])
def test_what_is_changed_in_place_is_not_kept(part: Callable[[Tensor], Tensor]) -> None:
    def evaluate(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros(2, 3)
        part(total).add_(given["x"])
        return total.sum(1), {"x": total[0]}

    replay = trace(evaluate, {"x": torch.ones(3)})
    assert replay is not None
    for _ in range(3):
        assert torch.equal(replay({"x": torch.ones(3)})[0], torch.tensor([3.0, 0.0]))


def test_only_what_is_needed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, folded = torch.rand(50, 50), list[torch.fx.GraphModule]()
    fold = traced_objective._fold_constants
    monkeypatch.setattr(traced_objective, "_fold_constants", lambda module: (fold(module), folded.append(module)))

    def evaluate(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scale = (weights * 2 + 1).log().square().sum()
        return given["x"] * scale, {"x": torch.zeros(3)}

    replay = trace(evaluate, {"x": torch.ones(3)})
    assert replay is not None
    assert [value.shape for name, value in folded[0].named_buffers() if name.startswith("_known")] == [()]
    replay({"x": torch.ones(3)})[1]["x"].add_(5)  # what is given away is the caller's
    assert not replay({"x": torch.ones(3)})[1]["x"].any()

    monkeypatch.setattr(traced_objective, "MAX_FOLDED_BYTES", 10)
    weights = weights.double()
    replay = trace(evaluate, {"x": torch.ones(3)})
    assert replay is not None
    assert torch.equal(replay({"x": torch.ones(3)})[0], evaluate({"x": torch.ones(3)})[0])
    assert all(value.nbytes <= 10 for name, value in folded[1].named_buffers() if name.startswith("_known"))
