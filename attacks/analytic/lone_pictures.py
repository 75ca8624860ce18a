"""Whether what one neuron's row of a batch's gradient holds is one picture, as far as the rounding of the update tells.

The rank test (`attacks.analytic.analytic`) is one equation where the network is next to linear over the pictures, as
over a batch of flat ones: mixtures of three whose squared shares sum to one pass it, and those next to that pass it
within a tolerance. So a picture is asked for more:

- the test's equations miss by no more than the rounding of the update, carried through them;
- the same rounding leaves the picture as near as pictures count as right;
- a second reading agrees. A ReLU that silences a neuron for all other pictures does so to the weights that its output
  is multiplied with, too: their gradient has to be this picture's alone. Where no weight tells, as behind activations
  that silence no neuron, or do so with another output than zero, another neuron has to hold the same picture to
  rounding. Where all that flows back has one direction, neurons that see the same pictures mix them alike, and their
  agreement says nothing. Or the signals of mixtures with what other rows hold have to be far from passing the test.

Where a picture may count more or less, by the classes beside it, the mean of several that are nearly alike looks like
one that counts as much as all of these. Then it has to be at levels of 8 bits, or signals of mixtures far off.

So right pictures are lost where nothing tells them from mixtures. Where all that flows back has one direction (one
output, two classes) and no further weights moved, as behind frozen layers, no question is left. In float16 a row is
further off than a picture that counts as right may be, or the rank test's equations than they tell. Levels of 8 bits
prove nothing there: the mean of two pictures that differ by even levels is at levels, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.update.first_linear_layer import LinearLayer
from attacks.update.float_rounding import LEAST_SPACING, rounding_of_numbers
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.picture_changes import change_last_digit
from attacks.verification.pixel_levels import are_levels_of_no_mixture, at_levels
from fl.seeds import stream
from fl.tensors import dense

DEVIATIONS = 5.0
"""Standard deviations that are no surprise."""
SUMMED_SPACINGS = 1.0
"""What sums over a batch may be off by for how they were computed, in spacings of the root mean square of all."""
COMPUTED_SPACINGS = 8.0
"""What the gradient of one picture may be off by for how it was computed, at least, in spacings of its size."""
COMPUTED_FACTOR = 10.0
"""Likewise, in units of what changes of the last digit of weights and pixels make of it."""
CHANGES = 3
"""Changes of the last digit that are made."""
LOUD = 20.0
"""Output of a neuron at which activations that are bounded above, such as ReLU6, are constant."""
SILENCING = 1e4
"""Times the largest output that a neuron can have of pixels: what is taken off its bias to silence it."""
MIXED_ROWS, CLEARLY = 8, 10.0
"""Neurons whose pictures are mixed half and half with one, and how many times the most that a signal may miss by the
signals of these mixtures have to."""
MOST_ROWS = 256
"""Neurons with the strongest signals that are searched for one that holds the same picture."""


@dataclass(frozen=True)
class LonePictures:
    """The question whether rows of a layer's gradient hold one picture each.

    Attributes:
        layer: which is given the pictures of a batch.
        share: what a gradient of size 1 of one picture adds to that of the batch: one over its size.
        left: left singular vectors of the layer's gradient, weight and bias beside each other (m, R).
        singular: its singular values (R,).
        right: right singular vectors (n + 1, R).
        fits: what the rank test's equations may miss by at most, whatever the rounding.
    """

    layer: LinearLayer
    share: float
    left: Tensor
    singular: Tensor
    right: Tensor
    fits: float

    def are_told(
        self, row: int, target: Tensor, weight: float, miss: tuple[float, float], *, least: bool = True
    ) -> bool:
        """Return whether the update tells, to its rounding, that a row holds one picture.

        Args:
            row: of the layer's gradient.
            target: of the picture (...).
            weight: how much it counts in the batch, where 1 is an equal share.
            miss: of the rank test's equations: of the signal's direction, and of its size.
            least: whether a picture with this target can count no less in any batch.
        """
        inputs = self.layer.update[row] / self.layer.bias_update[row]
        if not self._is_precise(row):
            return False
        near = self._gradients_nearby(row, inputs, target)
        allowed = self._allowed(row, near, weight)
        if any(one > most for one, most in zip(miss, allowed, strict=True)):
            return False
        if self._has_one_direction and max(allowed) > self.fits:
            return False  # further weights tell nothing else
        if not (least or self._is_no_mean(row, inputs, target, allowed[0])):
            return False
        outgoing = self._outgoing(row, inputs, target, near[0])
        if outgoing and all(self._is_alone(name, where, near, weight) for name, where in outgoing.items()):
            return True
        if outgoing and not self._is_bounded(row, inputs, target):
            return False  # one that silences it from above does not take its output off
        return self._is_held_again(row, inputs) or self._bends_at_mixtures(row, inputs, target, allowed[0])

    @cached_property
    def _deviations(self) -> tuple[Tensor, Tensor]:
        return row_deviations(self.layer)

    @cached_property
    def _has_one_direction(self) -> bool:
        task = self.layer.view.task
        return task.loss.sends_back_one_direction(task.output_shape)

    @property
    def _spacing(self) -> float:
        return _spacing_of(self.layer)

    def _errors_of_row(self, row: int) -> Tensor:
        """Return standard deviations of the picture that a row holds (n,)."""
        weight, bias = self._deviations
        signal = self.layer.bias_update[row]
        return torch.hypot(weight[row], bias[row] * self.layer.update[row] / signal) / signal.abs()

    def _is_precise(self, row: int) -> bool:
        """Return whether the picture of a row is as near as pictures count as right."""
        inputs = self.layer.update[row] / self.layer.bias_update[row]
        off = self.layer.to_pixels(torch.stack([inputs, inputs + self._errors_of_row(row)]))
        return float((off[1] - off[0]).square().mean().sqrt()) <= MAX_PIXEL_ERROR

    def _gradients_nearby(self, row: int, inputs: Tensor, target: Tensor) -> list[dict[str, Tensor]]:
        """Return gradients of a picture, and of the same with the last digits of all numbers changed."""
        layer = self.layer
        found = [layer.gradients(inputs, target)]
        errors = self._errors_of_row(row).clamp(min=self._spacing * float(inputs.square().mean().sqrt()))
        for number in range(CHANGES):
            draw = stream(number, "lone picture")
            noise = torch.randn(inputs.shape, generator=draw, dtype=torch.float64).to(inputs)
            weights = {
                name: change_last_digit(value, self._spacing, draw) for name, value in layer.network_weights.items()
            }
            found.append(layer.gradients(inputs + errors * noise, target, weights))
        return found

    def _allowed(self, row: int, near: list[dict[str, Tensor]], weight: float) -> tuple[float, float]:
        """Return by how much the rank test's equations may miss of a picture: by direction, and by size.

        With the picture read off the row itself, the size is that of the signal u into the row's neuron over what was
        observed there. So what the row is off by counts whole, though the rest of the gradient averages it out.
        """
        layer = self.layer
        own, *others = (layer.arrange("bias", each[layer.parameter_names[1]]) for each in near)
        signal = (layer.scale or 0.0) * self.share * weight * own
        spacing = COMPUTED_SPACINGS * self._spacing
        turned = COMPUTED_FACTOR * max(float((other - own).norm() / own.norm()) for other in others) + spacing
        grown = COMPUTED_FACTOR * max(float((other - own)[row].abs() / own[row].abs()) for other in others)
        sent = self.right @ (self.left.mT @ signal / self.singular)  # G^+ u (n + 1,)
        deviations, bias = self._deviations
        each = (torch.cat([deviations, bias[:, None]], 1).square() @ sent.square()).sqrt()  # of (dG) G^+ u (m,)
        seen = float(layer.bias_update[row].abs())
        return (
            DEVIATIONS * float(each.norm() / signal.norm()) + turned,
            (DEVIATIONS * float(each[row]) + spacing * float(signal.square().mean().sqrt())) / seen + grown,
        )

    def _outgoing(
        self, row: int, inputs: Tensor, target: Tensor, own: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, int]]:
        """Return where the weights lie that a neuron's output is multiplied with, by tensor: dimension and number.

        There no gradient is left of any picture for which the neuron is silent.
        """
        layer, count = self.layer, len(self.layer.bias)
        most = SILENCING * float(layer.weight[row].abs().sum() + layer.bias[row].abs() + 1)
        weights = layer.weights_with_bias(row, -most)
        silent = layer.gradients(inputs, target, weights, others=True)
        found = {}
        for name, value in own.items():
            if name in layer.parameter_names or name not in ObservedUpdate(layer.view).change:
                continue
            for axis in range(value.ndim):
                if value.shape[axis] != count or value.ndim < 2:
                    continue
                there, gone = value.select(axis, row), silent[name].select(axis, row)
                if bool(there.any()) and not bool(gone.any()) and bool(silent[name].any()):
                    found[name] = (axis, row)
        return found

    def _is_bounded(self, row: int, inputs: Tensor, target: Tensor) -> bool:
        """Return whether pictures for which a neuron's output is large silence it as well."""
        layer = self.layer
        output = float(layer.weight[row] @ inputs + layer.bias[row])
        loud = layer.gradients(inputs, target, layer.weights_with_bias(row, LOUD - output))
        return not bool(layer.arrange("bias", loud[layer.parameter_names[1]])[row])

    def _is_alone(self, name: str, where: tuple[int, int], near: list[dict[str, Tensor]], weight: float) -> bool:
        """Return whether the gradient of a neuron's outgoing weights is that of the picture alone."""
        view = self.layer.view
        observed = ObservedUpdate(view)
        scale = observed.scale(name)
        if scale is None:
            return False
        own, *others = (each[name].select(*where) * scale * self.share * weight for each in near)
        seen = dense(observed.change[name]).double()
        rounding = rounding_of_numbers(view)[name].select(*where)
        computed = max(float((other - own).norm()) for other in others)
        allowed = DEVIATIONS * float(torch.hypot(rounding, _summing(self.layer, seen)).norm())
        allowed += COMPUTED_FACTOR * computed + COMPUTED_SPACINGS * self._spacing * float(own.norm())
        return float((seen.select(*where) - own).norm()) <= allowed

    def _is_held_again(self, row: int, inputs: Tensor) -> bool:
        """Return whether another neuron holds the same picture to rounding, and not for want of directions."""
        if self._has_one_direction:
            return False
        layer = self.layer
        for other in layer.bias_update.abs().argsort(descending=True)[:MOST_ROWS].tolist():
            if other == row:
                continue
            away = layer.update[other] / layer.bias_update[other] - inputs
            allowed = torch.hypot(self._errors_of_row(row), self._errors_of_row(other)).norm()
            if float(away.norm()) <= DEVIATIONS * float(allowed) and self._is_precise(other):
                return True
        return False

    def _is_no_mean(self, row: int, inputs: Tensor, target: Tensor, allowed: float) -> bool:
        """Return whether what a row holds is no mean of pictures nearly alike that count less, which passes all else.

        Means are at levels of 8 bits by chance alone.
        """
        pixels = self.layer.to_pixels(inputs[None])
        if self.layer.view.task.inputs.is_image and at_levels(pixels) is not None and are_levels_of_no_mixture(pixels):
            return True
        return not self._has_one_direction and self._bends_at_mixtures(row, inputs, target, allowed)

    def _bends_at_mixtures(self, row: int, inputs: Tensor, target: Tensor, allowed: float) -> bool:
        """Return whether the rank test tells what a row holds from mixtures with what others do by the signals alone.

        Between pictures for which other neurons are active, the network bends, and the signal of a mixture is no
        mixture of signals. That a mixture's is one to rounding, as that of what this row holds is, takes as many
        coincidences as the layer has outputs.
        """
        layer, asked = self.layer, 0
        for other in layer.bias_update.abs().argsort(descending=True)[:MIXED_ROWS].tolist():
            if other == row:
                continue
            half = (inputs + layer.update[other] / layer.bias_update[other]) / 2
            signal = layer.arrange("bias", layer.gradients(half, target)[layer.parameter_names[1]])
            off = signal - self.left @ (self.left.mT @ signal)
            if not float(off.norm()) > CLEARLY * allowed * float(signal.norm()):
                return False
            asked += 1
        return asked > 0


