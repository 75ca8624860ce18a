"""Gradients of a loss by the outputs and by the last parameters, for many labels of the same images."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.search_control import check_time_limit
from fl.losses import Loss
from fl.tensors import Tensors, dense
from fl.view import ServerView

LAST = 2
"""Parameters that count as the last ones: of a linear layer with a bias, all."""
MAX_TRIED_LABELS = 100
"""Labels that are tried where none was found, at most."""


def batches_of_targets(loss: Loss, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Yield batches in which examples have each of some targets, as far as a loss takes them, by numbers of these (N,).

    A batch has one target for all examples. Where a loss refuses such a one, batches of different ones ask it. A pair
    of example and target may come twice.

    Args:
        loss: of the client.
        outputs: of the examples (N, ...).
        targets: (K, ...).
    """
    count, refused = len(outputs), set()
    for number in range(len(targets)):
        check_time_limit()
        if loss.takes(outputs, targets[[number] * count]):
            yield torch.full((count,), number)
        else:
            refused.add(number)
    for first in range(len(targets) if refused and count > 1 else 0):
        check_time_limit()
        numbers = (first + torch.arange(count)) % len(targets)
        if refused & {*numbers.tolist()} and loss.takes(outputs, targets[numbers]):
            yield numbers


@dataclass(frozen=True, eq=False)
class LabelGradients:
    """What flows back of labels in the network as it was sent, after one forward pass.

    Attributes:
        loss: of the client.
        outputs: (N, ...) of the images, with autograd's graph of the last parameters.
        parameters: the last ones that an update has, by name.
    """

    loss: Loss
    outputs: Tensor
    parameters: dict[str, Tensor]

    @classmethod
    def of(cls, view: ServerView, images: Tensor, names: Collection[str]) -> LabelGradients:
        """Evaluate the network.

        Args:
            view: in the precision that is computed in.
            images: (N, C, H, W).
            names: of the parameters that an update has.
        """
        weights: Tensors = {name: dense(value) for name, value in view.shared.items()}
        last = [name for name in weights if name in names][-LAST:]
        parameters = {name: dense(weights[name]).detach().requires_grad_() for name in last}
        network = view.client.network({**weights, **parameters}, {**view.client.task.buffers, **view.buffers})
        with torch.enable_grad():
            outputs = network(images.to(view.device, dense(next(iter(weights.values()))).dtype))
        return cls(view.task.loss, outputs, parameters)

    def by_outputs(self, labels: Tensor) -> Tensor:
        """Return the gradient by the outputs (N, ...)."""
        with torch.enable_grad():
            given = self.outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(given, labels.to(given.device)), given)
        return gradient

    def by_parameters(self, labels: Tensor) -> Tensor:
        """Return the gradient by the last parameters, as one vector; zeros of those that the outputs do not hang on."""
        return torch.cat([gradient.flatten() for gradient in self.by_each_parameter(labels).values()])

    def by_each_parameter(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the gradient by each of the last parameters, by name."""
        if not self.outputs.requires_grad:
            return {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        found = torch.autograd.grad(
            self.outputs,
            list(self.parameters.values()),
            self.by_outputs(labels),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self.parameters, found, strict=True))
