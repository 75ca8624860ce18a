r"""The linear equations that a layer's input satisfies, given what flows back into the layer and what it returned.

With x_c channel c of what the layer is given, over P positions, and s what flows back into its output,

    gradient equations:  K x_c = dL/dW[:, c]           for each c, with the same matrix K of signals,
    weight equations:    W x = y - b                   with the outputs y that are known,
    padding equations:   x = 0 where it is padding     (substituted: padded values are no unknowns).

Of a batch of N images the gradient equations are `sum over i of K_i x_ic = dL/dW[:, c]`: as many as of one image, for N
times the unknowns, while each image has its own weight equations. These are R-GAP's equations (Zhu and Blaschko, 2021);
R-CONV trusts the gradient's first (Eltaras et al., 2024). `solve_input` does either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.network.curved_activations import MonotoneActivation, ValleyActivation
from attacks.network.layer_chain import Stage
from attacks.search_control import check_time_for

SATURATION = 1e-12
"""Share of an activation's range within which a value is taken for its end."""


SVD_COST, PIVOTED_COST = 4.0, 8.0
"""Operations of a singular value decomposition, and of a least-squares solve with pivots, for each product of sides."""


@dataclass(frozen=True)
class ActivationInputs:
    """What the activation of a stage was given.

    Attributes:
        values: (N, ...); where they are not known, no less than what was given.
        known: where they are known (N, ...).
    """

    values: Tensor
    known: Tensor


@dataclass(frozen=True)
class SolvedInput:
    """What came into a stage, and how far its equations determine it.

    Attributes:
        values: of all images (N, ...).
        unknown_count: how many numbers that is.
        gradient_rank: how many numbers of what the layer is given the gradient equations alone determine.
        rank: how many of the unknowns all equations used determine.
        condition: condition number of the equations used; infinite where they leave something open.
    """

    values: Tensor
    unknown_count: int
    gradient_rank: int
    rank: int
    condition: float


@dataclass(frozen=True)
class WeakConstraints:
    """Gradient equations that say little: `sizes * (directions^T x_c) = projections[:, c]`, relative to the strongest.

    Attributes:
        directions: (N P, r), also those that no equation says anything of.
        sizes: (q,), q <= r.
        projections: (q, C).
    """

    directions: Tensor
    sizes: Tensor
    projections: Tensor


def invert_activation(activation: nn.Module, values: Tensor) -> tuple[ActivationInputs, Tensor]:
    """Return what an activation was given, where that can be told, and its slope there; all from what it returned.

    The slope of a common activation is a function of its value. Of a ReLU's values those that came out below zero,
    which is impossible, say how far off all of them may be: only larger ones count as active. Of an activation that
    falls and rises it is the larger of both inputs.
    """
    if isinstance(activation, nn.Sigmoid):
        known = (values > SATURATION) & (values < 1 - SATURATION)
        safe = torch.where(known, values, 0.5)
        return ActivationInputs(torch.logit(safe), known), safe * (1 - safe) * known
    if isinstance(activation, nn.Tanh):
        known = values.abs() < 1 - SATURATION
        safe = torch.where(known, values, 0.0)
        return ActivationInputs(torch.atanh(safe), known), (1 - safe.square()) * known
    if isinstance(activation, MonotoneActivation | ValleyActivation):
        given, known = activation.inverse(values)
        at_most = torch.where(known, given, given.clamp_min(0))  # well above a level stretch that ends below zero
        return ActivationInputs(at_most, known), activation.derivatives(given)[0] * known
    low = negative_slope(activation)
    if low == 0:
        known = values > torch.maximum(-2 * values.min(), SATURATION * values.abs().max())
        return ActivationInputs(values * known, known), known.to(values)
    slope = torch.ones_like(values).masked_fill(values < 0, low)
    return ActivationInputs(values / slope, torch.ones_like(values, dtype=torch.bool)), slope


def slope_change(activation: nn.Module, values: Tensor) -> Tensor:
    """Return how fast an activation's slope changes with what it returned, 0 where the activation is made of lines."""
    if isinstance(activation, nn.Sigmoid):
        return 1 - 2 * values
    if isinstance(activation, MonotoneActivation | ValleyActivation):
        given, known = activation.inverse(values)
        first, second = activation.derivatives(given)
        return torch.where(known, second / first.clamp_min(1e-9), 0.0)
    return -2 * values if isinstance(activation, nn.Tanh) else torch.zeros_like(values)


