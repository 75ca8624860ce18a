"""FedDF: the averaged network learns, on images that the server has, to say what the clients' networks say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from fl.data.sources.embedded import Faces
from fl.method import ServerState, methods
from fl.methods.bases.public_data import (
    PublicDataServer,
    build_module,
    client_result,
    ensemble_logits,
    with_module_state,
)
from fl.ranges import ClipNorm, Count, CountFrom0, StepSize
from fl.types import Group, Phase, Task, Upload


@methods.register("feddf")
@dataclass(frozen=True, kw_only=True)
class FedDF(PublicDataServer):
    """Ensemble distillation for robust model fusion (Lin et al., NeurIPS 2020), with one architecture for all clients.

    The server starts from FedAvg's mean and takes steps of Adam along the gradient of KL(softmax(z) || softmax(f(x))):
    z is the mean of the logits that the networks of the round's clients give its images x, which need no labels. The
    step size falls to 0 along a cosine, and gradients are clipped. What travels is FedAvg's.

    Constants are those of the authors' code for ResNet-8 on CIFAR-10, where x is CIFAR-100 or downsampled ImageNet:
    local SGD at step size 0.1 without momentum and decay, 40 epochs of batches of 64; on the server Adam at 1e-3 for
    10,000 steps, gradients clipped at 5. Batches of 128 are the default of its solver; with real images it takes the
    clients' size. It stops once 1,000 steps bring nothing more on labeled images that the server holds beside, a tenth
    of all training images, and returns the best network by them: here all steps are taken, so `server_steps` is worth
    choosing. Teachers judge in evaluation mode; the student trains in that of the clients, which moves batch-norm
    statistics.

    Attributes:
        lr: step size of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per local step.
        server_steps: of Adam in each round.
        server_lr: its step size at first; 0 is FedAvg, but for batch-norm statistics.
        server_batch: images per step of the server.
        server_max_norm: clips the gradient of each step of the server, or None.

    Raises:
        ValueError: a number out of range.
    """

    plain: ClassVar[str] = (
        "as fedavg, but the server also has pictures of its own, on which the averaged network learns to answer as the "
        "clients' networks do together."
    )

    lr: StepSize = 0.1
    epochs: CountFrom0 | None = 40
    batch_size: Count | None = 64
    server_steps: CountFrom0 = 10_000
    server_lr: StepSize = 1e-3
    server_batch: Count = 128
    server_max_norm: ClipNorm | None = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server_phase()

    @classmethod
    def example(cls) -> FedDF:
        """Return two epochs of two steps, three steps of the server on small faces."""
        server = {"public": Faces(size=8), "images": 6, "server_steps": 3, "server_lr": 0.01, "server_batch": 4}
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2, **server)  # type: ignore[arg-type]

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return FedAvg's mean, distilled."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        images = self.public_images(task).inputs
        target = (
            ensemble_logits([build_module(task, *client_result(server, upload)) for upload in uploads], images)
            .mean(0)
            .softmax(-1)
        )
        student = build_module(task, after.shared, after.buffers)
        moving = [value for value in student.parameters() if value.requires_grad]
        solver = torch.optim.Adam(moving, lr=self.server_lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, self.server_steps)
        for index in self.batches(server, self.server_phase(), len(images)):
            solver.zero_grad()
            said = student(images[index]).log_softmax(-1)
            functional.kl_div(said, target[index], reduction="batchmean").backward()
            if self.server_max_norm is not None:
                clip_grad_norm_(moving, self.server_max_norm)
            solver.step()
            schedule.step()
        return with_module_state(student, after)

    def server_phase(self) -> Phase:
        """Return the phase in which the server feeds its images; checks the settings."""
        group = Group(lr=self.server_lr, max_norm=self.server_max_norm)
        return Phase(groups=(group,), optimizer="adam", steps=self.server_steps, batch_size=self.server_batch)
