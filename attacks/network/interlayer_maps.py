"""Modules stand here for what lies between a network's weighted layers; they take any number of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SEARCH_SPAN = 40.0
"""Inputs of an activation are looked for up to so far from zero."""
BISECTIONS = 70
"""Of that span: more than double precision can tell apart."""


MIN_SLOPE = 1e-9
"""Slope below which an activation says nothing of what it was given."""
SATURATION = 1e-12
"""Share of an activation's range within which a value is taken for its level end."""
DIFFERENCE_STEP = 1e-5
"""Distance over which an activation's slope is taken to change evenly."""


class Reshape(nn.Module):
    """The same numbers in another shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, ...) as (N, *shape)."""
        return x.reshape(len(x), *self.shape)


class ReplayedMap(nn.Module):
    """A recorded map of one image, image by image.

    Args:
        run: takes (1, *shape).
        shape: of one image's numbers.
        whole: whether `run` gives several images at once what it gives each.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], shape: torch.Size, *, whole: bool = False) -> None:
        super().__init__()
        self.run, self.shape, self.whole = run, shape, whole

    def forward(self, x: Tensor) -> Tensor:
        """Return what the map makes (N, ...) of (N, *shape)."""
        x = x.reshape(len(x), *self.shape)
        return self.run(x) if self.whole or len(x) == 1 else torch.cat([self.run(one[None]) for one in x])


class ElementwiseAffine(ReplayedMap):
    """Each number times a number of its own plus another: a normalization, batch norm in evaluation mode."""

    def by_channel(self) -> tuple[Tensor, Tensor] | None:
        """Return the factor and shift of each channel (C,); None where they differ from place to place."""
        zero = torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            shift = self(zero)
            factor = (self(zero + 1) - shift).flatten(2)[0] if len(self.shape) > 1 else None
        if factor is None:
            return None
        shift = shift.flatten(2)[0]
        alike = torch.allclose(factor, factor[:, :1], rtol=1e-9) and torch.allclose(shift, shift[:, :1], rtol=1e-9)
        return (factor[:, 0], shift[:, 0]) if alike else None

    place = ""
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")


class LinearMap(ReplayedMap):
    """Any other affine map that has no parameters: a permutation, a resize, a blur, a mean taken off."""


class MonotoneActivation(nn.Module):
    """An activation that never falls as what it is given grows, alike for every number, e.g. ELU or softplus.

    Args:
        run: takes (1, *shape).
        shape: of one image's numbers.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], shape: torch.Size) -> None:
        super().__init__()
        self.run, self.shape = run, shape

    def forward(self, x: Tensor) -> Tensor:
        """Return what the activation makes of `x`, in the shape of `x`, whatever that is."""
        size = self.shape.numel()
        flat = x.flatten()
        filled = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
        parts = [self.run(part.view(1, *self.shape)).flatten() for part in filled.split(size)]
        return torch.cat(parts)[: len(flat)].view_as(x)

    def derivatives(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and second derivative at `x`."""
        bend = (self._slope(x + DIFFERENCE_STEP) - self._slope(x - DIFFERENCE_STEP)) / (
            2 * DIFFERENCE_STEP
        )  # some have no second derivative
        return self._slope(x), bend

    def _slope(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x)
        return slope

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what it was given where it returned `values`, and where that can be told: not on a level stretch."""
        low, high = torch.full_like(values, -SEARCH_SPAN), torch.full_like(values, SEARCH_SPAN)
        with torch.no_grad():
            least, most = self(low), self(high)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                above = self(middle) > values
                low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        found = (low + high) / 2
        slope, _ = self.derivatives(found)
        # what came out beyond its level ends, which is impossible, says how far off all values may be
        beyond = torch.maximum((least - values).amax(), (values - most).amax()).clamp_min(0)
        slack = torch.maximum(2 * beyond, SATURATION * (most - least).amax())
        level = self._slope(values.new_tensor([-SEARCH_SPAN, SEARCH_SPAN])) < MIN_SLOPE
        bottom, top = torch.where(level, slack, torch.zeros_like(slack)).unbind()
        within = (values > least + bottom) & (values < most - top) & (found.abs() < SEARCH_SPAN * (1 - 1e-9))
        return found, within & (slope > MIN_SLOPE)


class UnknownRest(nn.Identity):
    """Stands for all that a network computes above the last layer that its chain reaches to."""
