"""Which images a client feeds in which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl.runtime.secure_rng import secure_uniform
from fl.types import Order, Phase, Schedule


@dataclass(frozen=True, kw_only=True)
class PoissonPhase(Phase):
    """A phase whose batches are drawn by numbers that everybody may know, whatever the client holds.

    A client with no more images than a batch has nothing to draw from and feeds all of them in every step.

    Attributes:
        rate: probability with which each image enters a batch; None is batch_size / n.
        images: on which the number of steps in an epoch is based; None is n.
        secret: draw from the operating system's random numbers, not from the experiment's seed.

    Raises:
        ValueError: as of `Phase`, or if the rate is no probability.
    """

    sampler: str = "poisson"
    rate: float | None = None
    images: int | None = None
    secret: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ValueError(f"expected rate in (0, 1], got {self.rate}")
        if self.images is not None and self.images < 1:
            raise ValueError(f"expected images >= 1, got {self.images}")

    def draw(self, n: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], ...]:
        """Return indices below `n` for every batch of every step."""
        size = min(self.batch_size or n, n)
        whole = self.images or n
        per_epoch = -(-whole // min(self.batch_size or whole, whole))
        steps = self.steps if self.steps is not None else per_epoch * (self.epochs or 0)
        rate = 1.0 if n <= size else (self.rate or size / n)
        batches = []
        for _ in range(steps * self.batches_per_step):
            batches.append((self._uniform(n, generator) < rate).nonzero().flatten())
        k = self.batches_per_step
        return tuple(tuple(batches[i : i + k]) for i in range(0, len(batches), k))

    def _uniform(self, n: int, generator: torch.Generator) -> Tensor:
        if self.secret:
            return torch.from_numpy(secure_uniform(n))
        return torch.rand(n, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class SubsetPhase(Phase):
    """A phase that feeds some of a client's images only, the same in every round.

    A client with fewer than `every` images has none to hold out, and feeds all of them either way.

    Attributes:
        every: each image whose number, counted from 1, is a multiple of it is held out.
        held_out: whether those are fed, or all others.

    Raises:
        ValueError: as of `Phase`, or if nothing would be left.
    """

    every: int
    held_out: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 2:
            raise ValueError(f"expected every >= 2, got {self.every}")

    def subset(self, n: int) -> Tensor:
        """Return which of `n` images, in order."""
        held = (torch.arange(1, n + 1) % self.every == 0) == self.held_out
        return held.nonzero().flatten() if n >= self.every else torch.arange(n)


def plan_batches(phases: Sequence[Phase], n: int, generator: torch.Generator) -> Order:
    """Return indices below `n` for every batch of every step of every phase.

    Raises:
        ValueError: if the client has no image.
    """
    if n < 1:
        raise ValueError(f"expected at least 1 image, got {n}")
    return tuple(_plan_phase(phase, n, generator) for phase in phases)


def _plan_phase(phase: Phase, n: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], ...]:
    if isinstance(phase, PoissonPhase):
        return phase.draw(n, generator)
    if isinstance(phase, SubsetPhase):
        part = phase.subset(n)
        return tuple(tuple(part[i] for i in step) for step in _plan_steps(phase, len(part), generator))
    return _plan_steps(phase, n, generator)


def _plan_steps(phase: Phase, n: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], ...]:
    size = min(phase.batch_size or n, n)
    if phase.sampler == "poisson":
        steps = phase.steps if phase.steps is not None else -(-n // size) * (phase.epochs or 0)
        draw = (torch.rand(n, generator=generator) < size / n for _ in range(steps * phase.batches_per_step))
        batches = [mask.nonzero().flatten() for mask in draw]
    else:
        stream = _sample_batches(phase.sampler, n, size, generator)
        if phase.steps is not None:
            count = phase.steps * phase.batches_per_step
        else:
            count = -(-n // size) * (phase.epochs or 0)
            count -= count % phase.batches_per_step
            if phase.epochs and not count:  # a client of few images takes them again for one whole step
                count = phase.batches_per_step
        batches = [next(stream) for _ in range(count)]
    k = phase.batches_per_step
    return tuple(tuple(batches[i : i + k]) for i in range(0, len(batches), k))


def _sample_batches(sampler: str, n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(n, generator=generator) if sampler == "shuffle" else torch.arange(n)
        yield from order.split(size)


def batch_sizes(order: Order) -> Schedule:
    """Return the sizes of the batches of `order`."""
    return tuple(tuple(tuple(len(index) for index in step) for step in steps) for steps in order)


def sequential_order(sizes: Schedule, n: int) -> Order:
    """Return the images one after the other, from the first again in every phase: a guess of an unknown order."""
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
