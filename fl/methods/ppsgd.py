"""PPSGD: common layers with a common classifier, to which every client adds one of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.additive_head import PERSONAL, AdditiveHead
from fl.parametrization import Parametrization
from fl.privacy.private_method import PrivateMethod
from fl.ranges import ShareBelow1, StepSize, Weight
from fl.types import Group, Phase, Scope, Task


@methods.register("ppsgd")
@dataclass(frozen=True, kw_only=True)
class PPSGD(PrivateMethod, FedAvg):
    """PPSGD (Bietti et al., ICML 2022, Algorithm 1): logits (w + theta_i) phi(x), all three learned at once.

    Extractor and common classifier w are clipped together, get noise and are sent; the personal theta_i stays. The
    gradient of theta_i is that of w, so by default the noisy one serves both and costs nothing more. Bietti et al.
    protect clients, through a trusted server, in one joint step a round (`mode: client-level, steps: 1`). The HyperFL
    authors' code (Guo et al., AAAI 2025) has no common classifier (`parametrization: direct`) and trains the personal
    one without noise (`mode: as-published`); it stops at the first batch, as it changes weights between two passes
    over one graph. Defaults are its constants.

    Attributes:
        head_lr: step size of the personal classifier; over `lr` it is the paper's alpha.
        parametrization: the sum of two classifiers; "direct" leaves the common one out.
    """

    plain: ClassVar[str] = (
        "clients share a network trained under random noise, and each adds a correction of its own to the last layer, "
        "which it keeps."
    )
    trains_private_tensors: ClassVar[bool] = True
    released: ClassVar[str] = "the gradient of extractor and classifier together"

    lr: StepSize = 0.01
    momentum: ShareBelow1 = 0.5
    weight_decay: Weight = 5e-4
    head_lr: StepSize = 0.1
    parametrization: Parametrization = field(default_factory=AdditiveHead)

    @classmethod
    def example(cls) -> PPSGD:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, head_lr=0.2, epochs=2, batch_size=2, images=4, noise_multiplier=0.5, clip=1.0)

    def scope(self, name: str, task: Task) -> Scope:
        """Return what the parametrization says; without a common classifier the client's own is private."""
        return self.parametrization.scope(name) or (Scope.PRIVATE if name.startswith(task.head) else Scope.SHARED)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase, the private part with its own step size."""
        (phase,) = super().phases(task, round)
        own = Group(prefixes=(PERSONAL, task.head), lr=self.head_lr, weight_decay=self.weight_decay)
        return (replace(phase, groups=(own, *phase.groups)),)
