"""Says which labels explain an update with given images, and whether it tells of each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from attacks.update.label_gradients import MAX_TRIED_LABELS, LabelGradients, batches_of_targets
from attacks.verification.picture_changes import noise_like
from attacks.verification.update_comparison import NEARBY, UpdateComparison
from fl.seeds import stream

FAINT = 1e-3
"""Share of the largest gradient of the outputs, below which it is asked whether the picture matters at all."""
MOST_OTHER_LABELS = 10
"""Other labels that are tried for explaining the update as well, at most."""
LABELS_APART = 3.0
"""Times the rounding of an update's last tensors by which labels that both explain it may differ there, at most."""


def tells_every_picture(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether each of several pictures, with another in its place, leaves more than rounding.

    It is asked of those of which next to nothing flows back: a loss may give a class no weight.

    Args:
        check: the comparison with the update.
        images: (N, C, H, W), that explain the update.
        labels: (N,).
    """
    if not check.view.method.uses_labels:
        return True
    allowed = check.bounds.predict_exactly(images, labels)[1]
    gradients = check.label_gradients(images)
    sizes = gradients.by_outputs(labels).flatten(1).norm(dim=1)
    for number in (~(sizes >= FAINT * sizes.max())).nonzero().flatten().tolist():
        others = images.clone()
        others[number] = noise_like(images[0], stream(number, "another")).to(images) * images[number].abs().amax()
        if not check.leaves_more(others, labels, allowed):
            return False
    return True


def tells_other_labels(check: UpdateComparison, images: Tensor, labels: Tensor) -> bool:
    """Return whether no other class of one of the images explains the update to its rounding.

    Those are tried by which what flows back into the outputs has the nearest direction.

    Args:
        check: the comparison with the update.
        images: (N, C, H, W), that explain the update.
        labels: (N,), classes.
    """
    gradients = check.label_gradients(images)
    own = functional.normalize(gradients.by_outputs(labels).cpu().flatten(1), dim=1)
    classes = min(own.shape[1], MAX_TRIED_LABELS)
    near = own.new_full((len(images), classes), -math.inf)
    numbers = torch.arange(len(labels))
    for asked in batches_of_targets(gradients.loss, gradients.outputs, torch.arange(classes)):
        other = gradients.by_outputs(asked).cpu().flatten(1)
        near[numbers, asked] = (own * functional.normalize(other, dim=1)).sum(1).nan_to_num(-math.inf)
    tried = labels.cpu() < classes
    near[numbers[tried], labels.cpu()[tried]] = -math.inf
    allowed = check.bounds.predict_exactly(images, labels)[1]
    for place in near.flatten().argsort(descending=True)[:MOST_OTHER_LABELS].tolist():
        number, label = divmod(place, classes)
        if near[number, label] == -math.inf:
            continue
        changed = labels.clone()
        changed[number] = label
        if not gradients.loss.takes(gradients.outputs, changed):
            continue  # no client took a step with them
        if _last_tell_apart(check, gradients, labels, changed, allowed):
            continue
        missed = check.missed_share(check.predictor.predict(images, changed), check.bounds.rounding)
        if missed <= NEARBY and check.is_explained_to_rounding(images, changed):
            return False
    return True


def _last_tell_apart(
    check: UpdateComparison, gradients: LabelGradients, labels: Tensor, others: Tensor, allowed: Mapping[str, float]
) -> bool:
    """Return whether labels differ in the last parameters' gradients by more than both may miss of an update.

    That costs next to nothing beside the gradients of all parameters.
    """
    one, other = gradients.by_parameters(labels), gradients.by_parameters(others)
    size, own = float(other.square().sum()), float(one.norm())
    factor = max(float((one * other).sum()) / size, 0.0) if size else 0.0
    may_miss = math.hypot(*(allowed[name] for name in gradients.parameters))
    whole = math.hypot(*(float(check.observed[name].norm()) for name in gradients.parameters))
    return float((one - factor * other).norm()) * whole > LABELS_APART * may_miss * own


def labels_of_inputs(check: UpdateComparison, inputs: Tensor, weight: str) -> Tensor:
    """Return the label of each input (N, n, 1, 1) of a linear layer under which it sends back what was observed.

    The layer's gradient is the sum of delta_i x_i^T: times the pseudo-inverse of all x_i it has a row for each.

    Args:
        check: the comparison with the update.
        inputs: of the layer, which are all that is compared.
        weight: name of the layer's weight.
    """
    apart = torch.linalg.pinv(inputs.flatten(1).double()).mT  # (N, n)
    seen = functional.normalize(apart @ check.observed[weight].reshape(-1, apart.shape[1]).mT, dim=1)
    known = check.view.labels
    classes = torch.arange(min(check.view.task.num_classes, MAX_TRIED_LABELS)) if known is None else known.unique()
    outputs = check.label_gradients(inputs).outputs
    best, found = seen.new_full((len(inputs),), -math.inf), classes.new_zeros(len(inputs)).to(inputs.device)
    for numbers in batches_of_targets(check.view.task.loss, outputs, classes):
        labels = classes[numbers.to(classes.device)].to(inputs.device)
        made = check.predictor.predict(inputs, labels)[weight].reshape(-1, apart.shape[1])
        fits = (functional.normalize(apart @ made.mT, dim=1) * seen).sum(1)
        found, best = torch.where(fits > best, labels, found), torch.where(fits > best, fits, best)
    return found
