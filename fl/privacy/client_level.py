"""What clients have under differential privacy whose whole update is clipped and gets noise in every round."""

from __future__ import annotations

from fl.privacy.accounting import Charge, compute_epsilon
from fl.privacy_statement import PrivacyStatement


def state_client_level(
    charge: Charge, *, clip: float, delta: float, mode: str, released: str, trusted: str, reason: str = ""
) -> PrivacyStatement:
    """Return what a client has whether it took part with its images or with nothing (zero-out).

    Args:
        charge: of all rounds, with noise in units of `clip`, at rate 1.
        clip: longest norm of a client's update, in units of the update.
        delta: for which epsilon is stated, in (0, 1).
        mode: where the noise is added, "local" or "central".
        released: what gets the noise.
        trusted: whom it takes for honest.
        reason: why no epsilon follows; empty where one does, unless there is no noise.
    """
    sigma = charge.noise_multiplier
    why = reason or ("" if sigma else "no noise is added")
    epsilon, by_rdp = (None, None) if why else (compute_epsilon([charge], delta, kind) for kind in ("prv", "rdp"))
    return PrivacyStatement(
        unit="client",
        adjacency="zero-out",
        mode=mode,
        released=released,
        trusted=trusted,
        sampler="whole",
        rate=charge.rate,
        noise_multiplier=sigma,
        clip=clip,
        steps=charge.steps,
        delta=delta,
        epsilon=epsilon,
        epsilon_rdp=by_rdp,
        reason=why,
        profile="experiment",
    )
