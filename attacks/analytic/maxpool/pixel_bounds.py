"""How far pixels that no equation fixes can still move: outputs that pooling did not pass on were no larger."""

from __future__ import annotations

import torch
from scipy.optimize import linprog
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.refinement import Fit

MANY = 64
"""Open numbers up to which linear programs are solved for them."""


def spans(known: Equations, found: Fit, free: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far each free number of the input can move from where it was found, whatever the other free ones do (n,).

    All others stay. What moves has to keep every output that was passed on within what the forward equations leave, and
    every other one below it. Infinite where there are too many free numbers to tell, or no solution.

    Args:
        known: the layer's equations.
        found: their solution.
        free: which numbers may move (I, H, W).
        low: least value of each number (I, H, W), or what broadcasts to it.
        high: greatest value of each number.
    """
    at = free.flatten().nonzero().flatten()
    endless = torch.full((len(at),), float("inf")).to(found.x)
    if not 0 < len(at) <= MANY or known.layer.average:
        return endless
    columns = []
    for j in at.tolist():
        unit = torch.zeros_like(found.x)
        unit.view(-1)[j] = 1
        columns.append(known.layer.convolved(unit)[:, known.layer.cells].flatten())
    moved = torch.stack(columns, 1)  # (O K P, n)
    allowed = 3 * (found.forward + known.noise) * known.forward_scale + 3 * known.loose
    slack = allowed[..., None] - known.excess(found.x)
    chosen = (found.shares > 0.5) & known.seen[..., None]
    back = (allowed[..., None] + known.excess(found.x)).masked_fill(~chosen, float("inf"))
    touched = moved.abs().amax(1) > 0
    rows, limits = moved[touched], slack.flatten()[touched]
    kept, behind = -moved[touched & chosen.flatten()], back.flatten()[touched & chosen.flatten()]
    matrix, right = torch.cat([rows, kept]).cpu().numpy(), torch.cat([limits, behind]).clamp_min(0).cpu().numpy()
    now = found.x.flatten()[at]
    least = (low.expand_as(found.x).flatten()[at] - now).clamp_max(0).tolist()
    most = (high.expand_as(found.x).flatten()[at] - now).clamp_min(0).tolist()
    box = list(zip(least, most, strict=True))
    for n in range(len(at)):
        reach = []
        for sign in (1.0, -1.0):
            costs = [0.0] * len(at)
            costs[n] = -sign
            solved = linprog(costs, A_ub=matrix, b_ub=right, bounds=box, method="highs")
            reach.append(-solved.fun if solved.status == 0 else float("inf"))
        endless[n] = max(reach)
    return endless
