"""Decides whether a row of a batch's gradient, which belongs to one neuron, holds a single picture.

The rank test (`attacks.analytic.analytic`) is not enough. Where the network is nearly linear over the pictures, as it
is for flat ones, it is a single equation: mixtures of three pictures whose squared shares sum to one pass it, and close
ones pass it within a tolerance. So three things are required:

- The test's equations miss by no more than the rounding of the update, carried through them.
- With that rounding the picture is still as precise as pictures that count as right.
- A second reading agrees. One of these is enough:
  - *Outgoing weights.* A ReLU that silences the neuron for all other pictures also silences the gradient of the weights
    that its output is multiplied with. That gradient has to be this picture's alone.
  - *Another neuron*, if no outgoing weight tells (behind activations that silence no neuron, or do so at another output
    than zero): it holds the same picture to rounding. If all signals have one direction this proves nothing, since
    neurons that see the same pictures then mix them alike.
  - *Bends.* The signals of mixtures with what other rows hold are far from passing the rank test.

If a picture may count more or less by the classes beside it in the batch, the mean of several nearly alike pictures
looks like one picture that counts as much as all of them. Then the picture has to lie at levels of 8 bits, or signals
of mixtures have to be far off.

So a right picture is lost where nothing tells it from mixtures. If all signals have one direction (one output, two
classes) and no further weights moved, as behind frozen layers, no second reading is left. In float16 a row is less
precise than a picture that counts as right, or the equations miss by more than they tell. Levels of 8 bits prove
nothing there: the mean of two pictures that differ by an even number of levels is at levels, too.
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
from attacks.verification.eight_bit_pixels import are_levels_of_no_mixture, at_levels
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.picture_changes import change_last_digit
from fl.seeds import stream
from fl.tensors import dense

DEVIATIONS = 5.0
"""Standard deviations up to which a difference counts as rounding."""
SUMMED_SPACINGS = 1.0
"""Error of sums over a batch from the order of summation, in spacings of their root mean square."""
COMPUTED_SPACINGS = 8.0
"""Error of one picture's gradient from how it was computed, at least, in spacings of its size."""
COMPUTED_FACTOR = 10.0
"""The same error, in units of the effect that changes of the last digit of weights and pixels have."""
CHANGES = 3
"""Random changes of the last digit that are tried."""
LOUD = 20.0
"""Output of a neuron at which activations that are bounded above, such as ReLU6, are constant."""
SILENCING = 1e4
"""What is subtracted from a neuron's bias to silence it, in units of the largest output that pixels can give it."""
MIXED_ROWS = 8
"""Neurons whose pictures are mixed half and half with the one in question."""
CLEARLY = 10.0
"""How far signals of these mixtures must miss the rank test, in units of what a signal may miss by."""
MOST_ROWS = 256
"""Neurons with the strongest signals that are searched for one that holds the same picture."""


