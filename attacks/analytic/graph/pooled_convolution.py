r"""The input of a convolution below a ReLU and an overlapping max pooling, from pooled outputs, signal and gradient.

ImageNet's stem is meant: 7x7 with stride 2, 3x3 pooling with stride 2. With z = W * x + b the convolution's outputs,
known are

    (1) t = max(0, max over a window of z)   for every window and filter,
    (2) G = sum over windows of s patch(x at the position that passed),   s = dL/dt known.

Both are linear in x once it is known which position each open window (t > 0) passed on.

**Which positions it can be.** Every z_q is at most u_q, the smallest t of the windows that cover q. So only positions
with u_q = t can be the maximum of a window. Windows that overlap and show the same number passed on the same position:
they make one *group*, whose position lies in all its windows. That leaves three or four candidates of nine.

**Search** by annealing (expectation maximization under a falling standard deviation sigma of z):

- E: a candidate of a group is the position with probability q proportional to N(t; z, sigma^2) / Phi((t - z) / sigma):
  it is t, and all others are below.
- M: conjugate gradients on the normal equations of (1) at the candidates, weighted by q / sigma^2; of z <= u where it
  is violated; of (2) with expected patches, each filter with a variance of its own that holds what it misses and what
  its undecided groups scatter; and of a prior on differences of neighboring pixels, weak for what all color channels
  share and strong for what sets them apart.

The counts decide how far it comes. At 64 pixels groups and (2) are about 1.3 times as many equations as pixels, at 224
pixels six tenths; the rest is said by inequalities and the prior.

No attack calls this module so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

FIRST_SIGMA = 0.3
"""First standard deviation of z, in standard deviations of t."""


@dataclass(frozen=True)
class PooledConvolution:
    """Shapes and weights of the layer.

    Attributes:
        weight: (C, I, k, k), of the convolution with all that is affine behind it, such as a batch norm.
        bias: (C,), likewise.
        stride: of the convolution.
        padding: zeros around the input.
        window: side of a pooling window.
        pool_stride: between windows.
        pool_padding: positions around z that never pass.
    """

    weight: Tensor
    bias: Tensor
    stride: int
    padding: int
    window: int
    pool_stride: int
    pool_padding: int

    def outputs(self, images: Tensor) -> Tensor:
        """Return z."""
        return functional.conv2d(images, self.weight, self.bias, self.stride, self.padding)

    def linear(self, images: Tensor) -> Tensor:
        """Return z without the bias."""
        return functional.conv2d(images, self.weight, None, self.stride, self.padding)

    def transposed(self, outputs: Tensor, images: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return what a tensor shaped like z is in the input's space, by these weights or others."""
        weight = self.weight if weight is None else weight
        return conv2d_input(images.shape, weight, outputs, self.stride, self.padding)

    def gradient(self, images: Tensor, signal: Tensor) -> Tensor:
        """Return dL/dW where `signal` flows back into z."""
        return conv2d_weight(images, self.weight.shape, signal, self.stride, self.padding)


@dataclass(frozen=True)
class PooledObservation:
    """What is known of the layer.

    Attributes:
        pooled: t, (B, C, P, P).
        signal: dL/dt, likewise.
        gradient: dL/dW, (C, I, k, k), the sum over the batch.
        noise: error of `pooled`, relative to its largest entry; numbers nearer than twice that are the same.
    """

    pooled: Tensor
    signal: Tensor
    gradient: Tensor
    noise: float = 1e-6


