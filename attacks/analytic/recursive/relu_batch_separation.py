"""Separation of a batch's images at the first linear layer of a chain, by the bend of the (leaky) ReLU below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from attacks.analytic.maxpool.batch_separation import (
    MixingProblem,
    SeparatedBatch,
    SummedGradient,
    max_separable_images,
    separate_batch,
)
from attacks.analytic.recursive.layer_equations import negative_slope
from attacks.network.layer_chain import Stage
from attacks.result import NotApplicable


def first_layer_with_signal(stages: Sequence[Stage], gradients: Mapping[str, Tensor]) -> int | None:
    """Return the first linear layer, counted from below, whose bias moved: nothing above it is needed."""
    for i, stage in enumerate(stages):
        sent = gradients.get(f"{stage.name}.bias")
        if isinstance(stage.layer, nn.Linear) and sent is not None and bool(sent.any()):
            return i
    return None


def separate_images(
    stages: Sequence[Stage], gradients: Mapping[str, Tensor], top: int, count: int
) -> SeparatedBatch | NotApplicable:
    """Return signals and inputs of the layer `top` for each of `count` images, or why they can't be told apart.

    Its gradient is the sum over the images of signal times input, which any mixture of them explains as well. What
    tells them apart is the bias gradient of the layer below, which hangs on where that layer's (leaky) ReLU bends.

    Args:
        stages: of the network, bottom first.
        gradients: of the step, up to one factor, by name; the weight of `top` among them.
        top: number of a linear layer whose bias moved.
        count: number of images.
    """
    reason = _obstacle(stages, gradients, top, count)
    if reason is not None:
        return reason
    above, stage = stages[top], stages[top - 1]
    assert isinstance(above.layer, nn.Linear)
    offset, slope = (part.flatten() for part in above.input_affine())
    share = _bias_gain(stage)
    if share is None:
        return NotApplicable(f"pooling with padding above {stage.name} weighs its outputs unevenly", limit=True)
    rises = isinstance(above.activation, nn.LeakyReLU | nn.ReLU)
    summed = SummedGradient(
        weight=above.layer.weight.detach(),
        bias=above.layer.bias.detach(),
        slope_above=negative_slope(above.activation) if rises else None,
        gradient=gradients[f"{above.name}.weight"],
        bias_gradient=gradients[f"{above.name}.bias"],
        offset=offset,
        scale=slope,
        slope_below=negative_slope(stage.activation),
        lower_bias_gradient=gradients[f"{stage.name}.bias"],
        lower_scale=share,
    ).cpu()
    if MixingProblem.of(summed, count) is None:
        return NotApplicable(
            f"the gradient of {above.name} is not of rank {count}: of the {count} images of the batch some are alike "
            "or leave nothing, or more than these were fed"
        )
    found = separate_batch(summed, count)
    if found is None:
        return NotApplicable(f"the {count} images of the batch could not be told apart", limit=True)
    return found.to(gradients[f"{above.name}.weight"].device)


def _obstacle(stages: Sequence[Stage], gradients: Mapping[str, Tensor], top: int, count: int) -> NotApplicable | None:
    """Return why the equations for telling `count` images apart are too few, or None."""
    if top == 0:
        return NotApplicable(f"nothing below {stages[0].name} tells the {count} images of the batch apart")
    above, stage = stages[top], stages[top - 1]
    if not isinstance(stage.activation, nn.LeakyReLU | nn.ReLU):
        slope_change = f"it tells images apart by the bend of a (leaky) ReLU right below {above.name}: there is none"
        return NotApplicable(slope_change, limit=True)
    below = gradients.get(f"{stage.name}.bias")
    if below is None or not bool(below.any()):
        return NotApplicable(f"the update says nothing of the bias of {stage.name}, by which images are told apart")
    most = max_separable_images(len(below))
    if most < count:
        return NotApplicable(f"the {len(below)} biases of {stage.name} tell at most {most} images apart, not {count}")
    return None


def _bias_gain(stage: Stage) -> Tensor | None:
    """Return how much the activation's input grows with a bias of the layer (C,), or None where that varies."""
    with torch.no_grad():
        zero = torch.zeros_like(stage.layer(stage.layer_input(stage.zero_input())))
        share: Tensor = stage.after(zero + 1) - stage.after(zero)
    share = share.view(len(zero[0]), -1)
    return share[:, 0] if torch.allclose(share, share[:, :1]) else None
