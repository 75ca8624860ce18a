r"""Separation of a batch's images behind a linear layer, whose gradient holds only the sum over them.

The gradient of the layer's weight is the sum over B images of signal input^T. It has rank B, U R by a singular value
decomposition, so that with one unknown matrix A (B, B)

    signals = (U A)^T,   inputs = A^-1 R.                                                       (1)

The gradient of its bias fixes the sum of A's columns: A 1 = U^T bias_gradient (`total`). The rest follows from the
layer below. The bias gradient of its channel c is a sum over images b and the channel's units n,

    lower_bias_gradient_c = sum_b sum_n (weight^T signal_b)_n slope(input_bn) scale_n,          (2)

where the (leaky) ReLU's slope depends on the input's sign alone: linear in A once these signs are known.

A rough A tells most signs. What a ReLU lets through below zero is small or nothing, so that a row of A^-1 is nearly
orthogonal to many columns of R (as in SPEAR, Dimitrov et al., 2024, where zeros are exact), and nowhere far below zero.
Many random A near a rough one are then moved to where most channels are explained exactly, whatever the others leave,
until all are: a cross-entropy search (Rubinstein, 1999) whose members take robust least-squares steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice

import torch
from torch import Tensor

from attacks.search_control import check_time_limit
from fl.seeds import stream

DRAWS = 20_000
"""Rows of A^-1 solved for from random units that are taken to be at rest."""
DISTINCT_ROWS, COMBINED_ROWS = 300, 16
"""Rows, the most plausible first, that are refined, and of these that are combined."""
MAX_COMBINATIONS, MAX_REFINED = 2_000, 12
"""Combinations of rows looked at, and of these refined."""
AT_REST = 2.0
"""Times what an activation at rest typically lets through, up to which an input may count as at rest."""
SAME_INPUT = 0.02
"""Root mean square distance of two inputs, relative to theirs, up to which they count as one."""
REST_STD = 5.0
"""Times what an activation at rest lets through, by which such inputs differ from zero."""
COMMON_SHARE = 0.9
"""Share of what inputs at rest have in common that is taken for their size: all are a little below zero."""
PARTICLES = 512
"""Matrices that are moved at once."""
MAX_ROUNDS = 12
"""How often they are moved."""
ELITE = 0.1
"""Share of them from which the next ones are drawn."""
EXPLAINED, ENOUGH_CHANNELS = 1e-5, 0.9
"""Share of a bias gradient below which it counts as explained, and share of channels (of logarithms) that must be."""
ROUGH_ZERO = 3e-4
"""Size of a ReLU's zeros at first, relative to the input's root mean square."""
ROUNDING = 1e-6
"""The same in the end."""
TRUSTED_CHANNEL = 1e-3
"""Share of a channel's bias gradient that is left unexplained, from which on it is left out at the end."""
SPARE_EQUATIONS = 8
"""Equations beyond the unknowns that make an answer that explains them a proof."""
MIN_SINGULAR_VALUE, MORE_IMAGES = 1e-6, 0.1
"""Least singular value, relative to the largest, that is an image's own: less is rounding. And, relative to the least
of the images', one that is no rounding: there are more images."""
MAX_UNEXPLAINED = 1e-4
"""Share of the bias gradient that the right answer may leave unexplained: rounding."""
MAX_DEVIATION = 1e-2
"""How far off an answer may be, relative to the inputs: one that fixes nothing explains everything."""
CHUNK = 2**24
"""Inputs of candidate rows that are looked at together."""


