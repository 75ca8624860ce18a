"""Clients spread over processes: each trains its share with another engine, and the results come back in order."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fl.engines.base import Engine
from fl.engines.packing import Packed, pack, unpack
from fl.simulate import ClientState, Round
from fl.tensors import LowRank, Tensors

if TYPE_CHECKING:
    from fl.federation import Federation


class Processes(Engine):
    """Worker processes of one thread each; the numbers are bit for bit those of the inner engine at one thread.

    Args:
        inner: the engine each worker runs.
        workers: how many.
    """

    name = "process"

    def __init__(self, inner: Engine, workers: int) -> None:
        self.inner, self.workers = inner, workers
        self.pool: ProcessPoolExecutor | None = None

    def train(self, run: Federation, numbers: Sequence[int], *, evaluate: bool = False) -> Iterator[Round]:
        """As `Engine.train`, but traces come empty: `Federation.start` replays them, whoever needs one."""
        for number, packed in zip(numbers, self._spread(run, numbers, _train, evaluate), strict=True):
            done, state = (unpack(part) for part in packed)
            shared = run.download(number).shared
            upload = replace(done.upload, update=_based(done.upload.update, shared))
            result = replace(
                done.result,
                update=_based(done.result.update, shared),
                private=state.private,
                memory=state.memory,
            )
            yield replace(done, upload=upload, result=result, state=state)

    def accuracy(self, run: Federation, numbers: Sequence[int]) -> list[float]:
        """As `Engine.accuracy`."""
        return list(self._spread(run, numbers, _accuracy))

    def close(self) -> None:
        """End the workers."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None

    def _spread(
        self, run: Federation, numbers: Sequence[int], work: Callable[..., list[Any]], *settings: object
    ) -> Iterator[Any]:
        """`work` on the clients, a chunk at a time in whichever worker is free; what it gives for each, in order."""
        server = pack(run.server)
        for block in server.blocks.values():
            block.share_memory_()  # one copy for all workers
        size = self.inner.chunk
        chunks = [list(numbers[i : i + size]) for i in range(0, len(numbers), size)]
        tasks = deque[Future[list[Any]]]()
        try:
            pool = self._workers(run)
            for chunk in chunks:
                states = pack({n: run.clients[n] for n in chunk})
                tasks.append(pool.submit(work, server, states, chunk, *settings))
            while tasks:
                yield from tasks.popleft().result()
        except BrokenProcessPool as error:
            self.pool = None
            raise RuntimeError("a worker process died, probably for want of memory: use fewer workers") from error
        finally:
            for task in tasks:  # of a round that has ended before its last client
                task.cancel()

    def _workers(self, run: Federation) -> ProcessPoolExecutor:
        if self.pool is None:
            setup = pack((run.client, list(run.data), run.seed, run.rate))
            spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
            begin = (setup, self.inner, not torch.cuda.is_available() or torch.backends.cudnn.allow_tf32)
            self.pool = ProcessPoolExecutor(self.workers, spawn, initializer=_begin, initargs=begin)
        return self.pool


# ---- in a worker -----------------------------------------------------------------------------------------------------
_HERE: dict[str, Any] = {}
"""The federation a worker process belongs to, and its engine."""


def _begin(setup: Packed, engine: Engine, allow_tf32: bool) -> None:
    from fl.federation import Federation

    torch.set_num_threads(1)
    if not allow_tf32:  # as in the process that asked
        torch.backends.cudnn.allow_tf32 = False
    client, data, seed, rate = unpack(setup)
    _HERE.update(run=Federation(client, data, seed, rate, engine="loop"), engine=engine)


def _present(server: Packed, states: Packed) -> Federation:
    """The worker's federation, brought to the present round."""
    run: Federation = _HERE["run"]
    run.server = unpack(server)
    for number, state in unpack(states).items():
        run.clients[number] = state
    return run


def _train(server: Packed, states: Packed, numbers: list[int], evaluate: bool) -> list[tuple[Packed, Packed]]:
    """What goes back, and apart from it the state, which outlives the rest."""
    rounds = _HERE["engine"].train(_present(server, states), numbers, evaluate=evaluate)
    return [(pack(_sent(done)), pack(done.state)) for done in rounds]


def _accuracy(server: Packed, states: Packed, numbers: list[int]) -> list[float]:
    found: list[float] = _HERE["engine"].accuracy(_present(server, states), numbers)
    return found


def _sent(done: Round) -> Round:
    """A round without what the other side has or can make: the bases of structured updates, images, state."""
    upload = replace(done.upload, update=_bare(done.upload.update))
    result = replace(done.result, update=_bare(done.result.update), private={}, memory={})
    none = done.trace.inputs[:0]
    trace = replace(done.trace, order=(), draws=(), inputs=none, labels=none, indices=none)
    return replace(done, upload=upload, result=result, trace=trace, state=ClientState())


def _bare(update: Tensors) -> Tensors:
    return {k: replace(v, base=None) if isinstance(v, LowRank) else v for k, v in update.items()}


def _based(update: Tensors, shared: Tensors) -> Tensors:
    """The update with the bases that `_bare` took off: the server's own tensors, so that they cancel."""
    result: Tensors = {}
    for name, value in update.items():
        if isinstance(value, LowRank) and value.scale != 0:
            base = shared[name]
            assert isinstance(base, torch.Tensor)
            value = replace(value, base=base)
        result[name] = value
    return result
