"""DP-FedAvg: FedAvg by noisy gradients, or with noise on the sum of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.privacy.private_method import PrivateMethod
from fl.ranges import ShareBelow1, StepSize, Weight


@methods.register("dp-fedavg")
@dataclass(frozen=True, kw_only=True)
class DPFedAvg(PrivateMethod, FedAvg):
    """DP-FedAvg (McMahan et al., ICLR 2018), by default as HyperFL's tables have it: DP-SGD in every client.

    McMahan et al. protect clients from each other through a server they trust: `mode: client-level`; their headline is
    noise_multiplier 1.0 and clip 15. Guo et al. (AAAI 2025, appendix D.1) let clients trust nobody; defaults are
    their authors' constants for CIFAR-10 but for the step size (0.02 there, 0.01 for EMNIST and Fashion-MNIST), Poisson
    sampling and the sharper accountant, which are ours. With `clip` below every gradient, as here, only `lr * clip`
    counts.
    """

    plain: ClassVar[str] = (
        "as fedavg, but no single picture can move a training step by more than a fixed amount, and random noise hides "
        "that amount."
    )

    lr: StepSize = 0.01
    momentum: ShareBelow1 = 0.5
    weight_decay: Weight = 5e-4

    @classmethod
    def example(cls) -> DPFedAvg:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, epochs=2, batch_size=2, images=4, noise_multiplier=0.5, clip=1.0)
