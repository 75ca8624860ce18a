"""Solves for the patches of one image by the gradients of position embedding and patch layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.vit.token_embedding import TokenEmbedding

HALF_LEVEL = 0.5 / 255
"""Half a level of 8 bits, in pixel units."""
WORST_PIXEL_FACTOR = 5.0
"""How far the worst pixel may be off, in root mean squares of all."""
MIN_SIGNAL_TO_ROUNDING = 30.0
"""How many times its rounding a direction of the signals must be, relative to the largest, to be told."""
MIN_SINGULAR_VALUE = 1e-9
"""Share of the largest singular value below which an equation says nothing."""


@dataclass(frozen=True)
class PatchSolution:
    """What the equations dL/dW = sum over t of (dL/dp_t) x_t^T say of the patches x_t of one image.

    Attributes:
        pixels: (1, n).
        off: share of dL/dW that they leave unexplained.
        condition: of the equations; infinite where signals depend on each other.
        error: what rounding may put the worst pixel off by, as estimated from the condition, or by the distance of the
            worst patch's pixels to levels of 8 bits where they lie close to them.
        note: what is missing, in words.
    """

    pixels: Tensor
    off: float
    condition: float
    error: float
    note: str

    @classmethod
    def of(cls, tokens: TokenEmbedding, gradient: Mapping[str, Tensor], doubt: float) -> PatchSolution:
        """Solve the equations of one image.

        Args:
            tokens: how the network makes tokens.
            gradient: of position embedding and patch layer, up to one factor.
            doubt: share of it that is rounding.
        """
        signal, weight = tokens.patch_signals(gradient[tokens.position]), tokens.patch_gradient(gradient[tokens.weight])
        signal, weight = signal / signal.norm(), weight / signal.norm()
        left, sizes, right = torch.linalg.svd(signal, full_matrices=False)
        told = sizes > max(MIN_SINGULAR_VALUE, MIN_SIGNAL_TO_ROUNDING * doubt) * sizes[0]
        patches = right[told].mT @ ((left[:, told].mT @ weight) / sizes[told, None])
        off = float((weight - signal @ patches).norm() / weight.norm())
        pixels = tokens.pixels(patches)
        again = tokens.patches(pixels)
        off = max(off, float((weight - signal @ again).norm() / weight.norm()))
        whole = bool(told.all())
        condition = float(sizes[0] / sizes[-1]) if whole else float("inf")
        bound = max(doubt, off) * condition * float(pixels.square().mean().sqrt())
        error = WORST_PIXEL_FACTOR * min(bound, _distance_to_levels(tokens, pixels) if whole else bound)
        few = f"what flows back into {len(told)} patches has {int(told.sum())} independent directions alone"
        return cls(pixels, off, condition, error, "" if whole else few)

    def is_sharp(self, fits: float) -> bool:
        """Return whether no more than `fits` is unexplained and rounding leaves every pixel its level of 8 bits."""
        return self.error <= HALF_LEVEL and self.off <= fits


def _distance_to_levels(tokens: TokenEmbedding, pixels: Tensor) -> float:
    """Return the root mean square distance to levels of 8 bits of the worst patch's pixels: 0.29 levels by chance.

    Errors differ from patch to patch, as their signals do, and hardly within one.
    """
    distance = (pixels * 255 - (pixels * 255).round()).square() / 255**2
    image = distance.view_as(tokens.graph.image)
    none = torch.zeros_like(image)
    offset = tokens.patches(none)
    mean = ((tokens.patches(image) - offset) / (tokens.patches(none + 1) - offset)).mean(1)
    return float(mean.max().clamp_min(0).sqrt())
