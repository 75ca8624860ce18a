"""FedAvg and FedSGD: every parameter is shared, the server takes the weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fl.method import Method, methods
from fl.types import Group, Phase, Task


@methods.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1); with `steps=1` it is FedSGD.

    Attributes:
        lr: step size of local SGD.
        momentum: of local SGD.
        weight_decay: of local SGD.
        max_norm: clip each step's gradient to this norm, or None.
        epochs: local passes over the client's data; set to None when `steps` is given.
        steps: local steps instead of epochs.
        batch_size: images per step; None is all of them.
        sampler: how batches are drawn.
    """

    plain: ClassVar[str] = "clients train the whole network and send how it changed; the server averages the changes."

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_norm: float | None = None
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int | None = 50
    sampler: Literal["shuffle", "poisson", "sequential"] = "shuffle"

    def __post_init__(self) -> None:
        if self.steps is not None:  # epochs is only a default: naming steps replaces it
            object.__setattr__(self, "epochs", None)

    @classmethod
    def example(cls) -> FedAvg:
        """Two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """One phase in which everything moves."""
        group = Group(lr=self.lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
        return (
            Phase(
                groups=(group,),
                momentum=self.momentum,
                epochs=self.epochs,
                steps=self.steps,
                batch_size=self.batch_size,
                sampler=self.sampler,
            ),
        )
