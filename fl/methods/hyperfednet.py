"""HyperFedNet: a small shared hypernetwork makes all convolutions from private embeddings, one for every filter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.models.hypernetworks.filter_hypernetwork import EMBEDDINGS, Filters
from fl.parametrization import Generated, Parametrization
from fl.ranges import Count, CountFrom0, ShareBelow1, StepSize, Weight
from fl.types import Phase, Task


@methods.register("hyperfednet")
@dataclass(frozen=True, kw_only=True)
class HyperFedNet(FedAvg):
    """HyperFedNet (Chen et al., 2024, Algorithm 1): the server averages the hypernetwork, all else stays local.

    Hypernetwork, embeddings and the network's own weights take each step together, and filters are generated anew for
    it; `Filters(regenerate="round")` is Algorithm 1 to the letter, which generates them once a round (line 19) and then
    steps along them as well (line 23). Constants are those of section V-A. The paper's step size is the best of 0.1
    with drops, 0.1, 0.01 and 0.001, it does not say which; where it drops is not given either. Batch norm uses the
    batch's statistics in training and each client's own running ones at test (not given in the paper). A new client
    starts from the initial embeddings and weights (line 15), which are those of all clients.

    With `parametrization: direct` this is FedAvg under the paper's training.

    Attributes:
        lr: step size of everything that moves.
        momentum: of SGD, fresh in every round.
        nesterov: Nesterov's form of it.
        weight_decay: on everything that moves.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
        drops: rounds from which the step size is a tenth of what it was.
        tune: what fine-tuning moves: "own" the network's own weights, which met other filters before (section IV-C);
            "private" the embeddings as well.
        parametrization: the hypernetwork.
    """

    plain: ClassVar[str] = (
        "clients share a small second network that makes the filters of the first, piece by piece, from secret codes; "
        "codes, classifier and all other weights stay private."
    )

    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)  # with Nesterov's momentum

    lr: StepSize = 0.1
    momentum: ShareBelow1 = 0.9
    nesterov: bool = True
    weight_decay: Weight = 5e-4
    epochs: CountFrom0 | None = 4
    batch_size: Count | None = 128
    drops: tuple[CountFrom0, ...] = ()
    tune: Literal["own", "private"] = "own"
    parametrization: Parametrization = field(default_factory=Filters)

    @classmethod
    def example(cls) -> HyperFedNet:
        """Return two epochs of two steps on one tiny filter."""
        return cls(parametrization=Filters(embedding=3, block=(4, 1)), epochs=2, batch_size=2)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase in which everything moves."""
        (phase,) = super().phases(task, round)
        passed = sum(round >= drop for drop in self.drops)
        groups = tuple(replace(group, lr=group.lr * 0.1**passed) for group in phase.groups)
        return (replace(phase, groups=groups, nesterov=self.nesterov),)

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the network's own weights, and the embeddings where these are tuned, at the last step size."""
        (phase,) = self.phases(task, max(self.drops, default=0))
        made = self.parametrization.generates(task) if isinstance(self.parametrization, Generated) else []
        own = tuple(name for name in task.parameters if name not in made)
        moving = (*own, EMBEDDINGS) if self.tune == "private" else own
        return (replace(phase, groups=(replace(phase.groups[0], prefixes=moving),), epochs=epochs, steps=None),)
