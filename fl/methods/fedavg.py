"""FedAvg and FedSGD: every parameter is shared, the server takes the weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fl.method import Method, methods
from fl.ranges import ClipNorm, Count, CountFrom0, Positive, ShareBelow1, StepSize, Weight
from fl.types import OPTIMIZERS, Group, Optimizer, Phase, Task


@methods.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1); with `steps=1` it is FedSGD.

    Attributes:
        lr: step size of local training.
        optimizer: of local training, fresh in every round: as torch.optim has it, with its default constants.
        eps: what an adaptive optimizer adds to the size that it divides by; None is torch.optim's default (1e-8; 1e-10
            of Adagrad).
        momentum: of local SGD.
        weight_decay: of local training; "adamw" shrinks weights by it, the others add it to the gradient.
        max_norm: clip each step's gradient to this norm, or None.
        epochs: local passes over the client's data; set to None when `steps` is given.
        steps: local steps instead of epochs.
        batch_size: images per step; None is all of them.
        sampler: how batches are drawn.
    """

    plain: ClassVar[str] = "clients train the whole network and send how it changed; the server averages the changes."

    optimizers: ClassVar[tuple[str, ...]] = OPTIMIZERS
    """Those by which its clients can train."""

    lr: StepSize = 0.01
    optimizer: Optimizer = "sgd"
    eps: Positive | None = None
    momentum: ShareBelow1 = 0.0
    weight_decay: Weight = 0.0
    max_norm: ClipNorm | None = None
    epochs: CountFrom0 | None = 1
    steps: Count | None = None
    batch_size: Count | None = 50
    sampler: Literal["shuffle", "poisson", "sequential"] = "shuffle"

    def __post_init__(self) -> None:
        if self.steps is not None:  # epochs is only a default: naming steps replaces it
            object.__setattr__(self, "epochs", None)
        self.check_optimizer()

    def check_optimizer(self) -> None:
        """Refuse an optimizer that the method or its other settings can't go with.

        Raises:
            ValueError: says which and what to set.
        """
        if self.optimizer not in self.optimizers:
            able = " or ".join(map(repr, self.optimizers))
            raise ValueError(f"expected optimizer {able} for {self.name}, got {self.optimizer!r}")
        if self.optimizer == "sgd":
            if self.eps is not None:
                raise ValueError(f"expected eps only with an adaptive optimizer, got {self.eps} with optimizer 'sgd'")
            return
        if self.momentum:
            raise ValueError(f"expected momentum 0 with optimizer {self.optimizer!r}, got {self.momentum}: it is SGD's")
        if self.parametrization.structured:
            raise ValueError(
                f"expected optimizer 'sgd' for weights from a {self.parametrization.name}, got {self.optimizer!r}"
            )

    @classmethod
    def example(cls) -> FedAvg:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase in which everything moves."""
        group = Group(lr=self.lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
        return (
            Phase(
                groups=(group,),
                optimizer=self.optimizer,
                eps=self.eps,
                momentum=self.momentum,
                epochs=self.epochs,
                steps=self.steps,
                batch_size=self.batch_size,
                sampler=self.sampler,
            ),
        )
