"""A round of training that ours and the peers' code are asked for alike, and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

import fl.models
from benchmarks.peers.sources import Source
from benchmarks.peers.victims import normalized
from benchmarks.performance.noise_data import BATCH, federation, images
from fl.method import Method
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.types import Batch, Task

IMAGES = 600
LR, MOMENTUM, DECAY = 0.02, 0.5, 5e-4
CLIP, NOISE = 0.04, 10.625
"""All but the step size is the HyperFL authors'; the noise is what Opacus calibrates there (`trainers.DPAuthors`)."""


@dataclass(frozen=True)
class Setting:
    """A round, the same for every side.

    Attributes:
        network: by its name here.
        clients: with `IMAGES` images each.
        epochs: of local training.
        shuffle: whether the images are in a new order in every epoch, or always in that of the data.
        silent: whether DP-FedAvg adds no noise, so that two sides can be compared.
    """

    network: str
    clients: int = 1
    epochs: int = 5
    shuffle: bool = True
    silent: bool = False

    @property
    def sampler(self) -> Literal["shuffle", "sequential"]:
        """How batches are drawn, as methods of ours call it."""
        return "shuffle" if self.shuffle else "sequential"

    @property
    def task(self) -> Task:
        """The network, with the same initial weights each time."""
        return fl.models.build(self.network, num_classes=10, seed=0)

    @property
    def plain_model(self) -> nn.Module:
        """The network for images that are normalized already."""
        return normalized(self.task)

    def data(self) -> list[Batch]:
        """Return each client's images, normalized: peers normalize on loading, ours in the network's first layer."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.task.mean, self.task.std))
        held = (images(self.task, IMAGES, number) for number in range(self.clients))
        return [Batch((own.inputs - mean) / std, own.labels) for own in held]


class Trainer:
    """A federation that is ready to train."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def round(self) -> None:
        """Train every client."""
        raise NotImplementedError

    def weights(self) -> list[Tensor]:
        """Of the network after the round of a single client, in the order of its layers."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


class PeerTrainer(Trainer):
    """A peer's.

    Attributes:
        source: of the code.
        licence: of the code.
        changes: what is not as published in the round that is measured.
    """

    source: ClassVar[Source]
    licence: ClassVar[str]
    changes: ClassVar[str]


class Ours(Trainer):
    """A federation of ours, in the loop: one client after the other, then the aggregation."""

    def __init__(self, setting: Setting, method: Method) -> None:
        super().__init__(setting)
        self.run = federation(setting.task, method, clients=setting.clients, each=IMAGES, engine="loop")

    def round(self) -> None:
        """With aggregation."""
        self.run.step(evaluate=False)

    def weights(self) -> list[Tensor]:
        """Return the server's part."""
        return [dense(self.run.server.shared[name]) for name, _ in self.setting.task.model.named_parameters()]

    def close(self) -> None:
        """The federation's engine."""
        self.run.close()


def fedavg(setting: Setting) -> Ours:
    """Ours, FedAvg."""
    method = FedAvg(
        lr=LR, momentum=MOMENTUM, weight_decay=DECAY, batch_size=BATCH, epochs=setting.epochs, sampler=setting.sampler
    )
    return Ours(setting, method)


def dp_fedavg(setting: Setting) -> Ours:
    """Ours, DP-FedAvg as the HyperFL authors run it: batches of one size, from shuffled images."""
    method = DPFedAvg(
        mode="as-published",
        noise_multiplier=0.0 if setting.silent else NOISE,
        clip=CLIP,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        batch_size=BATCH,
        epochs=setting.epochs,
        sampler=setting.sampler,
    )
    return Ours(setting, method)
