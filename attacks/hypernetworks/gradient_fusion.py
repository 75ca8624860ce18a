"""A linear layer's update says what flowed back into it twice: in the bias, and in the weight once for every input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl.tensors import LowRank, Value, inner, matvec


@dataclass(frozen=True)
class SentTwice:
    """The update dW = g x^T, db = g of a layer that saw one input, each with noise of its own (rounding, a defence's).

    So noise on the update averages out over the inputs. How much there is follows from what the fits leave.

    Attributes:
        weight: dW (n, m).
        bias: db (n,).
        start: mean square of an entry of the layer's weight and of its bias, which rounding is relative to. An exact
            outer product counts as rounded like the bias, since no update is exact that is sent as numbers.
        seen: 1 where an entry was sent, 0 where a known defence cut it: of the weight (n, m), of the bias (n,); None if
            nothing is cut.
    """

    weight: Value
    bias: Tensor
    start: tuple[float, float]
    seen: tuple[Tensor, Tensor] | None = None

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient g (n,): the mean of both, weighted by inverse variances; zero where neither was sent."""
        raised = self._raised(x)
        of_raised, of_bias = self._noise(x, raised)
        weight, bias = self.start
        if isinstance(self.weight, LowRank) and bias > 0:
            of_raised = of_raised.maximum(of_bias * weight / bias / self._rows(x))
        ours, mine = 1 / (of_raised + self._lost(x)), self._told / of_bias
        return torch.where(mine + ours > 0, (self.bias * mine + raised * ours) / (mine + ours), 0.0)

    def lengths(self, x: Tensor) -> tuple[float, float]:
        """Squared length of g by the weight where x had this length, its noise left out, and its product with db.

        Both in units of the bias's noise, so that layers can be added up.
        """
        raised = self._raised(x)
        of_raised, of_bias = self._noise(x, raised)
        both = self._told * of_raised.isfinite() / of_bias
        own = (raised.square() - of_raised.nan_to_num(posinf=0.0)) * both
        return float(own.sum()), float((raised * self.bias * both).sum())

    def _raised(self, x: Tensor) -> Tensor:
        """The least-squares fit of g in dW = g x^T (n,)."""
        return matvec(self.weight, x) / self._rows(x).clamp_min(torch.finfo(x.dtype).tiny)

    def _noise(self, x: Tensor, raised: Tensor) -> tuple[Tensor, float]:
        """Variances as they are seen, not zero: of `raised` (n,), infinite where nothing was sent, and of the bias."""
        rows = self._rows(x)
        known = self.weight.numel() if self.seen is None else float(self.seen[0].sum())
        squares = inner(self.weight, self.weight)
        left = float(squares) - float((raised.square() * rows).sum())
        noise = max(left, 0.0) / max(known - raised.numel(), 1.0) + _least(squares, known)
        of_raised = torch.where(rows > 0, noise / rows, math.inf).expand_as(raised)
        both = (self._told * (rows > 0)).expand_as(raised)
        apart = torch.where(both > 0, (self.bias - raised).square() - of_raised - self._lost(x), 0.0)
        least = _least(self.bias @ self.bias, self.bias.numel())
        return of_raised, max(float(apart.sum() / both.sum().clamp_min(1.0)), least)

    def _lost(self, x: Tensor) -> Tensor:
        """The variance that no averaging takes off `raised` (n,): of rows too small to be sent.

        Where numbers are sent in coarse steps, a row whose entries are all below one is sent as zeros: no noise is seen
        in it, and all of it is lost.
        """
        lost = self._step**2 / 12 * (x.abs().sum() / (x @ x)) ** 2
        return torch.where(self.bias.abs() * x.abs().max() < 2 * self._step, lost, 0.0)

    @cached_property
    def _step(self) -> float:
        """The smallest number sent of the weight, 0 where it is none of coarse steps."""
        if self.seen is not None or not isinstance(self.weight, Tensor) or not bool(self.weight.any()):
            return 0.0
        return float(torch.where(self.weight == 0, math.inf, self.weight.abs()).min())

    def _rows(self, x: Tensor) -> Tensor:
        """The sum of squares of x over the entries sent of each row, (n,) or one for all."""
        return x @ x if self.seen is None else self.seen[0] @ x.square()

    @property
    def _told(self) -> Tensor:
        """1 where the bias was sent, (n,) or one for all."""
        return self.bias.new_ones(()) if self.seen is None else self.seen[1]


def _least(squares: Tensor, count: float) -> float:
    """The variance that double precision leaves on numbers of which there are `count`; in their own unit."""
    return torch.finfo(torch.float64).eps ** 2 * float(squares) / max(count, 1.0) + torch.finfo(torch.float64).tiny


def lengthened(x: Tensor, layers: Sequence[SentTwice]) -> Tensor:
    """`x` (m,) at the length that weights and biases agree on.

    A least-squares fit to a noisy bias comes out too short, as its noise adds to its square.
    """
    whole = common = 0.0
    for layer in layers:
        square, product = layer.lengths(x)
        whole, common = whole + square, common + product
    return x * (whole / common) if whole > 0 and common > 0 else x
