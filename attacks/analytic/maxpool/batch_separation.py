"""The images of a batch told apart behind a linear layer, whose gradient holds only the sum over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice

import torch
from torch import Tensor

from fl.seeds import stream

DRAWS = 20_000
"""Rows solved for from random units that are taken for silent."""
KEPT = 16
"""Rows, the most plausible first, that are combined."""
CHOICES, TRIED = 2_000, 12
"""Combinations looked at, and refined."""
SILENT = 2.0
"""Times what an activation at rest typically lets through, up to which an input may count as that."""
ALIKE = 0.02
"""Root mean square distance of two inputs, relative to theirs, up to which they count as one."""
ROUGH = 5.0
"""Times what an activation at rest lets through, by which such inputs differ from zero."""
ALONE = 0.9
"""Share of what inputs at rest have in common that is taken for their size: all are a little below zero."""
PARTICLES, ROUNDS, ELITE = 512, 12, 0.1
"""How many matrices are moved at once, how often, and the share of them from which the next ones are drawn."""
SMALL, ENOUGH = 1e-5, 0.9
"""Share of a bias gradient below which it counts as explained, and share of channels (of logarithms) that must be."""
REST, ROUNDING = 3e-4, 1e-6
"""Of an input's root mean square: what may be left of a ReLU's zeros at first, and in the end."""
TRUSTED = 1e-3
"""Share of a channel's bias gradient that is left unexplained, from which on it is left out at the end."""
SPARE = 8
"""Equations beyond the unknowns that make an answer that explains them a proof."""
TRACE, MORE = 1e-6, 0.1
"""Least singular value, relative to the largest, that is an image's own: less is rounding. And, relative to the least
of the images', one that is no rounding: there are more images."""
FITS = 1e-4
"""Share of the bias gradient that the right answer may leave unexplained: rounding."""
KNOWN = 1e-2
"""How far off an answer may be, relative to the inputs: one that fixes nothing explains everything."""
AT_ONCE = 2**24
"""Inputs of candidate rows that are looked at together."""


