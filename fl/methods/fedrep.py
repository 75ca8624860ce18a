"""FedRep: each client fits a classifier of its own to the shared extractor, then the extractor to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.ranges import Count, CountFrom0, ShareBelow1, Weight
from fl.types import Group, Phase, Task


@methods.register("fedrep")
@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """Federated representation learning (Collins et al., ICML 2021, Algorithm 1): head epochs, then body epochs.

    The classifier stays with the client and never moves together with the extractor. Constants are the paper's for
    CIFAR-10, as in the authors' scripts (`--local_ep 11 --local_rep_ep 1`); FEMNIST and CIFAR-100 take 5 epochs for the
    extractor. Their decay leaves biases out, the one here does not. Momentum starts at zero in both phases.

    Attributes:
        lr: step size of the extractor, and of the classifier where `head_lr` is None.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: passes for the extractor; None when `steps` is given.
        steps: steps for the extractor instead of epochs.
        batch_size: images per step.
        head_lr: step size of the classifier; None is that of the extractor, 0 leaves the classifier as it is.
        head_epochs: passes for the classifier, before the extractor moves; 0 leaves the phase out.
    """

    plain: ClassVar[str] = (
        "each client first trains the last layer, which it keeps, then the rest of the network, which the server "
        "averages."
    )

    momentum: ShareBelow1 = 0.5
    weight_decay: Weight = 1e-4
    batch_size: Count | None = 10
    head_epochs: CountFrom0 = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs < 0:
            raise ValueError(f"expected head_epochs >= 0, got {self.head_epochs}")

    @classmethod
    def example(cls) -> FedRep:
        """Return both phases, two steps an epoch, everything on."""
        return cls(
            lr=0.1, head_lr=0.2, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, head_epochs=1, batch_size=2
        )

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the classifier, then the extractor; a group of step size 0 keeps the classifier where it is."""
        (phase,) = FedAvg.phases(self, task, round)
        (moving,) = phase.groups
        own = replace(moving, prefixes=(task.head,), lr=self.lr if self.head_lr is None else self.head_lr)
        body = replace(phase, groups=(Group(prefixes=(task.head,), lr=0.0), moving))
        head = replace(phase, groups=(own,), epochs=self.head_epochs, steps=None)
        return (head, body) if self.head_epochs else (body,)
