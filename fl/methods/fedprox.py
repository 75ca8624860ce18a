"""FedProx: local training is held back towards the parameters the server sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, StepSize, Weight
from fl.tensors import Tensors, add_scaled
from fl.types import Batch

if TYPE_CHECKING:
    from fl.gradient import Gradient


@methods.register("fedprox")
@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term on every step (Li et al., MLSys 2020, Algorithm 2 and Eq. 2).

    Constants are the paper's for MNIST: step size 0.03, 20 epochs of batches of 10, mu = 1. The paper draws clients in
    proportion to their images and takes the plain mean; here they are drawn alike and the mean is weighted, as for
    FedAvg. The term pulls on all that is trained, private parameters included, each towards where it began the round.

    Attributes:
        mu: weight of `mu / 2 |w - w_t|^2`; the paper searches 0.001, 0.01, 0.1 and 1.
        lr: step size of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = "as fedavg, but a spring pulls each client back to the network it was sent."

    mu: Weight = 1.0
    lr: StepSize = 0.03
    epochs: CountFrom0 | None = 20
    batch_size: Count | None = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu >= 0:
            raise ValueError(f"expected mu >= 0, got {self.mu}")

    @classmethod
    def example(cls) -> FedProx:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, and mu times the way back to the start of the round."""
        loss = grad(params, batches[0])
        drift = add_scaled({name: params[name] for name in loss}, step.start, -1.0)
        return add_scaled(loss, drift, self.mu)

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Return True for one step, before which nothing has drifted."""
        return type(self).gradient is FedProx.gradient and (steps == 1 or self.mu == 0)
