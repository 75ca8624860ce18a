"""Compares an update with what one step on images makes, as far as it was rounded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from attacks.network.autograd_support import AUTOGRAD_ERRORS
from attacks.update.float_rounding import LEAST_SPACING, rounding_of_numbers, sent_types
from attacks.update.label_gradients import LabelGradients, batches_of_targets
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.training_phases import training_phases
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors, Value, dense
from fl.types import Candidate
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
NEARBY = 0.5
"""Share of an update up to which what a prediction leaves may be for numbers next to a bend of an activation."""
BRIGHTNESS_CHANGE = 0.02
"""A change of brightness that must show, or the picture is not borne out: 40 dB for one of full brightness."""
PARTIAL_TOLERANCE = 0.1
"""What a picture of which only some pixels are fixed may leave of any tensor."""
LAST_DIGIT_FACTOR, COMPUTED_AT_LEAST = 4.0, 8.0
"""What a gradient may be off by for how it was computed, in units of what a change of the pixels' last digit makes of
it, and at least, in spacings after 1: asked where an update must be one of exactly so many pictures."""
PAIR_DISTANCE = 0.0178
"""Root mean square, in pixel units, by which pictures differ that must be noticed when stated as one: 35 dB."""
UNLIKE_DISTANCE = 0.1
"""Likewise rows of tables, series and features, relative to their range or to twice their root mean square."""
UNSEEN_SLOPE = 1e-7
"""Relative to the largest slope of an update by a pixel: one by which it does not change."""
MOST_AVERAGED = 4
"""Pictures at levels of 8 bits whose mean is recognized by where its pixels lie."""
DISTANCES = (0.003, 0.01, 0.03, 0.1)
"""How far away pictures are asked for whether the update tells them apart, in pixel units: 50 to 20 dB."""
LEVEL_TOLERANCE = 0.2
"""How near to whole numbers all pixels lie that are at levels of 8 bits, or, of a mean of so many, at parts of them."""
SCATTERS = 5.0
"""Standard deviations by which the squares of many rounding errors may add up to more than their mean."""
BELOW_BOUND = 0.999
"""Share of the bound up to which a number of a gradient that was clipped by value counts as not clipped."""
FAINT = 1e-3
"""Share of the largest gradient of the outputs, below which it is asked whether the picture matters at all."""
MOST_OTHER_LABELS = 10
"""Other labels, at most, of which it is asked whether they explain an update as well."""
LABELS_APART = 3.0
"""Times the rounding of an update's last tensors by which labels that both explain it may differ there, at most."""
MAX_TRIED_LABELS = 100
"""Labels that are tried where none was found, at most."""


