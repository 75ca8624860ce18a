"""What a method or a defense claims under differential privacy, with all that the claim depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """What differential privacy a method gives, with all that it depends on.

    Attributes:
        unit: what is protected: one "record", or all of one "client".
        adjacency: "add-remove" (one unit more or less) or "zero-out" (a unit counts as nothing). Either moves a noisy
            sum by the clip at most; to put another unit in one's place moves it by twice that.
        mode: of the method.
        released: what gets the noise.
        trusted: whom it takes for honest.
        sampler: how batches are drawn.
        rate: probability of a unit to be in a step.
        noise_multiplier: standard deviation of the noise, in units of `clip`.
        clip: what one unit moves the sum by, at most.
        steps: noisy steps of a client.
        delta: for which epsilon is stated.
        epsilon: by the PRV accountant (exact where `rate` is 1); None where nothing is claimed.
        epsilon_rdp: by the RDP accountant; None likewise, and where that proves nothing.
        reason: why no epsilon is claimed; empty where one is.
        profile: "experiment" (noise from the experiment's seed) or "release" (from the operating system).
    """

    unit: Literal["record", "client"]
    adjacency: Literal["add-remove", "zero-out"]
    mode: str
    released: str
    trusted: str
    sampler: str
    rate: float
    noise_multiplier: float
    clip: float
    steps: int
    delta: float
    epsilon: float | None
    epsilon_rdp: float | None
    reason: str
    profile: str

    def sentence(self) -> str:
        """Return all of it in one sentence."""
        how = (
            f"noise {self.noise_multiplier:.4g} x clip {self.clip:.4g} on {self.released} in {self.steps} steps, "
            f"{self.sampler} batches at rate {self.rate:.4g}, {self.mode}; trusted: {self.trusted}; {self.profile} "
            f"noise"
        )
        if self.epsilon is None:
            return f"no epsilon is claimed: {self.reason} ({how})"
        claim = f"{self.unit}-level ({self.epsilon:.3g}, {self.delta:.1g})-differential privacy, {self.adjacency}"
        note = ", with noise that can be drawn again from the seed: no guarantee for a real release"
        by_rdp = f" (RDP: {self.epsilon_rdp:.3g})" if self.epsilon_rdp is not None else ""
        return f"{claim}{by_rdp}: {how}{note if self.profile == 'experiment' else ''}"
