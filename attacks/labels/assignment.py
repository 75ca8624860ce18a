"""Assigns labels to images once these are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from attacks.network.module_inputs import inputs_of_linear
from attacks.search_control import check_time_limit
from attacks.update.classifier_update import classifier_names
from attacks.update.label_gradients import batches_of_targets
from attacks.update.observed_update import ObservedUpdate
from fl.aggregated_view import as_single_client
from fl.losses import Loss
from fl.losses.function import OwnLoss
from fl.network import call_with
from fl.tensors import dense
from fl.types import frozen
from fl.view import ServerView

MAX_COUNT_ERROR = 0.1
"""How far from whole numbers counts of labels may come out."""
MAX_WAYS = 4096
"""Ways in which a batch can be made of some images and targets that are tried, at most."""
MAX_DIRECTION_DISTANCE = 0.1
"""Distance of two unit vectors over the classes up to which a label explains what an image left in the classifier."""


def assign_labels(view: ServerView, gradient: Mapping[str, Any], images: Tensor) -> Tensor | None:
    """Return the labels (N,) int64 of the images that one step was taken on, or None where nothing tells.

    The gradient of a linear classifier's weight is the mean of `(p_i - y_i) h_i^T`. The images give their features h_i
    and predictions p_i, so that the gradient times the pseudo-inverse of all h_i has a column for each, a multiple of
    p_i - y_i, which is negative at the image's own class alone (iDLG, Zhao et al. 2020, of one image). It is believed
    where all columns point where the predictions say. Under another loss of classes the label is the one by which the
    gradient of the image's outputs is nearest to the column, in direction: sizes may hang on the whole batch.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        images: found in one order or another, in [0, 1] (N, C, H, W).
    """
    read = read_classifier(view, gradient, images) if _takes_classes(view) else None
    return None if read is None else _labels_of(view, *read)


def assign_labels_by_features(
    view: ServerView, gradient: Mapping[str, Any], features: Tensor, outputs: Tensor
) -> Tensor | None:
    """Return the labels (N,) int64 as `assign_labels` does, of images whose features are known rather than themselves.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        features: what the classifier is given for each image (N, d).
        outputs: its outputs for them (N, K).
    """
    weight = classifier_names(view, view.update)[0]
    if not _takes_classes(view) or weight is None or weight not in gradient:
        return None
    return _labels_of(view, _columns(view, weight, gradient[weight], features), outputs)


def _labels_of(view: ServerView, columns: Tensor, outputs: Tensor) -> Tensor | None:
    """Return the labels (N,) that outputs and what images left in the classifier tell, or None where they do not."""
    if view.task.loss.is_cross_entropy:
        labels = columns.argmin(1)
        wanted = torch.softmax(outputs, -1) - nn.functional.one_hot(labels, columns.shape[1])
        far = _direction_distance(columns, wanted)
    else:
        labels, far = _nearest_labels(view.task.loss, columns, outputs)
    return labels.to(view.device) if bool((far <= MAX_DIRECTION_DISTANCE).all()) else None


def _nearest_labels(loss: Loss, columns: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the label (N,) by which each image's outputs (N, K) have the gradient nearest to its column (N, K).

    How far apart their directions are comes second (N,).
    """
    far, labels = columns.new_full((len(columns),), math.inf), torch.zeros(len(columns), dtype=torch.int64)
    for asked in batches_of_targets(loss, outputs, torch.arange(columns.shape[1])):
        check_time_limit()
        with torch.enable_grad():
            given = outputs.clone().requires_grad_()
            (wanted,) = torch.autograd.grad(loss(given, asked), given)
        off = _direction_distance(columns, wanted)
        far, labels = torch.where(off < far, off, far), torch.where(off < far, asked, labels)
    return labels, far


def _direction_distance(some: Tensor, others: Tensor) -> Tensor:
    """Return the distances of rows that are brought to length one (N,)."""
    unit = nn.functional.normalize
    return (unit(some, dim=-1) - unit(others, dim=-1)).norm(dim=-1)


