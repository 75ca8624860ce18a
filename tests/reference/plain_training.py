"""Local training as anyone would write it: a module, `loss.backward()`, an optimizer of torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


def train(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer],
    max_norm: float | None = None,
) -> nn.Module:
    """A copy of `model` after one step of cross-entropy on each batch."""
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    for inputs, labels in batches:
        stepper.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
    return model


def per_sample_gradients(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    """The gradient of each image's cross-entropy, one after the other."""
    model, found = copy.deepcopy(model), []
    for image, label in zip(inputs, labels, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found
