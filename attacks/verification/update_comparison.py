"""Compares an update with what one step on images makes, as far as it was rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.network.autograd_support import AUTOGRAD_ERRORS
from attacks.update.label_gradients import LabelGradients
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.verification.error_bounds import LAST_DIGIT_DRAWS, MAX_PIXEL_ERROR, MOST_LAST_DIGIT_DRAWS, ErrorBounds
from attacks.verification.picture_changes import brightness_variants, differences
from attacks.verification.step_prediction import StepPredictor
from attacks.verification.update_fit import Fit, best_factor, without_multiple
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate
from fl.view import ServerView

NEARBY = 0.5
"""Share of an update up to which what a prediction leaves may be for numbers next to a bend of an activation."""
PAIR_DISTANCE = 0.0178
"""Root mean square, in pixel units, by which pictures differ that must be noticed when stated as one: 35 dB."""
UNLIKE_DISTANCE = 0.1
"""Likewise rows of tables, series and features, relative to their range or to twice their root mean square."""
UNSEEN_SLOPE = 1e-7
"""Relative to the largest slope of an update by a pixel: one by which it does not change."""
DISTANCES = (0.003, 0.01, 0.03, 0.1)
"""How far away pictures are asked for whether the update tells them apart, in pixel units: 50 to 20 dB."""


@dataclass(frozen=True)
class UpdateComparison:
    """The comparison of an update with what one step on images makes.

    Attributes:
        view: in which nothing is private.
        errors: how far tensors of the update are off for having been rounded, relative to their norm.
        whole: whether all pixels count as right, rather than those fixed alone.
        spread: root mean square of what inputs that count as right may be off by.
    """

    view: ServerView
    errors: Mapping[str, float]
    whole: bool
    spread: float = MAX_PIXEL_ERROR

    @cached_property
    def observed(self) -> dict[str, Tensor]:
        """The update without decay, in double precision and in a unit of its own."""
        return {name: dense(value) / self.unit for name, value in self._update.items()}

    @cached_property
    def unit(self) -> float:
        """The unit of `observed`, a power of two, so that squares do not overflow."""
        return rescale_to_unit({**self._update})[1]

    @cached_property
    def _update(self) -> Mapping[str, Tensor]:
        return ObservedUpdate(self.view).in_double(self.view.update)

    @cached_property
    def predictor(self) -> StepPredictor:
        """The predictor of what one step on images makes."""
        return StepPredictor(self.view)

    @cached_property
    def bounds(self) -> ErrorBounds:
        """How long what right images leave of each tensor may be."""
        return ErrorBounds(self.view, self.errors, self.observed, self.unit, self.predictor)

    @property
    def stated_factor(self) -> float:
        """What a prediction is to be multiplied by where the update has the stated size. One was made before."""
        return self.predictor.unit / self.unit

    def is_explained(self, images: Tensor, labels: Tensor) -> bool | None:
        """Return whether these images make the update, and it tells how bright they are.

        It is None where the update does not tell.
        """
        allowed = self.near_bounds(images, labels)
        if allowed is None:
            return False
        if not self.whole:
            return True
        others, soon = brightness_variants(self.view, images), self._tells_by_last_parameters(images, labels, allowed)
        told = (
            (soon and self._is_told_by_last_parameters(other, labels, allowed))
            or self.leaves_other_direction(self.predictor.predict(other, labels), allowed)
            for other in others
        )
        return True if all(told) else None

    def _tells_by_last_parameters(self, images: Tensor, labels: Tensor, allowed: Mapping[str, float]) -> bool:
        """Return whether the gradient of the last parameters is what is sent of them, of images that explain them."""
        return self.follows_task_loss and not self._is_told_by_last_parameters(images, labels, allowed)

    @property
    def follows_task_loss(self) -> bool:
        """Whether a step goes along the gradient of the task's loss, which the last parameters can then be asked by."""
        method = self.view.method
        return method.takes_any_loss and method.follows_loss_gradient(1)

    def _is_told_by_last_parameters(self, images: Tensor, labels: Tensor, allowed: Mapping[str, float]) -> bool:
        """Return whether the last parameters alone tell that the update is not of images: one pass forward does."""
        gradients = LabelGradients.of(self.view, images, self.observed.keys()).by_each_parameter(labels)
        return self.leaves_other_direction({name: value.double() for name, value in gradients.items()}, allowed)

    def near_bounds(self, images: Tensor, labels: Tensor) -> dict[str, float] | None:
        """Return how far each tensor may be from what these images make, as near ones; None where they leave more."""
        made = self.predictor.predict(images, labels)
        factor = self.best_factor(made, self.bounds.rounding)
        if not 0 < factor < math.inf:
            return None
        allowed = self._near_bounds(images, labels, made, factor)
        return None if self.exceeds(made, allowed) else allowed

    def _near_bounds(
        self, images: Tensor, labels: Tensor, made: Mapping[str, Tensor], factor: float
    ) -> dict[str, float]:
        """Return how far each tensor of a prediction for images that count as right may be from the observed one."""
        if not self.whole:
            return self.bounds.of_partial_images()
        return self.bounds.of_near_images(images, labels, made, factor, self.spread)

    def is_explained_to_rounding(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether what these images leave of the update is no more than the rounding of its numbers.

        Two pictures stated as one leave more, if they differ by more than about the square root of that: what each
        adds to a layer is a product of two things that differ, and the mean of products is none of means.

        A prediction in double precision counts, and one in the client's own: where a number before a ReLU is next to
        zero, rounding may have put the client on its other side. Of a batch in another order, it may not have here.
        """
        made, allowed = self.bounds.predict_exactly(images, labels)
        if not 0 < self.best_factor(made, allowed) < math.inf:
            return False
        if not self.exceeds(made, allowed) or not self.exceeds(self.predictor.predict(images, labels), allowed):
            return True
        if self.missed_share(made, allowed) > NEARBY:
            return False  # no other side of a bend, but another label, say
        return any(
            not self.exceeds(*self.bounds.predict_exactly(images, labels, draws))
            for draws in range(LAST_DIGIT_DRAWS + 1, MOST_LAST_DIGIT_DRAWS + 1)
        )

    def has_stated_size(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether these images make the update at the step size that the view has."""
        made = self.predictor.predict(images, labels)
        factor = self.stated_factor
        allowed = self._near_bounds(images, labels, made, factor)
        return all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items())

    def has_stated_size_to_rounding(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether these images make the update at the step size that the view has, to its rounding."""
        made, allowed = self.bounds.predict_exactly(images, labels)
        factor = self.stated_factor
        return all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items())

    def tells_brightness_to_rounding(
        self, images: Tensor, labels: Tensor, read: Callable[[Tensor], Tensor | None] | None = None
    ) -> bool:
        """Return whether darker and brighter images leave more than rounding, whatever the size of each tensor.

        Args:
            images: that explain the update.
            labels: with which they do.
            read: says with which labels others would, if any; None takes the same for all.
        """
        allowed = self.bounds.predict_exactly(images, labels)[1]
        for other in brightness_variants(self.view, images):
            own = labels if read is None else read(other)
            made = None if own is None else self.predictor.predict_in_double(other, own)
            if made is not None and not self.leaves_other_direction(made, allowed):
                return False
        return True

    def tells_brightness_to_a_level(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether an image (1, C, H, W) makes the update to rounding, and none a quarter of a level brighter."""
        if not self.is_explained_to_rounding(images, labels):
            return False
        mean, _ = self.view.task.normalization(images)
        others = []
        for middle in (torch.zeros_like(mean), mean):
            away = images - middle
            size = float(away.double().square().mean().sqrt())
            if not size:
                return False
            others += [images + sign * MAX_PIXEL_ERROR / size * away for sign in (-1, 1)]
        return self.tells_apart(images, torch.cat(others), labels)

    def tells_apart(self, images: Tensor, others: Tensor, labels: Tensor) -> bool:
        """Return whether each of other images by itself leaves more than rounding, whatever the size of each tensor.

        Args:
            images: (1, C, H, W), that explain the update.
            others: (N, C, H, W), each in place of that.
            labels: (1,).
        """
        allowed = self.bounds.predict_exactly(images, labels)[1]
        made = (self.predictor.predict_in_double(other[None], labels) for other in others)
        return all(self.leaves_other_direction(one, allowed) for one in made)

    def tells_pairs_apart(self, images: Tensor, labels: Tensor, distance: float = PAIR_DISTANCE) -> bool:
        """Return whether pairs of pictures so far apart, stated as one, would be noticed.

        Brighter and darker ones are asked, and ones that differ at random, slowly and quickly over the picture. The one
        lies anywhere between them: where all that flows back has one direction, as of two classes, and of more where
        all others are far from likely, it is more for one of them than for the other, and no other direction tells
        that. So what they leave in the direction towards one of them does not count, whatever the loss. Then the size
        of the update tells as well, if the step size was stated and the picture makes an update of that size.

        Pictures that leave more than rounding may be such a pair's themselves: then the pairs asked must leave more
        than these do, relative to the rounding of the tensor where that is most.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            distance: root mean square, in the unit of `distinguishable_distance`.
        """
        made, allowed = self.bounds.predict_exactly(images, labels)
        factor = self.best_factor(made, allowed)
        if not 0 < factor < math.inf:
            return False
        if not self.is_explained_to_rounding(images, labels):
            excess = max(float((self.observed[n] - factor * v).norm()) / allowed[n] for n, v in made.items())
            allowed = {name: max(excess, 1.0) * value for name, value in allowed.items()}
        sized = not self.view.scale_unknown and not self.exceeds(made, allowed, self.stated_factor)
        away = self.spread / MAX_PIXEL_ERROR * distance
        return self.tells_differences(images, labels, away, Fit(made, allowed, factor, sized))

    def tells_differences(
        self,
        images: Tensor,
        labels: Tensor,
        distance: float,
        fit: Fit,
        heard: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Return whether pairs so far apart would be noticed.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            distance: root mean square, in the unit of the images.
            fit: of what the images make to the update.
            heard: 1 at numbers that count, 0 at others; None counts all.
        """
        made, allowed = fit.made, fit.allowed
        made = made if heard is None else {n: value * heard[n] for n, value in made.items()}
        for away in differences(images.double(), distance / 2):
            one, other = self.predictor.predict_pair(images.double(), away, labels)
            if heard is not None:
                one, other = ({n: v * heard[n] for n, v in each.items()} for each in (one, other))
            left = {n: (one[n] + other[n]) / 2 - value for n, value in made.items()}
            towards_one = {n: (one[n] - other[n]) / 2 for n in made}
            if not fit.sized:
                left, towards_one = without_multiple(left, made, allowed), without_multiple(towards_one, made, allowed)
            left = without_multiple(left, towards_one, allowed)
            if not any(fit.factor * float(left[n].norm()) > allowed[n] for n in made):
                return False
        return True

    def distinguishable_distance(self, images: Tensor, labels: Tensor) -> float | None:
        """Return the distance at which images no longer explain the update; None if even the largest one tried does.

        Others are brighter and darker, or differ at random, slowly or quickly over the picture.

        Returns:
            One of `DISTANCES`, root mean square, in pixel units; of a layer's inputs relative to twice their own.
        """
        allowed, unit = self.bounds.predict_exactly(images, labels)[1], self.spread / MAX_PIXEL_ERROR
        for distance in DISTANCES:
            changes = differences(images.double(), unit * distance)
            others = (images + sign * change for change in changes for sign in (1, -1))
            if all(self.leaves_more(other, labels, allowed) for other in others):
                return distance
        return None

    def count_unseen(self, images: Tensor, labels: Tensor) -> int:
        """Return how many numbers of the images change nothing in the update: of pixels that a stride passes over, say.

        It is asked by one gradient with respect to them, of a random sum of what they make.
        """
        inputs = images.to(self.view.device, self.view.dtype).detach().requires_grad_()
        draw = stream(0, "unseen")
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                made = predict(self.view, Candidate(inputs, labels.to(self.view.device)))
                drawn = [(v * torch.randn(v.shape, generator=draw).to(v)).sum() for v in map(dense, made.values())]
                (slopes,) = torch.autograd.grad(torch.stack(drawn).sum(), inputs, materialize_grads=True)
        except AUTOGRAD_ERRORS:  # of operations that can't be differentiated twice nobody can ask
            return 0
        largest = float(slopes.abs().max())
        return int((slopes.abs() <= UNSEEN_SLOPE * largest).sum()) if largest else 0  # of rounding every slope is zero

    def label_gradients(self, images: Tensor) -> LabelGradients:
        """Return the gradients of these images' labels; those asked for last are kept."""
        if not (self._last_gradients and _are_same(self._last_gradients[0][0], images)):
            gradients = LabelGradients.of(self.predictor.in_double, images, self.observed.keys())
            self._last_gradients[:] = [(images, gradients)]
        return self._last_gradients[0][1]

    @cached_property
    def _last_gradients(self) -> list[tuple[Tensor, LabelGradients]]:
        return []

    def best_factor(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
        """Return the factor that brings the prediction nearest to the observed update, tensors weighed by precision."""
        return best_factor(self.observed, made, allowed)

    def exceeds(self, made: Mapping[str, Tensor], allowed: Mapping[str, float], factor: float | None = None) -> bool:
        """Return whether what a prediction leaves of some tensor is more than allowed, at the best common factor."""
        factor = self.best_factor(made, allowed) if factor is None else factor
        return not all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items())

    def missed_share(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
        """Return what a prediction leaves of the update, as a share of it, at the best common factor."""
        factor = self.best_factor(made, allowed)
        left = math.hypot(*(float((self.observed[n] - factor * v).norm()) for n, v in made.items()))
        return left / max(math.hypot(*(float(self.observed[n].norm()) for n in made)), 1e-300)

    def leaves_more(self, images: Tensor, labels: Tensor, allowed: Mapping[str, float]) -> bool:
        """Return whether what images leave of some tensor is more than allowed, at the best common factor."""
        return self.exceeds(self.predictor.predict_in_double(images, labels), allowed)

    def leaves_other_direction(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> bool:
        """Return whether some tensor tells, by its direction alone, that the update is not of what was predicted.

        No client sends what is no number.
        """
        for name, value in made.items():
            observed = self.observed[name]
            size = float(value.square().sum())
            left = observed - value * (float((value * observed).sum()) / size) if size else observed
            if not float(left.norm()) <= allowed[name]:
                return True
        return False


def _are_same(images: Tensor, others: Tensor) -> bool:
    """Return whether images are the same, whichever precision they are in."""
    return images.device == others.device and torch.equal(images.double(), others.double())
