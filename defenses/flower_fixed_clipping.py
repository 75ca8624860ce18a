"""Flower's differential privacy with fixed clipping: updates are clipped, and the server adds noise to their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from defenses import defenses
from defenses.clip import Clip, ClipOfUnknownNorm
from defenses.noise import Noise
from fl.defense import Defense
from fl.method import Method
from fl.privacy.accounting import Charge
from fl.privacy.client_level import state_client_level
from fl.privacy_statement import PrivacyStatement
from fl.ranges import Count, OpenShare, Positive, Weight
from fl.tensors import Tensors
from fl.types import Task


@dataclass(frozen=True, kw_only=True)
class NoisyMeanOfClipped(Defense):
    """What Flower's fixed and adaptive clipping have in common: who clips, and who looks on.

    Attributes:
        noise_multiplier: standard deviation of the noise on the sum, in units of the clip, as Flower is told.
        num_sampled_clients: clients of a round.
        clipping: where updates are clipped, by the "client" (a mod) or by the "server" (the strategy's wrapper).
        observer: the "server", which has every client's update before noise; or the "clients" and whoever else has
            the models alone, who see the mean of a round with its noise.
        delta: for which epsilon is stated.

    Raises:
        ValueError: a setting out of range.
    """

    noise_multiplier: Weight = 0.2
    num_sampled_clients: Count = 20
    clipping: Literal["client", "server"] = "client"
    observer: Literal["server", "clients"] = "server"
    delta: OpenShare = 1e-5

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"expected noise_multiplier >= 0, got {self.noise_multiplier}")
        if self.num_sampled_clients < 1:
            raise ValueError(f"expected num_sampled_clients >= 1, got {self.num_sampled_clients}")
        if not 0 < self.delta < 1:
            raise ValueError(f"expected delta in (0, 1), got {self.delta}")

    @property
    def limit(self) -> float:
        """Longest norm of an update of this round."""
        raise NotImplementedError

    @property
    def std(self) -> float:
        """Standard deviation of the noise that the server adds to the mean."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """The number of clients whose mean alone the observer sees."""
        return self.num_sampled_clients if self.observer == "clients" else 1

    @property
    def is_clipped(self) -> bool:
        """Whether the observer sees updates clipped."""
        return self.clipping == "client" or self.observer == "clients"

    @property
    def _clip(self) -> Clip:
        return Clip(max_norm=self.limit if self.is_clipped else math.inf)

    def check(self, method: Method, task: Task) -> None:
        """Refuse a method whose server needs every client's update on its own, where only the mean is seen."""
        if self.observer == "clients" and not method.aggregates_mean_only:
            raise ValueError(
                f"{self.name}: expected a server that needs the mean of updates alone with observer 'clients', got "
                f"{method.name!r}"
            )

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the client's part of what is seen.

        Of the noise on a mean every client gets a share here that adds up to it, where all count alike.
        """
        clipped = self._clip.transform_update(update, None)
        if self.observer == "server":
            return clipped
        share = self.std * self.num_sampled_clients**0.5
        return Noise(std=share, unit="absolute").transform_update(clipped, generator)

    def release(self, update: Tensors) -> Tensors:
        """Return what a real client sends: noise is the server's to add."""
        return self._clip.transform_update(update, None) if self.clipping == "client" else update

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the predicted update as it is seen, but for noise."""
        return self._clip.surrogate(predicted, observed)

    def transmit_known_part(self, known: Tensors, observed: Tensors) -> Tensors:
        """Return the known part as far as clipping lets it through."""
        return self._clip.transmit_known_part(known, observed)

    def with_unknown_scale(self) -> Defense:
        """Return an update of unknown length."""
        return ClipOfUnknownNorm(scope="global") if self.is_clipped else Defense()

    def noise_std(self, observed: Tensors) -> dict[str, float]:
        """Return that of the noise that the observer sees."""
        return dict.fromkeys(observed, self.std if self.observer == "clients" else 0.0)

    def privacy(
        self, method: Method, task: Task, sizes: Sequence[int], rounds: int, *, beside: Sequence[Defense] = ()
    ) -> PrivacyStatement:
        """Return what a client has against the observer after `rounds` rounds in which it took part."""
        blind = self.observer == "clients"
        return state_client_level(
            Charge(self.std * self.num_sampled_clients / self.limit, 1.0, rounds),
            clip=self.limit,
            delta=self.delta,
            mode="central",
            released="the mean of the clients' updates",
            trusted="the server, which sees every update without noise",
            reason="" if blind else "the observer is the server, which has every update before it adds noise",
        )


@defenses.register("flower-fixed-clipping")
@dataclass(frozen=True, kw_only=True)
class FlowerFixedClipping(NoisyMeanOfClipped):
    """Clips updates, the server adds noise to their mean (McMahan et al., ICLR 2018), as Flower 1.42 does it.

    `fixedclipping_mod` clips at the client, DifferentialPrivacyServerSideFixedClipping at the server; either way the
    server adds noise to the mean, of standard deviation noise_multiplier * clipping_norm / num_sampled_clients. So an
    honest-but-curious server sees updates without any noise, and none is hidden from it. Those who see only the
    models get the mean: `observer` says from whose side is looked. That is Flower's mean where clients have as many
    images each, and where a group is exactly a round's clients. Flower has no defaults; these are those of its example
    of differential privacy with secure aggregation.

    An attacker who knows it clips its predictions, too.

    Attributes:
        clipping_norm: longest norm of all that is sent, in units of the update.
    """

    plain: ClassVar[str] = "an update that is too long is shortened, and the server adds random noise to the mean."

    clipping_norm: Positive = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.clipping_norm < math.inf:
            raise ValueError(f"expected clipping_norm > 0, got {self.clipping_norm}")

    @classmethod
    def example(cls) -> FlowerFixedClipping:
        """Return clipping that binds on a small update, seen by the server."""
        return cls(clipping_norm=0.05)

    @property
    def limit(self) -> float:
        """Longest norm of an update."""
        return self.clipping_norm

    @property
    def std(self) -> float:
        """Standard deviation of the noise that the server adds to the mean."""
        return self.noise_multiplier * self.clipping_norm / self.num_sampled_clients
