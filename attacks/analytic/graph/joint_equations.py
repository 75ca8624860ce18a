"""What is known of an input that layers share: equations of gradients, other linear equations, single numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LinearEquations(Protocol):
    """F x = t, weighed so that the error of each is about the same share of one."""

    @property
    def count(self) -> int:
        """Return the number of equations."""

    def push(self, x: Tensor) -> list[Tensor]:
        """Return F x for x (n, K, H, W)."""

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return F^T w."""

    def right_side(self) -> list[Tensor]:
        """Return t."""


@dataclass(frozen=True)
class KnownEntries:
    """What is known of single numbers of x.

    Attributes:
        known: (n, K, H, W) bool, where x is known outright.
        values: (n, K, H, W), x there, 0 elsewhere.
        nonnegative: whether no number of x is below zero.
        upper: (n, K, H, W), what numbers are not above; None where nothing is known of that.
    """

    known: Tensor
    values: Tensor
    nonnegative: bool = False
    upper: Tensor | None = None

    def unknown_counts(self, zero: Tensor | None = None) -> Tensor:
        """Return how many numbers of each channel (K,) are unknown, without those that turned out to be zero."""
        return (~self.known if zero is None else ~(self.known | zero)).sum((0, 2, 3))


@dataclass(frozen=True)
class GradientEquations:
    """A x_k = G_k for every channel k.

    Attributes:
        matrix: A (equations, n H W), weighed.
        right: G (equations, K), weighed alike.
        as_images: from rows of x (n H W, K) to (n, K, H, W).
        as_rows: the way back.
        known: bool (equations, K), which of G are known, 0 elsewhere; None where all are.
    """

    matrix: Tensor
    right: Tensor
    as_images: Callable[[Tensor], Tensor]
    as_rows: Callable[[Tensor], Tensor]
    known: Tensor | None = None

    @property
    def known_share(self) -> float:
        """Return the share of G that is known."""
        return 1.0 if self.known is None else float(self.known.double().mean())

    def apply_gram(self, x: Tensor) -> Tensor:
        """Return A^T A x for x (n H W, K), of every channel by its equations that are known."""
        made = self.matrix @ x
        return self.matrix.mT @ (made if self.known is None else made * self.known)
