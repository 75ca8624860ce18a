"""DP-SGD: every image's gradient is clipped, and noise is added to their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from defenses import defenses
from defenses.clip import ClipOfUnknownNorm
from fl.client import client_loss_gradient
from fl.defense import Defense, overrides
from fl.gradient import Gradient
from fl.method import Method
from fl.models.building_blocks.initialization import NORMS
from fl.privacy.accounting import Charge, costliest_charge
from fl.privacy.dp_sgd import Privatization, fastest_gradient, private_gradient
from fl.privacy_statement import PrivacyStatement
from fl.ranges import OpenShare, Positive, Weight
from fl.tensors import Tensors
from fl.types import Batch, Phase, Task


@defenses.register("dp-sgd")
@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """Clips each image's gradient, adds Gaussian noise to the sum, divides (Abadi et al., CCS 2016, Algorithm 1).

    A client's own noise in every local step: what the server gets is private for each image, whatever it does. How
    private (`privacy`) follows from the noise, the sampling and how many steps an image is in. Under Poisson sampling
    every step has it in the batch with a probability; in batches that go round the images every epoch has it in one
    step for certain, and nothing is gained from sampling. The guarantee is for counting an image as nothing, which
    moves a sum by the clip: how many images a client has is public, and with it the sizes of batches that go round.
    An image's norm is taken over all parameters that move together, private ones included, and these get the noise,
    too. Noise comes from the experiment's seed. A prediction clips each image and leaves the noise out; where noise is
    added, the client trains by ghost clipping if its network allows that, which is faster. After noise a structured
    update is dense.

    The noise has one size in every entry of a step's gradient, so the squared distance that an attacker compares is the
    likelihood already, and no tensor is weighted (where step sizes differ between tensors it is not quite). Where a
    rewrite has lost the update's unit, directions are compared: exact for one image, but for the noise.

    Attributes:
        clip: longest Euclidean norm of one image's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `clip`; 0 only clips.
        std: the same in units of the gradient, in place of `noise_multiplier`; None takes that.
        denominator: what the sum is divided by. It must be public: under Poisson sampling the expected batch size. None
            takes the size of the batch, which is public where all batches have one size.
        delta: for which epsilon is stated.

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = (
        "no picture may change the update by more than a fixed amount, and random noise covers that amount."
    )

    clip: Positive = 4.0
    noise_multiplier: Weight = 2.0
    std: Weight | None = None
    denominator: Positive | None = None
    delta: OpenShare = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ValueError(f"expected clip > 0, got {self.clip}")
        for name in ("noise_multiplier", "std"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"expected {name} >= 0, got {value}")
        if self.denominator is not None and not 0 < self.denominator < math.inf:
            raise ValueError(f"expected denominator > 0 or None, got {self.denominator}")
        if not 0 < self.delta < 1:
            raise ValueError(f"expected delta in (0, 1), got {self.delta}")

    @classmethod
    def example(cls) -> DPSGD:
        """Return clipping that binds, without noise, so that a round can be replayed."""
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
        if not method.has_per_sample_loss:
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
        """Return the mean of the clipped gradients, with noise where there is a generator."""
        noisy = generator is not None and self.multiplier > 0
        own = client_loss_gradient(grad)
        way = (
            fastest_gradient(own, params, batch) if noisy else private_gradient
        )  # without noise training equals prediction
        privatization = Privatization(clip=self.clip, noise_multiplier=self.multiplier, denominator=self.denominator)
        return way(own, params, batch, privatization, generator)

    def with_unknown_scale(self) -> Defense:
        """Return an update of unknown length."""
        return ClipOfUnknownNorm(scope="global")

    def privacy(
        self, method: Method, task: Task, sizes: Sequence[int], rounds: int, *, beside: Sequence[Defense] = ()
    ) -> PrivacyStatement:
        """Return what the client with least privacy has after `rounds` rounds, or why no epsilon follows.

        Raises:
            ValueError: no client.
        """
        if not sizes:
            raise ValueError("expected at least 1 client, got none")
        sigma = self.multiplier
        every = [method.phases(task, number) for number in range(max(rounds, method.first_round + 1))]
        met = {_noise_exposure(phases, n) for phases in every for n in sizes}
        charges = [Charge(sigma, rate, steps * rounds) for rate, steps in sorted(met)]
        most, epsilon, by_rdp = charges[-1], None, None
        if not (reason := self._no_epsilon_reason(method, beside or (self,))):
            most, epsilon, by_rdp = costliest_charge(charges, self.delta)
        samplers = dict.fromkeys(phase.sampler for phases in every for phase in phases)
        return PrivacyStatement(
            unit="record",
            adjacency="zero-out",
            mode="dp-joint",
            released="the gradient of all that moves",
            trusted="nobody else",
            sampler=" and ".join(samplers),
            rate=most.rate,
            noise_multiplier=sigma,
            clip=self.clip,
            steps=most.steps,
            delta=self.delta,
            epsilon=epsilon,
            epsilon_rdp=by_rdp,
            reason=reason,
            profile="experiment",
        )

    def _no_epsilon_reason(self, method: Method, beside: Sequence[Defense]) -> str:
        """Return why no epsilon follows, or nothing."""
        if self.multiplier == 0:
            return "no noise is added"
        if type(method).gradient is not Method.gradient:
            return f"{method.name} has a gradient of its own, and what that makes of the images is not accounted for"
        if type(method).finish is not Method.finish:
            return f"{method.name} sends or keeps more than its parameters, which alone move by noisy gradients"
        for part in beside:
            if overrides(part, "transform_batch"):
                return f"the defense {part.name} mixes images, and what is clipped then is no single image's gradient"
        return ""


def _noise_exposure(phases: Sequence[Phase], n: int) -> tuple[float, int]:
    """Return with what probability, and in how many steps of a round, an image of `n` is fed at most."""
    rate, steps = 0.0, 0
    for phase in phases:
        size = min(phase.batch_size or n, n)
        per_epoch = -(-n // size)
        poisson = phase.sampler == "poisson"
        if phase.steps is None:
            steps += (phase.epochs or 0) * (per_epoch if poisson else 1)
        else:
            steps += phase.steps if poisson else -(-phase.steps * phase.batches_per_step // per_epoch)
        rate = max(rate, size / n if poisson else 1.0)
    return rate, steps
