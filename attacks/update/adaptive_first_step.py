"""What the first step of an adaptive optimizer shows of a gradient: signs everywhere, and sizes where these are small.

From a state of zero, Adam, AdamW, RMSprop and Adagrad move every number by

    u = T d / (|d| + E),

where d is the gradient (with the decay that is not AdamW's), T the largest step there is and E what the optimizer adds
to the size that it divides by, in units of the gradient: T = lr and E = eps for Adam (Kingma and Ba, ICLR 2015,
Algorithm 1, with bias correction), T = lr / sqrt(1 - alpha) and E = eps / sqrt(1 - alpha) for RMSprop. So

    1 / d = (1 - r) / (E r),  r = u / T:

the step is short of T by the share E / |d|. It is known up to the rounding of the weights, in r a standard error of
sigma = spacing / (T sqrt(12)), and of the optimizer's own arithmetic, some 1e-7. In the reciprocal that is an error of
sigma / (E r^2), the same for all large numbers: sizes can be told up to about E / sigma, some 5e-3 for Adam at lr 1e-3
and weights of a tenth in float32, and above that only the sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.result import NotApplicable
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from fl.defense import Defense
from fl.local.optimizers import adaptive_eps
from fl.parametrization import Parametrization
from fl.tensors import LowRank, Tensors, dense
from fl.types import Phase
from fl.view import ServerView

ARITHMETIC_ERROR = 7e-8
"""Root mean square of how far float32's arithmetic puts a step of torch.optim.Adam off, relative to its size."""
RMSPROP_SHARE = (1 - 0.99) ** 0.5
"""What RMSprop's first step divides by, as a share of the gradient's size: torch's alpha is 0.99."""
MIN_LARGEST_STEP, MAX_EXCESS = 0.9, 1e-3
"""Shares of the largest step, of the largest one seen: less is of another step size, unless all gradients are as small
as eps; more is impossible."""
MAX_SIGMAS, MAX_SHARE_AT_TOP = 8.0, 0.05
"""Standard errors that no step is beyond the largest one, and share of all steps that are at one size short of it."""
STEP_SIZE_DOUBT = "the largest step of a number is"
MOST_DIGITS, DIGITS_OF_RATES = 7, 3
"""Digits of a number of single precision, and of a step size as people write it."""
MIN_SIGMAS = 3.0
"""Standard errors that a number's step is short of the largest one where its size counts as seen."""


@dataclass(frozen=True)
class StepSizeDoubt(NotApplicable):
    """A refusal since the update contradicts the step size that was stated."""


