"""Solves convolutions below batch normalization in training mode: inputs, signals and masks from one gradient.

docs/design/batch-statistics.md has the derivation. Symbols here are those of that page:

- N = B P: positions of all B images, P of each; sums and means below go over all N.
- X: input of the convolution; z = W X, its output; xhat = (z - mean(z)) / sigma, sigma^2 = var(z) + eps;
  y = gamma xhat + beta.
- s: what flows back into y; dz: what flows back into z,

      dz = gamma / sigma (s - m - k xhat),     m = mean(s),     k = mean(s xhat).

N m is beta's gradient and N k is gamma's, so both are known. G_d = dz S_d X is the convolution's gradient at the offset
d of its kernel, where S_d moves positions by d. No prior and no label is used. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.mask_correction import ZERO_MARGIN
from attacks.analytic.graph.shift_structure import columns_by_position, rank_gap
from attacks.analytic.graph.unmixing import unmix_sparse
from attacks.search_control import check_time_limit

SILENT_ROW = 1e-2
"""Size of a row, relative to the largest, up to which it may be zero in all images."""
BELOW_ZERO, MAX_NEGATIVE = 1e-3, 0.01
"""Size, relative to the root mean square, from which on a number below zero is no rounding, and the share of such
numbers from which on a direction is no image's."""
MAX_ROUNDS = 60
"""Rounds of the fixed point for normalized values that are unknown."""
MAX_REPAIRS = 12
"""Times that channels which do not fit are mended or left out and the rest is solved anew."""
MAX_FLIPS = 12
"""Bits of one channel that are changed at most at a time."""
OUTLIER = 6.0
"""How many times the median a channel's residual must be to be an outlier."""
ANDERSON_MEMORY = 4
"""Earlier rounds that the next one is extrapolated from."""


