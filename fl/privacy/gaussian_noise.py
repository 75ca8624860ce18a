"""Gaussian noise for differential privacy, from keys that are recorded with a step and can be replayed.

torch's generators on a CPU keep 32 bits of their seed: anyone could try all of them and take the noise off. Here it
comes from a counter-based generator with a key of 126 bits, also inside `vmap`, where torch's refuse to draw. For
experiments that is numpy's Philox, which is fast; for a release one made for secrets (`fl.runtime.secure_rng`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.runtime import secure_rng

KEY_WORDS = 2
"""Words of 63 bits in a key."""


def fresh_key() -> Tensor:
    """Return a key (2,) int64 from the operating system, which nobody can draw again."""
    return torch.tensor([secrets.randbits(63) for _ in range(KEY_WORDS)])


def draw_key(generator: torch.Generator) -> Tensor:
    """Return a key (2,) int64 from `generator`: the same again for the same seed."""
    return torch.randint(2**63 - 1, (KEY_WORDS,), generator=generator)


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers that follow from a key.

    Attributes:
        key: (2,) int64; under `vmap` a stack of them, one for each trial.
        secret: whether nobody without the key may tell them from chance, which takes about ten times as long.
    """

    key: Tensor
    secret: bool = False

    def like(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return independent numbers in the shapes and of the type of `values`, in their order."""
        some = next(iter(values.values()))
        sizes = [value.numel() for value in values.values()]
        kind = torch.float32 if some.dtype == torch.float32 else torch.float64
        flat: Tensor = _Normal.apply(self.key, sum(sizes), self.secret, kind)
        parts = flat.to(device=some.device, dtype=some.dtype).split(sizes)
        return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def _keyed_generator(key: Tensor) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(key.tolist(), dtype=np.uint64)))


class UntransformedDraw(torch.autograd.Function):
    """What is drawn outside of all transforms, from four arguments; it has no derivative by them."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Mark the draw as not differentiable."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return no gradient for any argument."""
        return None, None, None, None


class _Normal(UntransformedDraw):
    """A stack of keys gives a stack of draws."""

    @staticmethod
    def forward(key: Tensor, count: int, secret: bool, kind: torch.dtype) -> Tensor:
        if secret:
            return torch.from_numpy(secure_rng.keyed_normals(key.tolist(), count)).to(kind)
        form = np.float32 if kind == torch.float32 else np.float64
        return torch.from_numpy(_keyed_generator(key).standard_normal(count, dtype=form))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], key: Tensor, *rest: Any) -> tuple[Tensor, int]:
        keys = key.movedim(in_dims[0], 0) if in_dims[0] is not None else key[None].expand(info.batch_size, -1)
        return torch.stack([_Normal.apply(one, *rest) for one in keys]), 0
