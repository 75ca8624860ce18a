r"""Corrects which positions max pooling passed on, where a search has found nearly all of them.

`pooled_convolution` ends at a picture that meets the equation of each group of windows at some candidate, and for a few
groups at a wrong one. Equations of the groups alone do not show that, since pixels are more. The gradient does. With

    j       the position that is taken for a group k, and i another candidate of it,
    s_k     what flows back into the group, t_k its pooled output, c its filter,
    x       the layer's input, z = W * x + b,

    (1) z_j(x) + d_k = t_k,
    (2) G_c = sum over groups k of filter c, of s_k (patch_j(x) + sum over i of w_ki (patch_i(x) - patch_j(x))),

where d_k is zero for the right position, and w_ki is one for the right position where it is another one. Few groups are
wrong, so most w and d are zero. They are found with the change of x by weighted least squares, whose weights on

    e_k = sum over i of w_ki^2 + (d_k / D)^2

are weighed anew as 1 / (e_k + eps^2) while eps falls (a logarithmic penalty; Candes, Wakin and Boyd 2008, section 2.2).
D is a usual difference of candidates' outputs. All of d follows from x in closed form, so that it only weakens (1). A
filter whose equations (2) stay unexplained, as by windows that show the same number by chance, is weighed down as well.

Then positions move: to another candidate where its w is above one half, and to the candidate whose output is nearest
where that of the position is away from t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.pooled_convolution import (
    Candidates,
    PooledConvolution,
    PooledObservation,
    candidate_positions,
)
from attacks.search_control import check_time_limit

SIGMA_OUTPUTS = 1e-3
"""Standard deviation of (1), in standard deviations of t."""
SIGMA_GRADIENT = 0.03
"""That of (2): a share of what a usual switch makes of one number of the gradient."""
USUAL_DIFFERENCE = 0.1
"""D, in standard deviations of t."""
FIRST_EPS, LAST_EPS, EPS_DECAY = 1.0, 0.03, 0.6
WEIGHINGS, ITERATIONS = 10, 150
"""How often weights are chosen anew, and conjugate gradients' iterations for each."""
FILTER_DOUBT = 3.0
"""Mean square of what (2) misses of a filter, in its variance, from which the filter is weighed down."""
EQUATIONS_TRUSTED = 3
"""Weighings before that begins."""
DAMPING = 1e-6
"""Weight on the change of x, as a share of what the equations have on it."""
SMALL_STEP_LEFT = 1e-6
"""Share of the first squared residual at which conjugate gradients end."""
AWAY, NEARER = 0.02, 3.0
"""Standard deviations of t by which an output may miss, and by what factor another candidate's must miss less."""


@dataclass(frozen=True)
class Positions:
    """Which candidate each group is taken to have passed on.

    Attributes:
        candidates: that may have been.
        taken: of each group, the candidate's number.
    """

    candidates: Candidates
    taken: Tensor

    @classmethod
    def nearest(cls, layer: PooledConvolution, known: PooledObservation, images: Tensor) -> Positions | None:
        """Return the candidates whose outputs are nearest to the pooled ones; None where there are no candidates."""
        outputs = layer.outputs(images)
        candidates = candidate_positions(layer, known, outputs.shape)
        if not candidates.groups:
            return None
        return cls(candidates, _best_of_groups(candidates, -_misses(candidates, outputs)))

    @property
    def are_taken(self) -> Tensor:
        """Whether each candidate is the one of its group."""
        found = torch.zeros_like(self.candidates.group, dtype=torch.bool)
        found[self.taken] = True
        return found


