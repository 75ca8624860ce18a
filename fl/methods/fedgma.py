"""FedGMA: the server moves a weight less the less its clients agree on the direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fl.method import ServerState, mean, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, PositiveStep, Share, StepSize, Weight
from fl.tensors import dense
from fl.types import Task, Upload


@methods.register("fedgma")
@dataclass(frozen=True, kw_only=True)
class FedGMA(FedAvg):
    """Gradient masked averaging (Tenison et al., TMLR 2023, section 4).

    For every single weight the server takes the agreement A = |mean of the signs of the clients' updates|, clients
    counting alike, and multiplies the mean update, in which they count by their images, by 1 where A >= tau and by A
    elsewhere. Constants are those hFedF's Table 10 found for PACS, and its 2 epochs of batches of 64; Office-Home and
    VLCS take `tau=0.3` and `0.5`, with `server_lr=0.01`.

    Attributes:
        tau: threshold of the agreement, in [0, 1]; 0 is FedAvg.
        server_lr: step size of the server.
        lr: step size of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = "as fedavg, but a weight moves little where the clients' changes point both ways."

    tau: Share = 0.7
    server_lr: PositiveStep = 1.0
    lr: StepSize = 1e-3
    weight_decay: Weight = 1e-4
    epochs: CountFrom0 | None = 2
    batch_size: Count | None = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau <= 1:
            raise ValueError(f"expected tau in [0, 1], got {self.tau}")
        if not self.server_lr > 0:
            raise ValueError(f"expected server_lr > 0, got {self.server_lr}")

    @classmethod
    def example(cls) -> FedGMA:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the masked mean; buffers as in FedAvg."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        shared = dict(server.shared)
        for name, value in server.shared.items():
            updates = [dense(upload.update[name]) for upload in uploads]
            whole = dense(mean(uploads, lambda upload, name=name: upload.update[name]))  # type: ignore[misc]
            shared[name] = dense(value) - self.server_lr * mask(updates, self.tau) * whole
        return replace(after, shared=shared)


def mask(updates: Sequence[Tensor], tau: float) -> Tensor:
    """Return 1 where the signs of `updates` agree to at least `tau`, their agreement in [0, 1] elsewhere."""
    agreement = torch.stack(tuple(updates)).sign().mean(0).abs()
    return torch.where(agreement >= tau, torch.ones_like(agreement), agreement)