@dataclass(frozen=True)
class AdaptiveFirstStep:
    """A view's one step of an adaptive optimizer, read number by number.

    Attributes:
        view: what the server saw.
        phase: of local training.
    """

    view: ServerView
    phase: Phase

    @classmethod
    def of(cls, view: ServerView) -> AdaptiveFirstStep | NotApplicable:
        """Return the reading of a view, or why there is none."""
        phases, schedule = training_phases(view)
        active = [p for p, steps in zip(phases, schedule, strict=True) if steps] if schedule is not None else []
        steps = [step for steps in schedule or () for step in steps]
        if schedule is None or len(steps) != 1 or len(active) != 1:
            return NotApplicable("it reads the first step alone: of several, the sizes of the later ones are mixed in")
        if active[0].optimizer == "sgd":
            return NotApplicable("SGD's step is the gradient's: attacks on gradients take it as it is")
        if (reason := deviation_from_loss_gradient(view)) is not None:
            return NotApplicable(reason)
        if type(view.method.parametrization) is not Parametrization:
            return NotApplicable("the network's weights are generated: peel it first")
        if type(view.client.defense) is not Defense:
            return NotApplicable(f"the defense {view.defense.name} changes the sizes that are to be read")
        if view.parts:
            return NotApplicable("of a mean of clients' steps no single one is known")
        if any(group.max_norm is not None for group in active[0].groups):
            return NotApplicable("clipping made the gradients shorter by a factor that nobody knows")
        if any(isinstance(value, LowRank) for value in view.update.values()):
            return NotApplicable("the update is structured")
        read = cls(view, active[0])
        if read.names and (reason := read.step_size_doubt):
            return StepSizeDoubt(reason)
        return read if any(bool(step.any()) for step in read.steps.values()) else NotApplicable("nothing moved")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that moved."""
        owners = self.phase.assign(self.view.shared)
        moved = {name for name, value in self.change.items() if bool(dense(value).any())}
        return tuple(name for name, group in owners.items() if group.lr and name in moved)

    @cached_property
    def change(self) -> Tensors:
        """The update without AdamW's decay, by name."""
        return ObservedUpdate(self.view).change

    @property
    def own_eps(self) -> float:
        """What the optimizer adds, in its own terms."""
        return adaptive_eps(self.phase)

    @property
    def eps(self) -> float:
        """E: the size of a gradient at which the step is half the largest one."""
        return self.own_eps / (RMSPROP_SHARE if self.phase.optimizer == "rmsprop" else 1.0)

    def largest_step(self, name: str) -> float:
        """Return T, the step of a tensor where its gradient is large."""
        lr = self.phase.assign({name: None})[name].lr
        return lr / (RMSPROP_SHARE if self.phase.optimizer == "rmsprop" else 1.0)

    @cached_property
    def step_size_doubt(self) -> str:
        """What contradicts the step size that was stated where something moved, and what to state; empty if nothing.

        No number moves by more than T, and of a network's some come near.
        """
        ratios = {n: dense(self.change[n]).double().abs() / self.largest_step(n) for n in self.names}
        name = max(ratios, key=lambda n: float(ratios[n].max()))
        most, error = float(ratios[name].max()), float(self.errors[name].flatten()[ratios[name].argmax()])
        lr = self.phase.assign(self.view.shared)[self.names[0]].lr
        if MIN_LARGEST_STEP < most < 1 + MAX_EXCESS:
            return self._rounding_doubt(lr)
        written = in_known_digits(most, error / most, 1.0, DIGITS_OF_RATES)
        rate = in_known_digits(lr * most, error / most, lr, DIGITS_OF_RATES)
        return (
            f"{STEP_SIZE_DOUBT} {written} times the largest that a first step of {self.phase.optimizer} with lr: "
            f"{lr:g} has; give lr: {rate}, another optimizer, or the number of steps if there were several"
        )

    def _rounding_doubt(self, lr: float) -> str:
        """Return what says that steps are off by more than their errors: a step size that differs in a later digit.

        All numbers of large gradients, which are most, then end at one size that is not T; so do numbers of few bits.
        """
        steps = torch.cat([self.steps[name].abs().flatten() for name in self.names])
        errors = torch.cat([self.errors[name].flatten() for name in self.names])[steps > 0]
        steps = steps[steps > 0]
        if not len(steps):
            return ""
        top = float(steps.max())
        beyond = (steps - 1) / errors
        near = float(((steps - top).abs() < MAX_SIGMAS * errors).double().mean())
        short = top < 1 - MAX_SIGMAS * float(errors.median())
        if float(beyond.max()) <= MAX_SIGMAS and not (short and near > MAX_SHARE_AT_TOP):
            return ""
        most = beyond.argmax() if float(beyond.max()) > MAX_SIGMAS else steps.argmax()
        size, error = float(steps[most]), float(errors[most])
        written, rate = in_known_digits(size, error, 1.0), in_known_digits(lr * size, error, lr)
        return (
            f"{STEP_SIZE_DOUBT} {written} times the largest that a first step of {self.phase.optimizer} with lr: "
            f"{lr:g} has, which rounding of the weights does not explain. Either lr is another in a later digit (about "
            f"{rate}; it has to be given in full), or the numbers were rounded further (to float16, say), so that no "
            "size of a gradient can be told from them"
        )

    @cached_property
    def steps(self) -> dict[str, Tensor]:
        """The step r of every number, signed and relative to the largest, without AdamW's decay; 0 below rounding."""
        found = {name: dense(self.change[name]).double() / self.largest_step(name) for name in self.names}
        return {name: torch.where(r.abs() > MIN_SIGMAS * self.errors[name], r, 0.0) for name, r in found.items()}

    @cached_property
    def errors(self) -> dict[str, Tensor]:
        """The standard error sigma of every r."""
        return {name: self._error(name) for name in self.names}

    def _error(self, name: str) -> Tensor:
        sent, moved = dense(self.view.shared[name]), dense(self.view.update[name])
        after = (sent - moved).abs()
        spacing = (after.nextafter(after.new_tensor(torch.inf)) - after).double()
        spacing = spacing * (2**0.5 if self._decayed else 1.0)  # the decay by itself is rounded as well
        grid = spacing / 12**0.5 / self.largest_step(name) if self.view.rounded else torch.zeros_like(spacing)
        return grid.hypot(grid.new_tensor(ARITHMETIC_ERROR if after.dtype != torch.float64 else 1e-15))

    @property
    def _decayed(self) -> bool:
        return any(group.weight_decay for group in self.phase.groups)

    def reciprocals(self, name: str) -> tuple[Tensor, Tensor]:
        """Return 1 / d of every number of a tensor, infinite where it is zero, and the standard errors."""
        step = self.steps[name].abs()
        return (1 - step) / (self.eps * self.steps[name]), self.errors[name] / (self.eps * step.square())

    @cached_property
    def share_of_sizes(self) -> float:
        """The share of the numbers that moved whose size shows, by `MIN_SIGMAS` standard errors."""
        seen = moved = 0
        for name, step in self.steps.items():
            short = 1 - step.abs() > MIN_SIGMAS * self.errors[name]
            seen, moved = seen + int((short & (step != 0)).sum()), moved + int((step != 0).sum())
        return seen / max(moved, 1)

    @cached_property
    def resolved_size(self) -> float:
        """The size of a gradient that is known to within itself, E / sigma, for the median number."""
        return self.eps / self.usual_error

    @cached_property
    def usual_error(self) -> float:
        """The standard error of r of the median number."""
        return float(torch.cat([value.flatten() for value in self.errors.values()]).median())

    def gradients(self, limit: float) -> dict[str, Tensor]:
        """Return d as far as it can be told, no larger than `limit`."""
        found = {}
        for name, step in self.steps.items():
            size = self.eps * step.abs() / (1 - step.abs()).clamp_min(self.eps / limit)
            found[name] = (size.clamp_max(limit) * step.sign()).to(self.view.dtype)
        return found


