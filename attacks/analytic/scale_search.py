"""Searches for the size of a picture whose direction is known: the factor a in x = a v.

With x = a v and v known, a network sends back delta(a, y) of its own for each factor a and label y, and

    a delta(a, y) = gW v                                                                          (1)

are as many equations as the layer has outputs, for one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.network.operation_trace import MODEL_ERRORS
from attacks.network.pixel_layers import PixelLayer, PixelNetwork
from attacks.search_control import check_time_limit
from attacks.update.unmoved_tensors import without_unmoved
from attacks.verification.error_bounds import ERROR_FACTOR
from attacks.verification.update_comparison import UNLIKE_DISTANCE
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

FACTORS = 96
"""Factors that are tried if the picture has one part."""
FACTORS_OF_TWO = 20
"""Factors that are tried of each of two parts."""
DIM_FACTORS = 6
"""Smaller factors that are tried as well, each half of the one before, for dim pictures."""
STARTS_PER_LABEL = 2
"""The best factors of each label that are refined."""
STARTS = 16
"""The best factors of all labels that are refined."""
TARGETS_AT_ONCE = 8
"""Targets that are tried between two looks at the time limit."""
REFINEMENTS = 40
"""Steps of Levenberg and Marquardt."""
DIFFERENCE = 1e-6
"""Relative change of a factor in the difference quotient of the residual."""
WIDEST_INPUT = 10.0
"""Root mean square of an input that is no picture, at most."""
WIDE_FACTORS = 64
"""Factors that are tried for such inputs, with either sign."""
DECADES = 4.0
"""Powers of ten over which these factors are spread."""
NEARLY_ONE = 1e-2
"""Residual, as a share of the layers' update and equations, up to which a picture is handed out, unverified."""
SAME_PICTURE = 1e-5
"""Relative difference of two factors that count as one."""
MOST_CONFIRMED = 4
"""Pictures that explain their layers and are checked by the whole update, at most."""
MOST_PAIRED = 10
"""Targets, at most, with which pairs of inputs are compared (`tells_pairs_apart`)."""
PAIR_SHARES = (1.0, 0.25)
"""Shares of the largest factor at which pairs are compared."""
LEAST_SHARE = 1e-7
"""The least that a pair has to leave, because of rounding in double precision."""


@dataclass(frozen=True)
class InputDirection:
    """The direction of an input that one or more layers have in common, as their gradients tell it.

    Attributes:
        layers: numbers of these layers.
        layer: one of them.
        direction: v, of norm 1 (n,).
        observed: gW v of all of them (m,), in one unit.
        low: the smallest factor at which the pixels are in range.
        high: the largest such factor.
        residual: the share of gW that no single input explains.
    """

    layers: tuple[int, ...]
    layer: PixelLayer
    direction: Tensor
    observed: Tensor
    low: float
    high: float
    residual: float

    @property
    def is_pictured(self) -> bool:
        """Whether all pixels are in range at some factor."""
        return self.low < self.high

    @property
    def brightest(self) -> float:
        """The largest factor at which pixels are in range; where they never are, that of an input of size 1."""
        ends = (self.low, self.high) if self.is_pictured else (0.0, math.sqrt(len(self.direction)))
        return max(ends, key=abs)

    def without_range(self) -> InputDirection:
        """Return the same direction for pixels of any range."""
        limit = WIDEST_INPUT * math.sqrt(len(self.direction))
        return replace(self, low=-limit, high=limit)

    def factors(self, count: int) -> Tensor:
        """Return factors to try, in order: `count` evenly spaced ones, and smaller ones of either sign."""
        even = torch.linspace(self.low, self.high, count + 1, dtype=torch.float64)
        dim = max(abs(self.low), abs(self.high)) / count * 0.5 ** torch.arange(1, DIM_FACTORS, dtype=torch.float64)
        every = torch.cat([even, dim, -dim])
        every = every[(every != 0) & (every >= self.low) & (every <= self.high)]
        return every.unique().to(self.direction.device)

    def wide_factors(self) -> Tensor:
        """Return factors to try where pixels may have any range, in order."""
        sizes = self.high * torch.logspace(-DECADES, 0, WIDE_FACTORS, dtype=torch.float64)
        return torch.cat([-sizes.flip(0), sizes]).to(self.direction.device)


