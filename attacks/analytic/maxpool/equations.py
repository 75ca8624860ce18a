"""What a gradient says of the input of one convolution, and its least-squares solutions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import Layer
from attacks.analytic.maxpool.spd_linalg import Factor, gram

SMALLEST = 1e-7
"""Noise relative to the equations' own size, below which nothing is told apart in float32."""
OTHERS = 1e-6
"""What else a float32 gradient is off by beside the update's rounding, relative to its root mean square: sums made by
autograd, and rounding of what flows back. Of numbers whose own rounding is less this was left."""
Preconditioner = Literal["channels", "mean", "whole"]
"""What `System.solve` inverts."""
ITERATIONS = 200
"""Of conjugate gradients at most."""
LARGEST = 4096
"""Unknowns up to which a dense matrix of all of them is factorised."""


@dataclass(frozen=True)
class Equations:
    """What is known of a convolution's input X once everything above it is.

    With U_l the patch at position l and pos(o, k) the position that pooling passed on in cell k of channel o,

        filter_o . U_pos(o, k) + bias_o = target_ok, and no other position of the cell exceeds it,      (forward)
        gradient_o = sum_k signal_ok U_pos(o, k).                                                       (gradient)

    Attributes:
        layer: the convolution.
        gradient: of its weight (O, M).
        target: pooled outputs before the activation (O, K).
        signal: what flowed back into them (O, K).
        seen: whether a target is known (O, K); where not (a ReLU at rest) it is an upper bound, 0.
        loose: standard deviation of the targets (O, K): an activation's gentle slope magnifies rounding.
        doubt: factor on the signal, and divisor of the target, if an output was on the other side of the activation's
            bend (O, K); 1 where that is out of the question.
        noise: how far `gradient` may be off, relative to its root mean square.
        grain: how far each of its numbers may be off by rounding, relative to its root mean square (O, M); None where
            that is not known.
        above: how far `signal` may be off, relative to its root mean square: no number of the gradient tells more than
            that lets it, however it was rounded.
    """

    layer: Layer
    gradient: Tensor
    target: Tensor
    signal: Tensor
    seen: Tensor
    loose: Tensor
    doubt: Tensor
    noise: float = 1e-7
    grain: Tensor | None = None
    above: float = 0.0

    @cached_property
    def height(self) -> Tensor:
        """Targets without the bias (O, K)."""
        return self.target - self.layer.bias[:, None]

    @cached_property
    def forward_scale(self) -> Tensor:
        """Root mean square of the known outputs; of all where none is, and 1 where all are 0."""
        seen = self.seen if bool(self.seen.any()) else torch.ones_like(self.seen)
        size = self.height[seen].square().mean().sqrt()
        return torch.where(size > 0, size, 1.0)

    @cached_property
    def trust(self) -> Tensor:
        """Factor on a target's error that makes all comparable (O, K): below 1 where rounding alone explains more."""
        return (1e-6 * self.forward_scale / self.loose).clamp_max(1.0)

    def average(self, values: Tensor) -> Tensor:
        """Mean of `values` (O, K) over the targets seen, those known better counting more; 0 where there is none."""
        weights = self.trust.square() * self.seen
        return (values * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)

    @cached_property
    def gradient_scale(self) -> Tensor:
        """Root mean square of each filter's gradient (O,), never zero."""
        size = self.gradient.square().mean(1).sqrt()
        return size.clamp_min(1e-12 * size.max() + torch.finfo(size.dtype).tiny)

    @cached_property
    def floor(self) -> Tensor:
        """How far each of the gradient's equations may be off: rounding of the model, alike for all filters."""
        return max(self.noise, SMALLEST) * self.gradient.square().mean().sqrt()

    @cached_property
    def rounded(self) -> Tensor:
        """Variance of each of the gradient's equations (O, M) by rounding, its own and that of what flows back."""
        own = torch.full_like(self.gradient, max(self.noise, SMALLEST)) if self.grain is None else self.grain
        return (own.square() + max(OTHERS, self.above) ** 2) * self.gradient.square().mean()

    @cached_property
    def start(self) -> Tensor:
        """Every position of a cell alike (O, K, P)."""
        cells = self.layer.cells
        return self.gradient.new_full((len(self.gradient), *cells.shape), 1 / cells.shape[1])

    def sharpness(self, noise: Tensor) -> Tensor | None:
        """Factor on the precision of each of the gradient's equations (O, M) where `noise` (O,) is its filter's.

        What exceeds rounding is alike for all equations of a filter. None is 1.
        """
        if self.grain is None:
            return None
        noise = noise[:, None].square()
        exceeds = (noise - self.grain.square().mean() * self.gradient.square().mean()).clamp_min(0)
        return noise / (self.rounded + exceeds)

    def excess(self, x: Tensor) -> Tensor:
        """How far the output of each position exceeds the cell's target (O, K, P)."""
        return self.layer.outputs(x) - self.target[..., None]

    def residual(self, x: Tensor, shares: Tensor) -> Tensor:
        """What of the gradient is left (O, M) where `shares` (O, K, P) of every cell's signal go to its positions."""
        return self.gradient - self.layer.gradient(self.layer.placed(shares * self.signal[..., None]), x)

    def deviation(self, x: Tensor, shares: Tensor, left: Tensor) -> Tensor:
        """Standard deviation of each filter's gradient equations (O,): what is `left`, and what open cells may add."""
        cells = self.layer.patches(x)[self.layer.cells]
        mean = torch.einsum("okp,kpm->okm", shares, cells).square().sum(-1)
        spread = (torch.einsum("okp,kp->ok", shares, cells.square().sum(-1)) - mean).clamp_min(0)
        return ((left.square().sum(1) + (self.signal.square() * spread).sum(1)) / left.shape[1]).sqrt()


