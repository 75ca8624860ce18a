"""FedBE: as FedDF, and among the teachers are networks drawn from a distribution around the clients' ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn

from fl.data.partitions.label_skew import dirichlet
from fl.data.sources.embedded import Faces
from fl.method import ServerState, methods
from fl.methods.bases.public_data import (
    PublicDataServer,
    build_module,
    client_result,
    ensemble_logits,
    split_batches,
    with_module_state,
)
from fl.ranges import Count, CountFrom0, Positive, ShareBelow1, StepSize, Weight
from fl.tensors import Tensors, dense
from fl.types import Group, Phase, Task, Upload


@methods.register("fedbe")
@dataclass(frozen=True, kw_only=True)
class FedBE(PublicDataServer):
    """Bayesian model ensemble (Chen and Chao, ICLR 2021), as the authors' code has it.

    Teachers are the networks of the round's clients, their mean by images, and `drawn_models` that are drawn. Their
    mean probabilities on the server's images, which need no labels, are sharpened: p^(1 / temperature), scaled to sum
    to 1. The mean network follows KL(target || its own probabilities) by SGD, a mean over images and classes, and what
    the server sends is the mean of its iterates (stochastic weight averaging): those after `average_from` steps, every
    `average_every`. Where there are none of them it is the last one. What travels is FedAvg's.

    "gaussian": let g_i be the way from the network that was sent to client i's, tensor by tensor and of length 1. A
    draw is the sent tensor plus the mean length of these ways times (mean of g_i + `spread` * their standard deviation
    * e), e from N(0, I), number by number; variances are at least 1e-5, and clients count alike. "dirichlet": a mean of
    the clients' networks with random weights. The code gives no concentration for them; 1 is that of FedLAW's code.

    Constants are those of the code for its ResNet-32 on CIFAR-10, 10,000 of whose 50,000 training images the server
    holds: clients take 20 epochs of batches of 40 by SGD at 0.01 with momentum 0.9 and weight decay 2e-4 (1e-3 for a
    plain CNN), on the server step size 1e-3, momentum 0.9 and decay 1e-5. Its clients' step size depends on the round
    (half in the first, 0.2, 0.1 and 0.01 of it after 30, 60 and 90 % of all) and its decay spares biases and batch
    norm; here neither. It draws batch-norm statistics, too; here those of drawn networks are the mean ones. After
    averaging they are taken anew on the server's images, as there. It could not be checked against the paper's text
    whether its Gaussian is that of the code, nor its schedule of weight averaging.

    Attributes:
        lr: step size of local SGD.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per local step.
        drawn_models: how many teachers are drawn each round; 0 leaves clients and mean.
        distribution: they are drawn from.
        spread: of the Gaussian.
        concentration: of the Dirichlet distribution.
        temperature: below 1 sharpens.
        server_epochs: passes over the server's images in each round.
        server_lr: step size of the server; 0 is FedAvg, but for batch-norm statistics.
        server_batch: images per step of the server.
        average_from: steps of the server before the first that may enter the average.
        average_every: steps between those that do.

    Raises:
        ValueError: a number out of range.
    """

    plain: ClassVar[str] = (
        "as feddf, but the answers to learn are also those of further networks, drawn at random around the clients'."
    )

    takes_statistics: ClassVar[bool] = True

    lr: StepSize = 0.01
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 2e-4
    epochs: CountFrom0 | None = 20
    batch_size: Count | None = 40
    drawn_models: CountFrom0 = 10
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"
    spread: Weight = 0.1
    concentration: Positive = 1.0
    temperature: Positive = 0.5
    server_epochs: CountFrom0 = 20
    server_lr: StepSize = 1e-3
    server_batch: Count = 128
    average_from: CountFrom0 = 500
    average_every: Count = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server_phase()
        for key, least in {"drawn_models": 0, "spread": 0, "average_from": 0, "average_every": 1}.items():
            if not getattr(self, key) >= least:
                raise ValueError(f"expected {key} >= {least}, got {getattr(self, key)}")
        for key in ("concentration", "temperature"):
            if not getattr(self, key) > 0:
                raise ValueError(f"expected {key} > 0, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> FedBE:
        """Return two epochs of two steps, three steps of the server on small faces, two of them averaged."""
        server = {"public": Faces(size=8), "images": 6, "server_epochs": 1, "server_lr": 0.1, "server_batch": 2}
        drawn = {"drawn_models": 2, "average_from": 1, "average_every": 1}
        local = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
        return cls(**local, **server, **drawn)  # type: ignore[arg-type]

    def server_phase(self) -> Phase:
        """Return the phase in which the server trains."""
        group = Group(lr=self.server_lr, weight_decay=1e-5)
        return Phase(groups=(group,), momentum=0.9, epochs=self.server_epochs, batch_size=self.server_batch)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return FedAvg's mean, distilled."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        mean = build_module(task, after.shared, after.buffers)
        drawn = [build_module(task, params, after.buffers) for params in self.sample_teachers(server, uploads)]
        teachers = [mean, *drawn, *(build_module(task, *client_result(server, upload)) for upload in uploads)]
        images = self.public_images(task).inputs
        said = ensemble_logits(teachers, images).softmax(-1).mean(0) ** (1 / self.temperature)
        return with_module_state(self._distill(mean, images, said / said.sum(-1, keepdim=True), server), after)

    def sample_teachers(self, server: ServerState, uploads: Sequence[Upload]) -> list[Tensors]:
        """Return the parameters of the teachers that are drawn."""
        generator = self.server_generator(server, "models")
        if self.distribution == "dirichlet":
            shares = dirichlet(np.full(len(uploads), self.concentration), self.drawn_models, generator)
            return [_weighted_model(server, uploads, row.tolist()) for row in shares]
        return [_sample_gaussian(server, uploads, self.spread, generator) for _ in range(self.drawn_models)]

    def _distill(self, student: nn.Module, images: Tensor, target: Tensor, server: ServerState) -> nn.Module:
        """Return the student after SGD with weight averaging."""
        phase, averaged = self.server_phase(), AveragedModel(student)
        (group,) = phase.groups
        moving = [value for value in student.parameters() if value.requires_grad]
        solver = torch.optim.SGD(moving, group.lr, phase.momentum, weight_decay=group.weight_decay)
        for step, index in enumerate(self.batches(server, phase, len(images)), 1):
            solver.zero_grad()
            said = student(images[index]).log_softmax(-1)
            (functional.kl_div(said, target[index], reduction="batchmean") / said.shape[-1]).backward()
            solver.step()
            if step > self.average_from and step % self.average_every == 0:
                averaged.update_parameters(student)
        if not averaged.n_averaged:
            return student
        update_bn(split_batches(images, self.server_batch), averaged.module)
        return averaged.module


def _sample_gaussian(
    server: ServerState, uploads: Sequence[Upload], spread: float, generator: torch.Generator
) -> Tensors:
    """Return a draw from the Gaussian."""
    found: Tensors = {}
    for name, value in server.shared.items():
        ways = -torch.stack([dense(upload.update[name]) for upload in uploads])
        lengths = ways.flatten(1).norm(dim=1)
        tiny = torch.finfo(ways.dtype).tiny
        units = ways / lengths.clamp_min(tiny).view(-1, *[1] * (ways.ndim - 1))
        mean = units.mean(0)
        deviation = (units.square().mean(0) - mean.square()).clamp_min(1e-5).sqrt()
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64).to(mean)
        found[name] = dense(value) + lengths.mean() * (mean + spread * deviation * noise)
    return found


def _weighted_model(server: ServerState, uploads: Sequence[Upload], shares: Sequence[float]) -> Tensors:
    """Return the mean of the clients' networks with these weights."""
    return {
        name: dense(value) - sum(share * dense(u.update[name]) for share, u in zip(shares, uploads, strict=True))
        for name, value in server.shared.items()
    }
