"""HyperFL: a shared hypernetwork generates every client's extractor from its private embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fl.method import Method, methods
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.parametrization import Parametrization
from fl.ranges import ClipNorm, Count, CountFrom0, ShareBelow1, StepSize, Weight
from fl.types import Group, Phase, Scope, Task


@methods.register("hyperfl")
@dataclass(frozen=True, kw_only=True)
class HyperFL(Method):
    """HyperFL (Guo et al., AAAI 2025, Algorithm 1): classifier first, then hypernetwork and embedding together.

    Constants are those of the authors' code for CIFAR-10 and CINIC-10; EMNIST and Fashion-MNIST use `lr=0.01`.

    Attributes:
        lr: step size of hypernetwork and embedding.
        head_lr: step size of the classifier.
        momentum: of SGD, fresh in every phase and round.
        weight_decay: of SGD, on everything that moves.
        max_norm: clips the hypernetwork's gradient and, apart from it, the embedding's.
        epochs: passes for hypernetwork and embedding; None when `steps` is given.
        steps: steps instead of epochs.
        head_epochs: passes for the classifier, before; 0 leaves the phase out.
        batch_size: images per step; None is all of them.
        learn_embedding: whether the embedding moves (section 3.2 allows fixed ones).
        parametrization: the hypernetwork.
        train_mode: the authors train in evaluation mode.
    """

    plain: ClassVar[str] = (
        "clients share a second network that makes the weights of the first from a secret code of each client; code "
        "and classifier stay private, which is meant to hide the pictures."
    )

    lr: StepSize = 0.02
    head_lr: StepSize = 0.1
    momentum: ShareBelow1 = 0.5
    weight_decay: Weight = 5e-4
    max_norm: ClipNorm | None = 50.0
    epochs: CountFrom0 | None = 5
    steps: Count | None = None
    head_epochs: CountFrom0 = 1
    batch_size: Count | None = 50
    learn_embedding: bool = True
    parametrization: Parametrization = field(default_factory=Hypernetwork)
    train_mode: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "epochs", None)

    @classmethod
    def example(cls) -> HyperFL:
        """Return a tiny hypernetwork, both phases."""
        return cls(parametrization=Hypernetwork.example(), epochs=2, batch_size=2)

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: only what the parametrization shares is shared."""
        return self.parametrization.scope(name) or (Scope.SHARED if name in task.buffers else Scope.PRIVATE)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the classifier, then hypernetwork and embedding."""
        head = Phase(
            groups=(Group(prefixes=(task.head,), lr=self.head_lr, weight_decay=self.weight_decay),),
            momentum=self.momentum,
            epochs=self.head_epochs,
            batch_size=self.batch_size,
        )
        moving = ["hypernet.", EMBEDDING] if self.learn_embedding else ["hypernet."]
        main = Phase(
            groups=tuple(
                Group(prefixes=(prefix,), lr=self.lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
                for prefix in moving
            ),
            momentum=self.momentum,
            epochs=self.epochs,
            steps=self.steps,
            batch_size=self.batch_size,
        )
        return (head, main) if self.head_epochs else (main,)
