"""Pixels of which equations that hold to the last digit leave no doubt."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks.analytic.maxpool.equations import Equations

TIGHT = 2e-4
"""Uncertainty of a target, relative to the outputs, up to which it tells one level from the next."""
SHARE = 0.3
"""Of the equations that see a pixel, what has to hold: one in fifty holds by chance."""
LEAST = 2


def confirmed(known: Equations, x: Tensor, step: Tensor) -> Tensor:
    """Which pixels (H, W) of X (I, H, W), all of them on levels, are seen by outputs that are what they have to be.

    An output is a sum over all numbers of a patch. Were a single one of them a level off, one `step` (I, 1, 1), it
    would miss its target by more than may be: an output says nothing of a pixel whose taps are too small for that.
    """
    seen, held = counts(known, x, step)
    return (held >= LEAST) & (held >= SHARE * seen)


def tight(known: Equations) -> Tensor:
    """Which outputs (O, K) tell one level from the next."""
    return known.seen & (_bound(known) < TIGHT * known.forward_scale)


def counts(known: Equations, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """How many equations that tell levels apart see each pixel (H, W), and how many of these hold."""
    layer, told, bound = known.layer, tight(known), _bound(known)
    outputs = layer.outputs(x)
    largest, at = outputs.max(-1)
    holds = told & ((largest - known.target).abs() < bound)
    least = (layer.weight.abs() * step).amin(1).flatten(1).mT  # (kh * kw, O), of any channel
    count = len(least)
    ones = torch.eye(count).to(least).view(count, 1, *layer.kernel)  # tap after tap
    plane = replace(layer, weight=ones, bias=ones.new_zeros(count), shape=(1, *layer.shape[1:]))
    passed = one_hot(at, outputs.shape[-1]).to(x)
    reaching = least[..., None] > bound
    seen, held = (
        plane.pull(plane.placed(torch.einsum("okp,tok->tkp", passed, (reaching & which).to(x))))[0].round()
        for which in (told, holds)
    )
    return seen, held


def _bound(known: Equations) -> Tensor:
    """How far outputs may be off their targets (O, K)."""
    return 3 * (known.loose + known.noise * known.forward_scale)