@dataclass(frozen=True)
class SingleImageRows:
    """The test whether rows of a layer's gradient hold a single picture each.

    Attributes:
        layer: the layer, whose inputs are the pictures of a batch.
        share: weight of one picture in the batch's mean: one over the batch size.
        left: left singular vectors of the layer's gradient, weight and bias beside each other (m, R).
        singular: its singular values (R,).
        right: its right singular vectors (n + 1, R).
        fits: residual of the rank test's equations that is allowed at most, whatever the rounding.
    """

    layer: LinearLayer
    share: float
    left: Tensor
    singular: Tensor
    right: Tensor
    fits: float

    def holds_single_image(
        self, row: int, target: Tensor, weight: float, miss: tuple[float, float], *, least: bool = True
    ) -> bool:
        """Return whether a row holds a single picture, to the rounding of the update.

        Args:
            row: index of the row.
            target: of the picture (...).
            weight: how much the picture counts in the batch, where 1 is an equal share.
            miss: residuals of the rank test's equations: of the signal's direction, and of its size.
            least: whether a picture with this target counts at least `weight` in any batch.
        """
        inputs = self.layer.update[row] / self.layer.bias_update[row]
        if not self._is_precise(row):
            return False
        near = self._gradients_nearby(row, inputs, target)
        allowed = self._allowed(row, near, weight)
        if any(one > most for one, most in zip(miss, allowed, strict=True)):
            return False
        if self._has_one_direction and max(allowed) > self.fits:
            return False  # further weights add no information
        if not (least or self._is_no_mean(row, inputs, target, allowed[0])):
            return False
        outgoing = self._outgoing(row, inputs, target, near[0])
        if outgoing and all(self._is_alone(name, where, near, weight) for name, where in outgoing.items()):
            return True
        if outgoing and not self._is_bounded(row, inputs, target):
            return False  # an activation that silences it from above keeps its output
        return self._is_in_another_row(row, inputs) or self._rejects_mixtures(row, inputs, target, allowed[0])

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
        """Return the standard deviations of the picture in a row (n,)."""
        weight, bias = self._deviations
        signal = self.layer.bias_update[row]
        return torch.hypot(weight[row], bias[row] * self.layer.update[row] / signal) / signal.abs()

    def _is_precise(self, row: int) -> bool:
        """Return whether the picture in a row is as precise as one that counts as right."""
        inputs = self.layer.update[row] / self.layer.bias_update[row]
        off = self.layer.to_pixels(torch.stack([inputs, inputs + self._errors_of_row(row)]))
        return float((off[1] - off[0]).square().mean().sqrt()) <= MAX_PIXEL_ERROR

    def _gradients_nearby(self, row: int, inputs: Tensor, target: Tensor) -> list[dict[str, Tensor]]:
        """Return the gradients of a picture, and of the same with the last digits of all numbers changed."""
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
        """Return the residuals that the rank test's equations may have for a picture: of direction, and of size.

        The picture is read off the row itself. So its size is the signal u at the row's neuron over what was observed
        there, and the row's own error counts in full, though the rest of the gradient averages it out.
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
        """Return where a neuron's outgoing weights lie, by tensor: axis and index.

        Pictures for which the neuron is silent leave no gradient there.
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
        """Return whether a large output silences the neuron as well, as ReLU6 does."""
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

    def _is_in_another_row(self, row: int, inputs: Tensor) -> bool:
        """Return whether another row holds the same picture to rounding, where signals have several directions."""
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
        """Return whether the row's picture is no mean of nearly alike pictures that count less each.

        Such a mean passes all other tests. It is at levels of 8 bits only by chance.
        """
        pixels = self.layer.to_pixels(inputs[None])
        if self.layer.view.task.inputs.is_image and at_levels(pixels) is not None and are_levels_of_no_mixture(pixels):
            return True
        return not self._has_one_direction and self._rejects_mixtures(row, inputs, target, allowed)

    def _rejects_mixtures(self, row: int, inputs: Tensor, target: Tensor, allowed: float) -> bool:
        """Return whether the rank test clearly rejects mixtures of the row's picture with those of other rows.

        Between pictures for which different neurons are active, some activation bends. Then the signal of a mixture is
        no mixture of signals, and passes the test only by as many coincidences as the layer has outputs.
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
    """Return the standard deviations of a layer's update from rounding and summing: weight (m, n), bias (m,)."""
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
    """Return the largest singular value that rounding and summing can give to weight and bias side by side."""
    weight, bias = row_deviations(layer)
    whole = torch.cat([weight, bias[:, None]], 1)
    return float(whole.square().mean().sqrt()) * sum(math.sqrt(size) for size in whole.shape)


def _spacing_of(layer: LinearLayer) -> float:
    return max(torch.finfo(layer.view.dtype).eps, LEAST_SPACING)


def _summing(layer: LinearLayer, values: Tensor) -> Tensor:
    return SUMMED_SPACINGS * _spacing_of(layer) * values.square().mean().sqrt()
