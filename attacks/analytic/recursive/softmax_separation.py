"""The images of a batch, told apart at a softmax classifier: what flows back into it follows from what it was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.maxpool.batch_separation import SeparatedBatch
from fl.seeds import stream

FITS = 1e-4
"""Share of the signals that the right answer may leave unexplained: rounding."""
KNOWN = 1e-2
"""How far off an answer may be, relative to the inputs."""
EXACT = 1e-10
"""Share of the signals below which they count as explained to rounding: no better answer is looked for."""
SPARE = 2
"""Equations beyond the unknowns, at least: where there are none, any labels can be explained."""
TRACE = 1e-6
"""Least singular value, relative to the largest, that is an image's own: less is rounding."""
STARTS, TRIED, STEPS = 8, 100, 100
"""Starts tried with the likeliest labels, starts tried in all, and steps from each."""
STRIDE, STILL = 15, 0.5
"""Steps after which what is left must be less by this factor: else the start leads nowhere."""
SPREAD = 0.4
"""Standard deviation by which the logits of each further start differ more than those of the one before."""


@dataclass(frozen=True)
class Classified:
    """What the gradient of a classifier under mean cross entropy says of a batch, at its true size, in float64.

    Attributes:
        weight: of the classifier (K, d).
        bias: likewise (K,); zero if it has none.
        gradient: of the weight (K, d).
        moved: gradient of the bias (K,), or None.
    """

    weight: Tensor
    bias: Tensor
    gradient: Tensor
    moved: Tensor | None


def few(classes: int, count: int, *, bias: bool) -> bool:
    """Whether the equations are too few to tell `count` images apart behind a classifier of so many classes."""
    return (count + bias) * (classes - 1) - count**2 < SPARE or count >= classes


def told_by_loss(known: Classified, labels: Iterable[Tensor]) -> tuple[SeparatedBatch, Tensor] | None:
    """Signals and inputs of the classifier for each image, and its labels; None where no answer explains the gradient.

    With inputs X (B, d) and signals D (B, K) the gradient is D^T X: of rank B, U R by an SVD, so that D^T = U A and
    X = A^-1 R for an unknown A (B, B). The loss says what flows back at these inputs, if y are the labels:

        D = (softmax(X W^T + b) - e_y) / B.

    These are B (K - 1) equations for the B^2 numbers of A, and what the biases' gradient, D^T 1 = U A 1, says are K - 1
    more. They are solved by Levenberg and Marquardt's method, from where predictions are guessed. The labels may be in
    any order, and may repeat.

    Args:
        known: of the classifier.
        labels: of all images, the likeliest first; (B,) each, or probabilities (B, K) as of mixed images.
    """
    left, sizes, right = torch.linalg.svd(known.gradient, full_matrices=False)
    tried = 0
    for likeliest, classes in enumerate(labels):
        count, best = len(classes), None
        if len(sizes) < count or not sizes[count - 1] > TRACE * sizes[0]:
            return None
        mixed = _Mixed(known, left[:, :count], sizes[:count, None] * right[:count], classes)
        for start in range(2 if likeliest else STARTS):
            found, tried = mixed.solved(start), tried + 1
            fits = found is not None and found.left < FITS and found.off < KNOWN
            if found is not None and fits and (best is None or found.left < best.left):
                best = found
            if best is not None and best.left < EXACT:
                break
        if best is not None:
            return best, classes
        if tried >= TRIED:
            break
    return None


def likely(classes: int, count: int, guess: Tensor | None) -> Iterator[Tensor]:
    """Labels (B,) of so many images, each set of them once: those guessed, then those that differ least from them."""
    if guess is None:
        yield from map(torch.tensor, combinations_with_replacement(range(classes), count))
        return
    yield guess
    seen = {tuple(sorted(guess.tolist()))}
    last = [guess.tolist()]
    for _ in range(count):
        near = []
        for labels in last:
            for i in range(count):
                for k in range(classes):
                    other = tuple(sorted([*labels[:i], k, *labels[i + 1 :]]))
                    if other not in seen:
                        seen.add(other)
                        near.append(list(other))
                        yield torch.tensor(other)
        last = near