def correct_positions(
    layer: PooledConvolution, known: PooledObservation, images: Tensor, positions: Positions
) -> tuple[Tensor, Positions, int]:
    """Return the layer's input and the positions after one correction, and how many groups moved.

    Args:
        layer: the convolution and its pooling.
        known: what is known of it.
        images: the layer's input (B, I, H, W), near to the true one.
        positions: that are taken, nearly all of them right.
    """
    equations = _Equations(layer, known, images, positions)
    change, weights = equations.solve()
    images = images + change.to(images)
    candidates, spread = positions.candidates, float(known.pooled.std())
    taken = _best_of_groups(candidates, torch.where(positions.are_taken, 0.5, weights))
    missed = _misses(candidates, layer.outputs(images)) / spread
    nearest = _best_of_groups(candidates, -missed)
    far = (missed[taken] > AWAY) & (NEARER * missed[nearest] < missed[taken])
    taken = torch.where(far, nearest, taken)
    return images, Positions(candidates, taken), int((taken != positions.taken).sum())


def _misses(candidates: Candidates, outputs: Tensor) -> Tensor:
    """Return by how much the output at each candidate misses the pooled one."""
    return (outputs.flatten()[candidates.position] - candidates.target).abs()


def _best_of_groups(candidates: Candidates, score: Tensor) -> Tensor:
    """Return the first candidate of each group with the group's highest score."""
    group = candidates.group
    highest = score.new_full((candidates.groups,), -torch.inf).scatter_reduce(0, group, score, "amax")
    numbers = torch.arange(len(group), device=group.device)
    best = score >= highest[group]
    return group.new_full((candidates.groups,), len(group)).scatter_reduce(0, group[best], numbers[best], "amin")


