"""FedSAM: clients take the gradient where the loss is worst nearby, so that they end where it is flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, Weight
from fl.tensors import Tensors, add, norm
from fl.types import Batch

if TYPE_CHECKING:
    from fl.gradient import Gradient


@methods.register("fedsam")
@dataclass(frozen=True, kw_only=True)
class FedSAM(FedAvg):
    """FedAvg with sharpness-aware minimization (Qu et al., ICML 2022, Algorithm 1; Caldarola et al., ECCV 2022).

    With g the gradient of a batch at w, a step goes along the gradient of the same batch at w + rho g / |g|, the norm
    being that of all parameters that move. Decay, clipping and momentum then act as in FedAvg. Both gradients are taken
    in train mode, so that batch-norm statistics take in a batch twice, and a defense defends each.

    Constants are those of Caldarola et al.'s published script for CIFAR-10, which has rho to be chosen anew elsewhere.
    Their adaptive variant (FedASAM), their averaging of the server's weights and Qu et al.'s momentum (MoFedSAM) are
    methods of their own, not these.

    Attributes:
        rho: how far the loss is looked at around the parameters, >= 0; 0 is FedAvg.
        weight_decay: of local SGD.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "as fedavg, but clients look for networks that stay good when their weights are shaken a bit."
    )

    rho: Weight = 0.5
    weight_decay: Weight = 4e-4
    batch_size: Count | None = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rho >= 0:
            raise ValueError(f"expected rho >= 0, got {self.rho}")

    @classmethod
    def example(cls) -> FedSAM:
        """Return two epochs of two steps, everything on."""
        return cls(rho=0.05, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, a step of length rho uphill."""
        here = grad(params, batches[0])
        if self.rho == 0:
            return here
        up = self.rho / norm(here)
        return grad({**params, **{name: add(params[name], g, up) for name, g in here.items()}}, batches[0])

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Return whether it looks nowhere else (rho = 0)."""
        return type(self).gradient is FedSAM.gradient and self.rho == 0
