"""A picture whose direction alone stands in the update: of first linear layers without a bias that moved.

Of one picture and one step of SGD the gradient of a linear layer's weight is delta x^T. So x is known up to a factor,
which the bias's gradient, delta itself, would tell. Without it the rest of the network does: with x = a v, v known, the
network sends back delta(a, y) of its own for each factor a and label y, and

    a delta(a, y) = gW v                                                                          (1)

are as many equations as the layer has outputs, for one number. Pixels outside [0, 1] rule factors out. Where the step
size is unknown (1) holds up to a factor, which a network may leave open: one without biases is homogeneous but for its
loss. Several layers may be given a part of the picture each; then there is a factor for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attacks.analytic.scale_judgment import UP_TO_BRIGHTNESS, has_several_directions, is_one_input, judge_targets
from attacks.analytic.scale_search import NEARLY_ONE, InputDirection, ScaleSearch
from attacks.base import NotApplicable, Reconstruction, Remark, Result
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import trace_view
from attacks.network.pixel_layers import PixelLayer, PixelNetwork, pixel_layers
from attacks.search_control import StoppedError, in_overtime
from attacks.update.float_rounding import relative_rounding
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from attacks.verification.comparison import can_replay
from attacks.verification.words import KNOWN_TARGETS
from fl.defense import Defense
from fl.tensors import LowRank, dense
from fl.view import ServerView

MOST_PARTS = 2
"""Parts of a picture, each with a factor of its own, that are searched for together, at most."""
POWER_STEPS = 4
"""Power iterations that bring a layer's direction from its longest row to the leading singular vector."""
PIXEL_SLACK = 0.02
"""How far outside [0, 1] a pixel may come out, for rounding."""
ROUNDING_MARGIN = 1.5
"""Residual of a layer's update, relative to the rounding of its weights, that still counts as rounding."""
MAX_ROUNDING = 0.02
"""The same as a share of the update, at most."""

NOWHERE = NotApplicable("no linear layers of weights that moved are given all pixels as they are", limit=True)
TARGET_UNKNOWN = f"its size takes the target, which may be one of too many: {KNOWN_TARGETS}"
NO_SIZE = (
    "at no brightness do the layers above send back what it got, so that the loss or the step size may be another than "
    "stated, or what moved the weight no gradient of it (a merged adapter)"
)
NOT_SIZED = "its size was not found before {}"


def invert_direction(view: ServerView, tolerance: float) -> Result:
    """Return the picture of an update whose first linear layers tell it up to a factor, or why there is none.

    Args:
        view: what the server saw, of one picture.
        tolerance: residual of the layers' update that one picture may leave, if its rounding is not more.

    Returns:
        The picture, `verified` if no other that was found makes the update, and pictures a quarter of a level brighter
        or darker leave more than rounding. The caller has to confirm it by the whole update.
    """
    weights = _moved_weights(view)
    if isinstance(weights, NotApplicable):
        return weights
    if (reason := _obstacle(view)) is not None:
        return NotApplicable(reason)
    read = _read_network(view, weights)
    if isinstance(read, NotApplicable):
        return read
    network, parts = read
    limit = max(tolerance, *(_rounding_limit(view, part.layer.weight) for part in parts))
    targets, untaken = _possible_targets(view), _replay_obstacle(view)
    if targets is None or untaken:
        if len(parts) == 1 and parts[0].residual <= limit and has_several_directions(view):
            return up_to_a_factor(view, parts[0], untaken or TARGET_UNKNOWN)
        return NotApplicable(f"{UP_TO_BRIGHTNESS} alone: {untaken or TARGET_UNKNOWN}")
    stated = all(ObservedUpdate(view).scale(layer.weight) is not None for layer in network.layers)
    return _search(ScaleSearch(view, network, parts, targets, stated), limit)


def _search(search: ScaleSearch, limit: float) -> Result:
    """Return the picture whose size the layers above determine, or why they do not.

    Args:
        search: for the size.
        limit: largest residual, of the layers' update and of their equations, that counts as rounding.
    """
    part, nearly, stopped = search.parts[0], None, ""
    try:
        for targets in _target_groups(search):
            judged = judge_targets(replace(search, targets=targets), limit)
            if judged is not None and judged.objective <= limit:
                return judged
            nearly = nearly or judged
    except StoppedError as error:
        stopped = str(error)
    reason = NOT_SIZED.format(stopped) if stopped else NO_SIZE
    if nearly is not None:
        return replace(nearly, cut_short="; ".join(filter(None, (nearly.cut_short, stopped))))
    try:
        with in_overtime():
            told = is_one_input(search) and part.residual <= limit and search.tells_pairs_apart()
    except StoppedError as error:
        told, stopped = False, str(error)
        reason = NOT_SIZED.format(stopped)
    if told:
        return replace(up_to_a_factor(search.view, part, reason), cut_short=stopped)
    return NotApplicable(
        f"{part.layer.weight} tells the picture up to its brightness, and {reason}",
        limit=bool(stopped),
        cut_short=stopped and f"not done before {stopped}",
    )


def _target_groups(search: ScaleSearch) -> Iterator[Tensor]:
    """Yield the targets to try: first a label that the update tells by itself, if it does, then all."""
    view = search.view
    label = single_label(view)[0] if view.task.loss.is_cross_entropy and len(search.targets) > 1 else None
    if label is not None:
        yield label.to(search.targets)
    yield search.targets


