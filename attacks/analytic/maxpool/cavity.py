r"""Pooling positions of each filter, decided by what all other filters say of the input.

An input fitted to the gradients of all filters bears out whatever positions were supposed for each of them, and the
more so the more unknowns there are: with four images, seven tenths of a filter's equations are its own doing. So the
positions of filter o are decided by the input that the *other* filters' gradients tell, with its uncertainty: the
cavity of expectation propagation (Minka, 2001), here of kh kw equations a channel at once.

All of it is the same for every channel. With T_o the map from a channel to its part of filter o's gradient G_o
(kh kw x H W), v_o the variance of these equations, L the prior's precision, and one column of X and G for each channel,

    C    = (sum_o T_o^T T_o / v_o + L)^-1          covariance of a channel given all filters,
    x    = C sum_o T_o^T G_o / v_o                 its mean,
    r_o  = G_o - T_o x                             what the mean leaves of filter o.

Without filter o, by the matrix inversion lemma, with B_o = T_o C T_o^T and J_o = (v_o - B_o)^-1,

    x_-o = x - C T_o^T J_o r_o,                    mean,
    C_-o = C + C T_o^T J_o T_o C,                  covariance,
    G_o - T_o x_-o = r_o + B_o J_o r_o,            what it leaves of filter o, whose covariance by the input's alone is
    S_o  = T_o C_-o T_o^T = B_o + B_o J_o B_o.

So one inverse of the size of a plane serves all filters and channels. The cells' positions then follow from two kinds
of evidence: outputs, whose largest is the target, and the gradient, of which each position explains another part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import feature_prior
from attacks.analytic.maxpool.maximum_moments import condition_on_maximum
from attacks.analytic.maxpool.pixel_subset import PixelSubset

DAMPING, TEMPERATURE = 0.3, 2.5
"""Share of the new probabilities that enters, and what the gradient's evidence for them is divided by: with 0.7 and 1
four gray images stop with a sixth of their positions wrong."""
MAX_ROUNDS = 90
"""Four images took 57, two 15 to 35."""
OUTPUT_VARIANCE = 1e-3
"""Variance of the outputs' equations, relative to their mean square."""
MIN_FREE_SHARE = 0.02
"""Least share of a filter's equations that is taken to be left over once the input has followed them."""
MAX_NUMBERS = 2**26
"""Numbers in the largest of the search's arrays up to which it is made: half a gigabyte each. A round took four to six
times its largest array in all."""


def fits_in_memory(equations: Equations) -> bool:
    """Return whether a layer is small enough to be searched in this way."""
    (count, cells, positions), (_, height, width) = equations.uniform_selection.shape, equations.layer.shape
    patches = equations.uniform_selection.numel() * equations.gradient.shape[1]
    pairs = count * math.prod(equations.layer.cell_layer.kernel) ** 2 * max(cells, positions**2)
    return max(patches, pairs, (height * width) ** 2) <= MAX_NUMBERS


@dataclass(frozen=True)
class CavityState:
    """Where the search stands.

    Attributes:
        x: mean given all filters (I, H, W).
        selection: q, the probability of every position (O, K, P).
        variance: v, of each filter's gradient equations (O,), by what its cells leave open.
    """

    x: Tensor
    selection: Tensor
    variance: Tensor


def cavity_states(equations: Equations, rounds: int = MAX_ROUNDS, damping: float = DAMPING) -> Iterator[CavityState]:
    """Yield one state after the other.

    Args:
        equations: of the layer.
        rounds: states at most.
        damping: share of the new probabilities that enters.
    """
    prior = feature_prior(equations)
    precision = prior.pixels * prior.channels[0, 0]
    variance = equations.gradient_scale.square().maximum(equations.noise_floor**2)
    start = equations.layer.weight.new_zeros(equations.layer.shape)
    state = CavityState(start, equations.uniform_selection, variance)
    geometry = CellGeometry.of(equations.layer)
    for _ in range(rounds):
        others = LeaveOneFilterOut.of(equations, state, precision, geometry)
        if others is None:
            return
        selection = state.selection.lerp(others.update_selection(state.selection), damping)
        state = CavityState(others.x, selection, others.gradient_variance(selection))
        yield state


