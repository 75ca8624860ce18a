"""Asks what pictures make of the last parameters alone, to which one pass forward answers.

What tells pictures apart there tells them apart in the whole update, for a fifth of the work of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from attacks.verification.scale_directions import Closeness
from attacks.verification.update_comparison import UpdateComparison

SAME_GRADIENT = 1e-10
"""Share by which the gradient of the last parameters may miss what a whole step predicts of them: both are computed in
double precision, so that another method's direction, however near, is none."""


def of_last_parameters(
    asked: Closeness, check: UpdateComparison, images: Tensor, labels: Tensor, allowed: Mapping[str, float]
) -> Closeness | None:
    """Return what is asked of pictures, for the last parameters alone; None where their gradient is not what is sent.

    Args:
        asked: for all parameters.
        check: the comparison with the update.
        images: (N, C, H, W), which make `asked.own`.
        labels: (N, ...), with which they do.
        allowed: how far each tensor of the update may be off.
    """
    if not check.follows_task_loss:
        return None

    def gradients(pictures: Tensor) -> dict[str, Tensor]:
        return check.label_gradients(pictures).by_each_parameter(labels)

    made = gradients(images)
    own = {name: asked.own[name] for name in made}
    size = sum(float(value.square().sum()) for value in made.values())
    if not size:
        return None
    factor = sum(float((own[name] * value).sum()) for name, value in made.items()) / size
    if not factor > 0:
        return None
    missed = {name: float((own[name] - factor * value).norm()) for name, value in made.items()}
    if any(missed[name] > SAME_GRADIENT * float(value.norm()) for name, value in own.items()):
        return None
    return replace(
        asked,
        own=own,
        predict=lambda pictures: {name: factor * value for name, value in gradients(pictures).items()},
        exceeds=lambda pictures: check.leaves_other_direction(gradients(pictures), allowed),
        of_last=None,
    )
