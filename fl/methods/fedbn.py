"""FedBN: batch normalization stays with the client, everything else is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count
from fl.types import Scope, Task


@methods.register("fedbn")
@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """FedAvg without the batch-norm layers (Li et al., ICLR 2021, Algorithm 1): weights and statistics both stay.

    Constants are those of the authors' code for digits: step size 0.01, one epoch of batches of 32. Where a
    parametrization says who holds a parameter, its word counts first.

    Attributes:
        batch_size: images per step.
    """

    plain: ClassVar[str] = "as fedavg, but each client keeps to itself how its layers scale and center their inputs."

    batch_size: Count | None = 32

    @classmethod
    def example(cls) -> FedBN:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: the parameters and statistics of batch norm are private, everything else is shared."""
        given = self.parametrization.scope(name)
        if given is not None:
            return given
        return Scope.PRIVATE if _is_batch_norm(name, task) else Scope.SHARED


def _is_batch_norm(name: str, task: Task) -> bool:
    """Return whether a parameter or buffer of the network belongs to a batch-norm layer.

    A generator's belong to none.
    """
    if name not in task.parameters and name not in task.buffers:
        return False
    return isinstance(task.model.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._BatchNorm)
