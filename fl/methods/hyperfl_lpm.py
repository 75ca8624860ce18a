"""HyperFL-LPM: HyperFL for large pre-trained models, whose adapters alone are generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl.method import methods
from fl.methods.hyperfl import HyperFL
from fl.ranges import Count, StepSize
from fl.types import Scope, Task

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norm."""


@methods.register("hyperfl-lpm")
@dataclass(frozen=True, kw_only=True)
class HyperFLLPM(HyperFL):
    """HyperFL for large pre-trained models (Guo et al., AAAI 2025, section 3.3 and appendix D.1).

    HyperFL's rule over a network whose backbone is frozen (`resnet18-adapter`, `vit-adapter`): the hypernetwork then
    generates the adapters, since it generates whatever trains outside the classifier. Everybody knows the backbone.

    Constants are the paper's for ResNet-18. With ViT-S/16 set `lr=0.1` on CIFAR-10 and `lr=0.02` on EMNIST. The
    adapters' running statistics stay with the client where it trains in train mode; in evaluation mode, in which the
    authors train, they never move from 0 and 1 and are no secret.

    Attributes:
        lr: step size of hypernetwork and embedding.
        batch_size: images per step; None is all of them.
    """

    plain: ClassVar[str] = (
        "as hyperfl, but most of the network comes ready-made and known to everybody: the second network only makes "
        "the small parts that are put into it."
    )

    lr: StepSize = 0.01
    batch_size: Count | None = 16

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: only the hypernetwork is shared, and buffers that hold no client's statistics."""
        if self.train_mode and name in task.buffers and name.rpartition(".")[2] in STATISTICS:
            return Scope.PRIVATE
        return super().scope(name, task)