def read_step_size(update: Mapping[str, Tensor], optimizer: str) -> float:
    """Return the step size that the first step of an adaptive optimizer was made with, to three digits.

    Args:
        update: of that step, without decay; its largest number is that of a large gradient.
        optimizer: its name.
    """
    largest = max(float(value.abs().max()) for value in update.values())
    return round_rate(largest * (RMSPROP_SHARE if optimizer == "rmsprop" else 1.0))


def in_known_digits(value: float, error: float, unlike: float, enough: int = MOST_DIGITS) -> str:
    """Return a number in no more digits than its error leaves, and not as another one.

    Args:
        value: the number, above zero.
        error: its standard error, relative to it.
        unlike: the other one.
        enough: digits that are enough, where it is not the other one in them.
    """
    for digits in range(1, MOST_DIGITS):
        text = f"{value:.{digits}g}"
        is_known = abs(float(text) / value - 1) <= MIN_SIGMAS * error
        if (is_known or digits >= enough) and float(text) != unlike:
            return f"{float(text):.{MOST_DIGITS}g}"  # 10, not 1e+01
    return f"{value:.{MOST_DIGITS}g}"


def round_rate(rate: float) -> float:
    """Return a step size as people write it, to three digits."""
    return float(f"{rate:.{DIGITS_OF_RATES}g}")
