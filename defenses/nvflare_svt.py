"""NVFlare's SVTPrivacy: a few numbers of an update are sent, cut to a limit and with Laplace noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.privacy.gaussian_noise import Noise as Secret
from fl.privacy.gaussian_noise import draw_key, fresh_key
from fl.ranges import Count, Positive, Share, Weight
from fl.tensors import Tensors, dense

MAX_PASSES = 10_000
"""Passes over all numbers after which too few are above the threshold: NVFlare's filter would go on for ever."""
UNLIKELY_STDS = 10.0
"""Standard deviations of the noise that none of an update's numbers is off by: of Laplace's by a chance of 1e-6."""
LITTLE_NOISE = 1e-3
"""Scale of the noise on a number sent, relative to the limit, below which the filter leaves a gradient's ratios."""
RENYI_ORDERS = (*(1 + k / 20 for k in range(1, 180)), *range(10, 64))


@defenses.register("nvflare-svt")
@dataclass(frozen=True, kw_only=True)
class NVFlareSVT(Defense):
    """Sends a random few of the numbers, cut and with noise (Shokri and Shmatikov, CCS 2015), as NVFlare 2.9 does it.

    By the sparse vector technique (Dwork and Roth, 2014, section 3.6): a number per local step, cut to
    [-gamma, gamma], counts as large if its size with Laplace noise reaches a threshold with Laplace noise of its own.
    Passes over all numbers go on until enough are large. Of these as many as asked for are drawn and sent, cut and
    with Laplace noise again; all others are zero. At NVFlare's defaults the noise sent is twenty times the limit, and
    the budget that its accountant adds up grows with the network: 0.1 for a number sent, beside 0.1 for the choice.

    That leaves no ratio of numbers, so attacks that solve equations refuse. Where the noise is far below the limit they
    take what was sent and not cut for what it is. A search that knows the filter compares what
    was sent with predictions cut likewise, with derivatives that pass straight through.

    Attributes:
        fraction: share of all numbers that is sent; with `replace` some are drawn twice and fewer sent.
        epsilon: budget of the choice, threshold and queries together.
        noise_var: budget of each number sent, where `epsilon_release` is None; it is no variance.
        gamma: largest size of a number per step, in units of the update.
        tau: the threshold, likewise.
        replace: whether numbers are drawn with replacement.
        epsilon_threshold: part of `epsilon` for the threshold; None is 1 : (2 c)^(2/3), c numbers sent.
        epsilon_query: part of `epsilon` for the queries; None is the rest.
        epsilon_release: budget of all numbers sent together; None is `noise_var` for each.
        steps: what the client reports as number of its local steps (NUM_STEPS_CURRENT_ROUND); 1 where it reports none.

    Raises:
        ValueError: a setting out of range, or parts that do not add up to `epsilon`.
    """

    plain: ClassVar[str] = "a random few of the update's numbers are sent, cut to a limit and with random noise."

    fraction: Share = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: Weight = 1e-6
    replace: bool = True
    epsilon_threshold: Positive | None = None
    epsilon_query: Positive | None = None
    epsilon_release: Positive | None = None
    steps: Count = 1

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"expected fraction in [0, 1], got {self.fraction}")
        for name in ("epsilon", "noise_var", "gamma"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        self.budgets(1)

    @classmethod
    def example(cls) -> NVFlareSVT:
        """Return a filter that sends half of the numbers, cut, with little noise."""
        return cls(fraction=0.5, epsilon=1e5, noise_var=1e3, gamma=0.05)

    def count(self, numbers: int) -> int:
        """Return how many of `numbers` are drawn to be sent."""
        return min(math.ceil(numbers * self.fraction), numbers)

    def budgets(self, count: int) -> tuple[float, float, float]:
        """Return the budgets (epsilon) of the threshold, the queries and what is sent, for `count` numbers sent.

        Raises:
            ValueError: parts that do not add up.
        """
        first, second = self.epsilon_threshold, self.epsilon_query
        if first is None and second is None:
            first = self.epsilon / (1 + (2.0 * count) ** (2 / 3))
        if first is None:
            first = self.epsilon - (second or 0.0)
        second = self.epsilon - first if second is None else second
        if not (first > 0 and second > 0 and math.isclose(first + second, self.epsilon, rel_tol=1e-5, abs_tol=1e-8)):
            raise ValueError(
                f"expected epsilon_threshold and epsilon_query > 0 that add up to epsilon {self.epsilon}, got {first} "
                f"and {second}"
            )
        return first, second, count * self.noise_var if self.epsilon_release is None else self.epsilon_release

    def stated_epsilon(self, numbers: int) -> float:
        """Return the epsilon of one round of an update of `numbers` numbers, at delta 0, as NVFlare adds it up."""
        return sum(self.budgets(self.count(numbers))) if self.count(numbers) else 0.0

    def release_epsilon(self, numbers: int, delta: float) -> float:
        """Return the epsilon at `delta` of what is sent in one round, the choice of what left out.

        By Renyi divergences of Laplace noise (Mironov, CSF 2017, Proposition 6), or the plain sum where that is less.
        Another client's update moves each number by twice `gamma` at most.
        """
        count = self.count(numbers)
        if not count:
            return 0.0
        each = self.budgets(count)[2] / count
        bounds = [count * _laplace_renyi(each, a) + math.log(1 / delta) / (a - 1) for a in RENYI_ORDERS]
        return min(count * each, *bounds)

    def noise_scale(self, numbers: int) -> float:
        """Return the scale of the Laplace noise on what is sent of an update of `numbers`, in its units."""
        count = self.count(numbers)
        return 2 * self.gamma * count / self.budgets(count)[2] * self.steps if count else 0.0

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return what is sent; without a generator every number, cut, with derivatives that pass straight through."""
        if generator is None:
            return {name: self._cut(dense(value)) for name, value in update.items()}
        return self._sent(update, Secret(draw_key(generator)))

    def release(self, update: Tensors) -> Tensors:
        """Return what is sent with chance that nobody can draw again (`fl.runtime.secure_rng`)."""
        return self._sent(update, Secret(fresh_key(), secret=True))

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction, cut, where something was sent, and zero elsewhere."""
        return {
            name: torch.where(dense(observed[name]) != 0, self._cut(dense(value)), torch.zeros_like(dense(value)))
            for name, value in predicted.items()
        }

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part where a number was sent that noise alone does not bring below the limit, else zeros."""
        uncut = self.gamma * self.steps - UNLIKELY_STDS * next(iter(self.noise_std(observed).values()), 0.0)
        seen = {name: dense(observed[name]) for name in known}
        passed = {name: (value != 0) & (value.abs() < uncut) for name, value in seen.items()}
        return {name: dense(value) * passed[name] for name, value in known.items()}

    def preserves_norm_ratios(self) -> bool:
        """Return whether the noise on a number sent is so far below the limit that it hides nothing of most numbers."""
        return self.epsilon_release is None and 2 / self.noise_var < LITTLE_NOISE

    def with_unknown_scale(self) -> Defense:
        """Return which numbers were sent: in another unit the limits are unknown."""
        return SVTOfUnknownScale()

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return that of a number that was sent."""
        numbers = sum(value.numel() for value in observed.values())
        return dict.fromkeys(observed, 2**0.5 * self.noise_scale(numbers))

    def _cut(self, matrix: Tensor) -> Tensor:
        limit = self.gamma * self.steps
        return matrix.detach().clamp(-limit, limit) + (matrix - matrix.detach()) if matrix.ndim else matrix

    def _sent(self, update: Tensors, source: Secret) -> Tensors:
        parts = {name: dense(value) for name, value in update.items()}
        numbers = sum(part.numel() for part in parts.values())
        count = self.count(numbers)
        if not count:
            return {name: part if part.ndim == 0 else torch.zeros_like(part) for name, part in parts.items()}
        change = torch.cat([part.detach().double().flatten() for part in parts.values()]).cpu() / self.steps
        cut, draw = change.clamp(-self.gamma, self.gamma), _chance(source)
        large = self._choose(cut.abs(), count, draw).nonzero().flatten()
        if self.replace:
            chosen = large[(_uniform(draw(count)) * len(large)).long().clamp(max=len(large) - 1)]
        else:
            chosen = large[draw(len(large)).argsort()[:count]]
        sent = torch.zeros_like(cut)
        scale = 2 * self.gamma * count / self.budgets(count)[2]
        sent[chosen] = (cut[chosen] + scale * _laplace(draw, count)) * self.steps
        pieces = sent.split([part.numel() for part in parts.values()])
        return {
            name: part if part.ndim == 0 else piece.view(part.shape).to(part)
            for (name, part), piece in zip(parts.items(), pieces, strict=True)
        }

    def _choose(self, sizes: Tensor, count: int, draw: Callable[[int], Tensor]) -> Tensor:
        """Return which of the sizes (n,) are found large, at least `count` of them."""
        first, second, _ = self.budgets(count)
        threshold = self.tau + self.gamma / first * float(_laplace(draw, 1))
        spread, large = self.gamma * 2 * count / second, torch.zeros_like(sizes, dtype=torch.bool)
        for _ in range(MAX_PASSES):
            asked = (~large).nonzero().flatten()
            large[asked] = sizes[asked] + spread * _laplace(draw, len(asked)) >= threshold
            if int(large.sum()) >= count:
                return large
        raise ValueError(
            f"nvflare-svt: expected {count} numbers above the threshold {threshold:.3g}, got {int(large.sum())} in "
            f"{MAX_PASSES} passes, and NVFlare would go on for ever: lower fraction, tau or epsilon"
        )


@dataclass(frozen=True, kw_only=True)
class SVTOfUnknownScale(Defense):
    """What is known of the filter in another unit: which numbers were sent."""

    name: ClassVar[str] = "nvflare-svt"
    """It is still the filter, to whoever reads why an attack does not apply."""

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the prediction where something was sent, and zero elsewhere."""
        return {
            name: torch.where(dense(observed[name]) != 0, dense(value), torch.zeros_like(dense(value)))
            for name, value in predicted.items()
        }

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return zeros: what is added before numbers are cut does not add to them."""
        return {name: torch.zeros_like(dense(value)) for name, value in known.items()}

    def preserves_norm_ratios(self) -> bool:
        """Return False, as of the filter itself."""
        return False


def _chance(source: Secret) -> Callable[[int], Tensor]:
    """Return a function that draws so many standard normal numbers, other ones at every call."""
    calls = 0

    def draw(count: int) -> Tensor:
        nonlocal calls
        key, calls = source.key.clone(), calls + 1
        key[1] = (key[1] + calls) % 2**62  # a key of its own for every call
        return Secret(key, secret=source.secret).like({"": torch.zeros(count, dtype=torch.float64)})[""]

    return draw


def _laplace(draw: Callable[[int], Tensor], count: int) -> Tensor:
    """Return Laplace numbers (count,) of scale 1: half the difference of two sums of two squared normal numbers."""
    a, b, c, d = draw(4 * count).square().view(4, count)
    return (a + b - c - d) / 2


def _uniform(normal: Tensor) -> Tensor:
    """Return normal numbers as uniform ones in [0, 1]."""
    return torch.special.ndtr(normal)


def _laplace_renyi(epsilon: float, order: float) -> float:
    """Return the Renyi divergence of Laplace noise of pure budget `epsilon`, of an order above 1."""
    top = math.log(order / (2 * order - 1)) + (order - 1) * epsilon
    rest = math.log((order - 1) / (2 * order - 1)) - order * epsilon
    high = max(top, rest)
    return (high + math.log(math.exp(top - high) + math.exp(rest - high))) / (order - 1)
