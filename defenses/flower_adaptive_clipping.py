"""Flower's differential privacy with adaptive clipping: the norm to clip to follows from how many updates were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from defenses import defenses
from defenses.flower_fixed_clipping import NoisyMeanOfClipped
from fl.ranges import Count, Positive, Range, Share, Weight

LARGEST_SHARE = 1e6
NoisyShare = Annotated[float, Range(-LARGEST_SHARE, LARGEST_SHARE)]
"""A share that noise may have put below 0 or above 1."""


@defenses.register("flower-adaptive-clipping")
@dataclass(frozen=True, kw_only=True)
class FlowerAdaptiveClipping(NoisyMeanOfClipped):
    """Clips updates to a norm that moves from round to round (Andrew et al., NeurIPS 2021), as Flower 1.42 does it.

    The server multiplies the norm by exp(-clip_norm_lr * (share clipped - target_clipped_quantile)) after each round,
    the share with noise of its own, and then adds noise to the mean, of standard deviation z * norm / clients, with
    z = (noise_multiplier^-2 - (2 clipped_count_stddev)^-2)^(-1/2). Two things differ from the paper. The paper's share
    is of updates that are *not* clipped, so Flower's norm moves away from the quantile: it shrinks while more are
    clipped than the target, and grows while fewer are. And the noise goes by the norm after that move, the clipping by
    the one before. A round's defense has no memory here: `clipping_norm` is this round's, `next_clipping_norm` says
    what Flower makes of it. The server sends it, so every observer knows it. Whether an update was clipped goes to the
    server as a bit, which its length tells anyway.

    Flower has no default of noise multiplier and number of clients; these are ours, the others Flower's.

    Attributes:
        clipping_norm: this round's; Flower's first (initial_clipping_norm) is the default.
        target_clipped_quantile: see above.
        clip_norm_lr: see above.
        clipped_count_stddev: of the noise on the number of updates clipped; None is a twentieth of the clients, or
            none without noise.
        clipped_share: of this round's updates, as the server counted it with noise; the noise on the mean follows.

    Raises:
        ValueError: a setting out of range, or as much noise as leaves none for the count.
    """

    plain: ClassVar[str] = "an update longer than a norm that follows the rounds before is shortened to it."

    num_sampled_clients: Count = 100
    clipping_norm: Positive = 0.1
    target_clipped_quantile: Share = 0.5
    clip_norm_lr: Positive = 0.2
    clipped_count_stddev: Weight | None = None
    clipped_share: NoisyShare = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clipping_norm", "clip_norm_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if not 0 <= self.target_clipped_quantile <= 1:
            raise ValueError(f"expected target_clipped_quantile in [0, 1], got {self.target_clipped_quantile}")
        if self.clipped_count_stddev is not None and not 0 <= self.clipped_count_stddev < math.inf:
            raise ValueError(f"expected clipped_count_stddev >= 0 or None, got {self.clipped_count_stddev}")
        if not abs(self.clipped_share) <= LARGEST_SHARE:
            raise ValueError(f"expected clipped_share in [-1e6, 1e6], got {self.clipped_share}")
        if self.noise_multiplier > 0 and self.noise_multiplier >= 2 * self.count_stddev:
            raise ValueError(
                f"expected noise_multiplier < 2 * clipped_count_stddev = {2 * self.count_stddev:g}, got "
                f"{self.noise_multiplier:g}: raise clipped_count_stddev, or num_sampled_clients, of which it is a 20th"
            )

    @classmethod
    def example(cls) -> FlowerAdaptiveClipping:
        """Return clipping that binds on a small update, seen by the server."""
        return cls(clipping_norm=0.05)

    @property
    def count_stddev(self) -> float:
        """Standard deviation of the noise on the number of updates clipped."""
        if self.clipped_count_stddev is not None:
            return self.clipped_count_stddev
        return self.num_sampled_clients / 20 if self.noise_multiplier > 0 else 0.0

    @property
    def update_noise_multiplier(self) -> float:
        """z, the multiplier of the noise on the mean: with that on the count it makes `noise_multiplier` together."""
        if not self.noise_multiplier:
            return 0.0
        return float((self.noise_multiplier**-2 - (2 * self.count_stddev) ** -2) ** -0.5)

    @property
    def limit(self) -> float:
        """Longest norm of an update of this round."""
        return self.clipping_norm

    @property
    def std(self) -> float:
        """Standard deviation of the noise that the server adds to the mean, by the norm of the next round."""
        return self.update_noise_multiplier * self.next_clipping_norm(self.clipped_share) / self.num_sampled_clients

    def next_clipping_norm(self, clipped_share: float) -> float:
        """Return the norm of the next round, by the share of this round's updates that was clipped, with its noise."""
        return self.clipping_norm * math.exp(-self.clip_norm_lr * (clipped_share - self.target_clipped_quantile))