@dataclass(frozen=True)
class SummedGradient:
    """What a linear layer's gradient, and the bias gradient of the layer below, say of a batch of B images.

    Attributes:
        weight: of the linear layer (m, n).
        bias: of the linear layer (m,).
        low: slope below zero of the activation above it; None if there is none of that kind.
        gradient: of its weight (m, n), the sum of signal input^T over images.
        moved: of its bias (m,), the sum of signals.
        offset: what is taken off an input (n,) ...
        slope: ... and what the rest is divided by for what the activation below returned (n,).
        gentle: slope of that activation below zero.
        below: bias gradient of the layer below (C,), of whose channels the inputs are n / C each, one after the other.
        share: factor of the normalisation behind that layer (C,).
    """

    weight: Tensor
    bias: Tensor
    low: float | None
    gradient: Tensor
    moved: Tensor
    offset: Tensor
    slope: Tensor
    gentle: float
    below: Tensor
    share: Tensor

    def cpu(self) -> SummedGradient:
        """The same on the CPU."""
        parts = {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SeparatedBatch:
    """Images told apart.

    Attributes:
        signals: that flowed back into the layer (B, m).
        inputs: of the layer (B, n).
        off: how far both may be off, relative to their root mean square.
        left: share of the bias gradient below that is not explained.
    """

    signals: Tensor
    inputs: Tensor
    off: float
    left: float

    def to(self, device: torch.device) -> SeparatedBatch:
        """The same on `device`."""
        return replace(self, signals=self.signals.to(device), inputs=self.inputs.to(device))


def max_separable_images(channels: int) -> int:
    """How many images so many biases of the layer below tell apart: B images are B (B - 1) unknowns."""
    return int((1 + math.sqrt(1 + 4 * max(channels - SPARE, 0))) / 2)


def separate_batch(summed: SummedGradient, count: int) -> SeparatedBatch | None:
    """Signals and inputs of `count` images, in no particular order; None where no answer explains the gradients.

    The gradient has rank B: U R by an SVD, so that the signals are U A and the inputs A^-1 R with one unknown matrix A
    (B, B), of which the bias gradient fixes the sum of the columns. Below, the bias gradient of a channel is the sum
    over images and the channel's units of (weight^T signal) slope(input): linear in A once the inputs' signs are known.
    A rough A tells most of them: what an activation lets through below zero is small or nothing, so that a row of A^-1
    is nearly orthogonal to many columns of R (as in SPEAR, Dimitrov et al., 2024, where zeros are exact) and nowhere
    far below zero. Many random A near it are then moved to where most channels are explained exactly, whatever the
    others leave, until all are. Its least squares need a driver that torch has on the CPU alone:
    `known` has to be there (`Sum.cpu`).
    """
    mixture = MixingProblem.of(summed, count)
    if mixture is None:
        return None
    for start in islice(mixture.starts(), TRIED):
        found = mixture.refined(start)
        if found is not None and found.left < FITS and found.off < KNOWN:
            return found
    return None


@dataclass(frozen=True)
class MixingProblem:
    """A gradient U R of rank B.

    Attributes:
        known: what it is of.
        left: U (m, B), orthonormal columns.
        right: R (B, n).
        total: the sum of A's columns (B,).
    """

    summed: SummedGradient
    left: Tensor
    right: Tensor
    total: Tensor

    @classmethod
    def of(cls, summed: SummedGradient, count: int) -> MixingProblem | None:
        """From what is known of `count` images; None where the gradient is plainly not of as many: of another rank."""
        left, sizes, right = torch.linalg.svd(summed.gradient, full_matrices=False)
        if len(sizes) < count or not sizes[count - 1] > TRACE * sizes[0]:
            return None
        if len(sizes) > count and sizes[count] > MORE * sizes[count - 1]:
            return None
        left = left[:, :count]
        return cls(summed, left, sizes[:count, None] * right[:count], left.mT @ summed.moved)

    @property
    def count(self) -> int:
        """Number of images."""
        return len(self.total)

    @cached_property
    def returned(self) -> Tensor:
        """What a row of A^-1, whose product with `total` is 1, is multiplied by for what the activation returned."""
        return (self.right - self.total[:, None] * self.summed.offset) / self.summed.slope

    @cached_property
    def back(self) -> Tensor:
        """What A is multiplied by for what flows back below, but for its slope (C, n / C, B)."""
        factor = (
            self.summed.share.repeat_interleave(len(self.summed.slope) // len(self.summed.share)) * self.summed.slope
        )
        return ((self.summed.weight.mT @ self.left) * factor[:, None]).view(len(self.summed.below), -1, self.count)

    @cached_property
    def free(self) -> Tensor:
        """Directions in which the columns of A, one after the other, leave their sum as it is (B B, B (B - 1))."""
        fixed = torch.eye(self.count).to(self.total).repeat(1, self.count)
        return torch.linalg.svd(fixed)[2][self.count :].mT

    # ---- rough -------------------------------------------------------------------------------------------------------
    def starts(self) -> Iterator[Tensor]:
        """Rough inverses of A (B, B), those first whose signals are small just where outputs are negative."""
        rows = self._rows()
        picked = list(islice(combinations(range(len(rows)), self.count), CHOICES))
        if not picked:
            return
        made = rows[torch.tensor(picked, device=rows.device)]
        made = made[torch.linalg.cond(made) < 1e6]
        agreement = torch.cat([self._agreement(part) for part in made.split(256)])
        for i in agreement.argsort(descending=True, stable=True).tolist():
            yield made[i]

    def _agreement(self, made: Tensor) -> Tensor:
        """Share of the layer's outputs whose sign their signals confirm (N,), or what channels say where none do."""
        if self.summed.low is None:
            return -self._score(self._left(torch.linalg.inv(made))[1])
        active = made @ (self.right @ self.summed.weight.mT) + self.summed.bias > 0
        signals = (self.left @ torch.linalg.inv(made)).mT.abs()
        bound = SILENT * max(self.summed.low, 1e-3) * signals.square().mean(2, keepdim=True).sqrt()
        return (active == (signals > bound)).to(signals).mean((1, 2))

    def _rows(self) -> Tensor:
        """Candidates for rows of A^-1 (N, B): many inputs at rest, few below zero."""
        draw, count = stream(0, "separate"), self.count
        heard = self.returned.norm(dim=0)
        columns = self.returned[:, heard > 0.05 * heard.mean()].mT
        picked = torch.randint(len(columns), (DRAWS, count - 1), generator=draw).to(columns.device)
        system = torch.cat([columns[picked], self.total.expand(DRAWS, 1, -1)], 1)
        unit = torch.zeros(count, 1).to(columns)
        unit[-1] = 1
        solved, failed = torch.linalg.solve_ex(system, unit.expand(DRAWS, -1, -1))
        solved = solved[(failed == 0) & solved.isfinite().all(1).all(1)][..., 0]
        rows = self._distinct(solved, 300)
        for _ in range(3):
            precision = self._precision(rows)
            pulled = torch.linalg.solve_ex(precision, self.total.expand(len(rows), -1)[..., None])[0][..., 0]
            rows = pulled / (pulled @ self.total)[:, None]
            rows = rows[rows.isfinite().all(1)]
        return self._distinct(rows, KEPT)

    def _at_rest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What the activation would return (N, n), in units of what it typically lets through at rest, and its size."""
        values = rows @ self.returned
        size = values.square().mean(1, keepdim=True).sqrt() * max(self.summed.gentle, 1e-3)
        return values / size, size

    def _precision(self, rows: Tensor) -> Tensor:
        """Of each row, as the inputs at rest tell (N, B, B)."""
        values, size = self._at_rest(rows)
        weights = (values.abs() < SILENT).to(values) / (ROUGH * size).square()
        mean = torch.einsum("nr,ir->ni", weights, self.returned) / weights.sum(1, keepdim=True).sqrt().clamp_min(1e-300)
        form = torch.einsum("nr,ir,jr->nij", weights, self.returned, self.returned)
        form = form - ALONE * mean[:, :, None] * mean[:, None, :]  # what they have in common is hardly told
        return form + 1e-9 * form.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(self.count).to(form)

    def _plausible(self, rows: Tensor) -> Tensor:
        """How many more inputs are at rest than twice those that are far below zero (N,)."""
        values, _ = self._at_rest(rows)
        return (values.abs() < SILENT).sum(1) - 2 * (values < -SILENT).sum(1)

    def _distinct(self, rows: Tensor, limit: int) -> Tensor:
        """The most plausible rows that differ from each other."""
        parts = rows.split(max(1, AT_ONCE // self.returned.shape[1]))
        plausible = torch.cat([self._plausible(part) for part in parts])
        rows = rows[plausible.argsort(descending=True, stable=True)]
        triangle = torch.linalg.cholesky(self.right @ self.right.mT)
        turned = rows @ triangle
        size = turned.norm(dim=1)
        kept: list[int] = []
        open_ones = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        while len(kept) < limit and bool(open_ones.any()):
            kept.append(int(open_ones.nonzero()[0]))
            open_ones &= (turned - turned[kept[-1]]).norm(dim=1) > ALIKE * size
        return rows[kept]

    # ---- refined -----------------------------------------------------------------------------------------------------
    def refined(self, start: Tensor) -> SeparatedBatch | None:
        """From a rough inverse of A (B, B) on: many at random, the better half of which moves the next ones."""
        around = self._around(start)
        if around is None:
            return None
        made = torch.linalg.inv_ex(around)[0]
        centre = torch.linalg.inv(start).mT.flatten()
        draw = stream(1, "separate")
        best, least = made[0], float("inf")
        for _ in range(ROUNDS):
            rows, left = self._left(made)
            moved = self._settled(rows, made)
            _, after = self._left(moved)
            score, other = self._score(left), self._score(after)
            made = torch.where((other < score)[:, None, None], moved, made)
            score = torch.minimum(score, other)
            order = score.argsort()
            if score[order[0]] < least:
                best, least = made[order[0]], float(score[order[0]])
            if least < ENOUGH * math.log(SMALL):
                break
            steps = (made.mT.flatten(1) - centre) @ self.free
            elite = steps[order[: max(int(ELITE * len(steps)), 2 * steps.shape[1])]]
            spread = torch.cov(elite.mT).view(steps.shape[1], -1)
            spread = spread + 1e-3 * spread.diagonal().diag()
            factor, failed = torch.linalg.cholesky_ex(spread)
            if bool(failed):
                break
            fresh = torch.randn(steps.shape, generator=draw, dtype=torch.float64).to(steps)
            steps = elite.mean(0) + fresh @ factor.mT
            steps[: len(elite) // 2] = elite[: len(elite) // 2]
            made = (centre + steps @ self.free.mT).view(-1, self.count, self.count).mT
        return self._answer(best)

    def _around(self, start: Tensor) -> Tensor | None:
        """Inverses of A drawn around `start`, as far as the inputs at rest tell it (N, B, B); the first is itself."""
        draw = stream(2, "separate")
        plane = torch.linalg.svd(self.total[None])[2][1:].mT  # a row's product with the sum is 1
        factor, failed = torch.linalg.cholesky_ex(plane.mT @ self._precision(start) @ plane)
        if bool(failed.any()):
            return None
        fresh = torch.randn(PARTICLES, self.count, self.count - 1, generator=draw, dtype=torch.float64).to(start)
        fresh[0] = 0
        steps = torch.linalg.solve_triangular(factor.mT, fresh[..., None], upper=True)[..., 0]
        return start + steps @ plane.mT

    def _left(self, made: Tensor, margin: float = REST) -> tuple[Tensor, Tensor]:
        """Equations in A's columns (N, C, B B) with the signs that A (N, B, B) implies, and what A leaves (N, C).

        What a ReLU returned counts as zero up to `margin` of its root mean square.
        """
        returned, _ = torch.linalg.solve_ex(made, self.returned.expand(len(made), -1, -1))
        least = margin * returned.square().mean(2, keepdim=True).sqrt() if self.summed.gentle == 0 else 0.0
        slopes = torch.where(returned > least, 1.0, self.summed.gentle).to(made)
        slopes = slopes.view(len(made), self.count, len(self.summed.below), -1)
        rows = torch.einsum("nbck,ckj->ncbj", slopes, self.back).flatten(2)
        return rows, (rows @ made.mT.flatten(1)[..., None])[..., 0] - self.summed.below

    def _score(self, left: Tensor) -> Tensor:
        """Low where many channels are explained exactly, whatever the others leave (N,)."""
        return (left.abs() / self.summed.below.abs().mean() + SMALL).log().mean(1).nan_to_num(float("inf"))

    def _settled(self, rows: Tensor, made: Tensor) -> Tensor:
        """A (N, B, B) with the least sum of what channels leave, by weighted least squares in turn; signs stay."""
        size, columns = self.summed.below.abs().mean(), made.mT.flatten(1)
        first = (rows @ columns[..., None])[..., 0] - self.summed.below
        along, left, steps = rows @ self.free, first, columns
        for i in range(8):
            weights = 1 / (left.abs() + 10 ** (-3 - 0.6 * max(i - 1, 0)) * size)
            form = (along * weights[..., None]).mT @ along
            form = form + 1e-12 * form.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(form.shape[-1]).to(
                form
            )
            moved, _ = torch.linalg.solve_ex(form, -(along * weights[..., None]).mT @ first[..., None])
            left, steps = first + (along @ moved)[..., 0], columns + (self.free @ moved)[..., 0]
        return steps.view(-1, self.count, self.count).mT

    def _answer(self, made: Tensor) -> SeparatedBatch | None:
        """Signals and inputs by the least squares of the channels that are explained, and what the others leave.

        An input so near the bend that its side is open may be on either.
        """
        size = self.summed.below.abs().mean()
        for margin in (REST, *[ROUNDING] * 3):
            rows, left = self._left(made[None], margin)
            along, sure = rows[0] @ self.free, left[0].abs() < TRUSTED * size
            if not bool(made.isfinite().all()) or int(sure.sum()) < along.shape[1] + SPARE // 2:
                return None
            step = torch.linalg.lstsq(along[sure], -left[0, sure, None], driver="gelsd").solution
            made = (made.mT.flatten() + (self.free @ step)[:, 0]).view_as(made).mT
        _, left = self._left(made[None], ROUNDING)
        inverse, singular = torch.linalg.inv_ex(made)
        if bool(singular) or not bool(inverse.isfinite().all()):  # of noise, least squares may mix images into one
            return None
        inputs = inverse @ self.right
        noise = left[0, sure].norm() / (int(sure.sum()) - along.shape[1]) ** 0.5
        spread = noise**2 * self.free @ torch.linalg.pinv(along[sure].mT @ along[sure]) @ self.free.mT
        moved = torch.einsum("bi,jn->bnji", inverse, inputs).flatten(2)  # d inputs = -A^-1 dA inputs
        deviation = ((moved @ spread) * moved).sum(-1).clamp_min(0).sqrt()
        size = inputs.square().mean(1, keepdim=True).sqrt()
        near = (inverse @ self.returned).abs() * self.summed.slope.abs() < 5 * deviation + ROUNDING * size
        open_ones = torch.einsum("ckj,jb->bck", self.back, made).abs() * near.view(self.count, len(left[0]), -1)
        excess = (left[0].abs() - open_ones.sum((0, 2))).clamp_min(0)
        off = torch.maximum(deviation.norm() / inputs.norm(), spread.trace().sqrt() / made.norm())
        return SeparatedBatch(
            (self.left @ made).mT, inputs, float(off), float(excess.norm() / self.summed.below.norm())
        )