@dataclass(frozen=True)
class Prior:
    """What is expected of X: a Gaussian whose precision is a product over channels and pixels, and one per pixel.

    Attributes:
        channels: precision between channels (I, I).
        pixels: precision between pixels (H W, H W).
        mean: expected value of every channel (I,).
        sites: precision, and precision times mean, of what is known of single pixels (2, I, H, W), or None.
    """

    channels: Tensor
    pixels: Tensor
    mean: Tensor
    sites: Tensor | None = None

    @cached_property
    def right(self) -> Tensor:
        """The precision times the mean (I, H W)."""
        smooth = (self.channels @ self.mean)[:, None] * self.pixels.sum(0)
        return smooth if self.sites is None else smooth + self.sites[1].flatten(1)

    @cached_property
    def dense(self) -> Tensor:
        """The precision itself (N, N)."""
        matrix = torch.kron(self.channels, self.pixels)
        if self.sites is not None:
            matrix.diagonal().add_(self.sites[0].flatten())
        return matrix

    @property
    def blocks(self) -> Tensor:
        """Each channel's own part (I, H W, H W)."""
        parts = self.channels.diagonal()[:, None, None] * self.pixels
        return parts if self.sites is None else parts + torch.diag_embed(self.sites[0].flatten(1))

    def __matmul__(self, x: Tensor) -> Tensor:
        """The precision times X (I, H W)."""
        smooth = self.channels @ x @ self.pixels
        return smooth if self.sites is None else smooth + self.sites[0].flatten(1) * x

    def against(self, x: Tensor) -> float:
        """What speaks against X (I, H, W): minus twice the logarithm of its density, but for a constant."""
        x = x.flatten(1)
        return float((x * (self @ x - 2 * self.right)).sum())

    def around(self, x: Tensor, numbers: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """What is expected of steps (n,) of some numbers (n,), counted along X (I, H, W), the others being as they are.

        Returns:
            Precision (n, n), and precision times mean (n,), both in steps.
        """
        channel, place = numbers // len(self.pixels), numbers % len(self.pixels)
        own = self.channels[channel[:, None], channel] * self.pixels[place[:, None], place]
        if self.sites is not None:
            own = own + torch.diag(self.sites[0].flatten()[numbers])
        pulled = (self.right - self @ x.flatten(1)).flatten()[numbers]
        return own * step[:, None] * step, pulled * step

    def to(self, dtype: torch.dtype) -> Prior:
        """The same in another precision."""
        sites = None if self.sites is None else self.sites.to(dtype)
        return Prior(self.channels.to(dtype), self.pixels.to(dtype), self.mean.to(dtype), sites)

    def at(self, pixels: Tensor) -> Prior:
        """What its precision says of some pixels of the plane (n,), the others being known."""
        sites = None if self.sites is None else self.sites.flatten(2)[..., pixels]
        return Prior(self.channels, self.pixels[pixels[:, None], pixels], self.mean, sites)

    @property
    def alone(self) -> tuple[Tensor, Tensor] | None:
        """Mean (I, H W) and covariance (N, N) of X if nothing else is known, of single pixels neither.

        None where it is no Gaussian, as that of outputs which are zero or not finite.
        """
        channels, pixels = Factor.of(self.channels), Factor.of(self.pixels)
        if channels is None or pixels is None:
            return None
        return self.mean[:, None].expand(-1, len(self.pixels)), torch.kron(channels.inverse(), pixels.inverse())

    def weakened(self, factor: float) -> Prior:
        """The same with its smoothness times `factor`."""
        return replace(self, channels=self.channels * factor)


@dataclass(frozen=True)
class System:
    """Normal equations in X: one matrix for every channel alike, and the forward equations, which join channels.

    Solved by conjugate gradients, with each channel's own block inverted for a preconditioner: where the gradient's
    equations, which keep channels apart, outnumber the forward ones, a few iterations do.

    Attributes:
        layer: whose input is X; average pooling merged into it.
        plane: quadratic form of each channel (I, H W, H W), or of all alike (H W, H W).
        weights: of the forward equations (O, L).
        right: right-hand side (I, H W).
        prior: what is added to the matrix, or None.
    """

    layer: Layer
    plane: Tensor
    weights: Tensor
    right: Tensor
    prior: Prior | None = None

    @classmethod
    def of(
        cls,
        known: Equations,
        shares: Tensor,
        noise: Tensor,
        forward: Tensor,
        exceeded: Tensor | None = None,
        prior: Prior | None = None,
        fine: bool = False,
    ) -> System:
        """Averaged over uncertain positions.

        The spread of the patches within a cell counts as variance of the gradient's equations, so that cells which
        are not decided yet hold X back instead of averaging it.

        Args:
            known: the layer's equations.
            shares: probability of each position (O, K, P).
            noise: standard deviation of the gradient's equations, by filter (O,).
            forward: standard deviation of the forward equations.
            exceeded: 1 where a position is to be pulled down to the target although it was not passed on (O, K, P).
            prior: what is expected of X beside them.
            fine: weigh each of the gradient's equations by its own rounding, which every channel has another of.
        """
        layer = known.layer
        weights = known.seen[..., None].to(shares) if layer.average else shares * known.seen[..., None]
        if exceeded is not None:
            weights = weights + exceeded * (1 - weights)
        weights = weights / (forward**2 + known.loose**2)[..., None]
        told = layer.merged if layer.average else layer
        right = told.pull(told.placed(weights * known.height[..., None])).flatten(1)
        signal = known.signal / noise[:, None]
        maps = layer.correlation(layer.placed(shares * signal[..., None]))
        scaled = (known.gradient / noise[:, None]).view(layer.weight.shape).transpose(0, 1).flatten(1)
        sharp = known.sharpness(noise) if fine else None
        if sharp is None:
            plane = gram(maps)
        else:
            sharp = sharp.view(layer.weight.shape).transpose(0, 1).flatten(1)
            plane = torch.stack([gram(own.sqrt()[:, None] * maps) for own in sharp])
            scaled = scaled * sharp
        if layer.searched:
            plane += layer.pairs(_spread(shares, signal))
        right = right + scaled @ maps
        if prior is not None:
            right = right + prior.right
        return cls(told, plane, told.placed(weights), right, prior)

    def __call__(self, x: Tensor) -> Tensor:
        """The matrix times X (I, H W)."""
        outputs = self.layer.convolved(x.view(self.layer.shape))
        result = (x[:, None] @ self.plane)[:, 0] + self.layer.pull(self.weights * outputs).flatten(1)
        return result if self.prior is None else result + self.prior @ x

    def dense(self) -> Tensor:
        """The matrix itself (N, N)."""
        filters, count = self.layer.filters, self.plane.shape[-1]
        matrix = self.layer.form(torch.einsum("om,ol,on->lmn", filters, self.weights, filters))
        for i, own in enumerate(self.plane.expand(self.layer.shape[0], -1, -1)):
            matrix[i * count : (i + 1) * count, i * count : (i + 1) * count] += own
        return matrix if self.prior is None else matrix.add_(self.prior.dense)

    def solve(self, start: Tensor, tolerance: float = 1e-3, *, preconditioner: Preconditioner = "channels") -> Tensor:
        """X (I, H, W) from `start` on, until the preconditioned residual is `tolerance` of the right-hand side's.

        `preconditioner` says what is inverted: "channels", each channel's own part; the same with the "mean" of what
        outputs say of the channels, cheap and enough for a wide tolerance; or the "whole" matrix, dear, but one or two
        iterations do (up to `LARGEST` unknowns).
        """
        if preconditioner == "whole" and start.numel() <= LARGEST:
            matrix = self.dense()[None]
        else:
            mean = preconditioner == "mean"
            own = self.layer.mean_block(self.weights)[None] if mean else self.layer.blocks(self.weights)
            matrix = own + self.plane
            matrix = matrix if self.prior is None else matrix + self.prior.blocks
        return self._descend(start.flatten(1), _cholesky(matrix), tolerance).view(self.layer.shape)

    def _descend(self, x: Tensor, factor: Tensor, tolerance: float) -> Tensor:
        left = self.right - self(x)
        whole = (self.right * _apart(self.right, factor)).sum()
        step = moved = _apart(left, factor)
        size = (left * moved).sum()
        for _ in range(ITERATIONS):
            if not size > tolerance**2 * whole:
                break
            image = self(step)
            length = size / (step * image).sum()
            x, left = x + length * step, left - length * image
            moved = _apart(left, factor)
            before, size = size, (left * moved).sum()
            step = moved + size / before * step
        return x


def _spread(shares: Tensor, signal: Tensor) -> Tensor:
    """Covariance of the place a cell's signal goes to, summed over filters (K, P, P)."""
    squares = signal.square()
    result = -torch.einsum("ok,okp,okr->kpr", squares, shares, shares)
    result.diagonal(dim1=1, dim2=2).add_((squares[..., None] * shares).sum(0))
    return result


def _cholesky(blocks: Tensor) -> Tensor:
    """Factors of positive semi-definite matrices, with as small a multiple of the identity as they need.

    Of others, or what is not finite, whatever comes out.
    """
    mean = blocks.diagonal(dim1=1, dim2=2).mean()
    ridge = 1e-13 * mean
    while True:
        raised = blocks + ridge * torch.eye(blocks.shape[-1]).to(blocks)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not bool(failed.any()) or not ridge < mean:  # not a number is neither
            return factor
        ridge = ridge * 100


def _apart(x: Tensor, factor: Tensor) -> Tensor:
    """The inverse times X (I, H W), of blocks channel by channel, of one for all channels or of one matrix."""
    if len(factor) == 1:
        return torch.cholesky_solve(x.view(-1, factor.shape[-1]).mT, factor[0]).mT.reshape_as(x)
    return torch.cholesky_solve(x[..., None], factor)[..., 0]
