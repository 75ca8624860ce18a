"""Bounds how far an update may be from what images that count as right make of it.

What is asked depends on how near they are: an update of just these images is off by rounding and by what computing
does, one of images that are nearly the client's by what such small changes make of it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from attacks.update.classifier_update import classifier_names
from attacks.update.float_rounding import LEAST_SPACING, rounding_of_numbers, sent_types
from attacks.update.training_phases import training_phases
from attacks.verification.picture_changes import change_last_digit, changed_inside, noise_like
from attacks.verification.step_prediction import StepPredictor
from attacks.verification.update_fit import best_factor
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

MAX_PIXEL_ERROR = 0.25 / 255
"""Root mean square of what a picture that counts as right may be off by, in pixel units: a quarter of a level."""
BLUR_DRAWS = 2
"""Blurred pictures that tell how far that puts a prediction off."""
LAST_DIGIT_DRAWS, MOST_LAST_DIGIT_DRAWS = 2, 8
"""Changes of the last digit of pixels and weights that tell what computing does, and the most that are made where a
prediction leaves more: of a number next to a bend of an activation each change meets either side half of the times."""
ERROR_FACTOR = 3.0
"""How many times the expected error is no surprise."""
COMPUTED_SPACINGS, MIN_RELATIVE_ERROR = 64.0, 1e-9
"""What a gradient may be off by for the order its sums were taken in, in units of its type's spacing after 1, and at
least what is asked of no attack."""
CANCELED_SPACINGS = 8.0
"""Likewise of biases in training mode, in units of the whole update's size: batch normalization takes them off, so that
what flows back into them sums to nothing but rounding."""
PARTIAL_TOLERANCE = 0.1
"""Residual of a tensor that a picture with only some pixels fixed may leave; no picture may leave more."""
LAST_DIGIT_FACTOR, COMPUTED_AT_LEAST = 4.0, 8.0
"""What a gradient may be off by for how it was computed, in units of what a change of the pixels' last digit makes of
it, and at least, in spacings after 1: asked where an update must be one of exactly so many pictures."""
SCATTERS = 5.0
"""Standard deviations by which the squares of many rounding errors may add up to more than their mean."""


@dataclass(frozen=True)
class _Predicted:
    """What one step on images makes, and what computing does to it.

    Attributes:
        images: that were asked for.
        labels: likewise.
        made: of each tensor, in double precision.
        rounding: how long a tensor's error may be for having been rounded number by number.
        changes: how far each tensor is off, for each change of the last digit of pixels and weights so far.
    """

    images: Tensor
    labels: Tensor
    made: dict[str, Tensor]
    rounding: dict[str, float]
    changes: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ErrorBounds:
    """How long what right images leave of each tensor of an update may be.

    Attributes:
        view: in which nothing is private.
        errors: how far tensors of the update are off for having been rounded, relative to their norm.
        observed: the update, in double precision and in a unit of its own.
        unit: that unit.
        predictor: of what images make.
    """

    view: ServerView
    errors: Mapping[str, float]
    observed: Mapping[str, Tensor]
    unit: float
    predictor: StepPredictor

    @cached_property
    def rounding(self) -> dict[str, float]:
        """How long a tensor's error may be for being the difference of two models, and for having been computed."""
        eps = torch.finfo(self.view.dtype).eps
        sizes = {name: float(value.norm()) for name, value in self.observed.items()}
        whole = eps * math.hypot(*sizes.values())
        computed = max(COMPUTED_SPACINGS * eps, MIN_RELATIVE_ERROR)
        canceling = {n for n, value in self.observed.items() if value.ndim == 1 and self.view.method.train_mode}
        nothing = {n: (CANCELED_SPACINGS if n in canceling else 1e-3) * whole for n in sizes}
        return {n: max((ERROR_FACTOR * self.errors[n] + computed) * size, nothing[n]) for n, size in sizes.items()}

    @cached_property
    def deviations(self) -> dict[str, Tensor]:
        """The standard deviation of each number for having been rounded, in the unit of `observed`."""
        steps = sum(len(phase) for phase in training_phases(self.view)[1] or ())
        return {name: value * max(steps, 1) / self.unit for name, value in rounding_of_numbers(self.view).items()}

    def of_near_images(
        self, images: Tensor, labels: Tensor, made: Mapping[str, Tensor], factor: float, spread: float
    ) -> dict[str, float]:
        """Return how far each tensor may be from what images make that are off by no more than `spread`.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            made: of each tensor.
            factor: that brings it to the update.
            spread: root mean square of what images that count as right are off by.
        """
        squares = dict.fromkeys(made, 0.0)
        for number in range(BLUR_DRAWS):
            noise = torch.randn(images.shape, generator=stream(number, "borne out"), dtype=torch.float64)
            blurred = changed_inside(images, spread * noise.to(images))
            for name, value in self.predictor.predict(blurred, labels).items():
                squares[name] += float((factor * (value - made[name])).square().sum()) / BLUR_DRAWS
        partial = self.of_partial_images()  # with many numbers next to bends, such changes make any update
        return {n: min(self.rounding[n] + ERROR_FACTOR * math.sqrt(squares[n]), partial[n]) for n in made}

    def of_partial_images(self) -> dict[str, float]:
        """Return how far each tensor may be from the step of images with only some pixels fixed."""
        return {n: self.rounding[n] + PARTIAL_TOLERANCE * float(value.norm()) for n, value in self.observed.items()}

    def predict_exactly(
        self, images: Tensor, labels: Tensor, draws: int = LAST_DIGIT_DRAWS
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return a prediction, and how far each tensor of the update of exactly these images may be from it.

        Computing in the view's type does about what a change of the last digit of pixels and weights does. Batch
        normalization in training mode takes off most of what flows back, and leaves the rounding of that.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            draws: changes of the last digit, at least.
        """
        predicted = self._predicted(images, labels)
        while len(predicted.changes) < draws:
            predicted.changes.append(self._last_digit_change(predicted))
        eps = max(torch.finfo(self.view.dtype).eps, LEAST_SPACING)
        sizes = {name: float(self.observed[name].norm()) for name in predicted.made}
        still = math.hypot(*sizes.values()) * eps
        nothing = COMPUTED_SPACINGS if self._normalizes_batches else 1e-3
        allowed = {
            name: predicted.rounding[name]
            + LAST_DIGIT_FACTOR * max(change[name] for change in predicted.changes)
            + COMPUTED_AT_LEAST * eps * sizes[name]
            + nothing * still
            for name in predicted.made
        }
        return predicted.made, allowed

    def computing_errors(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Return how long the error of each tensor is for having been computed, by changes of the last digit.

        Args:
            images: (N, C, H, W).
            labels: (N,).
        """
        self.predict_exactly(images, labels)
        predicted = self._predicted(images, labels)
        return {name: max(change[name] for change in predicted.changes) for name in predicted.made}

    def _predicted(self, images: Tensor, labels: Tensor) -> _Predicted:
        """Return what images make in double precision, which is kept until others are asked for."""
        last = self._last_predicted
        if not (last and last[0].images is images and last[0].labels is labels):
            made = self.predictor.predict_in_double(images, labels)
            moved = {name: (value != 0) | self._off_grid[name] for name, value in made.items()}
            rounding = {name: _likely_length(self.deviations[name] * which) for name, which in moved.items()}
            last[:] = [_Predicted(images, labels, made, rounding)]
        return last[0]

    def _last_digit_change(self, predicted: _Predicted) -> dict[str, float]:
        """Return how far each tensor moves where the last digit of pixels and weights changes at random."""
        eps = max(torch.finfo(self.view.dtype).eps, LEAST_SPACING)
        factor = best_factor(self.observed, predicted.made, self.rounding)
        draw = stream(len(predicted.changes), "last digit")
        near = changed_inside(predicted.images.double(), eps * noise_like(predicted.images, draw))
        weights = {n: change_last_digit(v, eps, draw) for n, v in self.predictor.in_double.shared.items()}
        targets = self._round_targets(predicted.labels, draw)
        changed = self.predictor.predict_in_double(near, targets, weights)
        return {n: abs(factor) * float((v - predicted.made[n]).norm()) for n, v in changed.items()}

    def _round_targets(self, targets: Tensor, draw: torch.Generator) -> Tensor:
        """Return targets as far off as rounding may put those that were read from a bias, as unknown numbers are."""
        view = self.view
        name = classifier_names(view, {**self.observed})[1]
        if not view.task.loss.is_linear_in_targets or view.labels is not None or name is None:
            return targets
        seen = self.observed[name]
        if targets.shape != (1, *seen.shape) or not bool(seen.any()):
            return targets
        size = float(targets.abs().max()) / float(seen.abs().max())  # they lie far away, in the direction of the bias
        noise = torch.randn(seen.shape, generator=draw, dtype=torch.float64).to(targets)
        return targets + size * self.deviations[name].to(targets) * noise

    @cached_property
    def _last_predicted(self) -> list[_Predicted]:
        """What was asked for last: several questions ask for the same."""
        return []

    @cached_property
    def _normalizes_batches(self) -> bool:
        """Whether the client normalizes by the statistics of its batch."""
        return any(isinstance(m, _NormBase) and m.training for m in self.view.client.task.model.modules())

    @cached_property
    def _off_grid(self) -> dict[str, Tensor]:
        """Where weights were rounded although they did not move: they were no numbers of the type they came back in."""
        kind, start = sent_types(self.view)[1], self.view.shared
        return {n: dense(start[n]).to(kind).to(dense(start[n])) != dense(start[n]) for n in self.observed}


def _likely_length(deviations: Tensor) -> float:
    """Return how long a tensor of rounding errors of these standard deviations is, at most."""
    variances = deviations.flatten().square()
    expected, scatter = float(variances.sum()), math.sqrt(0.8 * float(variances.dot(variances)))
    return math.sqrt(min(3 * expected, expected + SCATTERS * scatter))