def negative_slope(activation: nn.Module) -> float:
    """Return the slope of a piecewise linear activation below zero; 1 for any other."""
    if isinstance(activation, nn.LeakyReLU):
        return float(activation.negative_slope)
    return 0.0 if isinstance(activation, nn.ReLU) else 1.0


def solve_input(
    stage: Stage,
    signal: Tensor,
    gradient: Tensor,
    outputs: ActivationInputs | None,
    *,
    trust: float | None,
    cutoff: float,
) -> SolvedInput:
    """Return what came into a stage, of all images of a batch at once.

    Args:
        stage: the layer.
        signal: dL/d(output of the layer) (N, out, ...).
        gradient: dL/d(weight of the layer), the sum over the images.
        outputs: what its activation is known to have been given.
        trust: what belongs to singular values of the gradient equations of at least this share of the largest is taken
            from them alone, and weight equations are used for the rest, if there is any. None solves all equations
            together, at equal weight as the signal's unit means nothing; but those of a linear layer's gradient alone.
        cutoff: singular values below this share of the largest count as zero.
    """
    count, shape = len(signal), stage.layer_input_shape
    rows, right = _gradient_equations(stage, signal, gradient, shape)
    if not bool(rows.isfinite().all() and right.isfinite().all() and rows.any()):
        nothing = stage.zero_input(count)
        return SolvedInput(nothing, nothing.numel(), 0, 0, math.inf)
    _check_time(SVD_COST * rows.numel() * max(rows.shape))
    left, sizes, directions = torch.linalg.svd(rows / rows.norm())
    right = right / rows.norm()
    determined = int((sizes > sizes[0] * cutoff).sum())
    strong = determined if trust is None or outputs is None else int((sizes > sizes[0] * trust).sum())
    positions, channels = rows.shape[1], right.shape[1]
    alone = outputs is None or (strong == positions and (trust is not None or gradient.ndim == 2))
    if stage.pointwise and (alone or trust is not None):
        turned = left.T @ right
        values = (directions[:strong].T @ (turned[:strong] / sizes[:strong, None])).T
        rank, condition = strong * channels, float(sizes[0] / sizes[strong - 1])
        if not alone:
            assert outputs is not None
            weak = WeakConstraints(directions[strong:].T, sizes[strong:] / sizes[0], turned[strong:] / sizes[0])
            values, more, worst = _fill_from_outputs(stage, shape, values, weak, outputs, cutoff)
            rank, condition = rank + more, max(condition, worst)
    else:
        values, rank, condition = _solve_together(stage, shape, rows / rows.norm(), right, outputs, cutoff)
    condition = condition if rank == values.numel() else math.inf
    return SolvedInput(_as_input(stage, values, count), values.numel(), determined * channels, rank, condition)