@dataclass(frozen=True)
class SummedGradient:
    """What a linear layer's gradient, and the bias gradient of the layer below, say of a batch of B images.

    Attributes:
        weight: of the linear layer (m, n).
        bias: of the linear layer (m,).
        slope_above: slope below zero of the activation above it; None if there is none of that kind.
        gradient: of its weight (m, n), the sum of signal input^T over images.
        bias_gradient: of its bias (m,), the sum of signals.
        offset: what is taken off an input (n,) ...
        scale: ... and what the rest is divided by for what the activation below returned (n,).
        slope_below: slope of that activation below zero.
        lower_bias_gradient: of the layer below (C,); each channel makes n / C of the inputs, one after the other.
        lower_scale: factor of the normalization behind that layer (C,).
    """

    weight: Tensor
    bias: Tensor
    slope_above: float | None
    gradient: Tensor
    bias_gradient: Tensor
    offset: Tensor
    scale: Tensor
    slope_below: float
    lower_bias_gradient: Tensor
    lower_scale: Tensor

    def cpu(self) -> SummedGradient:
        """Return this gradient with its tensors on the CPU."""
        parts = {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SeparatedBatch:
    """The images of a batch, one by one.

    Attributes:
        signals: that flowed back into the layer (B, m).
        inputs: of the layer (B, n).
        relative_error: how far both may be off, relative to their root mean square.
        unexplained: share of the equations that is not explained.
    """

    signals: Tensor
    inputs: Tensor
    relative_error: float
    unexplained: float

    def to(self, device: torch.device) -> SeparatedBatch:
        """Return this batch with its tensors on `device`."""
        return replace(self, signals=self.signals.to(device), inputs=self.inputs.to(device))


def max_separable_images(channels: int) -> int:
    """Return how many images so many biases of the layer below separate: B images are B (B - 1) unknowns."""
    return int((1 + math.sqrt(1 + 4 * max(channels - SPARE_EQUATIONS, 0))) / 2)


def separate_batch(summed: SummedGradient, count: int) -> SeparatedBatch | None:
    """Return signals and inputs of the images, in no particular order; None where no answer explains the gradients.

    Args:
        summed: the gradients, on the CPU (`SummedGradient.cpu`): the least squares need a driver that torch has there
            alone.
        count: of images.
    """
    problem = MixingProblem.of(summed, count)
    if problem is None:
        return None
    for start in islice(problem.rough_inverses(), MAX_REFINED):
        found = problem.refine(start)
        if found is not None and found.unexplained < MAX_UNEXPLAINED and found.relative_error < MAX_DEVIATION:
            return found
    return None


@dataclass(frozen=True)
class MixingProblem:
    """The equations for A; `u`, `r` and `total` as at the head of the module.

    Attributes:
        summed: the gradients.
        u: U (m, B), orthonormal columns.
        r: R (B, n).
        total: the sum of A's columns (B,).
    """

    summed: SummedGradient
    u: Tensor
    r: Tensor
    total: Tensor

    @classmethod
    def of(cls, summed: SummedGradient, count: int) -> MixingProblem | None:
        """Return the problem of `count` images; None where the gradient's rank shows that there were not as many."""
        left, sizes, right = torch.linalg.svd(summed.gradient, full_matrices=False)
        if len(sizes) < count or not sizes[count - 1] > MIN_SINGULAR_VALUE * sizes[0]:
            return None
        if len(sizes) > count and sizes[count] > MORE_IMAGES * sizes[count - 1]:
            return None
        left = left[:, :count]
        return cls(summed, left, sizes[:count, None] * right[:count], left.mT @ summed.bias_gradient)

    @property
    def count(self) -> int:
        """Number of images, B."""
        return len(self.total)

    @cached_property
    def activation_output_map(self) -> Tensor:
        """The matrix that takes a row of A^-1 to what the activation returned; the row's product with `total` is 1."""
        return (self.r - self.total[:, None] * self.summed.offset) / self.summed.scale

    @cached_property
    def backward_map(self) -> Tensor:
        """The matrix that takes A to what flows back below, apart from the activation's slope (C, n / C, B)."""
        summed = self.summed
        units = len(summed.scale) // len(summed.lower_scale)
        factor = summed.lower_scale.repeat_interleave(units) * summed.scale
        return ((summed.weight.mT @ self.u) * factor[:, None]).view(len(summed.lower_bias_gradient), -1, self.count)

    @cached_property
    def sum_preserving_directions(self) -> Tensor:
        """Directions in which the columns of A, one after the other, leave their sum as it is (B B, B (B - 1))."""
        fixed = torch.eye(self.count).to(self.total).repeat(1, self.count)
        return torch.linalg.svd(fixed)[2][self.count :].mT

    # ---- rough -------------------------------------------------------------------------------------------------------
    def rough_inverses(self) -> Iterator[Tensor]:
        """Yield rough A^-1 (B, B), those first whose signals are small just where outputs are negative."""
        rows = self._candidate_rows()
        picked = list(islice(combinations(range(len(rows)), self.count), MAX_COMBINATIONS))
        if not picked:
            return
        inverses = rows[torch.tensor(picked, device=rows.device)]
        inverses = inverses[torch.linalg.cond(inverses) < 1e6]
        agreement = torch.cat([self._agreement(part) for part in inverses.split(256)])
        for i in agreement.argsort(descending=True, stable=True).tolist():
            yield inverses[i]

    def _agreement(self, inverses: Tensor) -> Tensor:
        """Return the share of the layer's outputs whose sign their signals confirm (N,).

        Where no signal confirms any, the channels' score stands in.
        """
        slope = self.summed.slope_above
        if slope is None:
            return -self._score(self._linearize(torch.linalg.inv(inverses))[1])
        active = inverses @ (self.r @ self.summed.weight.mT) + self.summed.bias > 0
        signals = (self.u @ torch.linalg.inv(inverses)).mT.abs()
        bound = AT_REST * max(slope, 1e-3) * signals.square().mean(2, keepdim=True).sqrt()
        return (active == (signals > bound)).to(signals).mean((1, 2))

    def _candidate_rows(self) -> Tensor:
        """Return candidates for rows of A^-1 (N, B): many inputs at rest, few below zero.

        Drawn from random units that are taken to be at rest, then moved to what all inputs at rest tell.
        """
        draw, count = stream(0, "separate"), self.count
        norms = self.activation_output_map.norm(dim=0)
        columns = self.activation_output_map[:, norms > 0.05 * norms.mean()].mT
        picked = torch.randint(len(columns), (DRAWS, count - 1), generator=draw).to(columns.device)
        system = torch.cat([columns[picked], self.total.expand(DRAWS, 1, -1)], 1)
        unit = torch.zeros(count, 1).to(columns)
        unit[-1] = 1
        solved, failed = torch.linalg.solve_ex(system, unit.expand(DRAWS, -1, -1))
        solved = solved[(failed == 0) & solved.isfinite().all(1).all(1)][..., 0]
        rows = self._distinct_rows(solved, DISTINCT_ROWS)
        for _ in range(3):
            precision = self._row_precision(rows)
            pulled = torch.linalg.solve_ex(precision, self.total.expand(len(rows), -1)[..., None])[0][..., 0]
            rows = pulled / (pulled @ self.total)[:, None]
            rows = rows[rows.isfinite().all(1)]
        return self._distinct_rows(rows, COMBINED_ROWS)

    def _relative_to_rest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the activation would return (N, n), in units of its typical size at rest, and that size."""
        values = rows @ self.activation_output_map
        size = values.square().mean(1, keepdim=True).sqrt() * max(self.summed.slope_below, 1e-3)
        return values / size, size

    def _row_precision(self, rows: Tensor) -> Tensor:
        """Return the precision of each row, as the inputs at rest tell (N, B, B)."""
        values, size = self._relative_to_rest(rows)
        weights = (values.abs() < AT_REST).to(values) / (REST_STD * size).square()
        mean = torch.einsum("nr,ir->ni", weights, self.activation_output_map) / weights.sum(
            1, keepdim=True
        ).sqrt().clamp_min(1e-300)
        form = torch.einsum("nr,ir,jr->nij", weights, self.activation_output_map, self.activation_output_map)
        form = form - COMMON_SHARE * mean[:, :, None] * mean[:, None, :]  # what they have in common is hardly told
        return form + 1e-9 * form.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(self.count).to(form)

    def _plausibility(self, rows: Tensor) -> Tensor:
        """Return how many more inputs are at rest than twice those that are far below zero (N,)."""
        values, _ = self._relative_to_rest(rows)
        return (values.abs() < AT_REST).sum(1) - 2 * (values < -AT_REST).sum(1)

    def _distinct_rows(self, rows: Tensor, limit: int) -> Tensor:
        """Return the most plausible rows that differ from each other."""
        parts = rows.split(max(1, CHUNK // self.activation_output_map.shape[1]))
        plausibility = torch.cat([self._plausibility(part) for part in parts])
        rows = rows[plausibility.argsort(descending=True, stable=True)]
        triangle = torch.linalg.cholesky(self.r @ self.r.mT)
        turned = rows @ triangle  # distances between these are those of the inputs
        size = turned.norm(dim=1)
        kept: list[int] = []
        is_open = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        while len(kept) < limit and bool(is_open.any()):
            kept.append(int(is_open.nonzero()[0]))
            is_open &= (turned - turned[kept[-1]]).norm(dim=1) > SAME_INPUT * size
        return rows[kept]

    # ---- refined -----------------------------------------------------------------------------------------------------
    def refine(self, start: Tensor) -> SeparatedBatch | None:
        """Return what many random A around a rough inverse (B, B) lead to; the best ones move the next."""
        around = self._inverses_around(start)
        if around is None:
            return None
        particles = torch.linalg.inv_ex(around)[0]
        center = torch.linalg.inv(start).mT.flatten()
        draw = stream(1, "separate")
        best, least = particles[0], float("inf")
        for _ in range(MAX_ROUNDS):
            check_time_limit()
            particles, scores = self._robust_step(particles)
            order = scores.argsort()
            if scores[order[0]] < least:
                best, least = particles[order[0]], float(scores[order[0]])
            if least < ENOUGH_CHANNELS * math.log(EXPLAINED):
                break
            fresh = self._resample(particles, order, center, draw)
            if fresh is None:
                break
            particles = fresh
        return self._separate(best)

    def _robust_step(self, particles: Tensor) -> tuple[Tensor, Tensor]:
        """Return each A (N, B, B) after a robust step, where that explains more, and its score (N,)."""
        rows, residual = self._linearize(particles)
        moved = self._least_deviations(rows, particles)
        _, after = self._linearize(moved)
        scores, moved_scores = self._score(residual), self._score(after)
        particles = torch.where((moved_scores < scores)[:, None, None], moved, particles)
        return particles, torch.minimum(scores, moved_scores)

    def _resample(self, particles: Tensor, order: Tensor, center: Tensor, draw: torch.Generator) -> Tensor | None:
        """Draw new A (N, B, B) from a Gaussian fitted to the best ones, half of which stay; None where it can't be."""
        steps = (particles.mT.flatten(1) - center) @ self.sum_preserving_directions
        elite = steps[order[: max(int(ELITE * len(steps)), 2 * steps.shape[1])]]
        covariance = torch.cov(elite.mT).view(steps.shape[1], -1)
        covariance = covariance + 1e-3 * covariance.diagonal().diag()
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed):
            return None
        fresh = torch.randn(steps.shape, generator=draw, dtype=torch.float64).to(steps)
        steps = elite.mean(0) + fresh @ factor.mT
        steps[: len(elite) // 2] = elite[: len(elite) // 2]
        return (center + steps @ self.sum_preserving_directions.mT).view(-1, self.count, self.count).mT

    def _inverses_around(self, start: Tensor) -> Tensor | None:
        """Return A^-1 drawn around `start`, as far as the inputs at rest tell it (N, B, B); the first is itself."""
        draw = stream(2, "separate")
        plane = torch.linalg.svd(self.total[None])[2][1:].mT  # a row's product with the sum is 1
        factor, failed = torch.linalg.cholesky_ex(plane.mT @ self._row_precision(start) @ plane)
        if bool(failed.any()):
            return None
        fresh = torch.randn(PARTICLES, self.count, self.count - 1, generator=draw, dtype=torch.float64).to(start)
        fresh[0] = 0
        steps = torch.linalg.solve_triangular(factor.mT, fresh[..., None], upper=True)[..., 0]
        return start + steps @ plane.mT

    # ---- the equations (2) -------------------------------------------------------------------------------------------
    def _linearize(self, a: Tensor, margin: float = ROUGH_ZERO) -> tuple[Tensor, Tensor]:
        """Return the equations in A's columns (N, C, B B) under A's signs (N, B, B), and their residual (N, C).

        What a ReLU returned counts as zero up to `margin` of its root mean square.
        """
        returned, _ = torch.linalg.solve_ex(a, self.activation_output_map.expand(len(a), -1, -1))
        slope, target = self.summed.slope_below, self.summed.lower_bias_gradient
        least = margin * returned.square().mean(2, keepdim=True).sqrt() if slope == 0 else 0.0
        slopes = torch.where(returned > least, 1.0, slope).to(a)
        slopes = slopes.view(len(a), self.count, len(target), -1)
        rows = torch.einsum("nbck,ckj->ncbj", slopes, self.backward_map).flatten(2)
        return rows, (rows @ a.mT.flatten(1)[..., None])[..., 0] - target

    def _score(self, residual: Tensor) -> Tensor:
        """Return a score that is low where many channels are explained exactly, whatever the others leave (N,)."""
        size = self.summed.lower_bias_gradient.abs().mean()
        return (residual.abs() / size + EXPLAINED).log().mean(1).nan_to_num(float("inf"))

    def _least_deviations(self, rows: Tensor, a: Tensor) -> Tensor:
        """Return A (N, B, B) with the least sum of what channels leave, by reweighted least squares; signs stay."""
        target, columns = self.summed.lower_bias_gradient, a.mT.flatten(1)
        size = target.abs().mean()
        first = (rows @ columns[..., None])[..., 0] - target
        along, residual, moved = rows @ self.sum_preserving_directions, first, columns
        for i in range(8):
            weights = 1 / (residual.abs() + 10 ** (-3 - 0.6 * max(i - 1, 0)) * size)
            form = (along * weights[..., None]).mT @ along
            ridge = 1e-12 * form.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            form = form + ridge * torch.eye(form.shape[-1]).to(form)
            step, _ = torch.linalg.solve_ex(form, -(along * weights[..., None]).mT @ first[..., None])
            residual, moved = first + (along @ step)[..., 0], columns + (self.sum_preserving_directions @ step)[..., 0]
        return moved.view(-1, self.count, self.count).mT

    def _separate(self, a: Tensor) -> SeparatedBatch | None:
        """Return signals and inputs by the least squares of the channels that are explained, and what the others leave.

        An input so near the bend that its side is open may be on either.
        """
        size = self.summed.lower_bias_gradient.abs().mean()
        for margin in (ROUGH_ZERO, *[ROUNDING] * 3):
            rows, residual = self._linearize(a[None], margin)
            along, sure = rows[0] @ self.sum_preserving_directions, residual[0].abs() < TRUSTED_CHANNEL * size
            if not bool(a.isfinite().all()) or int(sure.sum()) < along.shape[1] + SPARE_EQUATIONS // 2:
                return None
            step = torch.linalg.lstsq(along[sure], -residual[0, sure, None], driver="gelsd").solution
            a = (a.mT.flatten() + (self.sum_preserving_directions @ step)[:, 0]).view_as(a).mT
        _, residual = self._linearize(a[None], ROUNDING)
        inverse, singular = torch.linalg.inv_ex(a)
        if bool(singular) or not bool(inverse.isfinite().all()):  # of noise, least squares may mix images into one
            return None
        inputs = inverse @ self.r
        noise = residual[0, sure].norm() / (int(sure.sum()) - along.shape[1]) ** 0.5
        covariance = (
            noise**2
            * self.sum_preserving_directions
            @ torch.linalg.pinv(along[sure].mT @ along[sure])
            @ self.sum_preserving_directions.mT
        )
        moved = torch.einsum("bi,jn->bnji", inverse, inputs).flatten(2)  # d inputs = -A^-1 dA inputs
        deviation = ((moved @ covariance) * moved).sum(-1).clamp_min(0).sqrt()
        left = self._unexplained(a, inverse, residual[0], inputs, deviation)
        off = torch.maximum(deviation.norm() / inputs.norm(), covariance.trace().sqrt() / a.norm())
        return SeparatedBatch((self.u @ a).mT, inputs, float(off), left)

    def _unexplained(self, a: Tensor, inverse: Tensor, residual: Tensor, inputs: Tensor, deviation: Tensor) -> float:
        """Return the share of the bias gradient below that inputs (B, n) near the bend explain on neither side."""
        size = inputs.square().mean(1, keepdim=True).sqrt()
        near = (inverse @ self.activation_output_map).abs() * self.summed.scale.abs() < 5 * deviation + ROUNDING * size
        either = torch.einsum("ckj,jb->bck", self.backward_map, a).abs() * near.view(self.count, len(residual), -1)
        excess = (residual.abs() - either.sum((0, 2))).clamp_min(0)
        return float(excess.norm() / self.summed.lower_bias_gradient.norm())
