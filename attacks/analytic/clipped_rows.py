"""The input of a linear layer whose gradient was clipped by value: off the rows that the clip left as they were."""

from __future__ import annotations

import math

import torch

from attacks.base import NotApplicable, Reconstruction, Remark
from attacks.labels.recovery import single_label
from attacks.update.first_linear_layer import LinearLayer
from attacks.update.float_rounding import relative_rounding
from attacks.update.update_rule import clipping_bound
from attacks.verification.clipped_comparison import BELOW_BOUND
from attacks.verification.replay_checks import reproduces_clipped_update
from fl.tensors import Tensors

MIN_SHARE, MIN_ROWS = 1e-2, 2
"""Share of the strongest row's square from which on a row says something of the input, and rows that have to agree."""
ROUNDING_MARGIN, MAX_ROUNDING = 1.5, 0.02
"""What may be left of the rows, relative to the rounding of the weights, and as a share of them."""
UNCLIPPED_ROWS = "the gradient was clipped by value"
"""How the note begins where rows agree that the clip left as they were."""


def invert_unclipped_rows(layer: LinearLayer, tolerance: float) -> Reconstruction | NotApplicable | None:
    """Return the input of a layer by rows of its gradient in which no number was clipped; None where none was.

    A row of the weight's gradient is the bias's number times the input. Rows that see different mixtures of several
    inputs do not agree. But those may see one mixture that do: of a classifier of small weights every label sends back
    nearly the same. So the step is taken again on the input, with its gradient clipped at the same bound: it must make
    what all layers from this one up were seen to get, to the rounding of that, and two unlike inputs must leave more,
    wherever between them it lies and whatever their size: for these outputs all that flows back may have one direction.
    Of losses of which it always has, nothing is proved, as an activation that bends tells of pairs less alike alone.

    Args:
        layer: of one image.
        tolerance: share of the rows that one input may leave, if their rounding is not more.
    """
    view = layer.view
    bound = clipping_bound(view)
    if bound is None:
        return None
    limit = BELOW_BOUND * bound / layer.unit
    free = (layer.update.abs().amax(1) < limit) & (layer.bias_update.abs() < limit) & (layer.bias_update != 0)
    if not bool(free.any()):
        return NotApplicable(
            f"the gradient was clipped by value, at {bound:.3g} in the update, and in every row of {layer.name!r} the "
            "clip was reached: no ratio of its numbers is the input's"
        )
    rows, bias = layer.update[free], layer.bias_update[free]
    found = bias @ rows / bias.square().sum()
    residual = float((rows - torch.outer(bias, found)).norm() / rows.norm()) if bool(rows.any()) else 0.0
    rounding = ROUNDING_MARGIN * relative_rounding(view, layer.parameter_names[0]) if view.dtype.itemsize > 2 else 0.0
    rounding *= float(layer.update.norm() / rows.norm()) if bool(rows.any()) else 1.0
    count = int((bias.square() >= MIN_SHARE * bias.square().max()).sum())
    proved = count >= MIN_ROWS and residual <= max(tolerance, min(rounding, MAX_ROUNDING))
    shape = view.task.output_shape
    proved = proved and math.prod(shape) > 2  # of two outputs all rows see one mixture
    proved = proved and not view.task.loss.sends_back_one_direction(shape)
    proved = proved and reproduces_clipped_update(view, found, bound)
    labels, note = single_label(view)
    said = f"{count} rows of {layer.name!r} that it left as they were agree to {residual:.1e}"
    words = f"{UNCLIPPED_ROWS}, and {said}" if proved else f"clipped by value: not confirmed, {said}"
    features: Tensors = {f"features/{layer.parameter_names[0]}" if proved else "features": found.to(view.dtype)}
    return Reconstruction(
        inputs=layer.pixels(found[None]) if layer.is_given_images else None,
        labels=labels,
        objective=residual if proved else math.nan,
        private=features,
        knowledge=() if view.labels is None else ("labels",),
        verified=None,
        note="; ".join(filter(None, (words, note))),
        remarks=frozenset({Remark.UNCLIPPED_ROWS} if proved else ()),
    )