@dataclass(frozen=True)
class ScaleSearch:
    """The search for the factors at which a picture sends back the observed signals.

    Attributes:
        view: what the server saw, of one picture and one step.
        network: the network up to the layers.
        parts: directions of parts of the picture, which together cover it.
        targets: that the picture may have (K, ...).
        sized: whether the step size is known, so that (1) holds in size and not in direction alone.
        wide: whether inputs of the layers may have any range.
    """

    view: ServerView
    network: PixelNetwork
    parts: Sequence[InputDirection]
    targets: Tensor
    sized: bool
    wide: bool = False

    @property
    def surplus(self) -> int:
        """The number of independent equations less the number of unknowns.

        Unknowns are the factor, the step size if it is not stated, and the target if there are several. Equations are
        numbers that flow back: at most one for each output, since all signals follow from the gradient of the outputs.
        Under cross entropy these sum to zero, so that one less counts; under any loss of classes the same is assumed.
        A further part brings as many equations as unknowns: its own factor. A bias that moved tells the signals
        without the factor.
        """
        task = self.view.task
        outputs = math.prod(task.output_shape) - int(task.loss.takes_classes)
        flowing = min(outputs, *(len(part.observed) for part in self.parts))
        flowing *= 2 if has_moved_bias(without_unmoved(self.view)) else 1
        return flowing - 1 - int(not self.sized) - int(len(self.targets) > 1)

    def tells_pairs_apart(self) -> bool:
        """Return whether two unlike inputs of one target would be noticed: they leave more than the observed residual.

        The two inputs lie around the one that was found. They are not noticed if both send back the same signal, as a
        classifier of small weights does, or signals of one direction, as where only two classes are likely. So pairs
        are tried at several brightnesses, since other classes may be likely there. Targets from which nothing flows
        back, such as a class that the loss ignores, are left out.
        """
        (part,) = self.parts
        middle = part.brightest * part.direction
        drawn = torch.randn(middle.shape, generator=stream(0, "pairs"), dtype=torch.float64).to(middle)
        away = UNLIKE_DISTANCE * middle.norm() / drawn.norm() * drawn
        return all(self._tells_apart(share * torch.stack([middle + away, middle - away])) for share in PAIR_SHARES)

    def _tells_apart(self, inputs: Tensor) -> bool:
        """Return whether two inputs (2, n) leave more than the observed residual, with any of the first targets."""
        (part,) = self.parts
        images = [replace(self, parts=[replace(part, direction=one)]).pictures(one.new_ones(1, 1)) for one in inputs]
        try:
            flows = self.network.signals(torch.cat(images), self.targets[:MOST_PAIRED], self.view.task.loss)
        except MODEL_ERRORS:
            return False
        flowing = torch.cat([flows[number] for number in part.layers], -1)  # (K, 2, m)
        flowing = flowing[flowing.isfinite().all(-1).all(-1) & flowing.any(-1).all(-1)]
        if not len(flowing):
            return False
        squares = torch.linalg.eigvals((flowing @ flowing.mT) @ (inputs @ inputs.mT)).real.clamp(min=0)
        shares = (squares.amin(1) / squares.sum(1)).sqrt()
        return bool((shares > max(ERROR_FACTOR * part.residual, LEAST_SHARE)).all())

    @cached_property
    def _observed(self) -> Tensor:
        return torch.cat([part.observed / part.observed.norm() for part in self.parts])

    def pictures(self, factors: Tensor) -> Tensor:
        """Return the pictures (N, C, H, W) at factors (N, parts); a pixel of several numbers is their mean."""
        shape = self.view.task.input_shape
        total = factors.new_zeros(len(factors), math.prod(shape))
        count = torch.zeros_like(total[0])
        for part, factor in zip(self.parts, factors.T, strict=True):
            layer = part.layer
            moving = layer.slope != 0
            values = (factor[:, None] * part.direction - layer.offset)[:, moving] / layer.slope[moving]
            total.index_add_(1, layer.index[moving], values)
            count.index_add_(0, layer.index[moving], torch.ones_like(layer.slope[moving]))
        return (total / count).view(len(factors), *shape)

    def _made(self, signals: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Return the left side of (1) in the layout of `_observed` (..., N, M), for signals and factors (N, parts)."""
        made = []
        for part, factor in zip(self.parts, factors.T, strict=True):
            flows = torch.cat([signals[number] for number in part.layers], -1)
            made.append(flows * factor[:, None] / part.observed.norm())
        return torch.cat(made, -1)

    def _residual(self, made: Tensor) -> Tensor:
        """Return the residual of (1), (..., M); at the best step size where that is not known."""
        if self.sized:
            return self._observed - made
        size = made.square().sum(-1, keepdim=True)
        factor = (made @ self._observed)[..., None] / size.where(size > 0, torch.ones_like(size))
        return self._observed - factor.clamp(min=0) * made

    def starts(self) -> tuple[Tensor, Tensor]:
        """Return the factors (N, parts) at which refining starts, and their targets' numbers (N,), the best first."""
        count = FACTORS if len(self.parts) == 1 else FACTORS_OF_TWO
        grids = [part.wide_factors() if self.wide else part.factors(count) for part in self.parts]
        factors = torch.cartesian_prod(*grids).view(-1, len(grids))
        pictures, costs = self.pictures(factors), []
        for targets in self.targets.split(TARGETS_AT_ONCE):
            check_time_limit()
            signals = self.network.signals(pictures, targets, self.view.task.loss)
            costs.append(self._residual(self._made(signals, factors)).square().sum(-1))
        cost = torch.cat(costs)  # (K, N)
        cost = cost.where(cost.isfinite(), torch.full_like(cost, math.inf))
        grid = cost.view(len(cost), *map(len, grids))
        lowest = torch.ones_like(grid, dtype=torch.bool)
        for axis in range(1, grid.ndim):
            ahead, behind = grid.narrow(axis, 1, grid.shape[axis] - 1), grid.narrow(axis, 0, grid.shape[axis] - 1)
            lowest.narrow(axis, 0, grid.shape[axis] - 1).logical_and_(behind <= ahead)
            lowest.narrow(axis, 1, grid.shape[axis] - 1).logical_and_(ahead <= behind)
        cost = cost.where(lowest.view_as(cost), torch.full_like(cost, math.inf))
        best = cost.topk(min(STARTS_PER_LABEL, cost.shape[1]), largest=False)
        order = best.values.flatten().argsort()[:STARTS]
        order = order[best.values.flatten()[order].isfinite()]
        return factors[best.indices.flatten()[order]], order // best.values.shape[1]

    def refine(self, factors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors (N, parts) after some steps of Levenberg and Marquardt, and their residuals' norms (N,)."""
        damping = factors.new_full((len(factors),), 1e-3)
        residual, slopes = self._linearize(factors, labels)
        cost = residual.square().sum(-1)
        for _ in range(REFINEMENTS):
            check_time_limit()
            square = slopes @ slopes.mT
            ridge = damping[:, None] * square.diagonal(dim1=1, dim2=2) + 1e-300
            step = torch.linalg.solve(square + ridge.diag_embed(), -(slopes @ residual[..., None])[..., 0])
            trial = factors + step
            new_residual, new_slopes = self._linearize(trial, labels)
            new_cost = new_residual.square().sum(-1)
            better = new_cost < cost
            factors = torch.where(better[:, None], trial, factors)
            residual = torch.where(better[:, None], new_residual, residual)
            slopes = torch.where(better[:, None, None], new_slopes, slopes)
            settled = bool(((step.abs() <= 1e-12 * factors.abs()).all(1) | (damping > 1e9)).all())
            cost, damping = torch.where(better, new_cost, cost), torch.where(better, damping / 10, damping * 10)
            if settled:
                break
        return factors, cost.sqrt() / math.sqrt(len(self.parts))

    def _linearize(self, factors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual (N, M) at factors (N, parts), and its derivative by each of them (N, parts, M)."""
        count = factors.shape[1]
        steps = (
            DIFFERENCE * torch.eye(count).to(factors) * factors.abs().clamp(min=1e-300)[:, None]
        )  # (N, parts, parts)
        points = torch.cat([factors[:, None], factors[:, None] + steps, factors[:, None] - steps], 1)
        targets = self.targets[labels].repeat_interleave(2 * count + 1, 0)
        flat = points.reshape(-1, count)
        signals = self.network.paired_signals(self.pictures(flat), targets, self.view.task.loss)
        residual = self._residual(self._made(signals, flat)).view(len(factors), 2 * count + 1, -1)
        size = steps.diagonal(dim1=1, dim2=2)[..., None]
        return residual[:, 0], (residual[:, 1 : count + 1] - residual[:, count + 1 :]) / (2 * size)


@dataclass(frozen=True)
class ScaleSolution:
    """A picture that explains its layers.

    Attributes:
        factors: one for each part (parts,).
        target: number of its target.
        residual: norm of the residual of (1), relative to the observed side.
    """

    factors: Tensor
    target: int
    residual: float


def find_solutions(search: ScaleSearch) -> list[ScaleSolution]:
    """Return the pictures that explain nearly all of their layers' equations, the best first."""
    try:
        factors, labels = search.starts()
        if not len(factors):
            return []
        factors, residual = search.refine(factors, labels)
    except MODEL_ERRORS:
        return []  # an operation that takes no batch of this kind
    lows, highs = (torch.tensor([getattr(p, end) for p in search.parts]).to(factors) for end in ("low", "high"))
    inside = ((factors >= lows) & (factors <= highs)).all(1) & (residual <= NEARLY_ONE)
    kept: list[ScaleSolution] = []
    for i in residual.argsort().tolist():
        same = (
            other.target == int(labels[i])
            and bool(((other.factors - factors[i]).abs() <= SAME_PICTURE * factors[i].abs()).all())
            for other in kept
        )
        if bool(inside[i]) and not any(same):
            kept.append(ScaleSolution(factors[i], int(labels[i]), float(residual[i])))
    return kept[:MOST_CONFIRMED]


def has_moved_bias(view: ServerView) -> bool:
    """Return whether a bias of a linear layer is among the tensors of an update."""
    sizes = {name: dense(value).shape for name, value in view.update.items()}
    pairs = ((size, sizes.get(name.removesuffix("bias") + "weight", ())) for name, size in sizes.items())
    return any(len(size) == 1 and len(weight) == 2 and weight[0] == size[0] for size, weight in pairs)