@dataclass(frozen=True)
class AnnealingSettings:
    """How the search goes.

    Attributes:
        roughness: typical difference of neighboring pixels in what all channels share, in the input's units.
        color_roughness: of what sets the channels apart.
        steps: of expectation and maximization.
        decay: of sigma, a step.
        inner_iterations: of conjugate gradients a step.
    """

    roughness: float = 0.08
    color_roughness: float = 0.02
    steps: int = 150
    decay: float = 0.97
    inner_iterations: int = 30


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
    tolerance = 2 * known.noise * float(t.max())
    grid = torch.arange(1, size + 1, device=t.device, dtype=torch.float64).reshape(1, 1, height, width)
    windows = functional.unfold(grid, layer.window, padding=layer.pool_padding, stride=layer.pool_stride)[0].long() - 1
    inside = windows >= 0  # (window^2, windows)
    which = torch.arange(windows.shape[1], device=t.device).expand_as(windows)[inside]
    covered = windows[inside]
    bound = t.new_full((rows, size), float("inf"))
    bound.scatter_reduce_(1, covered.expand(rows, -1), t[:, which], "amin")

    order = t.argsort(1)
    ascending = t.gather(1, order)
    new = torch.cat([torch.ones_like(order[:, :1]), (ascending.diff(dim=1) > tolerance).long()], 1)
    group = torch.empty_like(order).scatter_(1, order, (new.flatten().cumsum(0) - 1).reshape(new.shape))
    number = int(new.sum())
    members = torch.bincount(group.flatten(), minlength=number)
    signal = s.new_zeros(number).index_add_(0, group.flatten(), s.flatten())
    value = t.new_zeros(number).index_copy_(0, group.flatten(), t.flatten())

    fits = (t[:, which] > tolerance) & (t[:, which] <= bound[:, covered] + tolerance)
    row, entry = torch.nonzero(fits, as_tuple=True)
    pairs = group[row, which[entry]] * (rows * size) + row * size + covered[entry]
    pairs, counts = torch.unique(pairs, return_counts=True)
    found, position = pairs // (rows * size), pairs % (rows * size)
    everywhere = counts == members[found]
    found, position = found[everywhere], position[everywhere]
    kept, compact = torch.unique(found, return_inverse=True)
    return Candidates(compact, position, value[found], signal[found], bound.reshape(outputs), len(kept))


def invert_pooled_convolution(
    layer: PooledConvolution,
    known: PooledObservation,
    start: Tensor,
    settings: AnnealingSettings = AnnealingSettings(),
) -> Tensor:
    """Find the layer's input.

    Args:
        layer: the convolution and its pooling.
        known: what is known of it.
        start: (B, I, H, W), such as gray.
        settings: of the search.

    Returns:
        The input, (B, I, H, W). Nothing proves it: compare what the network makes of it.
    """
    images = start
    candidates = candidate_positions(layer, known, layer.outputs(images).shape)
    spread = float(known.pooled.std())
    sigma, variance = FIRST_SIGMA * spread, known.gradient.square().mean((1, 2, 3)).mean().expand(len(layer.weight))
    for step in range(settings.steps):
        probability = _probabilities(layer.outputs(images).flatten()[candidates.position], candidates, sigma)
        if step:
            variance = _variances(layer, known, candidates, images, probability)
        system = _System(layer, known, candidates, settings, _Weighting(probability, sigma, variance), images)
        images = images + system.solve(images, settings.inner_iterations)
        z = layer.outputs(images).flatten()[candidates.position]
        misfit = float(((z - candidates.target).abs() * probability).sum()) / max(1, candidates.groups)
        if sigma > misfit / 2:
            sigma = max(settings.decay * sigma, known.noise * spread)
    return images


def _probabilities(z: Tensor, candidates: Candidates, sigma: float) -> Tensor:
    """Return how likely each candidate is the one its group passed on, from z at the candidates: step E."""
    deviation = (candidates.target - z) / sigma
    score = -deviation.square() / 2 - torch.special.log_ndtr(deviation)
    top = score.new_full((candidates.groups,), -torch.inf).scatter_reduce(0, candidates.group, score, "amax")
    weight = (score - top[candidates.group]).exp()
    return weight / candidates.sums(weight)[candidates.group]


def _signal(candidates: Candidates, probability: Tensor, like: Tensor) -> Tensor:
    """Return what is expected to flow back into z, shaped like `like`."""
    flat = like.new_zeros(like.numel()).index_add_(0, candidates.position, probability * candidates.signal)
    return flat.reshape(like.shape)