class _Equations:
    """The equations (1) and (2) at one input, in single precision, for a change of it and w."""

    def __init__(
        self, layer: PooledConvolution, known: PooledObservation, images: Tensor, positions: Positions
    ) -> None:
        candidates, taken = positions.candidates, positions.taken
        outputs = layer.outputs(images)
        signal = candidates.placed(torch.where(positions.are_taken, candidates.signal, 0), outputs)
        self.missed = (candidates.target - outputs.flatten()[candidates.position])[taken].float()
        self.missed_gradient = (known.gradient - layer.gradient(images, signal)).float()
        self.layer, self.images, self.signal = layer.to(torch.float32), images.float(), signal.float()
        self.candidates, self.places = candidates, candidates.position[taken]
        self.flowing = candidates.signal.float()
        sizes = self.flowing.abs() * _patch_distances(layer, self.images, outputs, candidates, taken)
        self.open = ~positions.are_taken & (sizes > 0)
        self.alone = torch.bincount(candidates.group, minlength=candidates.groups) == 1
        spread, numbers = float(known.pooled.std()), math.sqrt(known.gradient[0].numel())
        usual = float(sizes[self.open].median()) if bool(self.open.any()) else 1.0
        self.precision = (SIGMA_GRADIENT * usual / numbers) ** -2
        self.variance, self.difference = (SIGMA_OUTPUTS * spread) ** 2, USUAL_DIFFERENCE * spread
        self.sizes = sizes

    def push(self, change: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a change of the input and w make of the outputs at the positions, and of the gradient."""
        moved = torch.where(self.open, weights, 0) * self.flowing
        placed = moved.new_zeros(self.signal.numel()).index_add_(0, self.candidates.position, moved)
        placed.index_add_(0, self.places, -self.candidates.sums(moved))
        gradient = self.layer.gradient(change, self.signal)
        gradient = gradient + self.layer.gradient(self.images, placed.reshape(self.signal.shape))
        return self.layer.linear(change).flatten()[self.places], gradient

    def pull(self, outputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transpose's product with weights of both."""
        placed = outputs.new_zeros(self.signal.numel()).index_add_(0, self.places, outputs).reshape(self.signal.shape)
        change = self.layer.transposed(placed, self.images)
        change = change + self.layer.transposed(self.signal, self.images, gradient)
        seen = self.layer.linear(self.images, gradient).flatten()
        seen = (seen[self.candidates.position] - seen[self.places][self.candidates.group]) * self.flowing
        return change, torch.where(self.open, seen, 0)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the change of the input and w."""
        change, weights = torch.zeros_like(self.images), torch.zeros_like(self.flowing)
        sparse, eps = torch.ones_like(self.missed), FIRST_EPS
        trust = torch.full_like(self.missed_gradient[:, :1, :1, :1], self.precision)
        for weighing in range(WEIGHINGS):
            check_time_limit()
            penalty = 1 / (sparse + eps**2)
            loose = self.difference**2 / penalty  # the variance that d leaves to each equation (1)
            precision = 1 / (self.variance + torch.where(self.alone, 0, loose))
            change, weights = self._least_squares(change, weights, precision, trust, penalty)
            outputs, gradient = self.push(change, weights)
            missed = torch.where(self.alone, 0, (self.missed - outputs) * precision * loose)
            switched = self.candidates.sums(torch.where(self.open, weights.clamp_min(0).square(), 0))
            sparse = switched + (missed / self.difference).square()
            if weighing >= EQUATIONS_TRUSTED - 1:
                off = self.precision * (self.missed_gradient - gradient).square().mean((1, 2, 3), keepdim=True)
                trust = self.precision * FILTER_DOUBT / (off + FILTER_DOUBT)
            eps = max(EPS_DECAY * eps, LAST_EPS)
        return change, weights

    def _least_squares(
        self, change: Tensor, weights: Tensor, precision: Tensor, trust: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the change and w of weighted least squares, from near ones, by preconditioned conjugate gradients.

        Args:
            change: of the input, where to begin.
            weights: w, likewise.
            precision: of each equation (1).
            trust: precision of each filter's equations (2).
            penalty: weight on each group's w.
        """
        usual = float(self.layer.weight.square().sum((1, 2, 3)).mean())
        scale = float(precision.mean()) * usual * self.candidates.groups / self.images[:, :1].numel()
        on_weights = torch.where(self.open, penalty[self.candidates.group], 0)
        trusted = trust.flatten()[self.candidates.position // self.signal[0, 0].numel() % self.signal.shape[1]]
        conditioned = torch.where(self.open, 1 / (trusted * self.sizes.square() + on_weights), 0)

        def normal(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            outputs, gradient = self.push(one, other)
            first, second = self.pull(precision * outputs, trust * gradient)
            return first + DAMPING * scale * one, second + on_weights * other

        wanted = self.pull(precision * self.missed, trust * self.missed_gradient)
        rest = [a - b for a, b in zip(wanted, normal(change, weights), strict=True)]
        slopes = [rest[0] / scale, conditioned * rest[1]]
        directions, size = slopes, _dot(rest, slopes)
        first = size
        for _ in range(ITERATIONS):
            products = normal(directions[0], directions[1])
            curvature = _dot(directions, products)
            if not curvature > 0:
                break
            length = size / curvature
            change, weights = change + length * directions[0], weights + length * directions[1]
            rest = [a - length * b for a, b in zip(rest, products, strict=True)]
            slopes = [rest[0] / scale, conditioned * rest[1]]
            size, last = _dot(rest, slopes), size
            if size <= SMALL_STEP_LEFT * first:
                break
            directions = [a + size / last * b for a, b in zip(slopes, directions, strict=True)]
        return change, weights


def _dot(one: tuple[Tensor, ...] | list[Tensor], other: tuple[Tensor, ...] | list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))


def _patch_distances(
    layer: PooledConvolution, images: Tensor, outputs: Tensor, candidates: Candidates, taken: Tensor
) -> Tensor:
    """Return how far the patch at each candidate is from that at the position of its group."""
    patches = functional.unfold(images, layer.weight.shape[-2:], padding=layer.padding, stride=layer.stride)
    flat = patches.transpose(0, 1).flatten(1)  # (numbers of a patch, B * places)
    places = patches.shape[-1]
    at = candidates.position // outputs[0].numel() * places + candidates.position % places
    one, other = at, at[taken][candidates.group]
    squares = torch.zeros(len(one), dtype=flat.dtype, device=flat.device)
    for row in flat:  # one number of the patches at a time, so that memory stays that of the candidates
        squares += (row[one] - row[other]).square()
    return squares.sqrt()
