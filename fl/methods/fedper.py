"""FedPer: the extractor is shared, every client keeps a classifier of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.ranges import StepSize
from fl.types import Group, Phase, Scope, Task


@methods.register("fedper")
@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    """Federated learning with personalization layers (Arivazhagan et al., 2019, Algorithms 1 and 2).

    Base layers (the extractor) and personalization layers (the classifier) are trained together; the server averages
    the base layers only.

    Attributes:
        head_lr: step size of the classifier, which then is clipped apart from the extractor; None trains both as
            one group at `lr`, 0 leaves the classifier as it is.
    """

    plain: ClassVar[str] = "as fedavg, but each client keeps the last layer, its classifier, to itself."

    head_lr: StepSize | None = None

    @classmethod
    def example(cls) -> FedPer:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: the classifier is private, everything else is shared."""
        return self.parametrization.scope(name) or (Scope.PRIVATE if name.startswith(task.head) else Scope.SHARED)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase, with a group for the classifier if it has its own step size."""
        (phase,) = super().phases(task, round)
        if self.head_lr is None:
            return (phase,)
        (body,) = phase.groups
        head = Group(prefixes=(task.head,), lr=self.head_lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
        return (replace(phase, groups=(head, body)),)
