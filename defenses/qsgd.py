"""QSGD: every number of the update is rounded at random to a multiple of its tensor's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from defenses import defenses
from fl.defense import Defense
from fl.ranges import Count, Range
from fl.tensors import Tensors, dense


@defenses.register("qsgd")
@dataclass(frozen=True, kw_only=True)
class QSGD(Defense):
    """Unbiased random rounding to s = 2^(bits - 1) - 1 levels of either sign (Alistarh et al., NIPS 2017, section 3.1).

    An entry x of a bucket of norm n becomes n sign(x) l / s, where l is |x| s / n rounded up with the probability of
    its fraction, else down. `bits` per number before any further coding, and one norm per bucket. A structured update
    leaves this defense dense. What the rounding adds is noise without a bias, so an attacker who knows it compares its
    predictions as they are: weighting tensors by their noise changed nothing that could be measured, and counting no
    error below one level lost.

    Attributes:
        bits: per number, sign included, in [2, 16].
        bucket: entries that share a norm, taken from each tensor in order; None is the whole tensor. The fewer, the
            less noise: with the Euclidean norm it grows as the root of the bucket.
        norm: "l2", or "max" for the largest absolute value (the paper's section 4).

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = "the numbers of the update are rounded up or down at random, to a few values."

    bits: Annotated[int, Range(2, 16)] = 4
    bucket: Count | None = None
    norm: Literal["l2", "max"] = "l2"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"expected bits in [2, 16], got {self.bits}")
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(f"expected bucket >= 1, got {self.bucket}")

    @property
    def levels(self) -> int:
        """s, the number of values of one sign beside zero."""
        return int(2 ** (self.bits - 1)) - 1

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update, rounded."""
        if generator is None:
            return update
        return {name: self._round(dense(value), generator) for name, value in update.items()}

    def _rows(self, matrix: Tensor) -> Tensor:
        size = self.bucket or matrix.numel()
        return pad(matrix.flatten(), (0, -matrix.numel() % size)).view(-1, size)

    def _round(self, matrix: Tensor, generator: torch.Generator) -> Tensor:
        rows = self._rows(matrix)
        norms = rows.norm(dim=1, keepdim=True) if self.norm == "l2" else rows.abs().amax(1, keepdim=True)
        share = rows.abs() / torch.where(norms > 0, norms, 1.0) * self.levels
        draw = torch.rand(rows.shape, generator=generator, dtype=rows.dtype).to(rows.device)
        level = (share + draw).floor().clamp(max=self.levels)
        signs = torch.where(level > 0, rows.sign(), 0.0)  # of a 0 no sign is sent, not even that of -0.0
        return (signs * level * norms / self.levels).flatten()[: matrix.numel()].view(matrix.shape)
