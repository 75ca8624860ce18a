"""DP-SGD: every image's gradient is clipped, and noise is added to their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from defenses import defenses
from defenses.clip import Unscaled
from fl.client import Gradient
from fl.defense import Defense
from fl.method import Method
from fl.models.initialise import NORMS
from fl.privacy import fastest, private_gradient
from fl.tensors import Tensors
from fl.types import Batch, Task


@defenses.register("dp-sgd")
@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """Clips each image's gradient, adds Gaussian noise to the sum, divides (Abadi et al., CCS 2016, Algorithm 1).

    A client's own noise in every local step: what the server gets is private for each image, whatever it does. How
    private follows from the noise, the sampling and the number of steps, and is not said here. An image's norm is taken
    over all parameters that move together, private ones included. A prediction clips each image and leaves the noise
    out; where noise is added, the client trains by ghost clipping if its network allows that, which is faster. After
    noise a structured update is dense.

    The noise has one size in every entry of a step's gradient, so the squared distance that an attacker compares is the
    likelihood already, and no tensor is weighted (where step sizes differ between tensors it is not quite). Where a
    rewrite has lost the update's unit, directions are compared: exact for one image, but for the noise.

    Attributes:
        clip: longest Euclidean norm of one image's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `clip`; 0 only clips.
        std: the same in units of the gradient, in place of `noise_multiplier`; None takes that.
        denominator: what the sum is divided by. It must be public: under Poisson sampling the expected batch size. None
            takes the size of the batch, which is public where all batches have one size.

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = (
        "no picture may change the update by more than a fixed amount, and random noise covers that amount."
    )

    clip: float = 4.0
    noise_multiplier: float = 2.0
    std: float | None = None
    denominator: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ValueError(f"expected clip > 0, got {self.clip}")
        for name in ("noise_multiplier", "std"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"expected {name} >= 0, got {value}")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise ValueError(f"expected denominator > 0 or None, got {self.denominator}")

    @classmethod
    def example(cls) -> DPSGD:
        """Clipping that binds, and no noise, so that a round can be replayed."""
        return cls(clip=0.5, noise_multiplier=0.0)

    @property
    def multiplier(self) -> float:
        """Standard deviation of the noise in units of `clip`, however it was given."""
        return self.noise_multiplier if self.std is None else self.std / self.clip

    def check(self, method: Method, task: Task) -> None:
        """Refuse what couples the images of a batch, and a denominator that is not public.

        Raises:
            ValueError: says what.
        """
        if not method.per_sample:
            raise ValueError(f"dp-sgd: expected a loss that treats images apart, got that of {method.name}")
        if any(isinstance(m, NORMS[0]) and m.training for m in task.model.modules()):
            raise ValueError(
                "dp-sgd: expected a model that treats images apart, got batch norm in train mode: use group norm, or "
                "train_mode=False in the method"
            )
        if self.denominator is None and any(phase.sampler == "poisson" for phase in method.phases(task, 0)):
            raise ValueError(
                "dp-sgd: expected a denominator under Poisson sampling, whose batch sizes are secret; give the "
                "expected batch size"
            )

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """The mean of the clipped gradients, with noise where there is a generator."""
        noisy = generator is not None and self.multiplier > 0
        way = fastest(grad, params, batch) if noisy else private_gradient  # without noise training equals prediction
        return way(
            grad,
            params,
            batch,
            clip=self.clip,
            noise_multiplier=self.multiplier,
            generator=generator,
            denominator=self.denominator,
        )

    def rescaled(self) -> Defense:
        """An update of unknown length."""
        return Unscaled(scope="global")
