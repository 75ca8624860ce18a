"""The input of a convolution in closed form, where it has at least as many filters as positions."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import Equations


def solve_by_row_space(equations: Equations) -> Tensor | None:
    """Return the layer's input X (I, H, W), or None where its gradient does not fix it.

    The gradient is S Phi, with S (O, L) the signal at every position and Phi (L, M) the patches. Where S has full
    column rank, its rows span what the patches span: every patch of X vanishes under the projection N onto the
    rest, so X minimizes sum_l U_l^T N U_l, up to a factor. The factor follows from S = gradient Phi^+, which in every
    cell must add up to the known signal, and where cells overlap over all of them.
    """
    layer = equations.layer
    positions = layer.positions
    if equations.gradient.shape[0] < positions or equations.gradient.shape[1] <= positions:
        return None
    _, _, rows = torch.linalg.svd(equations.gradient, full_matrices=False)
    rows = rows[:positions]
    rest = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device) - rows.mT @ rows
    form = layer.quadratic_form(rest)
    direction = _smallest(form)
    if direction is None:
        return None
    x = direction.view(layer.shape)
    signal = equations.gradient @ torch.linalg.pinv(layer.patches(x), rtol=1e-6)
    apart = layer.window_stride == layer.window
    found = signal[:, layer.cells].sum(-1) if apart else signal.sum(1)
    known = equations.signal if apart else equations.signal.sum(1)
    factor = (found * known).sum() / known.square().sum()
    return x * factor


def _smallest(form: Tensor, iterations: int = 8) -> Tensor | None:
    """Return the eigenvector (N,) of the smallest eigenvalue, or None where the next one is as small."""
    size = form.diagonal().mean()
    factor, failed = torch.linalg.cholesky_ex(form + 1e-10 * size * torch.eye(len(form)).to(form))
    if bool(failed):
        return None
    draw = torch.Generator().manual_seed(0)
    pair = torch.randn(len(form), 2, generator=draw, dtype=form.dtype).to(form.device)
    for _ in range(iterations):
        pair, _ = torch.linalg.qr(torch.cholesky_solve(pair, factor))
    values, vectors = torch.linalg.eigh(pair.mT @ form @ pair)
    if not values[0] < 1e-2 * values[1]:
        return None
    return pair @ vectors[:, 0]
