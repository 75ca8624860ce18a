"""Recorded evaluations as CUDA graphs: the numbers of autograd, and nothing read that was freed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from support.trials import problems
from torch import Tensor

from attacks.gradient_matching.engine import traced_objective
from attacks.gradient_matching.engine.traced_objective import CapturedGraph, trace


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "count"), [("one step", 1), ("several steps", 3), ("labels", 3), ("structured", 3)])
def test_on_a_gpu_a_record_is_a_graph_and_gives_the_numbers_of_autograd(name: str, count: int) -> None:
    trials, point = problems(name, count, device="cuda")
    replay = trace(trials._evaluate_by_autograd, point(0))
    assert isinstance(replay, CapturedGraph)
    kept = [replay(point(seed)) for seed in (1, 2)]
    for seed, (found, mine) in zip((1, 2), kept, strict=True):
        values, grads = trials._evaluate_by_autograd(point(seed))
        torch.testing.assert_close(found, values, rtol=1e-9, atol=0)
        for k in grads:
            assert (mine[k] - grads[k]).norm() <= 1e-7 * grads[k].norm()
            assert grads[k].any()


@contextlib.contextmanager
def _capture(graph: object) -> Iterator[None]:
    """What stands for a capture where there is no GPU: nothing is captured, nothing replayed."""
    yield


class _Nothing:
    def wait_stream(self, other: object) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    monkeypatch.setattr(Tensor, "is_cuda", True)


@pytest.mark.usefixtures("pretended")
def test_a_graph_keeps_all_that_it_reads_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    fold, folded = traced_objective._fold_constants, list[weakref.ref[torch.fx.GraphModule]]()
    monkeypatch.setattr(
        traced_objective, "_fold_constants", lambda module: (fold(module), folded.append(weakref.ref(module)))
    )
    monkeypatch.setattr(traced_objective, "_all_close", lambda *_: True)
    trials, point = problems("one step", 3)
    graph = trace(trials._evaluate_by_autograd, point(0))
    gc.collect()
    assert isinstance(graph, CapturedGraph)
    assert folded[0]() is not None
    start = {k: v.requires_grad_() for k, v in point(1).items()}
    graph(start)
    assert not any(value.requires_grad for value in graph.given.values())


@pytest.mark.usefixtures("pretended")
def test_a_graph_whose_numbers_differ_is_not_used() -> None:
    trials, point = problems("one step", 3)
    replay = trace(trials._evaluate_by_autograd, point(0))  # the graph's numbers are always its capture's
    assert replay is not None
    assert not isinstance(replay, CapturedGraph)
    assert torch.equal(replay(point(1))[0], trials._evaluate_by_autograd(point(1))[0])


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("failing", [RuntimeError("operation not permitted when stream is capturing"), OSError("full")])
def test_what_can_not_be_captured_is_replayed_as_it_is(failing: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: object) -> None:
        raise failing

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    trials, point = problems("one step", 1)
    replay = trace(trials._evaluate_by_autograd, point(0))
    assert replay is not None
    assert torch.equal(replay(point(1))[0], trials._evaluate_by_autograd(point(1))[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_taken_after_a_capture_is_not_that_of_the_graph() -> None:
    trials, point = problems("structured", 3, device="cuda")
    replay = trace(trials._evaluate_by_autograd, point(0))
    gc.collect()
    taken = [torch.full((1 + n % 2000,), torch.nan, device="cuda") for n in range(20_000)]
    assert replay is not None
    torch.testing.assert_close(replay(point(1))[0], trials._evaluate_by_autograd(point(1))[0], rtol=1e-9, atol=0)
    assert taken
