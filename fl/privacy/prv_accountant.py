"""Opacus' numerical accountant, which here keeps the Renyi divergences of a step: finding them is most of its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis import rdp
from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.prv.prvs import PoissonSubsampledGaussianPRV

MAX_ORDER = 1030
"""Order from which on Opacus' binomial coefficients overflow, so that nothing is proved unless every record is in."""


@lru_cache(maxsize=2**18)
def renyi_divergence(noise_multiplier: float, rate: float, order: float) -> float:
    """Return the Renyi divergence of one subsampled Gaussian step (Mironov et al., 2019, Section 3.3)."""
    if order >= MAX_ORDER and rate < 1:
        return math.inf  # where Opacus has no number, after a long time
    return float(rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=float(order)))


def renyi_divergences(noise_multiplier: float, rate: float, orders: Sequence[float]) -> NDArray[np.float64]:
    """Return the Renyi divergence of one subsampled Gaussian step at each of several orders."""
    return np.array([renyi_divergence(noise_multiplier, rate, order) for order in orders])


class NumericalAccountant(PRVAccountant):  # type: ignore[misc]
    """Opacus' accountant to the bit (Gopi et al., NeurIPS 2021)."""

    def _get_domain(
        self,
        prvs: list[PoissonSubsampledGaussianPRV],
        num_self_compositions: list[int],
        eps_error: float,
        delta_error: float,
    ) -> Domain:
        """Return the range that RDP proves for losses, in a mesh for `eps_error` (Gopi et al., Remark 5.6)."""
        steps, orders = sum(num_self_compositions), RDPAccountant.DEFAULT_ALPHAS
        each = [renyi_divergences(prv.noise_multiplier, prv.sample_rate, orders) for prv in prvs]
        total = sum(one * count for one, count in zip(each, num_self_compositions, strict=True))
        tails = [(total, delta_error / 4), *((one, delta_error / (8 * steps)) for one in each)]
        far = [rdp.get_privacy_spent(orders=orders, rdp=values, delta=delta)[0] for values, delta in tails]
        longest = max(*far, eps_error) + 3
        mesh = eps_error / np.sqrt(steps * np.log(12 / delta_error) / 2)
        return Domain.create_aligned(-longest, longest, mesh)
