r"""Separation of a batch's images at a softmax classifier whose loss the server knows.

With inputs X (B, d) and signals D (B, K), the loss's derivatives with respect to the logits, the gradient of the
classifier's weight is D^T X, a sum over the B images. It has rank B, U R by a singular value decomposition, so that

    D^T = U A,   X = A^-1 R                                                                     (1)

for one unknown matrix A (B, B). Mean cross entropy says what flows back at these inputs, if y are the labels:

    D = (softmax(X W^T + b) - e_y) / B.                                                         (2)

These are B (K - 1) equations for the B^2 numbers of A, and the gradient of the bias, D^T 1 = U A 1, says K - 1 more.
They are solved by the method of Levenberg and Marquardt, from where predictions are guessed, for one set of labels
after the other. The labels may be in any order, and may repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.maxpool.batch_separation import MIN_SINGULAR_VALUE, SeparatedBatch
from attacks.search_control import check_time_limit
from fl.seeds import stream

MAX_UNEXPLAINED = 1e-4
"""Share of the signals that the right answer may leave unexplained: rounding."""
MAX_DEVIATION = 1e-2
"""How far off an answer may be, relative to the inputs."""
EXACT_RESIDUAL = 1e-10
"""Share of the signals below which they count as explained to rounding: no better answer is looked for."""
MIN_SPARE_EQUATIONS = 2
"""Equations beyond the unknowns, at least: where there are none, any labels can be explained."""
STARTS = 8
"""Starts with the likeliest labels."""
OTHER_STARTS = 2
"""Starts with any other labels."""
MAX_STARTS = 100
"""Starts in all."""
MAX_STEPS = 100
"""Steps of Levenberg and Marquardt from each start."""
STRIDE, FALLING = 15, 0.5
"""Steps after which what is left must be less by this factor: else the start leads nowhere."""
LOGIT_SPREAD = 0.4
"""Standard deviation by which the logits of each further start differ more than those of the one before."""


@dataclass(frozen=True)
class ClassifierGradient:
    """What the gradient of a classifier under mean cross entropy says of a batch, at its true size, in float64.

    Attributes:
        weight: W, of the classifier (K, d).
        bias: b (K,); zero if it has none.
        gradient: of the weight (K, d).
        bias_gradient: of the bias (K,), or None.
    """

    weight: Tensor
    bias: Tensor
    gradient: Tensor
    bias_gradient: Tensor | None


def is_underdetermined(classes: int, count: int, *, bias: bool) -> bool:
    """Return whether the equations are too few to separate `count` images behind a classifier of so many classes.

    Args:
        classes: number of logits K.
        count: number of images B.
        bias: whether the classifier has a bias.
    """
    return (count + bias) * (classes - 1) - count**2 < MIN_SPARE_EQUATIONS or count >= classes


def separate_by_softmax(
    classifier: ClassifierGradient, candidates: Iterable[Tensor]
) -> tuple[SeparatedBatch, Tensor] | None:
    """Return signals and inputs of the classifier for each image, and their labels.

    Args:
        classifier: with its gradient.
        candidates: labels of all images, the likeliest first; (B,) each, or probabilities (B, K) as of mixed images.

    Returns:
        The separated images and the candidate that explains them; None where no answer explains the gradient.
    """
    left, sizes, right = torch.linalg.svd(classifier.gradient, full_matrices=False)
    tried = 0
    for number, labels in enumerate(candidates):
        count, best = len(labels), None
        if len(sizes) < count or not sizes[count - 1] > MIN_SINGULAR_VALUE * sizes[0]:
            return None
        problem = _MixingProblem(classifier, left[:, :count], sizes[:count, None] * right[:count], labels)
        for start in range(OTHER_STARTS if number else STARTS):
            check_time_limit()
            found, tried = problem.solve(start), tried + 1
            fits = found is not None and found.unexplained < MAX_UNEXPLAINED and found.relative_error < MAX_DEVIATION
            if found is not None and fits and (best is None or found.unexplained < best.unexplained):
                best = found
            if best is not None and best.unexplained < EXACT_RESIDUAL:
                break
        if best is not None:
            return best, labels
        if tried >= MAX_STARTS:
            break
    return None


def label_candidates(classes: int, count: int, guess: Tensor | None) -> Iterator[Tensor]:
    """Yield labels (B,) of so many images, each set of them once: the guess, then those that differ least from it.

    Args:
        classes: number of classes K.
        count: number of images B.
        guess: the likeliest labels (B,).
    """
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
class _MixingProblem:
    """The equations for A, under given labels.

    Attributes:
        classifier: with its gradient.
        u: U (K, B), orthonormal columns.
        r: R (B, d).
        labels: y (B,), or probabilities (B, K).
    """

    classifier: ClassifierGradient
    u: Tensor
    r: Tensor
    labels: Tensor

    @property
    def count(self) -> int:
        """Number of images, B."""
        return len(self.labels)

    def solve(self, start: int) -> SeparatedBatch | None:
        """Return what Levenberg and Marquardt's method finds from a start, or None where it leads nowhere.

        A step solves (J^T J + damping diag(J^T J)) step = J^T residual. One that makes the residual less is taken, and
        the damping falls; otherwise it grows.
        """
        a, damping = self._initial_mixing(start), 1e-3
        jacobian, residual = self._linearize(a)
        last = residual.norm()
        for done in range(1, MAX_STEPS + 1):
            normal, slope = jacobian.mT @ jacobian, jacobian.mT @ residual
            sizes = normal.diagonal() + 1e-12 * normal.diagonal().max()
            step, failed = torch.linalg.solve_ex(normal + damping * sizes.diag(), slope)
            moved = a - step.view_as(a)
            moved_jacobian, moved_residual = self._linearize(moved)
            if not bool(failed) and bool(moved_residual.norm() < residual.norm()):
                a, jacobian, residual, damping = moved, moved_jacobian, moved_residual, damping / 5
            elif damping > 1e9 or not bool(residual.isfinite().all()):
                break
            else:
                damping *= 4
            if done % STRIDE == 0:
                if not bool(residual.norm() < FALLING * last):
                    break
                last = residual.norm()
        return self._separate(a, jacobian, residual)

    def _initial_mixing(self, number: int) -> Tensor:
        """Return A (B, B) where predictions are those of no features at all, or of random ones."""
        draw, classifier = stream(number, "softmax", "apart"), self.classifier
        logits = classifier.bias + LOGIT_SPREAD * number * torch.randn(
            self.count, len(classifier.bias), generator=draw, dtype=torch.float64
        ).to(classifier.bias)
        a = self.u.mT @ self._signals(logits.softmax(-1)).mT
        if classifier.bias_gradient is not None:
            a = a + ((self.u.mT @ classifier.bias_gradient - a.sum(1)) / self.count)[:, None]
        # images of one class start in one place, where nothing tells them apart
        nudge = torch.randn(self.count, self.count, generator=draw, dtype=torch.float64).to(a)
        return a + 0.1 * a.abs().mean() * nudge

    def _signals(self, predictions: Tensor) -> Tensor:
        """Return the signals D (B, K) by (2), under predictions (B, K)."""
        hard = self.labels.ndim == 1
        labels = functional.one_hot(self.labels, predictions.shape[1]) if hard else self.labels
        return (predictions - labels.to(predictions)) / self.count

    def _linearize(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the equations' derivatives by A (B, B), row by row (m, B B), and what A leaves of them (m,)."""
        inverse = torch.linalg.inv_ex(a)[0]
        outputs = inverse @ (self.r @ self.classifier.weight.mT)
        predictions = (outputs + self.classifier.bias).softmax(-1)
        residual = self._signals(predictions) - (self.u @ a).mT
        # dX = -A^-1 dA X: what image k was given moves that of image i, by A^-1[i, j] for dA[j, k]
        mean = predictions @ outputs.mT
        moved = predictions[:, None] * (outputs - mean[..., None]) / self.count  # (i, k, K)
        jacobian = -torch.einsum("ij,ikc->icjk", inverse, moved)
        jacobian = jacobian - torch.einsum("cj,ik->icjk", self.u, torch.eye(self.count).to(a))
        jacobian, residual = jacobian.reshape(residual.numel(), -1), residual.flatten()
        if self.classifier.bias_gradient is not None:
            sums = torch.eye(self.count).to(a).repeat_interleave(self.count, 1)
            jacobian = torch.cat([jacobian, self.u @ sums])
            residual = torch.cat([residual, self.u @ a.sum(1) - self.classifier.bias_gradient])
        return jacobian, residual

    def _separate(self, a: Tensor, jacobian: Tensor, residual: Tensor) -> SeparatedBatch | None:
        """Return signals and inputs by (1), and to first order how far off the equations' residual may put them."""
        inverse, failed = torch.linalg.inv_ex(a)
        if bool(failed) or not bool(residual.isfinite().all() and jacobian.isfinite().all()):
            return None
        inputs, signals = inverse @ self.r, (self.u @ a).mT
        noise = residual.norm() / max(len(residual) - jacobian.shape[1], 1) ** 0.5
        covariance = noise**2 * torch.linalg.pinv(jacobian.mT @ jacobian, hermitian=True)
        moved = torch.einsum("ij,kn->injk", inverse, inputs).flatten(2)
        deviation = ((moved @ covariance) * moved).sum(-1).clamp_min(0).sqrt()
        mixing_deviation = covariance.trace().clamp_min(0).sqrt()
        off = torch.maximum(deviation.norm() / inputs.norm(), mixing_deviation / a.norm())
        return SeparatedBatch(signals, inputs, float(off), float(residual.norm() / signals.norm()))
