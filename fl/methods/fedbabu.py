"""FedBABU: the classifier stays as it began while the extractor is trained; clients fine-tune afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from torch import nn

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.ranges import CountFrom0, ShareBelow1, StepSize
from fl.types import Group, Phase, Task


@methods.register("fedbabu")
@dataclass(frozen=True, kw_only=True)
class FedBABU(FedAvg):
    """Federated averaging with body aggregation and body update (Oh et al., ICLR 2022, Algorithm 1).

    The classifier is part of the network that everybody knows: it is neither trained nor sent. What the paper reports
    comes of fine-tuning afterwards (section 5), 5 epochs at the step size of training: set the federation's
    `fine_tune_epochs: 5` and read the accuracy "tuned". Constants are the authors' for CIFAR-100, with 4 local epochs
    (of 1, 4 and 10); they divide the step size by 10 after half and three quarters of the rounds, which is not done
    here.

    Attributes:
        lr: step size of the extractor, and of fine-tuning.
        momentum: of local SGD.
        epochs: local passes; None when `steps` is given.
        tunes: what fine-tuning moves, which the paper compares: the whole network ("full"), "head" or "body".
    """

    plain: ClassVar[str] = (
        "as fedavg, but the last layer stays as it was drawn at first, and only the layers below it are trained and "
        "averaged; clients tune the network to their pictures afterwards."
    )

    lr: StepSize = 0.1
    momentum: ShareBelow1 = 0.9
    epochs: CountFrom0 | None = 4
    tunes: Literal["full", "head", "body"] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tunes not in {"full", "head", "body"}:
            raise ValueError(f"expected tunes 'full', 'head' or 'body', got {self.tunes!r}")

    @classmethod
    def example(cls) -> FedBABU:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def client_model(self, task: Task) -> nn.Module:
        """Return the network with a frozen classifier."""
        model = super().client_model(task)
        for name, value in model.named_parameters():
            if name.startswith(task.head):
                value.requires_grad_(False)
        return model

    def fine_tuning_method(self) -> FedBABU:
        """Return the rule of fine-tuning, in which the classifier may move."""
        return _Tuning(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class _Tuning(FedBABU):
    """FedBABU's fine-tuning: `tunes` says what moves."""

    def client_model(self, task: Task) -> nn.Module:
        """Return the network as it is."""
        return FedAvg.client_model(self, task)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase; a group of step size 0 keeps what is not tuned where it is."""
        (phase,) = super().phases(task, round)
        (all_,) = phase.groups
        still = Group(lr=0.0)
        groups = {
            "full": (all_,),
            "head": (replace(all_, prefixes=(task.head,)), still),
            "body": (replace(still, prefixes=(task.head,)), all_),
        }
        return (replace(phase, groups=groups[self.tunes]),)
