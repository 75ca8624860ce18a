"""Which images a client feeds in which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fl.types import Order, Phase, Schedule


def plan(phases: Sequence[Phase], n: int, generator: torch.Generator) -> Order:
    """Indices below `n` for every batch of every step of every phase.

    Raises:
        ValueError: if the client has no image.
    """
    if n < 1:
        raise ValueError(f"expected at least 1 image, got {n}")
    return tuple(_phase(phase, n, generator) for phase in phases)


def _phase(phase: Phase, n: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], ...]:
    size = min(phase.batch_size or n, n)
    if phase.sampler == "poisson":
        steps = phase.steps if phase.steps is not None else -(-n // size) * (phase.epochs or 0)
        draw = (torch.rand(n, generator=generator) < size / n for _ in range(steps * phase.batches_per_step))
        batches = [mask.nonzero().flatten() for mask in draw]
    else:
        stream = _batches(phase.sampler, n, size, generator)
        if phase.steps is not None:
            count = phase.steps * phase.batches_per_step
        else:
            count = -(-n // size) * (phase.epochs or 0)
            count -= count % phase.batches_per_step
        batches = [next(stream) for _ in range(count)]
    k = phase.batches_per_step
    return tuple(tuple(batches[i : i + k]) for i in range(0, len(batches), k))


def _batches(sampler: str, n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(n, generator=generator) if sampler == "shuffle" else torch.arange(n)
        yield from order.split(size)


def schedule(order: Order) -> Schedule:
    """The sizes of the batches of `order`."""
    return tuple(tuple(tuple(len(index) for index in step) for step in steps) for steps in order)


def in_turn(sizes: Schedule, n: int) -> Order:
    """The images one after the other, from the first again in every phase: a guess of an unknown order."""
    phases = []
    for steps in sizes:
        position, planned = 0, []
        for step in steps:
            batches = []
            for size in step:
                batches.append((position + torch.arange(size)) % n)
                position += size
            planned.append(tuple(batches))
        phases.append(tuple(planned))
    return tuple(phases)
