"""Clients spread over processes: each trains its share with another engine, and the results come back in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fl.engines.sequential import Engine
from fl.runtime.interprocess_packing import FlatPacked, Packed, flatten, pack, unpack
from fl.runtime.main_guard import UnguardedError
from fl.runtime.workers import Workers, use_worker_threads
from fl.simulation.client_round import ClientState, Round
from fl.simulation.federation_state import FederationState
from fl.tensors import LowRank, Tensors


class Processes(Engine):
    """Worker processes of one thread each; the numbers are bit for bit those of the inner engine at one thread.

    (Of as many threads as OMP_NUM_THREADS says, where it does.)

    Args:
        inner: the engine each worker runs.
        workers: how many.
        patience: seconds of training in this process before the workers are started, which takes about as long.
    """

    name = "process"

    def __init__(self, inner: Engine, workers: int, patience: float = 0.0) -> None:
        self.inner, self.workers, self.patience = inner, workers, patience
        self.pool: Workers | None = None

    def train(self, run: FederationState, numbers: Sequence[int], *, evaluate: bool = False) -> Iterator[Round]:
        """Train as `Engine.train`, but workers' traces come empty.

        `FederationState.start` replays them, whoever needs one.

        (But those of `noise_source: secure`, whose draws nobody can make again.)
        """
        rest = deque(self._chunks(numbers))
        while rest and self.patience > 0:
            with self._run_here():
                done = list(self.inner.train(run, rest.popleft(), evaluate=evaluate))
            yield from done
        for number, packed in self._distribute(run, rest, _train, evaluate):
            done, state = (unpack(part) for part in packed)
            shared = run.download(number).shared
            upload = replace(done.upload, update=_with_bases(done.upload.update, shared))
            result = replace(
                done.result,
                update=_with_bases(done.result.update, shared),
                private=state.private,
                memory=state.memory,
            )
            yield replace(done, upload=upload, result=result, state=state)

    def accuracy(self, run: FederationState, numbers: Sequence[int]) -> list[float]:
        """Score as `Engine.accuracy`."""
        if self.patience > 0:
            with self._run_here():
                return self.inner.accuracy(run, numbers)
        return [value for _, value in self._distribute(run, self._chunks(numbers), _accuracy)]

    def close(self) -> None:
        """End the workers, whatever they do."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    @contextmanager
    def _run_here(self) -> Iterator[None]:
        """Work of this process, as a worker would do it."""
        began = time.perf_counter()
        with use_worker_threads():
            yield
        self.patience -= time.perf_counter() - began

    def _chunks(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the clients that the inner engine trains together."""
        size = self.inner.chunk
        return [list(numbers[i : i + size]) for i in range(0, len(numbers), size)]

    def _distribute(
        self, run: FederationState, chunks: Sequence[list[int]], work: Callable[..., list[Any]], *settings: object
    ) -> Iterator[tuple[int, Any]]:
        """Run `work` on the clients, a chunk at a time in whichever worker is free.

        Each with what it gives, in order.
        """
        if not chunks:
            return
        server = pack(run.server)
        for block in server.blocks.values():
            block.share_memory_()  # one copy for all workers
        tasks = deque[tuple[list[int], Future[list[Any]]]]()
        try:
            pool = self._workers(run)
            for chunk in chunks:
                states = pack({n: run.clients[n] for n in chunk})
                tasks.append((chunk, pool.submit(work, server, states, chunk, *settings)))
            while tasks:
                chunk, task = tasks.popleft()
                yield from zip(chunk, pool.result(task), strict=True)
        except (RuntimeError, UnguardedError):
            self.close()
            raise
        finally:
            for _, task in tasks:  # of a round that has ended before its last client
                task.cancel()

    def _workers(self, run: FederationState) -> Workers:
        if self.pool is None:
            setup = pack((run.client, list(run.data), run.seed, run.client_fraction))
            self.pool = Workers(self.workers, _initialize_worker, flatten(setup), self.inner)
        return self.pool


# ---- in a worker -----------------------------------------------------------------------------------------------------
_WORKER_STATE: dict[str, Any] = {}
"""The federation a worker process belongs to, and its engine."""


def _initialize_worker(setup: FlatPacked, engine: Engine) -> None:
    client, data, seed, rate = unpack(setup.opened())
    _WORKER_STATE.update(run=FederationState(client, data, seed, rate), engine=engine)


def _current_federation(server: Packed, states: Packed) -> FederationState:
    """Return the worker's federation, brought to the present round."""
    run: FederationState = _WORKER_STATE["run"]
    run.server = unpack(server)
    for number, state in unpack(states).items():
        run.clients[number] = state
    return run


def _train(server: Packed, states: Packed, numbers: list[int], evaluate: bool) -> list[tuple[Packed, Packed]]:
    """Return what goes back, and apart from it the state, which outlives the rest."""
    rounds = _WORKER_STATE["engine"].train(_current_federation(server, states), numbers, evaluate=evaluate)
    return [(pack(_portable_round(done)), pack(done.state)) for done in rounds]


def _accuracy(server: Packed, states: Packed, numbers: list[int]) -> list[float]:
    found: list[float] = _WORKER_STATE["engine"].accuracy(_current_federation(server, states), numbers)
    return found


def _portable_round(done: Round) -> Round:
    """Return a round without what the other side has or can make: the bases of structured updates, images, state."""
    upload = replace(done.upload, update=_without_bases(done.upload.update))
    result = replace(done.result, update=_without_bases(done.result.update), private={}, memory={})
    none = done.trace.inputs[:0]
    trace = replace(done.trace, order=(), draws=(), inputs=none, labels=none, indices=none)
    return replace(done, upload=upload, result=result, trace=trace, state=ClientState())


def _without_bases(update: Tensors) -> Tensors:
    return {k: replace(v, base=None) if isinstance(v, LowRank) else v for k, v in update.items()}


def _with_bases(update: Tensors, shared: Tensors) -> Tensors:
    """Return the update with the bases that `_without_bases` took off.

    The server's own tensors, so that they cancel.
    """
    result: Tensors = {}
    for name, value in update.items():
        if isinstance(value, LowRank) and value.scale != 0:
            base = shared[name]
            assert isinstance(base, torch.Tensor)
            value = replace(value, base=base)
        result[name] = value
    return result