@dataclass(frozen=True)
class _Computed:
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
class _Fit:
    """How what images make goes with an update.

    Attributes:
        made: of each tensor, in double precision.
        allowed: how far each may be from the update.
        factor: that brings it to the update.
        sized: whether the update has the stated size, so that its size counts.
    """

    made: Mapping[str, Tensor]
    allowed: Mapping[str, float]
    factor: float
    sized: bool


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
    def update(self) -> ObservedUpdate:
        """The view's update."""
        return ObservedUpdate(self.view)

    @cached_property
    def observed(self) -> dict[str, Tensor]:
        """The update without decay, in double precision and in a unit of its own."""
        return {name: dense(value) / self._unit for name, value in self.update.in_double(self.view.update).items()}

    @cached_property
    def _unit(self) -> float:
        return rescale_to_unit({**self.update.in_double(self.view.update)})[1]

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

    def is_explained(self, images: Tensor, labels: Tensor) -> bool | None:
        """Return whether these images make the update, and it tells how bright they are.

        It is None where the update does not tell.
        """
        made = self._predicted_update(images, labels)
        factor = self._best_factor(made, self.rounding)
        if not 0 < factor < math.inf:
            return False
        allowed = self._error_bounds(images, labels, made, factor)
        factor = self._best_factor(made, allowed)
        if not all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items()):
            return False
        if not self.whole:
            return True
        return (
            True
            if all(
                self._leaves_other_direction(self._predicted_update(other, labels), allowed)
                for other in self._brightness_variants(images)
            )
            else None
        )

    def is_explained_to_rounding(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether what these images leave of the update is no more than the rounding of its numbers.

        Two pictures stated as one leave more, if they differ by more than about the square root of that: what each
        adds to a layer is a product of two things that differ, and the mean of products is none of means.

        A prediction in double precision counts, and one in the client's own: where a number before a ReLU is next to
        zero, rounding may have put the client on its other side. Of a batch in another order, it may not have here.
        """
        made, allowed = self._with_strict_bounds(images, labels)
        if not 0 < self._best_factor(made, allowed) < math.inf:
            return False
        if not self._exceeds(made, allowed) or not self._exceeds(self._predicted_update(images, labels), allowed):
            return True
        if self._missed_share(made, allowed) > NEARBY:
            return False  # no other side of a bend, but another label, say
        return any(
            not self._exceeds(*self._with_strict_bounds(images, labels, draws))
            for draws in range(LAST_DIGIT_DRAWS + 1, MOST_LAST_DIGIT_DRAWS + 1)
        )

    def tells_brightness_to_rounding(
        self, images: Tensor, labels: Tensor, read: Callable[[Tensor], Tensor | None] | None = None
    ) -> bool:
        """Return whether darker and brighter images leave more than rounding, whatever the size of each tensor.

        Args:
            images: that explain the update.
            labels: with which they do.
            read: says with which labels others would, if any; None takes the same for all.
        """
        allowed = self._with_strict_bounds(images, labels)[1]
        for other in self._brightness_variants(images):
            own = labels if read is None else read(other)
            if own is not None and not self._leaves_other_direction(self._predict_in_double(other, own), allowed):
                return False
        return True

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
            distance: root mean square, in the unit of `told_distance`.
        """
        made, allowed = self._with_strict_bounds(images, labels)
        factor = self._best_factor(made, allowed)
        if not 0 < factor < math.inf:
            return False
        if not self.is_explained_to_rounding(images, labels):
            excess = max(float((self.observed[n] - factor * v).norm()) / allowed[n] for n, v in made.items())
            allowed = {name: max(excess, 1.0) * value for name, value in allowed.items()}
        sized = not self.view.scale_unknown and not self._exceeds(made, allowed, self._stated_factor)
        away = self.spread / MAX_PIXEL_ERROR * distance
        return self._tells_differences(images, labels, away, _Fit(made, allowed, factor, sized))

    def _tells_differences(
        self,
        images: Tensor,
        labels: Tensor,
        distance: float,
        fit: _Fit,
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
        for away in _differences(images.double(), distance / 2):
            one, other = self._predict_pair(images.double(), away, labels)
            if heard is not None:
                one, other = ({n: v * heard[n] for n, v in each.items()} for each in (one, other))
            left = {n: (one[n] + other[n]) / 2 - value for n, value in made.items()}
            towards_one = {n: (one[n] - other[n]) / 2 for n in made}
            if not fit.sized:
                left, towards_one = _beside(left, made, allowed), _beside(towards_one, made, allowed)
            left = _beside(left, towards_one, allowed)
            if not any(fit.factor * float(left[n].norm()) > allowed[n] for n in made):
                return False
        return True

    def _predict_pair(
        self, images: Tensor, away: Tensor, labels: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what pairs make that differ from images by so much, to either side.

        Where a network takes no such numbers, as the logarithm of a negative one, both are kept in [0, 1].
        """
        made = [self._predict_in_double(images + sign * away, labels) for sign in (1, -1)]
        if not all(bool(value.isfinite().all()) for each in made for value in each.values()):
            room = torch.minimum(images, 1 - images).clamp(min=0)
            away = torch.minimum(torch.maximum(away, -room), room)
            made = [self._predict_in_double(images + sign * away, labels) for sign in (1, -1)]
        return made[0], made[1]

    def tells_every_picture(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether each of several pictures, with another in its place, leaves more than rounding.

        It is asked of those of which next to nothing flows back: a loss may give a class no weight.

        Args:
            images: (N, C, H, W), that explain the update.
            labels: (N,).
        """
        if not self.view.method.uses_labels:
            return True
        allowed = self._with_strict_bounds(images, labels)[1]
        gradients = self._label_gradients(images)
        sizes = gradients.by_outputs(labels).flatten(1).norm(dim=1)
        for number in (~(sizes >= FAINT * sizes.max())).nonzero().flatten().tolist():
            others = images.clone()
            others[number] = _noise_like(images[0], stream(number, "another")).to(images) * images[number].abs().amax()
            if not self._leaves_more(others, labels, allowed):
                return False
        return True

    def tells_other_labels(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether no other class of one of the images explains the update to its rounding.

        Those are tried by which what flows back into the outputs has the nearest direction.

        Args:
            images: (N, C, H, W), that explain the update.
            labels: (N,), classes.
        """
        gradients = self._label_gradients(images)
        own = functional.normalize(gradients.by_outputs(labels).cpu().flatten(1), dim=1)
        classes = min(own.shape[1], MAX_TRIED_LABELS)
        near = own.new_full((len(images), classes), -math.inf)
        numbers = torch.arange(len(labels))
        for asked in batches_of_targets(gradients.loss, gradients.outputs, torch.arange(classes)):
            other = gradients.by_outputs(asked).cpu().flatten(1)
            near[numbers, asked] = (own * functional.normalize(other, dim=1)).sum(1).nan_to_num(-math.inf)
        tried = labels.cpu() < classes
        near[numbers[tried], labels.cpu()[tried]] = -math.inf
        allowed = self._with_strict_bounds(images, labels)[1]
        for place in near.flatten().argsort(descending=True)[:MOST_OTHER_LABELS].tolist():
            number, label = divmod(place, classes)
            if near[number, label] == -math.inf:
                continue
            changed = labels.clone()
            changed[number] = label
            if not gradients.loss.takes(gradients.outputs, changed):
                continue  # no client took a step with them
            if self._last_tell_apart(gradients, labels, changed, allowed):
                continue
            missed = self._missed_share(self._predicted_update(images, changed), self.rounding)
            if missed <= NEARBY and self.is_explained_to_rounding(images, changed):
                return False
        return True

    def _label_gradients(self, images: Tensor) -> LabelGradients:
        """Return the gradients of labels of these images, of which those asked for last are kept."""
        if not (self._last_gradients and self._last_gradients[0][0] is images):
            self._last_gradients[:] = [(images, LabelGradients.of(self._in_double, images, self.observed.keys()))]
        return self._last_gradients[0][1]

    @cached_property
    def _last_gradients(self) -> list[tuple[Tensor, LabelGradients]]:
        return []

    def _last_tell_apart(
        self, gradients: LabelGradients, labels: Tensor, others: Tensor, allowed: Mapping[str, float]
    ) -> bool:
        """Return whether labels differ in the last parameters' gradients by more than both may miss of an update.

        That costs next to nothing beside the gradients of all parameters.
        """
        one, other = gradients.by_parameters(labels), gradients.by_parameters(others)
        size, own = float(other.square().sum()), float(one.norm())
        factor = max(float((one * other).sum()) / size, 0.0) if size else 0.0
        may_miss = math.hypot(*(allowed[name] for name in gradients.parameters))
        whole = math.hypot(*(float(self.observed[name].norm()) for name in gradients.parameters))
        return float((one - factor * other).norm()) * whole > LABELS_APART * may_miss * own

    def is_explained_clipped(self, images: Tensor, labels: Tensor, bound: float) -> bool:
        """Return whether these inputs make the update to its rounding, were numbers cut at a bound, and no two others.

        Two that differ from them, to either side, by a tenth of twice their root mean square must leave more in the
        numbers that were not cut. As in `tells_pairs_apart`, what they leave towards one of them does not count, nor
        their size, unless that is the stated one.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            bound: the largest size in the update.
        """
        made, allowed = self._with_strict_bounds(images, labels)
        limit = BELOW_BOUND * bound / self._unit
        at_bound = torch.cat([v[v.abs() >= limit].abs() for v in self.observed.values()])
        if not len(at_bound):
            return False
        cut = float(at_bound.median())  # the largest is off by the largest rounding error
        free = {name: self.observed[name].abs() < limit for name in made}
        below = {name: value * free[name] for name, value in self.observed.items() if name in made}
        factor = _best_factor(below, {name: value * free[name] for name, value in made.items()}, self.rounding)
        whole = self._best_factor(made, self.rounding)
        if not 0 < whole < math.inf or not 0 < factor < math.inf:
            return False
        allowed = {name: value * max(1.0, factor / whole) for name, value in allowed.items()}

        def clipped(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: (factor * value).clamp(-cut, cut) for name, value in values.items()}

        expected = clipped(made)
        if any(float((self.observed[n] - value).norm()) > allowed[n] for n, value in expected.items()):
            return False
        size = self._stated_factor
        stated = {name: (size * value).clamp(-cut, cut) for name, value in made.items()}
        sized = not self.view.scale_unknown and all(
            float((self.observed[n] - value).norm()) <= allowed[n] for n, value in stated.items()
        )
        uncut = {name: value.double() for name, value in free.items()}
        return self._tells_differences(
            images, labels, self.spread / MAX_PIXEL_ERROR * UNLIKE_DISTANCE, _Fit(made, allowed, factor, sized), uncut
        )

    def told_distance(self, images: Tensor, labels: Tensor) -> float | None:
        """Return the distance from images that explain the update at which others do not, or None of the largest asked.

        Others are brighter and darker, or differ at random, slowly or quickly over the picture.

        Returns:
            One of `DISTANCES`, root mean square, in pixel units; of a layer's inputs relative to twice their own.
        """
        allowed, unit = self._with_strict_bounds(images, labels)[1], self.spread / MAX_PIXEL_ERROR
        for distance in DISTANCES:
            changes = _differences(images.double(), unit * distance)
            others = (images + sign * change for change in changes for sign in (1, -1))
            if all(self._leaves_more(other, labels, allowed) for other in others):
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
        allowed = self._with_strict_bounds(images, labels)[1]
        made = (self._predict_in_double(other[None], labels) for other in others)
        return all(self._leaves_other_direction(one, allowed) for one in made)

    def _leaves_more(self, images: Tensor, labels: Tensor, allowed: Mapping[str, float]) -> bool:
        """Return whether what images leave of some tensor is more than allowed, at the best common factor."""
        return self._exceeds(self._predict_in_double(images, labels), allowed)

    def _exceeds(self, made: Mapping[str, Tensor], allowed: Mapping[str, float], factor: float | None = None) -> bool:
        """Return whether what a prediction leaves of some tensor is more than allowed, at the best common factor."""
        factor = self._best_factor(made, allowed) if factor is None else factor
        return not all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items())

    def _missed_share(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
        """Return what a prediction leaves of the update, as a share of it, at the best common factor."""
        factor = self._best_factor(made, allowed)
        left = math.hypot(*(float((self.observed[n] - factor * v).norm()) for n, v in made.items()))
        return left / max(math.hypot(*(float(self.observed[n].norm()) for n in made)), 1e-300)

    @cached_property
    def _asked_last(self) -> list[_Computed]:
        """What was asked for last: several questions are."""
        return []

    def _with_strict_bounds(
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
        if not (self._asked_last and self._asked_last[0].images is images and self._asked_last[0].labels is labels):
            made = self._predict_in_double(images, labels)
            moved = {name: (value != 0) | self._off_grid[name] for name, value in made.items()}
            rounding = {name: _likely_length(self.deviations[name] * which) for name, which in moved.items()}
            self._asked_last[:] = [_Computed(images, labels, made, rounding)]
        asked = self._asked_last[0]
        factor = self._best_factor(asked.made, self.rounding)
        eps = max(torch.finfo(self.view.dtype).eps, LEAST_SPACING)
        while len(asked.changes) < draws:
            draw = stream(len(asked.changes), "last digit")
            near = _changed_inside(images.double(), eps * _noise_like(images, draw))
            weights = {n: _change_last_digit(v, eps, draw) for n, v in self._in_double.shared.items()}
            changed = self._predict_in_double(near, labels, weights)
            asked.changes.append({n: abs(factor) * float((v - asked.made[n]).norm()) for n, v in changed.items()})
        sizes = {name: float(self.observed[name].norm()) for name in asked.made}
        still = math.hypot(*sizes.values()) * eps
        nothing = COMPUTED_SPACINGS if self._normalizes_batches else 1e-3
        allowed = {
            name: asked.rounding[name]
            + LAST_DIGIT_FACTOR * max(change[name] for change in asked.changes)
            + COMPUTED_AT_LEAST * eps * sizes[name]
            + nothing * still
            for name in asked.made
        }
        return asked.made, allowed

    @cached_property
    def _normalizes_batches(self) -> bool:
        """Whether the client normalizes by the statistics of its batch."""
        norms = [module for module in self.view.client.task.model.modules() if isinstance(module, _NormBase)]
        return self.view.method.train_mode and bool(norms)

    @cached_property
    def _off_grid(self) -> dict[str, Tensor]:
        """Where weights were rounded although they did not move: they were no numbers of the type they came back in."""
        kind, start = sent_types(self.view)[1], self.view.shared
        return {n: dense(start[n]).to(kind).to(dense(start[n])) != dense(start[n]) for n in self.observed}

    @cached_property
    def deviations(self) -> dict[str, Tensor]:
        """The standard deviation of each number for having been rounded, in the unit of `observed`."""
        steps = sum(len(phase) for phase in training_phases(self.view)[1] or ())
        return {name: value * max(steps, 1) / self._unit for name, value in rounding_of_numbers(self.view).items()}

    def has_stated_size(self, images: Tensor, labels: Tensor) -> bool:
        """Return whether these images make the update at the step size that the view has."""
        made = self._predicted_update(images, labels)
        factor = self._stated_factor
        allowed = self._error_bounds(images, labels, made, factor)
        return all(float((self.observed[n] - factor * v).norm()) <= allowed[n] for n, v in made.items())

    def labels_of(self, inputs: Tensor, weight: str) -> Tensor:
        """Return the label of each input (N, n, 1, 1) of a linear layer under which it sends back what was observed.

        The layer's gradient is the sum of delta_i x_i^T: times the pseudo-inverse of all x_i it has a row for each.

        Args:
            inputs: of the layer, which are all that is compared.
            weight: name of the layer's weight.
        """
        apart = torch.linalg.pinv(inputs.flatten(1).double()).mT  # (N, n)
        seen = functional.normalize(apart @ self.observed[weight].reshape(-1, apart.shape[1]).mT, dim=1)
        known = self.view.labels
        classes = torch.arange(min(self.view.task.num_classes, MAX_TRIED_LABELS)) if known is None else known.unique()
        outputs = self._label_gradients(inputs).outputs
        best, found = seen.new_full((len(inputs),), -math.inf), classes.new_zeros(len(inputs)).to(inputs.device)
        for numbers in batches_of_targets(self.view.task.loss, outputs, classes):
            labels = classes[numbers.to(classes.device)].to(inputs.device)
            made = self._predicted_update(inputs, labels)[weight].reshape(-1, apart.shape[1])
            fits = (functional.normalize(apart @ made.mT, dim=1) * seen).sum(1)
            found, best = torch.where(fits > best, labels, found), torch.where(fits > best, fits, best)
        return found

    def _error_bounds(
        self, images: Tensor, labels: Tensor, made: Mapping[str, Tensor], factor: float
    ) -> dict[str, float]:
        """Return how far each tensor of a prediction for images that count as right may be from the observed one."""
        if not self.whole:
            return {n: self.rounding[n] + PARTIAL_TOLERANCE * float(self.observed[n].norm()) for n in made}
        squares = dict.fromkeys(made, 0.0)
        for number in range(BLUR_DRAWS):
            noise = torch.randn(images.shape, generator=stream(number, "borne out"), dtype=torch.float64)
            blurred = _changed_inside(images, self.spread * noise.to(images))
            for name, value in self._predicted_update(blurred, labels).items():
                squares[name] += float((factor * (value - made[name])).square().sum()) / BLUR_DRAWS
        return {n: self.rounding[n] + ERROR_FACTOR * math.sqrt(squares[n]) for n in made}

    def _leaves_other_direction(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> bool:
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

    def _brightness_variants(self, images: Tensor) -> Iterator[Tensor]:
        """Return the images darker and brighter: what another step size for a layer's bias makes of them."""
        mean, _ = self.view.task.normalization(images)
        for middle in [torch.zeros_like(mean), *([mean] if bool(mean.any()) else [])]:
            for change in (-BRIGHTNESS_CHANGE, BRIGHTNESS_CHANGE):
                yield middle + (images - middle) * (1 + change)

    def _predicted_update(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what one step on images makes in the client's precision, without decay, as numbers in double."""
        with torch.no_grad():
            guess = Candidate(images.to(self.view.device, self.view.dtype), labels.to(self.view.device))
            return self._in_unit(self.update.in_double(predict(self.view, guess)))

    def _predict_in_double(
        self, images: Tensor, labels: Tensor, weights: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return what one step on images makes, all computed in double precision, whatever the client computed in.

        Args:
            images: (N, C, H, W).
            labels: (N,).
            weights: in place of the view's.
        """
        view = self._in_double if weights is None else replace(self._in_double, shared={**weights})
        with torch.no_grad():
            guess = Candidate(images.to(view.device, torch.float64), labels.to(view.device))
            return self._in_unit(ObservedUpdate(view).in_double(predict(view, guess)))

    def _in_unit(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a prediction in the unit of all of them, a power of two, so that squares do not overflow."""
        if not self._unit_of_predictions:
            self._unit_of_predictions.append(rescale_to_unit({**made})[1])
        unit = self._unit_of_predictions[0]
        return made if unit == 1 else {name: value / unit for name, value in made.items()}

    @cached_property
    def _unit_of_predictions(self) -> list[float]:
        """The unit, once something was predicted."""
        return []

    @property
    def _stated_factor(self) -> float:
        """What a prediction is to be multiplied by where the update has the stated size."""
        return self._unit_of_predictions[0] / self._unit

    @cached_property
    def _in_double(self) -> ServerView:
        """The view in double precision, so that a prediction is not rounded as the weights are."""
        view = self.view
        return replace(
            view,
            task=view.task.to(dtype=torch.float64),
            shared={**_all_double(view.shared)},
            update={**_all_double(view.update)},
            buffers={n: v.double() if v.is_floating_point() else v for n, v in view.buffers.items()},
            received={name: {**_all_double(sent)} for name, sent in view.received.items()},
            history=(),
        )

    def _best_factor(self, made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
        """Return the factor that brings the prediction nearest to the observed update, tensors weighed by precision."""
        return _best_factor(self.observed, made, allowed)


def _best_factor(update: Mapping[str, Tensor], made: Mapping[str, Tensor], allowed: Mapping[str, float]) -> float:
    """Return the factor that brings a prediction nearest to an update, tensors weighed by precision; NaN of zero."""
    top = bottom = 0.0
    for name, value in made.items():
        weight = 1 / max(allowed[name], 1e-150) ** 2
        top += weight * float((value * update[name]).sum())
        bottom += weight * float(value.square().sum())
    return top / bottom if bottom > 0 else math.nan


def _beside(
    update: Mapping[str, Tensor], made: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return what an update has beside the multiple of another that is nearest to it."""
    factor = _best_factor(update, made, allowed)
    return {name: value - factor * made[name] if math.isfinite(factor) else value for name, value in update.items()}


def _differences(images: Tensor, distance: float) -> Iterator[Tensor]:
    """Return changes of each image by this root mean square: of its brightness, and at random, slow and quick ones."""
    height, width = images.shape[-2:]
    noise = _noise_like(images, stream(0, "pair"))
    slow = functional.adaptive_avg_pool2d(noise, (min(3, height), min(3, width)))
    for kind in (images, functional.interpolate(slow, (height, width)), noise):
        size = kind.flatten(1).square().mean(1).sqrt().clamp(min=torch.finfo(kind.dtype).tiny)
        yield kind * (distance / size).view(-1, *[1] * (kind.ndim - 1))


def _changed_inside(images: Tensor, change: Tensor) -> Tensor:
    """Return changed inputs, of such in [0, 1] the other way where they would leave it.

    A network need not take others: a power of a negative number is none.
    """
    changed = images + change
    if not bool(((images >= 0) & (images <= 1)).all()):
        return changed
    return torch.where((changed < 0) | (changed > 1), images - change, changed)


def _noise_like(values: Tensor, draw: torch.Generator) -> Tensor:
    """Return normal noise of a tensor's shape, in double precision."""
    return torch.randn(values.shape, generator=draw, dtype=torch.float64).to(values.device)


def _change_last_digit(values: Value, eps: float, draw: torch.Generator) -> Tensor:
    """Return numbers times 1 + eps and normal noise, which is drawn in float32: that is four times as fast."""
    start = dense(values)
    noise = torch.randn(start.shape, generator=draw, dtype=torch.float32).to(start.device)
    return torch.addcmul(start, start, noise.to(start.dtype), value=eps)


def _all_double(values: Tensors) -> dict[str, Tensor]:
    """Return tensors, dense and in double precision."""
    return {name: dense(value).double() for name, value in values.items()}


def at_levels(images: Tensor) -> Tensor | None:
    """Return images at whole levels of 8 bits, where all pixels are next to one.

    Those of a mean of two are so only where these differ by even numbers of levels everywhere.
    """
    levels = 255 * images.double()
    return levels.round() / 255 if _is_near_grid(levels) else None


def is_on_coarse_grid(images: Tensor) -> bool:
    """Return whether all levels are multiples of one that divides the largest, which they are not just zero and that.

    The mean of so many black and white pictures lies there, and that of pictures of few shades.
    """
    levels = (255 * images.double()).round().long().clamp(0, 255)
    step = functools.reduce(math.gcd, levels.unique().tolist(), 255)
    return 1 < step < 255


def are_between_levels(images: Tensor) -> bool:
    """Return whether all pixels lie where those of a mean of some pictures at levels of 8 bits do."""
    levels = 255 * images.double()
    return not _is_near_grid(levels) and any(_is_near_grid(count * levels) for count in range(2, MOST_AVERAGED + 1))


def _is_near_grid(values: Tensor) -> bool:
    """Return whether all values are next to whole numbers."""
    return bool(((values - values.round()).abs() < LEVEL_TOLERANCE).all())


def _likely_length(deviations: Tensor) -> float:
    """Return how long a tensor of rounding errors of these standard deviations is, at most."""
    variances = deviations.flatten().square()
    expected, scatter = float(variances.sum()), math.sqrt(0.8 * float(variances.dot(variances)))
    return math.sqrt(min(3 * expected, expected + SCATTERS * scatter))