@dataclass(frozen=True)
class BatchNormalization:
    """Batch normalization in training mode with all that a server sees of it.

    Attributes:
        gamma: (C,), its weight.
        beta: (C,), its bias.
        gamma_gradient: (C,), sum over positions of s xhat.
        beta_gradient: (C,), sum over positions of s.
        mean: (C,), of the batch, from the buffers that came back.
        variance: (C,), of the batch, biased.
        count: N.
        eps: added to the variance.
    """

    gamma: Tensor
    beta: Tensor
    gamma_gradient: Tensor
    beta_gradient: Tensor
    mean: Tensor
    variance: Tensor
    count: int
    eps: float = 1e-5

    @property
    def sigma(self) -> Tensor:
        """Return the standard deviation of every channel as the buffers have it, (C,)."""
        return (self.variance + self.eps).sqrt()

    def normalize(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return xhat (B, C, h, w) and sigma (C,) of all outputs z of the layer below."""
        mean = z.mean((0, 2, 3), keepdim=True)
        sigma = (z.var((0, 2, 3), unbiased=False) + self.eps).sqrt()
        return (z - mean) / _spread(sigma), sigma

    def scale(self, normalized: Tensor) -> Tensor:
        """Return y from xhat, (B, C, h, w) each."""
        return normalized * _spread(self.gamma) + _spread(self.beta)

    def unscale(self, outputs: Tensor) -> Tensor:
        """Return xhat from y, (B, C, h, w) each."""
        return (outputs - _spread(self.beta)) / _spread(self.gamma)

    def pull_back(self, signal: Tensor, normalized: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Return dz from s and xhat, (B, C, h, w) each. `sigma` is that of the buffers where none is given."""
        sigma = self.sigma if sigma is None else sigma
        m, k = _spread(self.beta_gradient / self.count), _spread(self.gamma_gradient / self.count)
        return _spread(self.gamma / sigma) * (signal - m - normalized * k)

    def push_up(self, output_signal: Tensor, normalized: Tensor, sigma: Tensor) -> Tensor:
        """Return s from dz and xhat, (B, C, h, w) each: `pull_back` solved for the signal."""
        m, k = _spread(self.beta_gradient / self.count), _spread(self.gamma_gradient / self.count)
        return output_signal * _spread(sigma / self.gamma) + m + normalized * k


@dataclass(frozen=True)
class NormalizedConvolution:
    """A convolution without bias, padded by half its odd kernel, with batch normalization on top.

    Attributes:
        weight: (C, K, kh, kw).
        gradient: like the weight.
        stride: the same for rows and columns.
        size: rows and columns of the input.
        images: B.
        norm: of its output.
        name: of the weight.
    """

    weight: Tensor
    gradient: Tensor
    stride: int
    size: tuple[int, int]
    images: int
    norm: BatchNormalization
    name: str = ""

    @property
    def output_size(self) -> tuple[int, int]:
        """Return rows and columns of the output."""
        return (self.size[0] - 1) // self.stride + 1, (self.size[1] - 1) // self.stride + 1

    @property
    def padding(self) -> tuple[int, int]:
        """Return zeros at each side of rows and columns."""
        return self.weight.shape[2] // 2, self.weight.shape[3] // 2

    def apply(self, inputs: Tensor) -> Tensor:
        """Return z (B, C, h, w) of the inputs X (B, K, H, W)."""
        return functional.conv2d(inputs, self.weight, stride=self.stride, padding=self.padding)

    @cached_property
    def equations(self) -> LayerEquations:
        """Return the layer without its normalization."""
        strides = (self.stride, self.stride)
        channels, inputs = self.weight.shape[:2]
        seen = torch.Size((self.images, inputs, *self.size))
        made = torch.Size((self.images, channels, *self.output_size))
        return LayerEquations(self.name, self.weight, self.gradient, strides, self.padding, (1, 1), 1, seen, made)

    def pull_back(self, output_signal: Tensor) -> Tensor:
        """Return what flows back into X (B, K, H, W) from dz (B, C, h, w)."""
        return self.equations.pull_back(output_signal)

    def signal_through(self, signal: Tensor, inputs: Tensor) -> Tensor:
        """Return what flows back into known inputs X (B, K, H, W) from s (B, C, h, w), through normalization, too."""
        normalized, sigma = self.norm.normalize(self.apply(inputs))
        return self.pull_back(self.norm.pull_back(signal, normalized, sigma))

    def normalized_outputs(self, inputs: Tensor) -> Tensor:
        """Return y (B, C, h, w) of known inputs X (B, K, H, W)."""
        normalized, _ = self.norm.normalize(self.apply(inputs))
        return self.norm.scale(normalized)

    def design(self, output_signal: Tensor) -> Tensor:
        """Return A (C kh kw, B H W) with A x = the gradient, for the numbers x of any input channel."""
        return self.equations.signal_matrix(output_signal).flatten(0, 1)

    def right_side(self) -> Tensor:
        """Return the gradient (C kh kw, K), a column for each input channel."""
        return self.equations.right_side().flatten(0, 1)

    def as_images(self, channels: Tensor) -> Tensor:
        """Return rows of input channels (K, B H W) as (B, K, H, W)."""
        return self.equations.as_images(channels, self.equations.input_shape)


# ---------------------------------------------------------------------------------------------- shifts


@dataclass(frozen=True)
class CenteredColumns:
    """What flows back into a convolution, and its input, up to one mixing of the images.

    Attributes:
        signals: (C, P, B), dz times an unknown B x B matrix.
        inputs: (P, B, K), the inverse of that matrix times X, at each position.
        gap: of the gradient's singular values, the last that counts over the next; infinite where there is no next.
    """

    signals: Tensor
    inputs: Tensor
    gap: float


def find_centered_columns(gradient: Tensor, size: tuple[int, int], images: int) -> CenteredColumns:
    """Return dz and X of a convolution with stride 1 below batch normalization, up to a mixing of the images.

    It takes N - 1 independent rows of dz and N of X: N <= K and N - 1 <= C, where dz sums to nothing over positions.

    Args:
        gradient: (C, K, kh, kw), odd kernel of at least three, padded to keep the size.
        size: rows and columns of the output.
        images: B.

    Raises:
        ValueError: where N > K or N - 1 > C.
    """
    n = images * size[0] * size[1]
    channels, inputs = gradient.shape[:2]
    if n > inputs or n - 1 > channels:
        raise ValueError(f"{n} positions are more than {channels} filters of {inputs} channels tell apart.")
    row, column = gradient.shape[2] // 2, gradient.shape[3] // 2
    near = gradient[:, :, row - 1 : row + 2, column - 1 : column + 2].permute(2, 3, 0, 1)  # G_d, |d| <= 1
    left_basis, sizes, right_basis = torch.linalg.svd(near.reshape(-1, inputs), full_matrices=False)
    gap = rank_gap(sizes, n)
    moved = (left_basis[:, :n] * sizes[:n]).reshape(3, 3, channels, n)  # dz S_d A^-1 for an unknown A
    u, s, v = torch.linalg.svd(moved[1, 1], full_matrices=False)
    shifts = _Shifts((v[: n - 1].mT / s[: n - 1]) @ u[:, : n - 1].mT @ moved, v[n - 1])
    left, right = shifts.restore((0, -1), ((-1, 0), (1, 0))), shifts.restore((0, 1), ((-1, 0), (1, 0)))
    up, down = shifts.restore((-1, 0), ((0, -1), (0, 1))), shifts.restore((1, 0), ((0, -1), (0, 1)))
    mixed = torch.stack(columns_by_position((left, right), (up, down), size, images), 1)  # A, (n, P, B)
    signals = torch.einsum("cn,npb->cpb", moved[1, 1], mixed)
    solved = torch.linalg.solve(mixed.reshape(n, n), right_basis[:n])
    return CenteredColumns(signals, solved.reshape(-1, images, inputs), gap)


@dataclass(frozen=True)
class _Shifts:
    """T_d = A S_d A^-1 but for its component along n = A 1, which dz does not see.

    Attributes:
        seen: (3, 3, n, n), (I - n n^T) T_d by d + 1.
        hidden: n, of length one.
    """

    seen: Tensor
    hidden: Tensor

    def restore(self, shift: tuple[int, int], others: Sequence[tuple[int, int]]) -> Tensor:
        """Return T_d in full, from T_e T_d = T_(e + d): (seen_e n) r_d = seen_(e+d) - seen_e seen_d, linear in r_d."""
        own = self.seen[shift[0] + 1, shift[1] + 1]
        total, weight = torch.zeros_like(self.hidden), torch.zeros_like(self.hidden[0])
        for other in others:
            first = self.seen[other[0] + 1, other[1] + 1]
            both = self.seen[shift[0] + other[0] + 1, shift[1] + other[1] + 1]
            q = first @ self.hidden
            total, weight = total + q @ (both - first @ own), weight + q @ q
        return own + torch.outer(self.hidden, total / weight)


def unmix_by_zeros(mixtures: Tensor, seed: int = 0) -> Tensor | None:
    """Return V (B, B) so that each column of mixtures @ V is one image's, up to a positive factor; None if not found.

    Inputs behind a ReLU are often exactly zero and never negative: the zeros tell images apart (`unmix_sparse`), and
    the sign of the others tells that of the factor.

    Args:
        mixtures: (M, B), rows of B nonnegative numbers times one unknown B x B matrix.
        seed: of the search.
    """
    if mixtures.shape[1] == 1:
        return mixtures.sum(0, keepdim=True).sign()
    size = mixtures.norm(dim=1)
    heard = mixtures[size > SILENT_ROW * size.max()]  # what is zero in all images has less rounding than other zeros
    found = unmix_sparse(heard, seed=seed)
    directions = found.directions * (heard @ found.directions).sum(0).sign()
    values = heard @ directions
    negative = (values < -BELOW_ZERO * values.square().mean(0).sqrt()).double().mean(0)
    return directions if found.complete and bool((negative < MAX_NEGATIVE).all()) else None


@dataclass(frozen=True)
class SolvedConvolution:
    """All that passes through one normalized convolution.

    Attributes:
        inputs: X (B, K, H, W), zeros set.
        unrounded: X as it was solved, with its rounding where it is zero.
        signal: s (B, C, h, w).
        normalized: xhat (B, C, h, w).
        sigma: (C,).
        misfit: of the batch's means, relative: how well statistics and shifts agree.
    """

    inputs: Tensor
    unrounded: Tensor
    signal: Tensor
    normalized: Tensor
    sigma: Tensor
    misfit: float


def solve_by_shifts(layer: NormalizedConvolution, like: Tensor | None = None) -> SolvedConvolution | None:
    """Return input and signal of a convolution with stride 1 whose input is a ReLU's output; None where it fails.

    Nothing above the layer need be known. The batch's means, which came back with the buffers, tell the factor of every
    image: mean(z_c) = sum over b of lambda_b mean(z_bc).

    Args:
        layer: with N <= K and N - 1 <= C.
        like: s (B, C, h, w) as it is known from elsewhere: images are returned in that order. It fails where two of
            these are nearest to the same image.
    """
    try:
        columns = find_centered_columns(layer.gradient, layer.output_size, layer.images)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None  # nothing flows back, or equal positions take the same
    unmixing = unmix_by_zeros(columns.inputs.transpose(1, 2).flatten(0, 1))
    if unmixing is None:
        return None
    b, size = layer.images, layer.output_size
    inputs = (columns.inputs.transpose(1, 2) @ unmixing).permute(2, 1, 0).reshape(b, -1, *size)
    means = layer.apply(inputs).mean((2, 3)).mT / b
    factors = torch.linalg.lstsq(means, layer.norm.mean[:, None]).solution[:, 0]
    misfit = float((means @ factors - layer.norm.mean).norm() / layer.norm.mean.norm())
    unrounded = inputs * factors[:, None, None, None]
    output_signal = columns.signals @ torch.linalg.inv(unmixing).mT / factors
    output_signal = output_signal.permute(2, 0, 1).reshape(b, -1, *size)
    inputs = set_zeros(unrounded)
    normalized, sigma = layer.norm.normalize(layer.apply(inputs))
    signal = layer.norm.push_up(output_signal, normalized, sigma)
    if like is not None:
        known, own = (functional.normalize(t.flatten(1), dim=1) for t in (like, signal))
        order = (known @ own.mT).argmax(1)
        if len(order.unique()) < b:
            return None
        inputs, unrounded, signal, normalized = (t[order] for t in (inputs, unrounded, signal, normalized))
    return SolvedConvolution(inputs, unrounded, signal, normalized, sigma, misfit)


# ---------------------------------------------------------------------------------------------- known signals


@dataclass(frozen=True)
class KnownSignal:
    """What is known above one of the layers that see the same input.

    Attributes:
        layer: the layer.
        signal: s (B, C, h, w).
        normalized: xhat (B, C, h, w) where it is known.
        known: where that is, boolean (B, C, h, w).
        unmasked: what flows back into the activation above (B, C, h, w): s is that or zero. Wrong bits are corrected
            where it is given.
    """

    layer: NormalizedConvolution
    signal: Tensor
    normalized: Tensor
    known: Tensor
    unmasked: Tensor | None = None


@dataclass(frozen=True)
class SolvedInputs:
    """The input of layers whose signals are known.

    Attributes:
        inputs: X (B, K, H, W), as solved.
        signals: s of every layer, with bits corrected.
        residual: of the gradients' equations that were used, relative.
        changed: bits that were changed.
        left_out: channels whose equations were left out in the end, since they do not fit.
        rounds: of the fixed point, all together.
    """

    inputs: Tensor
    signals: tuple[Tensor, ...]
    residual: float
    changed: int
    left_out: int
    rounds: int


@dataclass(frozen=True)
class KnownInputs:
    """Entries of an input that are known beforehand, such as those that an open sum above tells.

    Attributes:
        values: X (B, K, H, W) where it is known.
        known: where that is, boolean (B, K, H, W).
    """

    values: Tensor
    known: Tensor


def solve_inputs(
    branches: Sequence[KnownSignal], entries: KnownInputs | None = None, tolerance: float = 1e-9
) -> SolvedInputs:
    """Return the common input of one or more normalized convolutions whose signals s are known.

    dz depends on xhat, which is known where the activation above is open and unknown elsewhere. Each round solves the
    gradients' equations for X by least squares with xhat as it stands, then takes xhat from W X and the batch's
    statistics. The term with xhat is small, of order N^-1/2, so that a dozen rounds with Anderson's extrapolation do.
    A wrong bit of a mask spoils the equations of its own channel alone: such channels are mended or left out.

    Args:
        branches: of layers with the same input, such as a block's first convolution and its shortcut.
        entries: of the input that are known, for layers of stride 1.
        tolerance: relative change of xhat at which it ends.
    """
    branches = list(branches)
    used = [torch.ones(b.signal.shape[1], dtype=torch.bool, device=b.signal.device) for b in branches]
    rounds = changed = 0
    start: Tensor | None = None
    for _ in range(MAX_REPAIRS):
        inputs, parts, count = _iterate(branches, used, tolerance, start, entries)
        rounds += count
        start = torch.cat([p.flatten() for p in parts])
        flips, again = 0, []
        misses = [_misses(b, p, inputs) for b, p in zip(branches, parts, strict=True)]
        for i, (branch, miss) in enumerate(zip(branches, misses, strict=True)):
            size = miss.norm(dim=1)
            bad = size > OUTLIER * size[used[i]].median()
            if branch.unmasked is not None and bool(bad.any()):
                branches[i], mended = _mend_channels(branch, inputs, miss, bad)
                flips += int(mended.sum())
            again.append(_leave_out(bad, size, branch.layer, entries))
        changed += flips
        settled = all(bool((a == u).all()) for a, u in zip(again, used, strict=True))
        used = again
        if settled and not flips:
            break
    right = torch.cat([b.layer.gradient.flatten(1)[u].flatten() for b, u in zip(branches, used, strict=True)])
    miss = torch.cat([m[u].flatten() for m, u in zip(misses, used, strict=True)])
    left_out = sum(int((~u).sum()) for u in used)
    return SolvedInputs(inputs, tuple(b.signal for b in branches), _relative(miss, right), changed, left_out, rounds)


def _iterate(
    branches: Sequence[KnownSignal],
    used: Sequence[Tensor],
    tolerance: float,
    start: Tensor | None,
    entries: KnownInputs | None,
) -> tuple[Tensor, list[Tensor], int]:
    """Return X, xhat of every layer and the rounds of the fixed point, with the equations of some channels."""
    shapes = [b.signal.shape for b in branches]
    lengths = [b.signal.numel() for b in branches]
    fixed = torch.cat([b.known.flatten() for b in branches])
    told = torch.cat([torch.where(b.known, b.normalized, torch.zeros_like(b.normalized)).flatten() for b in branches])
    state = told if start is None else torch.where(fixed, told, start)
    history: list[tuple[Tensor, Tensor]] = []
    changes: list[float] = []
    for round_ in range(1, MAX_ROUNDS + 1):
        check_time_limit()
        parts = [p.reshape(s) for p, s in zip(state.split(lengths), shapes, strict=True)]
        inputs = _solve_linear(branches, parts, used, entries)
        following = torch.cat([_normalize(b.layer, inputs).flatten() for b in branches])
        step = torch.where(fixed, torch.zeros_like(state), following - state)
        changes.append(float(step.norm() / state.norm().clamp_min(1e-30)))
        stuck = round_ > 6 and changes[-1] < 1e-4 and changes[-1] > 0.7 * min(changes[:-1])
        if changes[-1] < tolerance or stuck:
            break
        history = [*history, (state, step)][-ANDERSON_MEMORY - 1 :]
        state = torch.where(fixed, told, _extrapolate(history))
    return inputs, parts, round_


def _misses(branch: KnownSignal, normalized: Tensor, inputs: Tensor) -> Tensor:
    """Return what the gradient has and the solution has not, (C, K kh kw)."""
    output_signal = branch.layer.norm.pull_back(branch.signal, normalized)
    found = conv2d_weight(inputs, branch.layer.weight.shape, output_signal, branch.layer.stride, branch.layer.padding)
    return (branch.layer.gradient - found).flatten(1)


def _leave_out(bad: Tensor, size: Tensor, layer: NormalizedConvolution, entries: KnownInputs | None) -> Tensor:
    """Return which channels' equations to use: those that fit, as long as they outnumber the unknowns."""
    unknown = layer.images * layer.size[0] * layer.size[1]
    if entries is not None:
        unknown = int((~entries.known).sum((0, 2, 3)).max())
    taps = layer.weight.shape[2] * layer.weight.shape[3] / layer.stride**2
    enough = min(len(bad), int(1.3 * unknown / max(taps, 1)) + 1)
    return ~bad | (size <= size.sort().values[enough - 1])


def _mend_channels(branch: KnownSignal, inputs: Tensor, misses: Tensor, bad: Tensor) -> tuple[KnownSignal, Tensor]:
    """Return the branch with bits of bad channels changed where that explains the gradient, and how many in each.

    m and k are known from gradients, so that a bit of s changes dz at its own position alone, by gamma / sigma s.
    """
    layer, unmasked = branch.layer, branch.unmasked
    assert unmasked is not None
    patches = layer.equations.patches(inputs)  # (N, K kh kw)
    weight = patches.square().sum(1)
    scale = layer.norm.gamma / layer.norm.sigma
    signal, whole = (t.transpose(0, 1).flatten(1).clone() for t in (branch.signal, unmasked))
    size = misses.norm(dim=1)
    noise = float(size[~bad].median()) if bool((~bad).any()) else 0.0
    count = torch.zeros_like(bad, dtype=torch.long)
    for c in torch.nonzero(bad)[:, 0].tolist():
        rest = misses[c]
        for _ in range(MAX_FLIPS):
            if float(rest.norm()) < OUTLIER * noise:
                break
            change = scale[c] * torch.where(signal[c] == 0, whole[c], -whole[c])
            gain = 2 * change * (patches @ rest) - change.square() * weight
            best = int(gain.argmax())
            if float(gain[best]) <= 0.1 * float(rest @ rest):
                break
            rest = rest - change[best] * patches[best]
            signal[c, best] = whole[c, best] if float(signal[c, best]) == 0 else 0.0
            count[c] += 1
    shape = branch.signal.transpose(0, 1).shape
    return replace(branch, signal=signal.reshape(shape).transpose(0, 1)), count


def _normalize(layer: NormalizedConvolution, inputs: Tensor) -> Tensor:
    """Return xhat by the statistics of the outputs themselves.

    Inputs behind a ReLU have a large mean, and an error of it changes all of a channel's outputs alike. Normalized by
    their own statistics they do not show it, by those of the buffers it would grow from round to round.
    """
    return layer.norm.normalize(layer.apply(inputs))[0]


def _extrapolate(history: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the next state from (state, step) of earlier rounds (Anderson, 1965)."""
    state, step = history[-1]
    if len(history) == 1:
        return state + step
    steps = torch.stack([step - s for _, s in history[:-1]], 1)
    states = torch.stack([state - s for s, _ in history[:-1]], 1)
    share = torch.linalg.lstsq(steps, step[:, None]).solution
    return state + step - ((states + steps) @ share)[:, 0]


def _solve_linear(
    branches: Sequence[KnownSignal], normalized: Sequence[Tensor], used: Sequence[Tensor], entries: KnownInputs | None
) -> Tensor:
    """Return X from the gradients' equations of the used channels, with xhat as given.

    dz sums to nothing over positions. So a constant on pixels that one tap alone of a kernel sees, all outputs once, is
    invisible in the gradient; with strides there are such pixels. The batch's means tell that constant.
    """
    layers = [b.layer for b in branches]
    systems, sides = [], []
    for branch, x, use in zip(branches, normalized, used, strict=True):
        layer = branch.layer
        rows = use.repeat_interleave(layer.weight.shape[2] * layer.weight.shape[3])
        systems.append(layer.design(layer.norm.pull_back(branch.signal, x))[rows])
        sides.append(layer.right_side()[rows])
    matrix, right = torch.cat(systems), torch.cat(sides)
    first = layers[0]
    if first.stride == 1 and entries is not None:
        values, known = (t.transpose(0, 1).flatten(1).mT for t in (entries.values, entries.known))
        return first.as_images(_least_squares_around(matrix, right, values, known).mT)
    if first.stride == 1:
        return first.as_images(_least_squares(matrix, right).mT)
    invisible = matrix.new_zeros(first.images, *first.size)
    invisible[:, :: first.stride, :: first.stride] = 1
    constant = invisible.flatten()[None]
    solved = _least_squares(
        torch.cat([matrix, constant * (matrix.norm() / matrix.shape[1])]),
        torch.cat([right, torch.zeros_like(right[:1])]),
    )
    inputs = first.as_images(solved.mT)
    maps, misses = [], []
    for layer in layers:
        py, px = layer.padding
        maps.append(layer.weight[:, :, py, px] / layer.norm.sigma[:, None])
        misses.append((layer.norm.mean - layer.apply(inputs).mean((0, 2, 3))) / layer.norm.sigma)
    shift = torch.linalg.lstsq(torch.cat(maps), torch.cat(misses)[:, None]).solution
    return first.as_images((solved + constant.mT * shift.mT).mT)


def _least_squares_around(matrix: Tensor, right: Tensor, values: Tensor, known: Tensor) -> Tensor:
    """Return the least squares solution, column by column with other entries fixed, refined once."""
    normal = matrix.mT @ matrix
    normal.diagonal().add_(1e-15 * float(normal.diagonal().mean()))
    solved = torch.where(known, values, torch.zeros_like(values))
    factors = {}
    for _ in range(2):
        gradient = matrix.mT @ (right - matrix @ solved)
        for k in range(right.shape[1]):
            free = torch.nonzero(~known[:, k])[:, 0]
            if k not in factors:
                factors[k] = torch.linalg.cholesky(normal[free][:, free])
            solved[free, k] += torch.cholesky_solve(gradient[free, k : k + 1], factors[k])[:, 0]
    return solved


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the least squares solution by normal equations, refined once."""
    normal = matrix.mT @ matrix
    normal.diagonal().add_(1e-15 * float(normal.diagonal().mean()))
    factor = torch.linalg.cholesky(normal)
    solved = torch.cholesky_solve(matrix.mT @ right, factor)
    return solved + torch.cholesky_solve(matrix.mT @ (right - matrix @ solved), factor)


# ---------------------------------------------------------------------------------------------- masks


def set_zeros(inputs: Tensor) -> Tensor:
    """Return a solved ReLU output with zeros for what is no larger than its rounding, told by its negative entries."""
    return inputs * (inputs > ZERO_MARGIN * float(inputs.min().abs()))


def _spread(channels: Tensor) -> Tensor:
    """Return numbers of channels (C,) so that they broadcast over images and positions."""
    return channels[:, None, None]


def _relative(miss: Tensor, whole: Tensor) -> float:
    return float(miss.norm() / whole.norm().clamp_min(1e-300))
