"""Why a chain of layers with max pooling can't be undone one layer at a time: what the update or the network lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from attacks.analytic.recursive.pooled_conv_equations import (
    input_statistics,
    pooling_between,
)
from attacks.base import NotApplicable
from attacks.network.layer_chain import Stage

MAX_UNKNOWNS = 12_288
"""Numbers of a batch's inputs of one convolution that are solved for: their covariance has so many rows."""
SUPPORTED = "it takes at most one normalization and one pooling without padding, averages before activations"
"""What may stand between two layers."""


def find_obstacle(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> NotApplicable | None:
    """Return why the stages can't be undone, or None."""
    if reason := _missing_update(stages, gradients):
        return NotApplicable(reason)
    reason = _unsupported(stages)
    return NotApplicable(reason, limit=True) if reason else None


def _missing_update(stages: Sequence[Stage], gradients: dict[str, Tensor]) -> str | None:
    """Return what the update or the model lacks, or None."""
    for stage in stages:
        weight = gradients.get(f"{stage.name}.weight")
        if weight is None:
            return f"the update says nothing of {stage.name}: its weight was not sent"
        if not bool(weight.any()):
            return f"the update says nothing of {stage.name}: its weight moved by no more than rounding"
        if not bool(weight.isfinite().all()):
            return f"the update of {stage.name} has numbers that are not finite"
        parts = (stage.before, stage.layer, stage.after)
        if not all(bool(value.isfinite().all()) for part in parts for value in part.state_dict().values()):
            return f"the model has numbers at {stage.name} that are not finite"
        bias = gradients.get(f"{stage.name}.bias")
        if isinstance(stage.layer, nn.Linear) and bias is not None and not bool(bias.any()):
            return f"the bias of {stage.name} did not move although its weight did: its update is lost (to rounding?)"
    return None


def _unsupported(stages: Sequence[Stage]) -> str | None:
    """Return what of the stages is not handled here, or None."""
    first = stages[0]
    if not first.pointwise:
        return (
            f"what lies between the image and {first.name} ({_module_names(first.before)}) loses or mixes its numbers"
        )
    if isinstance(first.layer, nn.Conv2d) and input_statistics(first) is None:
        return f"the normalization before {first.name} ({_module_names(first.before)}) differs from place to place"
    for below, stage in zip([None, *stages], stages, strict=False):
        if isinstance(stage.layer, nn.Conv2d) and tuple(stage.layer.dilation) != (1, 1):
            return f"{stage.name} is dilated, which is not handled; see the attack rconv"
        if below is not None and isinstance(below.layer, nn.Conv2d) and pooling_between(below, stage) is None:
            there = _module_names([*below.after, below.activation, *stage.before])
            return f"what lies between {below.name} and {stage.name} ({there}) can't be undone: {SUPPORTED}"
        if below is not None and (few := _too_few_equations(below, stage)):
            return few
    return None


def _too_few_equations(stage: Stage, above: Stage) -> str | None:
    """Return by how much the equations of a convolution fall short of its large input, or None."""
    conv = stage.layer
    if not isinstance(conv, nn.Conv2d) or stage.layer_input_shape.numel() <= MAX_UNKNOWNS:
        return None
    pooled, weight = pooling_between(stage, above), conv.weight
    own, unknown = weight[:, 0].numel(), stage.layer_input_shape[1:].numel()
    if pooled is None or pooled.average or pooled.window == (1, 1) or own >= unknown:
        return None
    return f"{stage.name} has {own} gradient equations for the {unknown} numbers of each channel of its input"


def _module_names(modules: Iterable[nn.Module]) -> str:
    """Return where in the model some modules stand, in words."""
    return ", ".join(str(getattr(module, "place", type(module).__name__)) for module in modules)
