"""What a gradient and known outputs say of the input of one convolution: equations (1) and (2) of the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer

MIN_RELATIVE_NOISE = 1e-7
"""Noise relative to the equations' own size, below which nothing is told apart in float32."""
AUTOGRAD_NOISE = 1e-6
"""What a float32 gradient is off by beside the update's rounding, relative to its root mean square: sums made by
autograd, and rounding of what flows back. Of numbers whose own rounding is less this was left."""
TRUSTED_STD = 1e-6
"""Standard deviation of a target, relative to the outputs, up to which all targets count alike."""


@dataclass(frozen=True)
class Equations:
    """Equations that the input X of a convolution answers once everything above it is known.

    Attributes:
        layer: the convolution with its pooling.
        gradient: G, of its weight (O, M).
        target: t, pooled outputs before the activation (O, K).
        signal: s, the loss's derivative with respect to them (O, K).
        target_known: whether a target is known (O, K); where not it is an upper bound: 0 of a ReLU at rest.
        target_std: standard deviation of the targets (O, K): an activation's gentle slope magnifies rounding.
        side_factor: what the signal is multiplied by, and the target divided by, if an output lies on the other side of
            the activation's bend or lowest value (O, K); 1 where that is out of the question.
        gradient_noise: how far `gradient` may be off, relative to its root mean square.
        rounding: how far each of its numbers may be off by rounding, relative to its root mean square (O, M); None
            where that is not known.
        signal_noise: how far `signal` may be off, relative to its root mean square: no number of the gradient tells
            more than that lets it, however it was rounded.
        other_target: targets on the other side of the activation's lowest value (O, K), which no factor leads to; None
            of an activation that only rises. Until the side is chosen such a target is not known.
    """

    layer: ConvPoolLayer
    gradient: Tensor
    target: Tensor
    signal: Tensor
    target_known: Tensor
    target_std: Tensor
    side_factor: Tensor
    gradient_noise: float = 1e-7
    rounding: Tensor | None = None
    signal_noise: float = 0.0
    other_target: Tensor | None = None

    @property
    def count(self) -> int:
        """How many equations there are: of outputs with a target or two, and of gradients of filters that moved."""
        moved, told = self.gradient.any(1), self.target_known
        if self.other_target is not None:
            told = told | (self.side_factor != 1)
        return int(told.sum()) + int(moved.sum()) * self.gradient.shape[1]

    @cached_property
    def target_minus_bias(self) -> Tensor:
        """t_ok - b_o (O, K)."""
        return self.target - self.layer.bias[:, None]

    @cached_property
    def output_scale(self) -> Tensor:
        """Root mean square of the known outputs; of all where none is, and 1 where all are 0."""
        known = self.target_known if bool(self.target_known.any()) else torch.ones_like(self.target_known)
        size = self.target_minus_bias[known].square().mean().sqrt()
        return torch.where(size > 0, size, 1.0)

    @cached_property
    def target_weight(self) -> Tensor:
        """Factor on a target's error that makes all comparable (O, K): below 1 where rounding alone explains more."""
        return (TRUSTED_STD * self.output_scale / self.target_std).clamp_max(1.0)

    def mean_over_targets(self, values: Tensor) -> Tensor:
        """Return the mean of `values` (O, K) over known targets, better ones counting more; 0 where there is none."""
        weights = self.target_weight.square() * self.target_known
        return (values * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)

    @cached_property
    def gradient_scale(self) -> Tensor:
        """Root mean square of each filter's gradient (O,), never zero."""
        size = self.gradient.square().mean(1).sqrt()
        return size.clamp_min(1e-12 * size.max() + torch.finfo(size.dtype).tiny)

    @cached_property
    def noise_floor(self) -> Tensor:
        """How far each of the gradient's equations may be off: rounding of the model, alike for all filters."""
        return max(self.gradient_noise, MIN_RELATIVE_NOISE) * self.gradient.square().mean().sqrt()

    @cached_property
    def open_side_std(self) -> Tensor:
        """How far each filter's equations may be off by sides of an activation's lowest value not chosen yet (O,).

        In the root mean square of its gradient the signals of all cells have the weight of their squares.
        """
        change = self.signal * (self.side_factor - 1) * ~self.target_known
        share = change.square().sum(1) / self.signal.square().sum(1).clamp_min(torch.finfo(change.dtype).tiny)
        return share.sqrt() * self.gradient.square().mean(1).sqrt()

    @cached_property
    def on_rising_side(self) -> Equations:
        """The same with all outputs above the input with the activation's lowest value."""
        asked = self.side_factor != 1
        return replace(
            self, target_known=self.target_known | asked, side_factor=self.side_factor.masked_fill(asked, 1.0)
        )

    @cached_property
    def rounding_variance(self) -> Tensor:
        """Variance of each of the gradient's equations (O, M) by rounding, its own and that of what flows back."""
        own = self.rounding
        if own is None:
            own = torch.full_like(self.gradient, max(self.gradient_noise, MIN_RELATIVE_NOISE))
        return (own.square() + max(AUTOGRAD_NOISE, self.signal_noise) ** 2) * self.gradient.square().mean()

    @cached_property
    def uniform_selection(self) -> Tensor:
        """The selection that holds every position of a cell alike (O, K, P)."""
        cells = self.layer.cells
        return self.gradient.new_full((len(self.gradient), *cells.shape), 1 / cells.shape[1])

    def precision_factors(self, std: Tensor) -> Tensor | None:
        """Return a factor on the precision of each gradient equation (O, M) where `std` (O,) is its filter's deviation.

        What exceeds rounding is alike for all equations of a filter. None stands for 1.
        """
        if self.rounding is None:
            return None
        variance = std[:, None].square()
        exceeds = (variance - self.rounding.square().mean() * self.gradient.square().mean()).clamp_min(0)
        return variance / (self.rounding_variance + exceeds)

    def excess(self, x: Tensor) -> Tensor:
        """Return how far the output of each position exceeds its cell's target (O, K, P)."""
        return self.layer.outputs(x) - self.target[..., None]

    def residual(self, x: Tensor, selection: Tensor) -> Tensor:
        """Return what X leaves of the gradient (O, M): G_o - sum_k s_ok sum_p q_okp U_l(k,p)."""
        return self.gradient - self.layer.weight_gradient(self.layer.scatter(selection * self.signal[..., None]), x)

    def gradient_std(self, x: Tensor, selection: Tensor, residual: Tensor) -> Tensor:
        """Return the standard deviation of each filter's gradient equations (O,).

        It is made of the `residual` (O, M) and of what cells that are not decided may add: the variance of their
        patches under q.

        Args:
            x: an input (I, H, W).
            selection: probabilities of positions (O, K, P).
            residual: what both leave of the gradient (O, M).
        """
        cells = self.layer.patches(x)[self.layer.cells]
        mean = torch.einsum("okp,kpm->okm", selection, cells).square().sum(-1)
        spread = (torch.einsum("okp,kp->ok", selection, cells.square().sum(-1)) - mean).clamp_min(0)
        total = residual.square().sum(1) + (self.signal.square() * spread).sum(1)
        return (total / residual.shape[1]).sqrt()