def count_labels(view: ServerView, gradient: Mapping[str, Any], images: Tensor, count: int) -> Tensor | None:
    """Return how often each image is in a batch with each label (N, K) int64, or None where nothing tells.

    Of losses other than cross entropy nothing does.

    Image i, m_i times in the batch, c_i of them with each label, leaves a multiple k of `m_i p_i - c_i` in the
    classifier. Over p_i that is largest, `k m_i`, at labels it does not have. All m_i together are the batch, which
    gives k. What comes out has to be whole numbers.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        images: distinct ones, in [0, 1] (N, C, H, W).
        count: of the batch's images.
    """
    read = read_classifier(view, gradient, images) if _takes_classes(view) and view.task.loss.is_cross_entropy else None
    if read is None:
        return None
    columns, predictions = read[0], torch.softmax(read[1], -1)
    shares = (columns / predictions).amax(1)  # k m_i
    factor = float(shares.sum()) / count
    if not bool((shares > 0).all()) or not factor > 0:
        return None
    copies = shares / factor
    labels = copies.round()[:, None] * predictions - columns / factor
    found = labels.round().to(torch.int64)
    near = all(float((part - part.round()).abs().max()) < MAX_COUNT_ERROR for part in (copies, labels))
    whole = bool((found >= 0).all()) and torch.equal(found.sum(1), copies.round().to(torch.int64))
    return found.to(view.device) if near and whole and int(found.sum()) == count else None


def count_targets(
    view: ServerView, gradient: Mapping[str, Any], images: Tensor, count: int
) -> tuple[Tensor, Tensor] | None:
    """Return which of some images each of the batch is (N,), and its label or target (N, ...); None if untold.

    Of cross entropy counts are read off (`count_labels`). Of other losses all ways in which the batch can be made of
    the images are tried, and the one is taken that leaves what is nearest to the classifier's gradient: in size, too,
    where that is known.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        images: distinct ones, in [0, 1] (U, C, H, W).
        count: of the batch's images.
    """
    task = view.task
    told = not task.loss.sends_back_one_direction(task.output_shape)  # of two classes columns say one number alone
    if _takes_classes(view) and task.loss.is_cross_entropy and told:
        counts = count_labels(view, gradient, images, count)
        if counts is None:
            return None
        which, labels = counts.nonzero().unbind(1)
        times = counts[which, labels]
        return which.repeat_interleave(times), labels.repeat_interleave(times)
    if isinstance(task.loss, OwnLoss) or not view.method.uses_labels:
        return None  # how much an example counts may hang on the others
    every = task.loss.every_target(task.output_shape, MAX_WAYS)
    if every is None or math.comb(len(images) * len(every) + count - 1, count) > MAX_WAYS:
        return None
    read = read_classifier(view, gradient, images)
    if read is None:
        return None
    kinds = torch.cartesian_prod(torch.arange(len(images)), torch.arange(len(every)))
    ways = torch.tensor(list(combinations_with_replacement(range(len(kinds)), count)))
    which = kinds[ways][..., 0]
    present = torch.stack([(which == number).any(1) for number in range(len(images))], 1).all(1)
    ways = ways[present]
    best = _nearest_way(view, kinds[ways], every, read)
    return None if best is None else (best[:, 0].to(view.device), every.to(view.device)[best[:, 1].to(view.device)])


def _nearest_way(view: ServerView, ways: Tensor, every: Tensor, read: tuple[Tensor, Tensor]) -> Tensor | None:
    """Return the way (N, 2) of several (W, N, 2) in which images and targets leave what was read; None if none does."""
    columns, outputs = read[0], read[1]
    slopes = []
    for target in every.to(outputs.device):
        check_time_limit()
        with torch.enable_grad():
            given = outputs.clone().requires_grad_()
            loss = view.task.loss(given, target.expand(len(outputs), *target.shape)) * len(outputs)
            slopes.append(torch.autograd.grad(loss, given)[0])
    each = torch.stack(slopes, 1).flatten(2)  # (U, M, K)
    parts = each[ways[..., 0], ways[..., 1]] / ways.shape[1]  # (W, N, K)
    made = parts.new_zeros(len(ways), *columns.shape)
    for number in range(len(columns)):
        made[:, number] = (parts * (ways[..., 0] == number)[..., None].to(parts)).sum(1)
    seen = columns.flatten().to(made)
    weight = classifier_names(view, view.update)[0]
    scale = None if weight is None or view.scale_unknown else ObservedUpdate(view).scale(weight)
    if scale:
        far = (scale * made.flatten(1) - seen).norm(dim=1) / seen.norm()
        if float(far.min()) <= MAX_DIRECTION_DISTANCE:
            return ways[int(far.argmin())]
    far = _direction_distance(made.flatten(1), seen[None])
    return ways[int(far.argmin())] if float(far.min()) <= MAX_DIRECTION_DISTANCE else None