def row_deviations(layer: LinearLayer) -> tuple[Tensor, Tensor]:
    """Return standard deviations of a layer's update for rounding and summing: of weight (m, n) and bias (m,)."""
    found, pair = rounding_of_numbers(layer.view), []
    for kind, name, size in zip(
        ("weight", "bias"), layer.parameter_names, (layer.update, layer.bias_update), strict=True
    ):
        rounding = layer.arrange(kind, found[name]) / layer.unit
        if kind == "weight" and layer.factors is not None:
            rounding = rounding / layer.factors.abs().clamp(min=torch.finfo(rounding.dtype).tiny)
        pair.append(torch.hypot(rounding, _summing(layer, size).expand_as(rounding)))
    return pair[0], pair[1]


def largest_noise(layer: LinearLayer) -> float:
    """Return the largest singular value that rounding and summing may leave of weight and bias beside each other."""
    weight, bias = row_deviations(layer)
    whole = torch.cat([weight, bias[:, None]], 1)
    return float(whole.square().mean().sqrt()) * sum(math.sqrt(size) for size in whole.shape)


def _spacing_of(layer: LinearLayer) -> float:
    return max(torch.finfo(layer.view.dtype).eps, LEAST_SPACING)


def _summing(layer: LinearLayer, values: Tensor) -> Tensor:
    return SUMMED_SPACINGS * _spacing_of(layer) * values.square().mean().sqrt()
