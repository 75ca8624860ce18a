"""The equations of a convolution in a chain: what the layers above it say of its outputs and their signal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.recursive.layer_equations import ActivationInputs, invert_activation, slope_change
from attacks.network.curved_activations import MIN_SLOPE, ValleyActivation
from attacks.network.layer_chain import Stage
from attacks.network.operation_recognition import ElementwiseAffine, Reshape
from attacks.update.float_rounding import relative_entry_rounding
from fl.view import ServerView

RESHAPING = (nn.Identity, nn.Flatten, Reshape)
OPEN_STD = 1e-2
"""Standard deviation, relative to the root mean square of all, from which on a number counts as not known at all."""
MAX_OPEN_SHARE = 0.1
"""Share of such numbers from which on a layer counts as unsolved: the one below is to contradict what came out."""
PLAUSIBLE_DEVIATIONS = 5.0
"""Standard deviations below the mean of what an activation was given down to which it may have been given numbers."""
UNBOUNDED = 1e3
"""Bound on an unknown output, relative to the largest known one."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of windows side by side or overlapping; (1, 1) is none."""

    window: tuple[int, int] = (1, 1)
    average: bool = False
    stride: tuple[int, int] = (1, 1)


def pooling_between(stage: Stage, above: Stage) -> Pooling | None:
    """Return how outputs are pooled before the stage above takes them, or None where that can't be undone."""
    after = [m for m in stage.after if not isinstance(m, RESHAPING)]
    before = [m for m in above.before if not isinstance(m, RESHAPING)]
    norms = [m for m in after if isinstance(m, ElementwiseAffine)]
    pools = [m for m in [*after, *before] if isinstance(m, nn.MaxPool2d | nn.AvgPool2d)]
    if len(norms) + len(pools) != len(after) + len(before) or len(norms) > 1 or len(pools) > 1:
        return None
    if norms and (after[0] is not norms[0] or norms[0].by_channel() is None):
        return None
    if not pools:
        return Pooling()
    (pool,) = pools
    window, stride = _pair(pool.kernel_size), _pair(pool.stride)
    average = isinstance(pool, nn.AvgPool2d)
    if (
        any(step > side for step, side in zip(stride, window, strict=True))
        or _pair(pool.padding) != (0, 0)
        or pool.ceil_mode
        or _pair(getattr(pool, "dilation", 1)) != (1, 1)
    ):
        return None
    if average and pool in before and not isinstance(stage.activation, nn.Identity):
        return None  # averages of what an activation bent are not linear in the convolution's outputs
    return Pooling(window, average, stride)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class ActivationOutputs:
    """What is known of what a layer returned, pooled; image by image (B, .).

    Attributes:
        inputs: what its activation was given. What is not known is no more than `inputs.values`.
        signal: what flows back into that.
        std: how far `inputs` may be off.
        side_factor: between the slopes on both sides of a bend where `std` leaves the side open, else 1. Of an
            activation that falls and rises the side is open where both its inputs are plausible.
        signal_noise: how far the activation's slope may put the signal off, relative to its root mean square: of
            activations without bends it changes with what they are given.
        other_inputs: the smaller of both inputs of an activation that falls and rises; None for any other.
    """

    inputs: ActivationInputs
    signal: Tensor
    std: Tensor
    side_factor: Tensor
    signal_noise: float
    other_inputs: Tensor | None = None

    @classmethod
    def of(cls, stage: Stage, above: Stage, values: Tensor, signal: Tensor, off: Tensor) -> ActivationOutputs:
        """Return the outputs of `stage`, from what comes into the stage above and flows back into that.

        Args:
            stage: whose outputs they are.
            above: what takes them.
            values: (B, ...).
            signal: likewise.
            off: how far each of the values may be off, relative to the root mean square of all.
        """
        if above.pointwise:
            values, signal = (
                above.undo_input_maps(values),
                signal.flatten(1) * above.input_affine(values.dtype)[1].flatten(),
            )
        values, signal = values.flatten(1), signal.flatten(1)
        error = off.flatten(1) * values.square().mean().sqrt()
        inputs, slope = invert_activation(stage.activation, values)
        side_factor, other = torch.ones_like(slope), None
        if isinstance(stage.activation, ValleyActivation):
            inputs, side_factor, other = _open_falling_side(stage.activation, values, inputs, slope)
        if isinstance(stage.activation, nn.LeakyReLU):
            gentle = stage.activation.negative_slope
            ratio = torch.where(values >= 0, gentle, 1 / gentle).to(values)
            side_factor = torch.where(values.abs() > 5 * error, side_factor, ratio)
        back = signal * slope
        change = (signal * slope_change(stage.activation, values) * error).norm()
        noise = float(change / back.norm()) if bool(back.any()) else 0.0  # where nothing flows back nothing is off
        lost = off.flatten(1) > OPEN_STD
        if 0 < float(lost.double().mean()) < MAX_OPEN_SHARE:
            most = UNBOUNDED * inputs.values.abs().amax()
            inputs = ActivationInputs(torch.where(lost, most, inputs.values), inputs.known & ~lost)
            if other is not None:
                side_factor = side_factor.masked_fill(lost, 1.0)  # neither side's input is known
        return cls(inputs, back, error / slope.clamp_min(1e-6), side_factor, noise, other)


