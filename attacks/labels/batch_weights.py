"""How much an example counts in a batch, where a loss of the user's own lets that follow from the others' classes."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

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
    All batches of classes are tried, with outputs drawn at random.

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
    seen = [_weights_in(loss, outputs, batch) for batch in asked if loss.takes(outputs, batch)]
    if seen and all(one is not None and bool(((one - 1).abs() <= SAME_WEIGHT).all()) for one in seen):
        return [torch.ones(1, dtype=torch.float64)] * classes
    if math.comb(classes + count - 1, count) > MOST_BATCHES:
        return None
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