def _takes_classes(view: ServerView) -> bool:
    return view.method.uses_labels and view.task.loss.takes_classes


def fits_no_label(view: ServerView, gradient: Mapping[str, Any], images: Tensor) -> bool:
    """Return whether what an image left in the classifier is of none of the classes, each of which was asked.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        images: found in one order or another, in [0, 1] (N, C, H, W).
    """
    read = read_classifier(view, gradient, images) if _takes_classes(view) else None
    if read is None or assign_labels(view, gradient, images) is not None:
        return False
    asked = batches_of_targets(view.task.loss, read[1], torch.arange(read[1].shape[1]))
    pairs = {pair for numbers in asked for pair in enumerate(numbers.tolist())}
    return len(pairs) == read[1].numel()


def read_classifier(view: ServerView, gradient: Mapping[str, Any], images: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what each image left in the classifier's gradient over its features (N, K), and its outputs (N, K).

    It is None where the classifier is no linear layer that is given one vector for each image.

    Args:
        view: whose classifier may be shared or not.
        gradient: of the step, up to one factor.
        images: in [0, 1] (N, C, H, W).
    """
    weight = classifier_names(view, view.update)[0]
    if weight is None or weight not in gradient:
        return None
    seen = _features(view, weight, images)
    if seen is None or not all(bool(part.isfinite().all()) for part in seen):
        return None
    features, outputs = seen
    return _columns(view, weight, gradient[weight], features), outputs


def _columns(view: ServerView, weight: str, gradient: Any, features: Tensor) -> Tensor:
    """Return what each image left in a classifier's gradient over its features (N, K), by the numbers sent."""
    values, observed = dense(gradient).to(features), ObservedUpdate(view)
    if observed.is_complete(weight):
        return (values @ torch.linalg.pinv(features)).mT
    sent = observed.transmitted(weight).to(features.device)
    each = []
    for row, which in zip(values, sent, strict=True):  # as many as there are classes
        check_time_limit()
        each.append(row[which] @ torch.linalg.pinv(features[:, which]))
    return torch.stack(each, 1)


def order_matters(view: ServerView) -> bool:
    """Return whether it matters which image has which of the labels read off, which come in a row.

    So it is where the known order says which image is in which small batch, and in a group that is not one client with
    all images: where clients take several steps, are clipped or normalize by their own batch, it matters whose image
    has which.
    """
    if view.parts and isinstance(as_single_client(view), str):
        return True
    batches = [batch for steps in view.order or () for step in steps for batch in step]
    return any(len(batch) and set(batch.tolist()) != set(range(view.batch_size or 0)) for batch in batches)


def _features(view: ServerView, weight: str, images: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what the classifier is given for each image (N, d), and the logits (N, K); None if that can't be told.

    In double precision on the CPU, as some devices have none.
    """
    model = view.client.network_in(torch.float64, "cpu")
    known = {**frozen(model), **view.shared}
    if any(name not in known for name, _ in model.named_parameters()):
        return None
    weights = {name: dense(known[name]).to(p) for name, p in model.named_parameters()}
    kinds = {n: torch.float64 if v.is_floating_point() else v.dtype for n, v in view.buffers.items()}
    buffers = {n: v.to("cpu", kinds[n], copy=True) for n, v in view.buffers.items()}
    try:
        with inputs_of_linear(model, weight) as given, torch.no_grad():
            outputs = call_with(model, {**weights, **buffers}, images.to("cpu", torch.float64))
    except RuntimeError:  # nor does every network run in double precision
        return None
    if len(given) != 1 or given[0].ndim != 2 or len(given[0]) != len(images):
        return None
    return given[0], outputs