def _obstacle(view: ServerView) -> str | None:
    """Return why the layers' gradients are not outer products of one picture, or None if they are."""
    if view.batch_size != 1 or view.parts or type(view.client.defense) is not Defense:
        return "a picture up to its brightness takes one picture, and no defense"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    return "it takes pixels, and the model is given ids" if view.task.inputs.has_ids else None


def _replay_obstacle(view: ServerView) -> str:
    """Return why the client's step can't be replayed on a picture; empty if it can."""
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    if len(steps) != 1:
        return "the size follows from one local step, and these are several or of unknown number"
    if view.private or not view.method.uses_labels or not can_replay(view):
        return "what flows back can't be computed, since some of the network or of the rule is private"
    return ""


def _moved_weights(view: ServerView) -> dict[str, Tensor] | NotApplicable:
    """Return the gradients of matrices that moved, or why they can't be those of layers that see a whole picture."""
    gradient = ObservedUpdate(view).gradient
    if isinstance(gradient, NotApplicable):
        return gradient
    weights: dict[str, Tensor] = {
        n: v for n, v in gradient.items() if not isinstance(v, LowRank) and v.ndim == 2 and bool(v.any())
    }
    enough = sum(max(value.shape) for value in weights.values()) >= math.prod(view.task.input_shape)
    return weights if enough else NOWHERE


def _read_network(
    view: ServerView, weights: Mapping[str, Tensor]
) -> tuple[PixelNetwork, list[InputDirection]] | NotApplicable:
    """Return the layers that see all of the picture, and the directions of their inputs, or why there are none."""
    traced = trace_view(view, view.device)
    if isinstance(traced, NotApplicable):
        return traced
    layers = pixel_layers(traced[1], weights)
    groups: list[list[int]] = []
    for number, layer in enumerate(layers):
        group = next((g for g in groups if layers[g[0]].is_given_the_same(layer)), None)
        groups.append([number]) if group is None else group.append(number)
    chosen = _covering(layers, groups, math.prod(view.task.input_shape))
    if chosen is None:
        return NOWHERE
    used = [number for group in chosen for number in group]
    network = PixelNetwork(traced[1], [layers[number] for number in used])
    parts = []
    for group in chosen:
        part = _read_part([layers[i] for i in group], tuple(used.index(i) for i in group), weights)
        if not part.residual <= NEARLY_ONE:
            return NotApplicable(
                f"the update of {part.layer.weight} is not that of one input: {part.residual:.1e} is left"
            )
        parts.append(part)
    return network, parts


def up_to_a_factor(view: ServerView, part: InputDirection, reason: str) -> Reconstruction:
    """Return a layer's input of known direction, as bright as pixels in [0, 1] can be."""
    labels, note = single_label(view)
    words = f"{UP_TO_BRIGHTNESS}: {reason}"
    return Reconstruction(
        inputs=None,
        labels=labels,
        objective=part.residual,
        private={f"features/{part.layer.weight}": (part.brightest * part.direction).to(view.dtype)},
        knowledge=() if view.labels is None else ("labels",),
        note="; ".join(filter(None, (words, note))),
        remarks=frozenset({Remark.DIRECTION_ONLY}),
    )


def _covering(layers: Sequence[PixelLayer], groups: Sequence[list[int]], count: int) -> list[list[int]] | None:
    """Return at most `MOST_PARTS` groups of layers with a common input that together see all pixels, or None."""
    seen = [set(layers[group[0]].index[layers[group[0]].slope != 0].tolist()) for group in groups]
    chosen: list[int] = []
    covered: set[int] = set()
    while len(covered) < count and len(chosen) < MOST_PARTS and len(chosen) < len(groups):
        best = max(range(len(groups)), key=lambda i: len(seen[i] - covered))
        chosen, covered = [*chosen, best], covered | seen[best]
    return [groups[i] for i in chosen] if len(covered) == count else None


def _read_part(layers: Sequence[PixelLayer], numbers: tuple[int, ...], weights: Mapping[str, Tensor]) -> InputDirection:
    """Return the direction of an input that several layers have in common."""
    gradient = torch.cat([layer.arrange(dense(weights[layer.weight]).double()) for layer in layers])
    direction = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(POWER_STEPS):
        direction = direction / direction.norm()
        direction = gradient.mT @ (gradient @ direction)
    direction = direction / direction.norm()
    observed = gradient @ direction
    residual = float((gradient - torch.outer(observed, direction)).norm() / gradient.norm())
    offset, slope = layers[0].offset, layers[0].slope
    heard = (direction != 0) & (slope != 0)
    ends = torch.stack([offset - PIXEL_SLACK * slope, offset + (1 + PIXEL_SLACK) * slope])[:, heard] / direction[heard]
    low, high = float(ends.amin(0).max()), float(ends.amax(0).min())
    return InputDirection(numbers, layers[0], direction, observed, low, high, residual)


def _possible_targets(view: ServerView) -> Tensor | None:
    """Return the targets that the picture may have (K, ...), or None if they are too many or real numbers."""
    if view.labels is not None:
        return view.labels
    task = view.task
    classes = task.num_classes if task.loss.takes_classes else 0
    return task.loss.every_target(task.output_shape, max(classes, MAX_TRIED_LABELS))


def _rounding_limit(view: ServerView, weight: str) -> float:
    rounding = ROUNDING_MARGIN * relative_rounding(view, weight) if view.dtype.itemsize > 2 else 0.0
    return min(rounding, MAX_ROUNDING)
