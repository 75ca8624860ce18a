"""Which of several examples has which of the targets that the server knows in no order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.labels.assignment import read_classifier
from attacks.labels.targets import outputs_of
from attacks.update.label_gradients import batches_of_targets
from fl.losses import Loss
from fl.seeds import stream
from fl.view import ServerView

MOST_MATCHED = 128
"""Examples whose targets are told by what they left in the classifier, at most."""
MOST_TURNED = 4
"""Examples whose targets are put into every order, at most, where nothing tells which has which."""
MOVES = 4
"""Orders, drawn at random, in which it is asked whether a loss looks at where an example stands."""
SAME_GRADIENT = 1e-4
"""What gradients of the outputs in two batches may differ by, relative to the largest, to count as the same."""


@dataclass(frozen=True)
class KnownTargets:
    """The targets of several examples, as far as it is told which has which.

    Attributes:
        orders: the targets (N, ...) in the order of the examples, the likeliest first.
        complete: whether the right order is among these, if the examples are right.
    """

    orders: tuple[Tensor, ...]
    complete: bool

    @classmethod
    def of(cls, view: ServerView, images: Tensor) -> KnownTargets:
        """Return the known targets of images (N, C, H, W), of one step on all of them.

        What each left in a linear classifier is the gradient of its outputs, up to a factor that all share. So it is
        told which target has that gradient, under losses that look at each example by itself. Without such a classifier
        few examples are asked in every order.

        Args:
            view: that has `labels`.
            images: in [0, 1], in whatever order they were found.
        """
        known = view.labels
        assert known is not None
        if len(known) != len(images) or bool((known == known[:1]).all()):
            return cls((known,), True)
        outputs = outputs_of(view, images.to(view.device, view.dtype)).double()
        gradients = _of_each_pair(view.task.loss, outputs, known) if len(images) <= MOST_MATCHED else None
        if gradients is None:
            return cls((known,), False)
        read = read_classifier(view, view.update, images)
        if read is None or read[0].shape != outputs.flatten(1).shape:
            turned = tuple(_in_every_order(known)) if len(images) <= MOST_TURNED else (known,)
            return cls(turned, len(images) <= MOST_TURNED)
        return cls((known[_match(read[0].cpu(), gradients)],), True)


def _of_each_pair(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the gradient by each example's outputs of each target (N, N, K); None where more than both counts.

    Args:
        loss: of the client.
        outputs: of the examples (N, ...).
        targets: as many.
    """
    count = len(outputs)
    found = outputs.new_full((count, count, outputs[0].numel()), math.nan)
    examples = torch.arange(count)
    for numbers in batches_of_targets(loss, outputs, targets):
        found[examples, numbers] = _by_outputs(loss, outputs, targets[numbers.to(targets.device)])
    if not bool(found.isfinite().all()):
        return None  # no batch had some pair
    own = found[examples, examples]
    draw = stream(0, "places in a batch")
    for places in (examples, examples.roll(1), *(torch.randperm(count, generator=draw) for _ in range(MOVES))):
        moved = outputs[places], targets[places.to(targets.device)]
        if not loss.takes(*moved):
            return None
        off = (_by_outputs(loss, *moved) - own[places]).abs().max()  # for other targets beside it, or another place
        if not float(off) <= SAME_GRADIENT * float(own.abs().max()):
            return None
    return found.cpu()


def _by_outputs(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of a batch's loss by its outputs (N, K)."""
    with torch.enable_grad():
        given = outputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(given, targets), given)
    return gradient.detach().flatten(1)


def _match(seen: Tensor, gradients: Tensor) -> Tensor:
    """Return which target each example has (N,), so that all gradients fit what was seen up to one factor.

    Args:
        seen: what each example left (N, K).
        gradients: of each target (N, N, K).
    """
    strongest = int(seen.norm(dim=1).argmax())
    least, found = math.inf, torch.arange(len(seen))
    for one in gradients[strongest]:
        size = float(one.square().sum())
        factor = float((seen[strongest] * one).sum()) / size if size else 0.0
        if not factor > 0:
            continue
        costs = (seen[:, None] - factor * gradients).square().sum(2)
        rows, columns = linear_sum_assignment(costs.numpy())
        if (left := float(costs[rows, columns].sum())) < least:
            least, found = left, torch.from_numpy(columns)
    return found


def _in_every_order(targets: Tensor) -> Iterator[Tensor]:
    """Yield targets in all orders that differ."""
    numbers = torch.unique(targets, dim=0, return_inverse=True)[1].tolist()
    seen: set[tuple[int, ...]] = set()
    for order in itertools.permutations(range(len(targets))):
        key = tuple(numbers[one] for one in order)
        if key not in seen:
            seen.add(key)
            yield targets[list(order)]
