r"""The input of a convolution below a ReLU and an overlapping max pooling, from pooled outputs, signal and gradient.

ImageNet's stem is meant: 7x7 with stride 2, 3x3 pooling with stride 2. With z = W * x + b the convolution's outputs,
known are

    (1) t = max(0, max over a window of z)   for every window and filter,
    (2) G = sum over windows of s patch(x at the position that passed),   s = dL/dt known.

Both are linear in x once it is known which position each open window (t > 0) passed on.

**Which positions it can be.** Every z_q is at most u_q, the smallest t of the windows that cover q. So only positions
with u_q = t can be the maximum of a window. Windows that overlap and show the same number passed on the same position:
they make one *group*, whose position lies in all its windows. That leaves three or four candidates of nine. Windows
apart that show the same number, as some do by chance, are groups of their own, and so are those of a flat area, which
have no position in common.

**Search** by annealing, under a falling standard deviation sigma of z:

- A candidate of a group is the position with probability q proportional to N(t; z, sigma^2) / Phi((t - z) / sigma): it
  is t, and all others are below.
- A step of Gauss and Newton, by conjugate gradients: on (1) at the candidates, weighted by q / sigma^2; on z <= u where
  it is violated; on (2) with expected patches, each filter with a variance of its own, that of what it misses; and on a
  prior. q hangs on x by way of z, and the step takes that into account: so (2) moves the positions, too, and not only
  the pixels below positions that (1) has chosen. Without that term (2) stays a tenth unexplained.
- The prior is one of few edges: differences of neighboring pixels are Student-distributed, as weighted squares that
  are weighed anew at every step. It is weak for what all channels share and strong for what sets them apart.

**Deeper layers.** The input may itself be made of a picture by further layers, as by VGG's first convolution
(`InputMap`). Then the step is in the picture, by the chain rule.

Products take float32, what is left of the equations float64 (iterative refinement).

The counts decide how far it comes. At 64 pixels groups and (2) are half as many again as there are pixels, at 224
pixels six tenths of them; the rest is said by inequalities and the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import csr_array, triu
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from attacks.analytic.graph.linearization import Forward, Linearization, RecordedDerivative, RecordedFunction
from attacks.search_control import check_time_limit

SMALL_SIGMA = 3e-3
"""Standard deviation of z, in standard deviations of t, below which it falls faster."""
SMALL_CHANGE = 1e-8
"""Share of the input that a step changes where the search ends."""
EDGE_FREEDOM = 1.0
"""Degrees of freedom of the differences of neighboring pixels: few, so that edges cost little."""
MIN_GRADIENT_MISS = 1e-7
"""Share of the gradient that each filter is taken to miss at least."""
SMALL_STEP_LEFT = 1e-6
"""Share of the first squared residual at which conjugate gradients end."""


@dataclass(frozen=True)
class PooledConvolution:
    """Shapes and weights of the layer.

    Attributes:
        weight: (C, I, k, k), of the convolution with all that is affine behind it, such as a batch norm.
        bias: (C,), likewise.
        stride: of the convolution, rows and columns as in all that follows.
        padding: zeros around the input.
        window: sides of a pooling window.
        pool_stride: between windows.
        pool_padding: positions around z that never pass.
    """

    weight: Tensor
    bias: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    window: tuple[int, int]
    pool_stride: tuple[int, int]
    pool_padding: tuple[int, int]

    def outputs(self, images: Tensor) -> Tensor:
        """Return z."""
        return functional.conv2d(images, self.weight, self.bias, self.stride, self.padding)

    def linear(self, images: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return z without the bias, by these weights or others."""
        weight = self.weight if weight is None else weight
        return functional.conv2d(images, weight, None, self.stride, self.padding)

    def transposed(self, outputs: Tensor, images: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return what a tensor shaped like z is in the input's space, by these weights or others."""
        weight = self.weight if weight is None else weight
        return conv2d_input(images.shape, weight, outputs, self.stride, self.padding)

    def gradient(self, images: Tensor, signal: Tensor) -> Tensor:
        """Return dL/dW where `signal` flows back into z."""
        return conv2d_weight(images, self.weight.shape, signal, self.stride, self.padding)

    def to(self, dtype: torch.dtype) -> PooledConvolution:
        """Return the layer in another precision."""
        return replace(self, weight=self.weight.to(dtype), bias=self.bias.to(dtype))


@dataclass(frozen=True)
class PooledObservation:
    """What is known of the layer.

    Attributes:
        pooled: t, (B, C, P, P).
        signal: dL/dt, likewise.
        gradient: dL/dW, (C, I, k, k), the sum over the batch.
        noise: error of `pooled`, relative to its largest entry; overlapping windows whose numbers are nearer than four
            times that show the same.
    """

    pooled: Tensor
    signal: Tensor
    gradient: Tensor
    noise: float = 1e-6


@dataclass(frozen=True)
class InputMap:
    """What makes the layer's input of pictures, in two precisions."""

    forward: Forward
    single_forward: Forward


@dataclass(frozen=True)
class AnnealingSettings:
    """How the search goes.

    Attributes:
        roughness: scale of differences of neighboring pixels in what all channels share, in the input's units.
        color_roughness: of what sets the channels apart.
        first_sigma: first standard deviation of z, in standard deviations of t.
        steps: of Gauss and Newton, at most.
        decay: of sigma, a step.
        final_decay: of sigma below `SMALL_SIGMA`, where most positions are decided.
        inner_iterations: of conjugate gradients a step.
        precision: of the products; float32 is twice as fast.
    """

    roughness: float = 0.1
    color_roughness: float = 0.03
    first_sigma: float = 0.3
    steps: int = 115
    decay: float = 0.93
    final_decay: float = 0.8
    inner_iterations: int = 40
    precision: torch.dtype = torch.float32


@dataclass(frozen=True)
class Candidates:
    """Which positions may have been passed on.

    Attributes:
        group: (N,), the group of each candidate.
        position: (N,), its place in z, flattened.
        target: (N,), the t of its group.
        signal: (N,), the sum of s over the windows of its group.
        bound: u, shaped like z.
        groups: number of groups.
    """

    group: Tensor
    position: Tensor
    target: Tensor
    signal: Tensor
    bound: Tensor
    groups: int

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of each group's candidates."""
        return values.new_zeros(self.groups, *values.shape[1:]).index_add_(0, self.group, values)

    def placed(self, values: Tensor, like: Tensor) -> Tensor:
        """Return a tensor shaped like z with each candidate's value at its position."""
        return values.new_zeros(like.numel()).index_add_(0, self.position, values).reshape(like.shape)


def candidate_positions(layer: PooledConvolution, known: PooledObservation, outputs: torch.Size) -> Candidates:
    """Find the positions that each group of windows can have passed on.

    Args:
        layer: the convolution and its pooling.
        known: pooled outputs and their signal.
        outputs: shape of z, (B, C, H, W).
    """
    pooled, (batch, channels, height, width) = known.pooled, outputs
    rows, size = batch * channels, height * width
    t, s = pooled.reshape(rows, -1), known.signal.reshape(rows, -1)
    tolerance = 4 * known.noise * float(t.max())
    grid = torch.arange(1, size + 1, device=t.device, dtype=torch.float64).reshape(1, 1, height, width)
    windows = functional.unfold(grid, layer.window, padding=layer.pool_padding, stride=layer.pool_stride)[0].long() - 1
    inside = windows >= 0  # (window^2, windows)
    which = torch.arange(windows.shape[1], device=t.device).expand_as(windows)[inside]
    covered = windows[inside]
    bound = t.new_full((rows, size), float("inf"))
    bound.scatter_reduce_(1, covered.expand(rows, -1), t[:, which], "amin")

    overlapping = _overlapping_windows(windows, inside)
    fits = (t[:, which] > 0) & (t[:, which] <= bound[:, covered] + tolerance)
    row, entry = torch.nonzero(fits, as_tuple=True)
    window, position = row * t.shape[1] + which[entry], row * size + covered[entry]
    group = _groups(t, overlapping, tolerance)
    shared = _at_common_positions(group, window, position, rows * size)
    # windows that seem to share a position and have none in common: the same number by chance, or a flat area
    left = torch.zeros_like(group, dtype=torch.bool)
    left[window] = True
    left &= ~torch.isin(group, group[window[shared]])
    group = torch.where(left, torch.arange(len(group), device=t.device), group)
    shared = _at_common_positions(group, window, position, rows * size)
    pairs = torch.unique(group[window[shared]] * (rows * size) + position[shared])
    found, position = pairs // (rows * size), pairs % (rows * size)
    total = s.new_zeros(len(group)).index_add_(0, group, s.flatten())
    kept, compact = torch.unique(found, return_inverse=True)
    return Candidates(compact, position, t.flatten()[found], total[found], bound.reshape(outputs), len(kept))


def _overlapping_windows(windows: Tensor, inside: Tensor) -> Tensor:
    """Return pairs of windows (2, n) that have a position in common, from their positions (window^2, windows)."""
    which = torch.arange(windows.shape[1], device=windows.device).expand_as(windows)
    places = (which[inside].cpu().numpy(), windows[inside].cpu().numpy())
    covers = csr_array((np.ones(len(places[0]), dtype=np.float32), places))
    one, other = triu(covers @ covers.T, k=1).nonzero()
    return torch.as_tensor(np.stack((one, other)), dtype=torch.long, device=windows.device)


def _groups(t: Tensor, pairs: Tensor, tolerance: float) -> Tensor:
    """Return of every window, counted over rows of t, the first of those that overlap and show the same number."""
    row, pair = torch.nonzero((t[:, pairs[0]] - t[:, pairs[1]]).abs() <= tolerance, as_tuple=True)
    one, other = (row * t.shape[1] + side[pair] for side in pairs)
    group = torch.arange(t.numel(), device=t.device)
    while True:
        lowest = torch.minimum(group[one], group[other])
        following = group.scatter_reduce(0, one, lowest, "amin").scatter_reduce(0, other, lowest, "amin")
        if torch.equal(following, group):
            return group
        group = following


def _at_common_positions(group: Tensor, window: Tensor, position: Tensor, positions: int) -> Tensor:
    """Return which pairs of a window and a position in it are at positions of all windows of its group."""
    _, which, counts = torch.unique(group[window] * positions + position, return_inverse=True, return_counts=True)
    members = torch.bincount(group, minlength=len(group))
    return counts[which] == members[group[window]]


def invert_pooled_convolution(
    layer: PooledConvolution,
    known: PooledObservation,
    start: Tensor,
    settings: AnnealingSettings = AnnealingSettings(),
    before: InputMap | None = None,
) -> Tensor:
    """Find the layer's input, or the picture that it is made of.

    Args:
        layer: the convolution and its pooling.
        known: what is known of it.
        start: (B, I, H, W), such as gray.
        settings: of the search.
        before: what makes the layer's input of the picture; None where it is the picture.

    Returns:
        The input or the picture, (B, I, H, W). Nothing proves it: compare what the network makes of it.
    """
    images = start
    inputs = _Inputs(before, start, settings.precision)
    candidates = candidate_positions(layer, known, layer.outputs(inputs.at(images).value).shape)
    if not candidates.groups:
        return images
    spread = float(known.pooled.std())
    sigma = settings.first_sigma * spread
    problem = _Problem(layer, known, candidates, settings, inputs)
    for step in range(settings.steps):
        check_time_limit()
        system = _System(problem, images, sigma, first=step == 0)
        change = system.solve()
        images = images + change
        if sigma <= known.noise * spread and float(change.norm()) <= SMALL_CHANGE * float(images.norm()):
            break
        decay = settings.decay if sigma > SMALL_SIGMA * spread else settings.final_decay
        sigma = max(decay * sigma, known.noise * spread)
    return images


class _InputAt:
    """The layer's input at one point, and products with its derivative by the picture."""

    def __init__(self, images: Tensor, forward: Forward | None, record: RecordedDerivative | None = None) -> None:
        self._linear = None if forward is None else Linearization(forward, images, record)
        self.value = images if self._linear is None else self._linear.values[0]

    def push(self, direction: Tensor) -> Tensor:
        return direction if self._linear is None else self._linear.push(direction)[0]

    def pull(self, weights: Tensor) -> Tensor:
        return weights if self._linear is None else self._linear.pull([weights])


class _Inputs:
    """The layer's input as a function of the picture."""

    def __init__(self, before: InputMap | None, images: Tensor, precision: torch.dtype) -> None:
        self.before, self.precision = before, precision
        self.record = None
        if before is not None:
            self.record = RecordedFunction(before.single_forward).record(images.to(precision))

    def at(self, images: Tensor) -> _InputAt:
        """Return it at a point, in full precision."""
        return _InputAt(images, None if self.before is None else self.before.forward)

    def roughly_at(self, images: Tensor) -> _InputAt:
        """Return it at a point, in the precision of products."""
        forward = None if self.before is None else self.before.single_forward
        return _InputAt(images.to(self.precision), forward, self.record)


def measure_misfit(layer: PooledConvolution, known: PooledObservation, images: Tensor) -> float:
    """Return what images leave of pooled outputs and gradient, the root mean square of both, relative.

    Args:
        layer: the convolution and its pooling.
        known: what is known of it.
        images: the layer's input, (B, I, H, W).
    """
    return math.hypot(*(float(missed.norm()) for missed in relative_misses(layer, known, images)))


def relative_misses(layer: PooledConvolution, known: PooledObservation, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what images leave of pooled outputs and of the gradient, so that `measure_misfit` is the norm of both.

    Args:
        layer: the convolution and its pooling.
        known: what is known of it.
        images: the layer's input, (B, I, H, W).
    """
    z = layer.outputs(images)
    pooled, places = functional.max_pool2d(z, layer.window, layer.pool_stride, layer.pool_padding, return_indices=True)
    passed = torch.zeros_like(z).flatten(2)
    passed.scatter_add_(2, places.flatten(2), (known.signal * (pooled > 0)).flatten(2))
    gradient = layer.gradient(images, passed.reshape(z.shape))
    sizes = (math.sqrt(2) * known.pooled.norm(), math.sqrt(2) * known.gradient.norm())
    return (pooled.relu() - known.pooled) / sizes[0], (gradient - known.gradient) / sizes[1]


def _probabilities(z: Tensor, candidates: Candidates, sigma: float) -> tuple[Tensor, Tensor]:
    """Return how likely each candidate is the one its group passed on, from z at the candidates.

    Also returned is the derivative of the logarithm by z, before it is made to sum to one.
    """
    deviation = (candidates.target - z) / sigma
    log_below = torch.special.log_ndtr(deviation)
    score = -deviation.square() / 2 - log_below
    slope = (deviation + torch.exp(-deviation.square() / 2 - math.log(2 * math.pi) / 2 - log_below)) / sigma
    top = score.new_full((candidates.groups,), -torch.inf).scatter_reduce(0, candidates.group, score, "amax")
    weight = (score - top[candidates.group]).exp()
    return weight / candidates.sums(weight)[candidates.group], slope


@dataclass(frozen=True)
class _Derivative:
    """The derivative of z and of the expected gradient (2) by the input, at one point.

    Attributes:
        layer: the convolution and its pooling.
        candidates: of its groups.
        probability: of each candidate.
        slope: of the logarithm of that by z.
        signal: what is expected to flow back into z.
        images: the point.
    """

    layer: PooledConvolution
    candidates: Candidates
    probability: Tensor
    slope: Tensor
    signal: Tensor
    images: Tensor

    def to(self, dtype: torch.dtype) -> _Derivative:
        """Return it in another precision."""
        candidates = replace(self.candidates, signal=self.candidates.signal.to(dtype))
        parts = (t.to(dtype) for t in (self.probability, self.slope, self.signal, self.images))
        return _Derivative(self.layer.to(dtype), candidates, *parts)

    def push(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Return how z and the expected gradient change."""
        own = self.candidates
        outputs = self.layer.linear(direction)
        rate = self.slope * outputs.flatten()[own.position]
        change = self.probability * (rate - own.sums(self.probability * rate)[own.group])
        moved = own.placed(change * own.signal, outputs)
        return outputs, self.layer.gradient(direction, self.signal) + self.layer.gradient(self.images, moved)

    def pull(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """Return the transpose's product with weights of z and of the gradient."""
        own = self.candidates
        seen = self.layer.linear(self.images, gradient).flatten()[own.position] * own.signal
        change = self.slope * self.probability * (seen - own.sums(self.probability * seen)[own.group])
        through_outputs = self.layer.transposed(outputs + own.placed(change, outputs), self.images)
        return through_outputs + self.layer.transposed(self.signal, self.images, gradient)


@dataclass(frozen=True)
class _EdgePrior:
    """Weighted squares of the differences of neighboring pixels.

    Attributes:
        precision: (I, I), of a difference's channels.
        down: (B, 1, H - 1, W), the weight of each difference of rows.
        right: (B, 1, H, W - 1), of columns.
    """

    precision: Tensor
    down: Tensor
    right: Tensor

    @classmethod
    def of(cls, images: Tensor, settings: AnnealingSettings) -> _EdgePrior:
        """Return the prior that stands for Student's distribution at these images."""
        number = images.shape[1]
        shared = images.new_full((number, number), 1 / number)
        apart = torch.eye(number, dtype=images.dtype, device=images.device) - shared
        precision = shared / settings.roughness**2 + apart / settings.color_roughness**2

        def weight(differences: Tensor) -> Tensor:
            size = (torch.einsum("ij,bjhw->bihw", precision, differences) * differences).sum(1, keepdim=True) / number
            return (EDGE_FREEDOM + 1) / (EDGE_FREEDOM + size)

        return cls(precision, weight(images.diff(dim=2)), weight(images.diff(dim=3)))

    def to(self, dtype: torch.dtype) -> _EdgePrior:
        """Return it in another precision."""
        return _EdgePrior(self.precision.to(dtype), self.down.to(dtype), self.right.to(dtype))

    def apply(self, images: Tensor) -> Tensor:
        """Return half the derivative of the weighted squares."""
        down, right = self.down * images.diff(dim=2), self.right * images.diff(dim=3)
        pad = functional.pad
        total = pad(down, (0, 0, 1, 0)) - pad(down, (0, 0, 0, 1)) + pad(right, (1, 0)) - pad(right, (0, 1))
        return torch.einsum("ij,bjhw->bihw", self.precision, total)


@dataclass(frozen=True)
class _Problem:
    """What stays the same over all steps.

    Attributes:
        layer: the convolution and its pooling.
        known: what is known of it.
        candidates: positions that may have been passed on.
        settings: of the search.
        inputs: the layer's input as a function of the picture.
    """

    layer: PooledConvolution
    known: PooledObservation
    candidates: Candidates
    settings: AnnealingSettings
    inputs: _Inputs


class _System:
    """The normal equations of one step, linear in the images."""

    def __init__(self, problem: _Problem, images: Tensor, sigma: float, *, first: bool) -> None:
        layer, known, candidates = problem.layer, problem.known, problem.candidates
        settings, inputs = problem.settings, problem.inputs
        taken = inputs.at(images)
        z = layer.outputs(taken.value)
        probability, slope = _probabilities(z.flatten()[candidates.position], candidates, sigma)
        signal = candidates.placed(probability * candidates.signal, z)
        missed = known.gradient - layer.gradient(taken.value, signal)
        size = known.gradient.square().mean()
        variance = missed.square().mean((1, 2, 3)).clamp_min(float(MIN_GRADIENT_MISS**2 * size))
        variance = (size.expand_as(variance) if first else variance)[:, None, None, None]
        passed = candidates.placed(probability, z)
        above = (z > candidates.bound) * (1 - passed).clamp_min(0)
        weight = (passed + above) / sigma**2
        wanted = candidates.placed(probability * candidates.target, z)
        wanted = wanted + above * candidates.bound.clamp(min=0, max=float(known.pooled.max()))
        derivative = _Derivative(layer, candidates, probability, slope, signal, taken.value)
        prior = _EdgePrior.of(images, settings)
        pulled = derivative.pull(wanted / sigma**2 - weight * z, missed / variance)
        self.right = taken.pull(pulled) - prior.apply(images)
        self.settings, kind = settings, settings.precision
        self.derivative, self.prior, self.inputs = derivative.to(kind), prior.to(kind), inputs.roughly_at(images)
        self.weight, self.variance = weight.to(kind), variance.to(kind)

    def _apply(self, direction: Tensor) -> Tensor:
        outputs, gradient = self.derivative.push(self.inputs.push(direction))
        pulled = self.derivative.pull(self.weight * outputs, gradient / self.variance)
        return self.inputs.pull(pulled) + self.prior.apply(direction)

    def solve(self) -> Tensor:
        """Return the step, by conjugate gradients."""
        scale = self.right.norm().clamp_min(1e-300)
        rest = (self.right / scale).to(self.settings.precision)
        found, direction = torch.zeros_like(rest), rest
        first = size = float(rest.square().sum())
        for _ in range(self.settings.inner_iterations):
            product = self._apply(direction)
            curvature = float((direction * product).sum())
            if not curvature > 0:
                break
            length = size / curvature
            found, rest = found + length * direction, rest - length * product
            following = float(rest.square().sum())
            if following <= SMALL_STEP_LEFT * first:
                break
            direction, size = rest + following / size * direction, following
        return found.to(self.right) * scale
