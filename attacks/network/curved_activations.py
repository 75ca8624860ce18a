"""Activations that are told by their values alone, and undone by bisection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attacks.network.operation_trace import MODEL_ERRORS

MOST_RUNS = 32
"""Images that an activation of few numbers is given one by one, at most."""
SEARCH_SPAN, MAX_DOUBLINGS = 40.0, 20
"""Inputs of an activation are looked for up to so far from zero, doubled so often at most while values reach beyond."""
BISECTIONS = 70
"""Bisections of that span: more than double precision resolves."""
MIN_SLOPE = 1e-9
"""Slope below which an activation says nothing of what it was given."""
SATURATION = 1e-12
"""Share of an activation's range within which a value is taken for its level end."""
DIFFERENCE_STEP = 1e-5
"""Distance over which an activation's slope is taken to change evenly."""
TWO_INPUTS = "{} takes the same value at several inputs, so that neither they nor its slope follow from it"
"""Why an activation that falls and rises can't be undone."""


class CurvedActivation(nn.Module):
    """An activation that treats every number alike.

    Args:
        run: takes (1, *shape).
        shape: of one image's numbers.
    """

    place = ""

    def __init__(self, run: Callable[[Tensor], Tensor], shape: torch.Size) -> None:
        super().__init__()
        self.run, self.shape = run, shape

    def forward(self, x: Tensor) -> Tensor:
        """Return what the activation makes of `x`, in the shape of `x`, whatever that is."""
        size = self.shape.numel()
        flat = x.flatten()
        filled = torch.cat([flat, flat.new_zeros(-len(flat) % size)]).view(-1, *self.shape)
        made = self._run_at_once(filled) if len(filled) > MOST_RUNS else None
        if made is None:
            made = torch.cat([self.run(one[None]) for one in filled])
        return made.flatten()[: len(flat)].view_as(x)

    def _run_at_once(self, many: Tensor) -> Tensor | None:
        """Return what the activation makes of many images (N, *shape), or None where it takes one alone."""
        try:
            made = self.run(many)
            asked = [0, len(many) // 2, len(many) - 1]
            alone = torch.cat([self.run(many[i][None]) for i in asked])
        except MODEL_ERRORS:
            return None
        same = made.shape == many.shape and torch.allclose(made[asked], alone, rtol=SATURATION, atol=SATURATION)
        return made if same else None

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

    def _search_end(self, values: Tensor, end: float, *, largest: bool) -> float:
        """Return `end`, doubled until the activation is level there or beyond the largest (or least) of `values`."""
        limit = values.amax() if largest else values.amin()
        for _ in range(MAX_DOUBLINGS):
            at = values.new_tensor([end])
            with torch.no_grad():
                made = self(at)[0]
            short = made < limit if largest else made > limit
            if not bool(short & made.isfinite()) or not bool(self._slope(at).abs() > MIN_SLOPE):
                break
            end *= 2
        return end

    def _bisect(self, values: Tensor, low: float, high: float) -> Tensor:
        """Return where between two inputs the activation takes `values`, if it rises or falls all the way."""
        left, right = torch.full_like(values, low), torch.full_like(values, high)
        with torch.no_grad():
            rises = bool(self(values.new_tensor([low, high])).diff() > 0)
            for _ in range(BISECTIONS):
                middle = (left + right) / 2
                made = self(middle)
                beyond = made > values if rises else made < values
                left, right = torch.where(beyond, left, middle), torch.where(beyond, middle, right)
        return (left + right) / 2


class MonotoneActivation(CurvedActivation):
    """An activation that never falls as what it is given grows, e.g. ELU or softplus."""

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what it was given where it returned `values`, and where that can be told: not on a level stretch.

        On a level stretch it is that stretch's larger end, as far as was looked.
        """
        low = self._search_end(values, -SEARCH_SPAN, largest=False)
        high = self._search_end(values, SEARCH_SPAN, largest=True)
        ends = values.new_tensor([low, high])
        with torch.no_grad():
            least, most = self(ends)
        found = self._bisect(values, low, high)
        # what came out beyond its level ends, which is impossible, says how far off all values may be
        beyond = torch.maximum((least - values).amax(), (values - most).amax()).clamp_min(0)
        slack = torch.maximum(2 * beyond, SATURATION * (most - least))
        level = self._slope(ends) < MIN_SLOPE
        bottom, top = torch.where(level, slack, torch.zeros_like(slack)).unbind()
        inside = (found > low * (1 - 1e-9)) & (found < high * (1 - 1e-9))
        within = (values > least + bottom) & (values < most - top) & inside
        return found, within & (self._slope(found) > MIN_SLOPE)


class ValleyActivation(CurvedActivation):
    """An activation that falls to one lowest value and rises from there on, e.g. GELU, SiLU, Mish or hard swish.

    A value below its level at minus infinity has two inputs, one on each side of the lowest.

    Args:
        run: as of any curved activation.
        shape: likewise.
        near: an input below and one above the one with the lowest value (2,), in the type and where `run` takes them.

    Attributes:
        lowest: the input with the lowest value.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], shape: torch.Size, near: Tensor) -> None:
        super().__init__(run, shape)
        low, high = near.tolist()
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            falls = float(self._slope(near.new_tensor([middle]))) < 0
            low, high = (middle, high) if falls else (low, middle)
        self.lowest = high

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the larger of the inputs that have such values, and where there is one.

        Where values are too low to tell it from the smaller one, it is the largest that they may have.
        """
        high = self._search_end(values, SEARCH_SPAN, largest=True)
        with torch.no_grad():
            least = self(values.new_tensor([self.lowest]))
        slack = 2 * (least - values).amax().clamp_min(0)  # impossible values say how far off all may be
        found = self._bisect(values.maximum(least + slack), self.lowest, high)
        known = (values > least + slack) & (found < high * (1 - 1e-9)) & (self._slope(found) > MIN_SLOPE)
        return found, known

    def falling_inverse(self, values: Tensor) -> Tensor:
        """Return the smaller of the inputs that have such values; minus infinity where none has.

        On a level stretch it is that stretch's right end.
        """
        low = self._search_end(values, -SEARCH_SPAN, largest=True)
        found = self._bisect(values, low, self.lowest)
        with torch.no_grad():
            most = self(values.new_tensor([low]))
        return torch.where(values > most + SATURATION, -torch.inf, found)
