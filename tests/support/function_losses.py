"""Losses that are given as functions, and what a step under one sends of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction
from attacks.verification.confirmation import confirm
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

SHAPE, CLASSES, LR = (3, 8, 8), 6, 0.1


Function = Callable[[Tensor, Tensor], Tensor]


entropy = functional.cross_entropy


def focal(outputs: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Lin et al., ICCV 2017, equation 4."""
    each = entropy(outputs, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** gamma * each).mean()


def smoothed(share: float) -> Function:
    return partial(entropy, label_smoothing=share)


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return entropy(outputs, labels, weight=torch.linspace(0.5, 2, outputs.shape[1]).to(outputs))


LOSSES: dict[str, Function] = {
    "smoothed": smoothed(0.1),
    "focal": focal,
    "weighted": weighted,
    "module": nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES), label_smoothing=0.05),
    "sum": partial(entropy, reduction="sum"),
    "margin": functional.multi_margin_loss,
}


def network(classes: int = CLASSES, *, end: nn.Module | None = None) -> nn.Module:
    ends = [] if end is None else [end]
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, classes), *ends)
    initialize(model, stream(0, "network"))
    return model


def convolutional(classes: int = CLASSES) -> nn.Module:
    body = nn.Conv2d(3, 24, 3, padding=1, stride=2), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(384, 32), nn.ReLU()
    model = nn.Sequential(*body, nn.Linear(32, classes))
    initialize(model, stream(0, "network"))
    return model


def pictures(count: int) -> Tensor:
    return torch.rand(count, *SHAPE, generator=stream(0, "pictures")).mul(255).round() / 255


def labels_of(count: int, classes: int = CLASSES) -> Tensor:
    """With one label twice where there are more than two pictures."""
    return torch.tensor([1, 0, 4, 1, 5, 2, 2, 3])[:count] % classes


def seen(
    model: nn.Module, made: Function, stated: object, images: Tensor, labels: Tensor, count: int = 0
) -> ServerView:
    """The view of a step under one loss, of which another or the same is stated, and so many pictures."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(made(model(images), labels), list(named.values()))
    update = {n: (p - (p - LR * grad)).detach() for (n, p), grad in zip(named.items(), grads, strict=True)}
    method = FedAvg(lr=LR, steps=1, batch_size=None, train_mode=False)
    return from_update(model, update, input_shape=SHAPE, method=method, batch_size=count or len(images), loss=stated)


def claimed(view: ServerView, images: Tensor, labels: Tensor | None = None) -> Reconstruction:
    """What is left of a claim that these pictures are verified."""
    found = confirm(view, Reconstruction(inputs=images, labels=labels, verified=True))
    assert isinstance(found, Reconstruction)
    return found


def own_output(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of the label's own output alone, so that what flows back has one direction for each label."""
    return functional.softplus(-outputs[range(len(labels)), labels]).mean()


def linear(*, bias: float = 0.0) -> nn.Module:
    """With a bias by which all classes but two are far from likely, if one is given."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES))
    initialize(model, stream(0, "network"))
    model[1].bias.data[2:] += bias
    return model


def unbent(bias: float) -> nn.Module:
    """Whose activations are all open."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    initialize(model, stream(0, "network"))
    model[1].bias.data.fill_(3.0)
    model[3].bias.data[2:] = bias
    return model


class Mixed(nn.Module):
    """Mixes outputs, so that what flows back into the last layer is not what flows back into them."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs @ torch.randn(CLASSES, CLASSES, generator=stream(4, "mixed")).to(outputs)


class RefusedError(Exception):
    """What a user's own code raises."""


def two_classes_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    if len(labels.unique()) < 2:
        raise RefusedError("needs two classes")
    return smoothed(0.1)(outputs, labels)


def own_batch_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    if sorted(labels.tolist()) != [0, 1, 4]:
        raise RefusedError("needs its own batch")
    return smoothed(0.1)(outputs, labels)


def now_and_then(calls: Iterator[int]) -> Function:
    def raising(outputs: Tensor, labels: Tensor) -> Tensor:
        if next(calls) % 5 == 4:
            raise RefusedError("not now")
        return smoothed(0.1)(outputs, labels)

    return raising
