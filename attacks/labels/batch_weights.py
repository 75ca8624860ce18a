"""How much an example counts in a batch, where a loss of the user's own lets that follow from the others' classes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement, islice

import torch
from torch import Tensor

from fl.losses import Loss
from fl.losses.function import FunctionError, OwnLoss, function_errors_named
from fl.seeds import stream

MOST_BATCHES = 1000
"""Batches of classes that are tried, at most."""
SAME_WEIGHT = 1e-4
"""How far weights, or directions of gradients, may be apart and count as the same, relative to them."""


def batch_weights(
    loss: Loss, output_shape: torch.Size, targets: int, count: int, device: torch.device | None = None
) -> list[Tensor] | None:
    """Return for each target how much its example may count in a batch, where 1 is an equal share.

    In PyTorch's weighted cross entropy it is the weight of its class over the mean weight of the batch's classes.
    All batches of classes are tried, with outputs drawn at random. Where these are too many, but how often
    classes occur decides, all ways in which they may occur are.

    Args:
        loss: of the client.
        output_shape: of one example.
        targets: how many an example may have: the classes (K,), under a loss of the user's own.
        count: examples in the batch, > 1.
        device: where the loss is taken, which may hold tensors of its own; None is the CPU.

    Returns:
        Different weights (n,) of each target, in double precision, on the CPU; None where more than classes decides, or
        where batches are too many to try.
    """
    if not isinstance(loss, OwnLoss) or not loss.takes_classes:
        return [torch.ones(1, dtype=torch.float64)] * targets
    try:
        with function_errors_named():
            outputs = torch.randn(count, *output_shape, generator=stream(0, "batch weights")).to(device)
            return _weights_of_classes(loss, outputs)
    except FunctionError:  # it takes no example alone
        return [torch.ones(1, dtype=torch.float64)] * targets


def _weights_of_classes(loss: OwnLoss, outputs: Tensor) -> list[Tensor] | None:
    """Return the different weights (n,) of each class by outputs (N, K) of a batch; None where they are not told."""
    count, classes = outputs.shape[:2]
    asked = [(first + torch.arange(count)) % classes for first in range(0, classes, count)]
    # weights by how often classes occur in the batch are equal where each occurs as often
    asked += [torch.where(torch.arange(count) < count - 1, first, (first + 1) % classes) for first in range(classes)]
    seen = [_weights_in(loss, outputs, batch) for batch in asked if loss.takes(outputs, batch)]
    if seen and all(one is not None and bool(((one - 1).abs() <= SAME_WEIGHT).all()) for one in seen):
        return [torch.ones(1, dtype=torch.float64)] * classes
    if math.comb(classes + count - 1, count) > MOST_BATCHES:
        return _weights_of_any_class(loss, outputs)
    found: list[set[float]] = [set() for _ in range(classes)]
    for batch in combinations_with_replacement(range(classes), count):
        if not loss.takes(outputs, torch.tensor(batch)):
            continue
        weights = _weights_in(loss, outputs, torch.tensor(batch))
        if weights is None:
            return None
        for label, weight in zip(batch, weights.tolist(), strict=True):
            found[label].add(weight)
    return [torch.tensor(sorted(values) or [1.0], dtype=torch.float64) for values in found]


def _weights_of_any_class(loss: OwnLoss, outputs: Tensor) -> list[Tensor] | None:
    """Return the weights that each class may have where only how often classes occur decides; None where more does.

    Then it is enough to try each way in which classes may occur, with two choices of these.
    """
    count, classes = outputs.shape[:2]
    ways = list(islice(_partitions(count, count), MOST_BATCHES + 1))
    if len(ways) > MOST_BATCHES:
        return None
    found, renamed = set[float](), torch.randperm(classes, generator=stream(0, "renamed classes"))
    for times in ways:
        if len(times) > classes:
            continue
        batch = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
        each = [_weights_in(loss, outputs, one) for one in (batch, renamed[batch]) if loss.takes(outputs, one)]
        if any(one is None for one in each) or len(each) == 1:
            return None
        if each and not torch.allclose(each[0], each[1], rtol=SAME_WEIGHT, atol=0):  # type: ignore[arg-type]
            return None
        found |= {value for one in each[:1] if one is not None for value in one.tolist()}
    return [torch.tensor(sorted(found) or [1.0], dtype=torch.float64)] * classes


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of numbers of at most this size, the largest first."""
    if not total:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def _weights_in(loss: OwnLoss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return how much each example counts (N,) beside what it does alone; None where its gradient turns."""
    targets = targets.to(outputs.device)
    together = len(outputs) * _gradient(loss, outputs, targets)
    alone = torch.cat([_gradient(loss, outputs[[i]], targets[[i]]) for i in range(len(outputs))])
    size = alone.square().sum(1)
    weights = torch.where(size > 0, (together * alone).sum(1) / size.where(size > 0, torch.ones_like(size)), 0.0)
    turned = (together - weights[:, None] * alone).norm(dim=1) > SAME_WEIGHT * together.norm(dim=1)
    return None if bool(turned.any()) else weights


def _gradient(loss: OwnLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        given = outputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(given, targets), given)
    return gradient.double().nan_to_num()
