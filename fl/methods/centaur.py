"""CENTAUR: a private representation for all, and a classifier of its own for every client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.privacy.private_method import PrivateMethod
from fl.ranges import CountFrom0, ShareBelow1, StepSize, Weight
from fl.types import Group, Phase, Scope, Task


@methods.register("centaur")
@dataclass(frozen=True, kw_only=True)
class Centaur(PrivateMethod, FedAvg):
    """CENTAUR (Shen et al., ICLR 2023, Algorithm 1): first the classifier, then the extractor, which alone is sent.

    Shen et al. protect clients, through a trusted server (`mode: client-level`); their code has 15 epochs for the
    classifier, no momentum, and clips at 0.25 (EMNIST) to 0.01 (CIFAR-10). Defaults are those of the HyperFL authors'
    code (Guo et al., AAAI 2025), where every record's gradient of the extractor is clipped. There the classifier has no
    noise (`mode: as-published`), although it is trained on the same records; by default it has, and its epoch counts.

    Attributes:
        head_lr: step size of the classifier.
        head_epochs: passes for the classifier, before; 0 leaves the phase out.
    """

    plain: ClassVar[str] = (
        "clients share the layers that recognize shapes, trained under random noise, and keep the last layer, their "
        "classifier, to themselves."
    )
    trains_private_tensors: ClassVar[bool] = True
    released: ClassVar[str] = "the gradients of the classifier and then of the extractor"

    lr: StepSize = 0.01
    momentum: ShareBelow1 = 0.5
    weight_decay: Weight = 5e-4
    head_lr: StepSize = 0.1
    head_epochs: CountFrom0 = 1

    @classmethod
    def example(cls) -> Centaur:
        """Return both phases, two epochs of two steps for the extractor."""
        return cls(lr=0.1, epochs=2, batch_size=2, images=4, noise_multiplier=0.5, clip=1.0)

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: the classifier is private, everything else is shared."""
        return self.parametrization.scope(name) or (Scope.PRIVATE if name.startswith(task.head) else Scope.SHARED)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the classifier, then the extractor."""
        head = Group(prefixes=(task.head,), lr=self.head_lr, weight_decay=self.weight_decay)
        first = Phase(groups=(head,), momentum=self.momentum, epochs=self.head_epochs, batch_size=self.batch_size)
        (whole,) = super().phases(task, round)
        names = tuple(name for name in task.parameters if not name.startswith(task.head))
        main = replace(whole, groups=(replace(whole.groups[0], prefixes=names),))
        return (self.with_sampling(first), main) if self.head_epochs else (main,)