@dataclass(frozen=True)
class _Mixed:
    """A gradient U R of rank B, under given labels.

    Attributes:
        known: what it is of.
        left: U (K, B), orthonormal columns.
        right: R (B, d).
        labels: (B,), or probabilities (B, K).
    """

    known: Classified
    left: Tensor
    right: Tensor
    labels: Tensor

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.labels)

    def solved(self, start: int) -> SeparatedBatch | None:
        """What is found from the start of that number, or None where it leads nowhere."""
        mixing, damping = self._start(start), 1e-3
        rows, off = self._equations(mixing)
        last = off.norm()
        for done in range(1, STEPS + 1):
            form, slope = rows.mT @ rows, rows.mT @ off
            sizes = form.diagonal() + 1e-12 * form.diagonal().max()
            step, failed = torch.linalg.solve_ex(form + damping * sizes.diag(), slope)
            moved = mixing - step.view_as(mixing)
            there, less = self._equations(moved)
            if not bool(failed) and bool(less.norm() < off.norm()):
                mixing, rows, off, damping = moved, there, less, damping / 5
            elif damping > 1e9 or not bool(off.isfinite().all()):
                break
            else:
                damping *= 4
            if done % STRIDE == 0:
                if not bool(off.norm() < STILL * last):
                    break
                last = off.norm()
        return self._answer(mixing, rows, off)

    def _start(self, number: int) -> Tensor:
        """A (B, B) where predictions are those of no features at all, or of random ones."""
        draw = stream(number, "softmax", "apart")
        logits = self.known.bias + SPREAD * number * torch.randn(
            self.count, len(self.known.bias), generator=draw, dtype=torch.float64
        ).to(self.known.bias)
        mixing = self.left.mT @ self._back(logits.softmax(-1)).mT
        if self.known.moved is not None:
            mixing = mixing + ((self.left.mT @ self.known.moved - mixing.sum(1)) / self.count)[:, None]
        # images of one class start in one place, where nothing tells them apart
        nudge = torch.randn(self.count, self.count, generator=draw, dtype=torch.float64).to(mixing)
        return mixing + 0.1 * mixing.abs().mean() * nudge

    def _back(self, predictions: Tensor) -> Tensor:
        """What flows back (B, K) under predictions (B, K)."""
        whole = self.labels.ndim == 1
        labels = functional.one_hot(self.labels, predictions.shape[1]) if whole else self.labels
        return (predictions - labels.to(predictions)) / self.count

    def _equations(self, mixing: Tensor) -> tuple[Tensor, Tensor]:
        """What A (B, B) leaves of all equations (m,), and its derivatives by the numbers of A, row by row (m, B B)."""
        inverse = torch.linalg.inv_ex(mixing)[0]
        outputs = inverse @ (self.right @ self.known.weight.mT)
        predictions = (outputs + self.known.bias).softmax(-1)
        off = self._back(predictions) - (self.left @ mixing).mT
        # dX = -A^-1 dA X: what image k was given moves that of image i, by A^-1[i, j] for dA[j, k]
        mean = predictions @ outputs.mT
        moved = predictions[:, None] * (outputs - mean[..., None]) / self.count  # (i, k, K)
        rows = -torch.einsum("ij,ikc->icjk", inverse, moved)
        rows = rows - torch.einsum("cj,ik->icjk", self.left, torch.eye(self.count).to(mixing))
        rows, off = rows.reshape(off.numel(), -1), off.flatten()
        if self.known.moved is not None:
            sums = torch.eye(self.count).to(mixing).repeat_interleave(self.count, 1)
            rows = torch.cat([rows, self.left @ sums])
            off = torch.cat([off, self.left @ mixing.sum(1) - self.known.moved])
        return rows, off

    def _answer(self, mixing: Tensor, rows: Tensor, off: Tensor) -> SeparatedBatch | None:
        """Signals and inputs by A (B, B), and to first order how far off the equations' rest may put them."""
        inverse, failed = torch.linalg.inv_ex(mixing)
        if bool(failed) or not bool(off.isfinite().all() and rows.isfinite().all()):
            return None
        inputs, signals = inverse @ self.right, (self.left @ mixing).mT
        noise = off.norm() / max(len(off) - rows.shape[1], 1) ** 0.5
        covariance = noise**2 * torch.linalg.pinv(rows.mT @ rows, hermitian=True)
        moved = torch.einsum("ij,kn->injk", inverse, inputs).flatten(2)
        deviation = ((moved @ covariance) * moved).sum(-1).clamp_min(0).sqrt()
        error = torch.maximum(deviation.norm() / inputs.norm(), covariance.trace().clamp_min(0).sqrt() / mixing.norm())
        return SeparatedBatch(signals, inputs, float(error), float(off.norm() / signals.norm()))