def _open_falling_side(
    activation: ValleyActivation, values: Tensor, inputs: ActivationInputs, slope: Tensor
) -> tuple[ActivationInputs, Tensor, Tensor]:
    """Return inputs that are not known where the falling side has a plausible one, too; its share of slopes; and it."""
    known = inputs.values[inputs.known]
    falling = activation.falling_inverse(values)
    if not len(known):
        return inputs, torch.ones_like(slope), falling
    plausible = inputs.known & (falling > known.mean() - PLAUSIBLE_DEVIATIONS * known.std(correction=0))
    there = activation.derivatives(torch.where(plausible, falling, 0.0))[0]
    there = there * (there.abs() > MIN_SLOPE)
    factor = torch.where(plausible, there / slope.clamp_min(MIN_SLOPE), 1.0)
    return ActivationInputs(inputs.values, inputs.known & ~plausible), factor, falling


def conv_equations(
    view: ServerView,
    stage: Stage,
    above: Stage,
    gradients: dict[str, Tensor],
    returned: ActivationOutputs,
    visible_cells: tuple[int, int] | None,
) -> Equations:
    """Return the equations that a convolution's input answers.

    Args:
        view: what the server saw, which tells how the gradient was rounded.
        stage: of the convolution.
        above: the stage that takes its outputs.
        gradients: by the layer's name and ".weight".
        returned: what is known of its outputs.
        visible_cells: rows and columns of the outputs, pooled, that the layer above saw; None is all.
    """
    layer, scale = _conv_pool_layer(stage, above, visible_cells, images=len(returned.signal))
    outputs = _by_channel(returned, layer)
    gradient = gradients[f"{stage.name}.weight"]
    return Equations(
        layer,
        gradient.flatten(1) / scale[:, None],
        target=outputs.inputs.values,
        signal=outputs.signal,
        target_known=outputs.inputs.known,
        target_std=outputs.std,
        side_factor=outputs.side_factor,
        rounding=_relative_rounding(view, stage, gradient),
        other_target=outputs.other_inputs,
    )


def _conv_pool_layer(
    stage: Stage, above: Stage, visible_cells: tuple[int, int] | None, *, images: int
) -> tuple[ConvPoolLayer, Tensor]:
    """Return a convolution with its normalization at rest and its pooling, and the normalization's factors (O,)."""
    conv, pooled = stage.layer, pooling_between(stage, above)
    assert isinstance(conv, nn.Conv2d)
    assert pooled is not None
    weight = conv.weight.detach()
    bias = weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.detach()
    scale, shift = batch_norm_scale(stage, weight)
    channels, height, width = stage.layer_input_shape
    layer = ConvPoolLayer(
        weight * scale[:, None, None, None],
        bias * scale + shift,
        (channels, images * height, width),
        _pair(conv.padding),  # type: ignore[arg-type]
        _pair(conv.stride),  # type: ignore[arg-type]
        pooled.window,
        pooled.average,
        images,
        visible_cells,
        pooled.stride,
    )
    return layer, scale


def _by_channel(returned: ActivationOutputs, layer: ConvPoolLayer) -> ActivationOutputs:
    """Return what is known of a convolution's outputs as (O, K), of the visible cells alone."""
    rows, columns = replace(layer, visible_cells=None).pooled_size
    height, width = layer.pooled_size

    def arrange(part: Tensor) -> Tensor:
        seen = part.view(layer.images, len(layer.weight), rows, columns)[..., :height, :width]
        return seen.transpose(0, 1).flatten(1)

    return replace(
        returned,
        inputs=ActivationInputs(arrange(returned.inputs.values), arrange(returned.inputs.known)),
        signal=arrange(returned.signal),
        std=arrange(returned.std),
        side_factor=arrange(returned.side_factor),
        other_inputs=None if returned.other_inputs is None else arrange(returned.other_inputs),
    )


def batch_norm_scale(stage: Stage, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return factor and shift of each output (O,) by batch normalization at rest."""
    norms = [m for m in stage.after if isinstance(m, ElementwiseAffine)]
    if not norms:
        return like.new_ones(len(like)), like.new_zeros(len(like))
    (norm,) = norms
    found = norm.by_channel()
    assert found is not None
    return found


def _relative_rounding(view: ServerView, stage: Stage, gradient: Tensor) -> Tensor | None:
    """Return the rounding of each equation of a convolution's `gradient` (O, M), without a normalization between."""
    found = (
        None
        if any(isinstance(m, ElementwiseAffine) for m in stage.after)
        else relative_entry_rounding(view, stage.parameter_name("weight"))
    )
    return None if found is None else stage.arrange("weight", found.to(gradient.device)).flatten(1)


def input_statistics(stage: Stage) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation of the normalization before the first layer, channel by channel (I,).

    None where there is another map, or they differ from place to place.
    """
    if not stage.pointwise:
        return None
    offset, slope = (part.flatten(2)[0] for part in stage.input_affine())
    if not all(torch.allclose(part, part[:, :1], rtol=1e-9, atol=1e-12) for part in (offset, slope)):
        return None
    offset, slope = offset[:, 0], slope[:, 0]
    return -offset / slope, 1 / slope
