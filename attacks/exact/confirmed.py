"""Pixels of which equations that hold to the last digit leave no doubt."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import one_hot

from attacks.exact.equations import Equations

TIGHT = 2e-4
"""Uncertainty of a target, relative to the outputs, up to which it tells one level from the next."""
SHARE = 0.3
"""Of the equations that see a pixel, what has to hold: one in fifty holds by chance."""
LEAST = 2


def confirmed(known: Equations, x: Tensor) -> Tensor:
    """Which pixels (H, W) of X (I, H, W), all of them on levels, are seen by outputs that are what they have to be.

    An output is a sum over all numbers of a patch. Were one of them a level off, it would miss its target by a hundred
    times its rounding.
    """
    seen, held = counts(known, x)
    return (held >= LEAST) & (held >= SHARE * seen)


def counts(known: Equations, x: Tensor) -> tuple[Tensor, Tensor]:
    """How many equations that tell levels apart see each pixel (H, W), and how many of these hold."""
    layer = known.layer
    bound = 3 * (known.loose + known.noise * known.forward_scale)
    outputs = layer.outputs(x)
    largest, at = outputs.max(-1)
    tight = known.seen & (bound < TIGHT * known.forward_scale)
    holds = tight & ((largest - known.target).abs() < bound)
    ones = layer.weight.new_ones(1, 1, *layer.kernel)
    plane = replace(layer, weight=ones, bias=layer.bias[:1], shape=(1, *layer.shape[1:]))
    passed = one_hot(at, outputs.shape[-1]).to(x)
    seen, held = (
        plane.pull(plane.placed((passed * told[..., None]).sum(0, keepdim=True)))[0].round() for told in (tight, holds)
    )
    return seen, held