def _variances(
    layer: PooledConvolution, known: PooledObservation, candidates: Candidates, images: Tensor, probability: Tensor
) -> Tensor:
    """Return the variance of each filter's gradient equations: what they miss, and what undecided groups scatter."""
    shape = candidates.bound.shape
    channels, size = shape[1], shape[2] * shape[3]
    side = layer.weight.shape[-1]
    patches = functional.unfold(images, side, padding=layer.padding, stride=layer.stride)  # (B, I k k, H W)
    image, place = candidates.position // (channels * size), candidates.position % size
    channel = candidates.position // size % channels
    seen = patches[image, :, place]
    mean = candidates.sums(probability[:, None] * seen)
    scatter = probability * candidates.signal.square() * (seen - mean[candidates.group]).square().sum(1)
    scatter = torch.zeros_like(layer.bias).index_add_(0, channel, scatter) / seen.shape[1]
    missed = known.gradient - layer.gradient(images, _signal(candidates, probability, candidates.bound))
    floor = 1e-14 * known.gradient.square().mean()
    return (missed.square().mean((1, 2, 3)) + scatter).clamp_min(float(floor))


@dataclass(frozen=True)
class _Weighting:
    """How much each equation of a step counts.

    Attributes:
        probability: of each candidate.
        sigma: standard deviation of z.
        variance: of each filter's gradient equations.
    """

    probability: Tensor
    sigma: float
    variance: Tensor


class _System:
    """The normal equations of one step, linear in the images."""

    def __init__(
        self,
        layer: PooledConvolution,
        known: PooledObservation,
        candidates: Candidates,
        settings: AnnealingSettings,
        weighting: _Weighting,
        images: Tensor,
    ) -> None:
        probability, sigma, variance = weighting.probability, weighting.sigma, weighting.variance
        z = layer.outputs(images)
        self.layer, self.variance = layer, variance[:, None, None, None]
        passed = z.new_zeros(z.numel()).index_add_(0, candidates.position, probability).reshape(z.shape)
        target = z.new_zeros(z.numel()).index_add_(0, candidates.position, probability * candidates.target)
        above = (z > candidates.bound).to(z) * (1 - passed)
        self.signal = _signal(candidates, probability, z)
        self.weight = (passed + above) / sigma**2
        wanted = target.reshape(z.shape) + above * candidates.bound.clamp(min=0, max=float(known.pooled.max()))
        number = images.shape[1]
        shared = images.new_full((number, number), 1 / number)
        apart = torch.eye(number, dtype=images.dtype, device=images.device) - shared
        self.precision = shared / settings.roughness**2 + apart / settings.color_roughness**2
        missed = (known.gradient - layer.gradient(images, self.signal)) / self.variance
        self.right = (
            layer.transposed(wanted / sigma**2 - self.weight * z, images)
            + layer.transposed(self.signal, images, missed)
            - self._prior(images)
        )

    def _prior(self, images: Tensor) -> Tensor:
        down, right = images.diff(dim=2), images.diff(dim=3)
        pad = functional.pad
        total = pad(down, (0, 0, 1, 0)) - pad(down, (0, 0, 0, 1)) + pad(right, (1, 0)) - pad(right, (0, 1))
        return torch.einsum("ij,bjhw->bihw", self.precision, total)

    def _apply(self, direction: Tensor) -> Tensor:
        gradient = self.layer.gradient(direction, self.signal) / self.variance
        return (
            self.layer.transposed(self.weight * self.layer.linear(direction), direction)
            + self.layer.transposed(self.signal, direction, gradient)
            + self._prior(direction)
        )

    def solve(self, images: Tensor, iterations: int) -> Tensor:
        """Return the step, by conjugate gradients."""
        found, rest = torch.zeros_like(images), self.right
        direction, size = rest, float(rest.square().sum())
        first = size
        for _ in range(iterations):
            if size <= 1e-4 * first:
                break
            product = self._apply(direction)
            length = size / float((direction * product).sum())
            found, rest = found + length * direction, rest - length * product
            following = float(rest.square().sum())
            direction, size = rest + following / size * direction, following
        return found
