"""NVFlare's PercentilePrivacy: the smallest numbers of an update are not sent, the largest are cut to a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.ranges import Count, Positive, Range
from fl.tensors import Tensors, dense, dot, norm

BOUND_TOLERANCE = 1e-5
"""How near to its limit, relative to that, a number is that was cut to it."""


@defenses.register("nvflare-percentile")
@dataclass(frozen=True, kw_only=True)
class NVFlarePercentile(Defense):
    """Sets small numbers to zero and cuts large ones (Shokri and Shmatikov, CCS 2015), as NVFlare 2.9 does it.

    Of the change per local step, numbers smaller in size than a percentile of all are sent as zero, and what is left is
    cut to [-gamma, gamma] number by number. There is no noise and no differential privacy. NVFlare leaves an update as
    it is where a setting is out of range; here that is an error. Numbers without dimension pass as they are.

    An attacker who knows it takes what lies between as exact, a zero for an interval, as wide as the smallest number
    sent, and a number at the limit for a bound. A search counts no error inside them. `analytic` fits what is exact,
    takes narrow intervals for zero, and says which pixels that fixes. Attacks that need whole tensors refuse where
    numbers were cut to the limit.

    Attributes:
        percentile: share in percent of all numbers, the smallest, that are not sent; of equal sizes all or none.
        gamma: largest size of a number per step, in units of the update (weights, so it depends on the step size).
        steps: what the client reports as number of its local steps (NUM_STEPS_CURRENT_ROUND); 1 where it reports none.

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = "the smallest numbers of the update are not sent, and the largest are cut to a limit."

    percentile: Annotated[float, Range(0, 100)] = 10.0
    gamma: Positive = 0.01
    steps: Count = 1

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"expected percentile in [0, 100], got {self.percentile}")
        if not 0 < self.gamma < math.inf:
            raise ValueError(f"expected gamma > 0, got {self.gamma}")

    @classmethod
    def example(cls) -> NVFlarePercentile:
        """Return a filter that drops half of a small update and cuts some of the rest."""
        return cls(percentile=50.0, gamma=0.05)

    @property
    def limit(self) -> float:
        """Largest size of a number that is sent, in units of the update."""
        return self.gamma * self.steps

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update as it is sent."""
        if not update:
            return update
        change = {name: dense(value) / self.steps for name, value in update.items()}
        cutoff = _percentile(torch.cat([value.detach().abs().flatten() for value in change.values()]), self.percentile)
        return {name: self._filter(value, cutoff) for name, value in change.items()}

    def _filter(self, change: Tensor, cutoff: Tensor) -> Tensor:
        if change.ndim == 0:
            return change * self.steps
        kept = torch.where(change.detach().abs() < cutoff, torch.zeros_like(change), change)
        return kept.clamp(-self.gamma, self.gamma) * self.steps

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction, at zero where it lies in the interval of a zero, and cut where the update was."""
        return _within_intervals(predicted, observed, dict.fromkeys(observed, torch.tensor(self.limit)))

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part where numbers came through as they were, zero elsewhere."""
        return {
            name: dense(value) * _is_exact(dense(observed[name]), torch.tensor(self.limit))
            for name, value in known.items()
        }

    def gap_limit(self, observed: Tensors) -> float:
        """Return the size of the smallest number that came through as it was, which the percentile is at most."""
        limit = torch.tensor(self.limit)
        return float(_smallest_sent((dense(value), limit) for value in observed.values()))

    def with_unknown_scale(self) -> Defense:
        """Return the filter with limits in an unknown unit."""
        return PercentileOfUnknownScale()


@dataclass(frozen=True, kw_only=True)
class PercentileOfUnknownScale(Defense):
    """What is known of the filter in another unit: a tensor's largest size is taken for its limit."""

    name: ClassVar[str] = "nvflare-percentile"
    """It is still the filter, to whoever reads why an attack does not apply."""

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction at the observed size of what is exact, put into the intervals."""
        limits = {name: dense(value).abs().amax() for name, value in observed.items()}
        exact: Tensors = {name: _is_exact(dense(observed[name]), limits[name]) for name in predicted}
        mine: Tensors = {name: dense(value) * dense(exact[name]) for name, value in predicted.items()}
        seen: Tensors = {name: dense(observed[name]) * dense(exact[name]) for name in predicted}
        along, size = dot(mine, seen), dot(mine, mine)
        fitted = torch.where(along > 0, along / size.clamp_min(1e-38), norm(observed) / norm(predicted))
        return _within_intervals({name: dense(value) * fitted for name, value in predicted.items()}, observed, limits)

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part where numbers came through as they were, zero elsewhere."""
        return {
            name: dense(value) * _is_exact(dense(observed[name]), dense(observed[name]).abs().amax())
            for name, value in known.items()
        }


def _percentile(sizes: Tensor, percent: float) -> Tensor:
    """Return a percentile of sizes (n,), interpolated linearly between two of them; infinite sizes sort last."""
    ordered, at = sizes.sort().values, percent / 100 * (len(sizes) - 1)
    low = ordered[math.floor(at)]
    return low + (ordered[math.ceil(at)] - low) * (at - math.floor(at))


def _is_exact(seen: Tensor, limit: Tensor) -> Tensor:
    """Return where numbers came through as they were: neither zero nor cut to the limit."""
    below = seen.abs() < limit * (1 - BOUND_TOLERANCE) if seen.ndim else torch.ones_like(seen, dtype=torch.bool)
    return (seen != 0) & below


def _smallest_sent(observed: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the smallest size of a number that came through as it was, of tensors and limits; infinity of none."""
    each = [torch.where(_is_exact(seen, limit), seen.abs(), math.inf).amin() for seen, limit in observed if seen.ndim]
    return torch.stack(each).amin() if each else torch.tensor(math.inf)


def _within_intervals(predicted: Tensors, observed: Tensors, limits: dict[str, Tensor]) -> Tensors:
    """Return a prediction that differs from what was observed only by how far it lies outside of what that allows."""
    widest = _smallest_sent((dense(value), limits[name]) for name, value in observed.items())
    allowed: Tensors = {}
    for name, value in predicted.items():
        matrix, seen, limit = dense(value), dense(observed[name]), limits[name]
        if seen.ndim == 0:
            allowed[name] = matrix
            continue
        beside = matrix - matrix.clamp(-widest, widest)
        sign = seen.sign()
        cut = sign * torch.minimum(sign * matrix, seen.abs())
        allowed[name] = torch.where(seen == 0, beside, torch.where(_is_exact(seen, limit), matrix, cut))
    return allowed