@dataclass(frozen=True)
class CellGeometry:
    """What the search needs of the layer alone: its cells as seen in one channel, with patches of m numbers.

    Attributes:
        plane: one position per cell, of a single channel.
        all_pixels: all numbers of a plane.
        filter_products: products of the filters at two positions of a cell, summed over channels (O, P, P, m * m).
    """

    plane: ConvPoolLayer
    all_pixels: PixelSubset
    filter_products: Tensor

    @classmethod
    def of(cls, layer: ConvPoolLayer) -> CellGeometry:
        """Return the geometry of the cells of a layer."""
        cells, (channels, height, width) = layer.cell_layer, layer.shape
        plane = replace(cells, weight=cells.weight[:, :1], shape=(1, height, width))
        filters = cells.filters.view(len(layer.weight), -1, channels, math.prod(cells.kernel))
        products = torch.einsum("opim,orin->oprmn", filters, filters).flatten(3)
        nothing = layer.weight.new_zeros(height, width, dtype=torch.bool)
        return cls(plane, PixelSubset.of(plane, nothing), products)


@dataclass(frozen=True)
class LeaveOneFilterOut:
    """What is expected of the input without each filter's own gradient; symbols as at the head of the module.

    Attributes:
        equations: of the layer.
        x: mean given all filters (I, H, W).
        covariance: C, the same for all channels (H W, H W).
        tc: T C (O, kh kw, H W).
        tct: B = T C T^T (O, kh kw, kh kw).
        inner: J = (v - B)^-1 (O, kh kw, kh kw).
        residual: r, what the mean leaves of the gradient (O, kh kw, I).
        variance: v (O,).
        geometry: of the layer's cells.
    """

    equations: Equations
    x: Tensor
    covariance: Tensor
    tc: Tensor
    tct: Tensor
    inner: Tensor
    residual: Tensor
    variance: Tensor
    geometry: CellGeometry

    @classmethod
    def of(
        cls, equations: Equations, state: CavityState, precision: Tensor, geometry: CellGeometry
    ) -> LeaveOneFilterOut | None:
        """Return it for a state; None where rounding is in the way.

        Args:
            equations: of the layer.
            state: of the search.
            precision: L, that the prior expects of a plane (H W, H W).
            geometry: of the layer's cells.
        """
        layer, channels = equations.layer, equations.layer.shape[0]
        count = len(state.variance)
        signal = layer.scatter(state.selection * equations.signal[..., None])
        maps = layer.gradient_map(signal).unflatten(0, (count, -1))  # T
        weighted = maps / state.variance[:, None, None]
        factor, failed = torch.linalg.cholesky_ex(maps.flatten(0, 1).mT @ weighted.flatten(0, 1) + precision)
        if bool(failed):
            return None
        gradient = equations.gradient.view(count, channels, -1).mT
        x = torch.cholesky_solve(weighted.flatten(0, 1).mT @ gradient.flatten(0, 1), factor)  # (H W, I)
        covariance = torch.cholesky_inverse(factor)
        tc = maps @ covariance
        tct = tc @ maps.mT
        ridge = (1 + 1e-9) * state.variance[:, None, None] * torch.eye(maps.shape[1]).to(maps)
        inner = torch.linalg.inv(ridge - tct)
        residual = gradient - maps @ x
        mean = x.mT.reshape(layer.shape)
        return cls(equations, mean, covariance, tc, tct, inner, residual, state.variance, geometry)

    @cached_property
    def cell_patches(self) -> Tensor:
        """The patches of every cell in x_-o, the input without the filter's own gradient (O, K, P, M)."""
        layer, count = self.equations.layer, len(self.tc)
        shift = (self.tc.mT @ (self.inner @ self.residual)).mT  # C T^T J r (O, I, H W)
        without = (self.x.flatten(1) - shift).reshape(-1, *layer.shape[1:])
        patches = replace(layer, shape=without.shape).patches(without).unflatten(1, (count, -1))  # type: ignore[arg-type]
        return patches.transpose(0, 1)[:, layer.cells].contiguous()

    @cached_property
    def residual_covariance(self) -> Tensor:
        """S, the covariance of what x_-o leaves of each filter's gradient (O, kh kw, kh kw), by the input's alone."""
        return self.tct + self.tct @ self.inner @ self.tct

    @cached_property
    def output_moments(self) -> tuple[Tensor, Tensor]:
        """Mean (O, K, P) and covariance (O, K, P, P) of the outputs without the bias, by x_-o and C_-o."""
        layer, (count, equations, _), geometry = self.equations.layer, self.tc.shape, self.geometry
        mean = torch.einsum("okpm,om->okp", self.cell_patches, layer.filters)
        common = geometry.all_pixels.patch_covariances(self.covariance)  # of C (K, m, m)
        planes = self.tc.reshape(-1, *layer.shape[1:])
        patches = replace(geometry.plane, shape=planes.shape).patches(planes)  # type: ignore[arg-type]
        own = patches.view(len(common), count, equations, -1)
        added = torch.einsum("koam,oab,kobn->okmn", own, self.inner, own)  # of C T^T J T C
        covariance = torch.einsum("oprm,okm->okpr", geometry.filter_products, (common + added).flatten(2))
        tiny = 1e-9 * self.equations.output_scale.square() * torch.eye(mean.shape[2]).to(mean)
        return mean, covariance + tiny

    def gradient_variance(self, selection: Tensor) -> Tensor:
        """Return v, of each filter's equations (O,): what open cells may add, and no less than what is left of them."""
        _, equations, channels = self.residual.shape
        size = equations * channels
        mean = torch.einsum("okp,okpm->okm", selection, self.cell_patches).square().sum(-1)
        spread = torch.einsum("okp,okp->ok", selection, self.cell_patches.square().sum(-1)) - mean
        spread = spread.clamp_min(0) + size * self.covariance.diagonal().mean() * (1 - selection.square().sum(-1))
        own_share = self.tct.diagonal(dim1=1, dim2=2).mean(1) / self.variance
        left = self.residual.square().sum((1, 2)) / (size * (1 - own_share).clamp_min(MIN_FREE_SHARE))
        open_cells = (self.equations.signal.square() * spread).sum(1) / size
        return (open_cells + self.equations.noise_floor**2).maximum(left)

    def update_selection(self, selection: Tensor) -> Tensor:
        """Return new probabilities (O, K, P), cell after cell, each given the others'."""
        equations, cells = self.equations, self.cell_patches
        from_outputs = self._output_evidence()
        whitened, products = self._whiten(selection)
        square = 0.5 * products.diagonal(dim1=2, dim2=3)
        residual = self.residual + self.tct @ (self.inner @ self.residual)  # G - T x_-o
        left = residual.mT.flatten(1)[..., None]  # (O, M, 1)
        selection = selection.clone()
        for k in range(cells.shape[1]):
            signal, before = equations.signal[:, k, None], selection[:, k, :, None]
            along = signal * (whitened[:, k] @ left)[..., 0] + (products[:, k] @ before)[..., 0]  # without this cell
            now = torch.softmax((along - square[:, k]) / TEMPERATURE + from_outputs[:, k], -1)[..., None]
            left.baddbmm_(cells[:, k].mT, signal[..., None] * (before - now))
            selection[:, k] = now[..., 0]
        return selection

    def _output_evidence(self) -> Tensor:
        """Return the log-probability of each position by the outputs (O, K, P)."""
        equations = self.equations
        variance = (OUTPUT_VARIANCE * equations.output_scale.square() + equations.target_std**2)[..., None]
        return condition_on_maximum(equations, *self.output_moments, variance)[0].clamp_min(1e-300).log()

    def _whiten(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches times the gradient's precision (O, K, P, M), and s^2 times their products (O, K, P, P)."""
        cells, (count, size, _) = self.cell_patches, self.residual.shape
        covariance = (
            self.gradient_variance(selection)[:, None, None] * torch.eye(size).to(cells) + self.residual_covariance
        )
        inverse = torch.linalg.inv(covariance)
        whitened = (cells.view(count, -1, size) @ inverse.mT).view_as(cells)
        return whitened, self.equations.signal[..., None, None].square() * (whitened @ cells.mT)