def _gradient_equations(stage: Stage, signal: Tensor, gradient: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the gradient equations, turned so that no more rows than unknowns are left: (q, N P) and (q, C)."""
    rows = gradient_rows(stage, signal, shape)
    right = gradient.flatten(2).transpose(1, 2) if gradient.ndim == 4 else gradient
    return triangularize(rows, right.reshape(len(rows), -1))


def _as_input(stage: Stage, values: Tensor, count: int) -> Tensor:
    """Return solved values in the shape of what came into the stage (N, ...)."""
    if not stage.pointwise:
        return values.reshape(count, *stage.shape)
    by_image = values.reshape(stage.layer_input_shape[0], count, -1).transpose(0, 1)
    return stage.undo_input_maps(by_image.reshape(count, *stage.layer_input_shape))


def gradient_rows(stage: Stage, signal: Tensor, shape: torch.Size) -> Tensor:
    """Return the matrix K of the gradient equations (rows, N P), with P positions of one channel of the layer's input.

    dL/dW[o, c, k] = sum over images i and outputs l of signal[i, o, l] x_ic[where tap k of the kernel lies at output
    l], so that K is the same for every channel. A linear layer has one position and one tap. The positions of an image
    stand side by side.

    Args:
        stage: the layer's.
        signal: what flows back into the layer (N, ...).
        shape: of the layer's input (C, H, W) or (F,).
    """
    if not isinstance(stage.layer, nn.Conv2d):
        return signal.flatten(1).T
    lies = _taps(stage.layer, shape)
    taps, outputs = lies.shape
    signals = signal.reshape(len(signal), -1, 1, outputs).expand(-1, -1, taps, -1)
    rows = signals.new_zeros(*signals.shape[:3], shape[1] * shape[2] + 1)
    rows = rows.scatter_add_(3, lies.expand_as(signals), signals)[..., 1:].flatten(1, 2)
    return rows.transpose(0, 1).flatten(1)


def weight_rows(stage: Stage, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return what a stage makes of the layer's input (C * P,) as a matrix (m, C * P) and an offset (m,)."""
    with torch.no_grad():
        zero = torch.zeros(1, *shape, dtype=torch.float64)
        weight = stage.layer.weight
        assert isinstance(weight, Tensor)
        if isinstance(stage.layer, nn.Conv2d):
            lies = _taps(stage.layer, shape).T[None, :, None]  # (1, L, 1, taps)
            values = weight.flatten(2)[:, None].expand(-1, lies.shape[1], -1, -1)
            rows = values.new_zeros(*values.shape[:3], shape[1] * shape[2] + 1)
            weight = rows.scatter_(3, lies.expand_as(values), values)[..., 1:].reshape(-1, shape.numel())
        if not len(stage.after):
            return weight, stage.layer(zero).flatten()
        returned = torch.zeros_like(stage.layer(zero))
        columns = stage.after(weight.T.reshape(-1, *returned.shape[1:])) - stage.after(returned)
        return columns.flatten(1).T, stage.activation_input(zero).flatten()


def _taps(layer: nn.Conv2d, shape: torch.Size) -> Tensor:
    """Return where each tap of the kernel lies at each output (taps, L): positions from 1, and 0 for padding."""
    numbers = torch.arange(1.0, shape[1] * shape[2] + 1, dtype=torch.float64).view(1, 1, *shape[1:])
    assert not isinstance(layer.padding, str)
    kernel = functional.unfold(numbers, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return kernel[0].long()


def _fill_from_outputs(
    stage: Stage, shape: torch.Size, values: Tensor, weak: WeakConstraints, outputs: ActivationInputs, cutoff: float
) -> tuple[Tensor, int, float]:
    """Complete channels (C, N P) from their well determined part `values`, by outputs and weak gradient equations."""
    weights, offset = weight_rows(stage, shape)
    channels, images = len(values), len(outputs.values)
    each = zip(
        outputs.values.flatten(1),
        outputs.known.flatten(1),
        values.reshape(channels, images, -1).unbind(1),
        weak.directions.chunk(images),
        strict=True,
    )
    parts, sides, norms = [], [], []
    for returned, known, strong, directions in each:
        rows = weights[known]
        sides.append((returned - offset)[known] - rows @ strong.flatten())
        parts.append((rows.view(len(rows), *strong.shape) @ directions).flatten(1))
        norms.append(rows.norm())
    unit = float(torch.stack(norms).norm()) / math.sqrt(values.numel())
    count = len(weak.sizes)
    gradient = functional.pad(weak.sizes.diag(), (0, weak.directions.shape[1] - count)) * unit
    rows = torch.cat([torch.block_diag(*[gradient] * channels), *parts])
    sides = [weak.projections[:count].T.flatten() * unit, *sides]
    found, rank, condition = least_squares(rows, torch.cat(sides)[:, None], cutoff, unit)
    return values + found.view(channels, -1) @ weak.directions.T, rank, condition


def _solve_together(
    stage: Stage, shape: torch.Size, small: Tensor, right: Tensor, outputs: ActivationInputs | None, cutoff: float
) -> tuple[Tensor, int, float]:
    """Solve all equations at once: for what the layer is given, where what comes in follows from it, else for that.

    The former channel by channel (C N P,), the latter image by image.
    """
    channels, positions = right.shape[1], shape[1:].numel()
    images, told_outputs = small.shape[1] // positions, 0 if outputs is None else int(outputs.known.sum())
    _check_time(2.0 * (channels * len(small) + told_outputs) * (channels * small.shape[1]) ** 2)
    rows, sides = torch.block_diag(*[small] * channels), right.T.flatten()
    if outputs is not None:
        weights, offset = weight_rows(stage, shape)
        known = outputs.known.flatten(1)
        told = [_for_batch_input(weights[k], i, images, channels) for i, k in enumerate(known)]
        factor = _ratio_or_zero(weights.norm() * math.sqrt(images), rows.norm())
        rows = torch.cat([rows * factor, *told])
        given = (outputs.values.flatten(1) - offset)[known]
        sides = torch.cat([sides * factor, given])
    if not stage.pointwise:
        with torch.no_grad():
            basis = torch.eye(stage.shape.numel(), dtype=torch.float64).view(-1, *stage.shape)
            offset = stage.layer_input(torch.zeros_like(basis[:1])).flatten()
            before = (stage.layer_input(basis).flatten(1) - offset).T
        assert len(before) == channels * positions
        parts = rows.view(len(rows), channels, images, positions).unbind(2)
        sides = sides - torch.stack([part.flatten(1) @ offset for part in parts]).sum(0)
        rows = torch.cat([part.flatten(1) @ before for part in parts], 1)
    values, rank, condition = least_squares(rows, sides[:, None], cutoff)
    return values, rank, condition


def _for_batch_input(rows: Tensor, image: int, images: int, channels: int) -> Tensor:
    """Return equations in one image's layer input (m, C P) as equations in that of all images (m, C N P)."""
    apart = rows.new_zeros(len(rows), channels, images, rows.shape[1] // channels)
    apart[:, :, image] = rows.view(len(rows), channels, -1)
    return apart.flatten(1)


def least_squares(rows: Tensor, right: Tensor, cutoff: float, unit: float = 0.0) -> tuple[Tensor, int, float]:
    """Return the shortest solution of min |rows x - right|, the rank of `rows`, and their condition number.

    Args:
        rows: (m, n).
        right: (m, c).
        cutoff: singular values below this share of the largest, or of `unit` if that is more, count as zero.
        unit: size of equations that are more than rounding.
    """
    triangle, turned = triangularize(rows, right)
    largest, smallest = _extreme_singular_values(triangle)
    if smallest > cutoff * max(largest, unit):
        return torch.linalg.solve_triangular(triangle, turned, upper=True), rows.shape[1], largest / smallest
    if not largest > cutoff * unit:
        return turned.new_zeros(rows.shape[1], right.shape[1]), 0, math.inf
    _check_time(PIVOTED_COST * triangle.numel() * min(triangle.shape))
    found = torch.linalg.lstsq(triangle, turned, rcond=cutoff * max(1.0, unit / largest), driver="gelsy")
    return found.solution, int(found.rank), math.inf


def triangularize(rows: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return at most n equations with the same least-squares solution: (min(m, n), n) and (min(m, n), c)."""
    unknowns = rows.shape[1]
    _check_time(2.0 * rows.numel() * min(rows.shape))
    if rows.shape[0] <= unknowns:
        q, upper = torch.linalg.qr(rows)
        return upper, q.T @ right
    upper = torch.linalg.qr(torch.cat([rows, right], 1), mode="r").R[:unknowns]
    return upper[:, :unknowns].contiguous(), upper[:, unknowns:].contiguous()


def _check_time(operations: float) -> None:
    """End the attack where a solve of so many operations can't be done in the time left."""
    check_time_for(operations / torch.get_num_threads())


def _extreme_singular_values(upper: Tensor) -> tuple[float, float]:
    """Estimate the extreme singular values of an upper triangular matrix (k, n), 0 for less than full rank.

    By the power method on it and on its inverse.
    """
    big = small = upper.new_ones(upper.shape[1], 1)
    for _ in range(12):
        size = big.norm()
        big = upper.T @ (upper @ (big / size)) if bool(size) else big
    largest = math.sqrt(float(big.norm()))
    if upper.shape[0] < upper.shape[1] or not bool(upper.diagonal().all()):
        return largest, 0.0
    for _ in range(12):
        below = torch.linalg.solve_triangular(upper.T, small / small.norm(), upper=False)
        small = torch.linalg.solve_triangular(upper, below, upper=True)
    size = float(small.norm())
    return largest, 1 / math.sqrt(size) if math.isfinite(size) else 0.0


def _ratio_or_zero(x: Tensor, y: Tensor) -> Tensor:
    """Return the ratio x / y, or 0 where that is no number."""
    return (x / y).nan_to_num(0.0, 0.0, 0.0)
