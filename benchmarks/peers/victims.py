"""Who is attacked: single images, each with what the server sees of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.models import models
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel


@dataclass(frozen=True)
class Victim:
    """One image and what its client sends.

    Attributes:
        image: (1, C, H, W) in [0, 1].
        label: (1,) int64.
        view: what the server saw, its update the gradient that peers are handed.
        gradient: in the order of the model's parameters.
        seed: of the attack.
    """

    image: Tensor
    label: Tensor
    view: ServerView
    gradient: list[Tensor]
    seed: int

    def start(self) -> torch.Generator:
        """Where the random start is drawn from, ours and the peers' alike."""
        return stream(self.seed, "attack", 0)


def victims(task: Task, images: Batch, *, knows_labels: bool) -> list[Victim]:
    """Return each image alone in one step of a client that got `task`'s network."""
    federation = Federation(
        Client(task, FedAvg(lr=1.0, steps=1, batch_size=None)), [ClientData(images, images)], seed=0
    )
    found = []
    for i in range(len(images)):
        one = images.take(torch.tensor([i]))
        view, _ = federation.observe(0, data=one, threat=ThreatModel(knows_labels=knows_labels))
        gradient = gradients(task.model, one.inputs, one.labels)
        named = dict(zip((name for name, _ in task.model.named_parameters()), gradient, strict=True))
        # weights before - weights after would be this gradient, rounded to the unit of the weights
        view = replace(view, update={name: named[name] for name in view.update})
        found.append(Victim(one.inputs, one.labels, view, gradient, seed=i))
    return found


def gradients(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Of the mean cross entropy, in the order of the model's parameters."""
    loss = nn.functional.cross_entropy(model(inputs), labels)
    return [g.detach() for g in torch.autograd.grad(loss, list(model.parameters()))]


def network(name: str, classes: int, settings: dict[str, object]) -> Task:
    """Return a network of ours from seed 0, its parameters ready for autograd."""
    task = models.build({"name": name, **settings}).build_task(num_classes=classes, seed=0)
    for parameter in task.model.parameters():
        parameter.requires_grad_()
    return task


def normalized(task: Task) -> nn.Module:
    """Return a copy of the network that takes normalized images, as peers search for them."""
    model = copy.deepcopy(task.model)
    model.normalize = nn.Identity()
    return model
