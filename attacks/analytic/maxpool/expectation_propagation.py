r"""Pixels behind the first convolution, by expectation propagation (Minka, 2001).

The posterior of X is a product of factors. Each is replaced by a Gaussian, its *site*:

- the prior, which is Gaussian already;
- for each filter o and cell k, "the largest of the P outputs w_o . U_l(k,p) is t_ok": a mixture over which one it is,
  the others truncated (`maximum_moments`). Its site has precision S_ok (P x P) and shift h_ok = S_ok times its mean;
- for each pixel, "it is on one of its levels" (`PixelLevels.match_moments`);
- for each filter, its gradient G_o, given the probabilities q: Gaussian with mean sum_k s_ok sum_p q_okp U_l(k,p), and
  with the covariance that cells which are not decided add (`gradient_precision`).

One iteration multiplies all sites to one Gaussian over X, with precision and precision times mean the sums of theirs,
and forms each cell's site anew. With E, V the outputs' moments under this Gaussian,

    (4)  cavity:  V_c = (V^-1 - S)^-1,   E_c = V_c (V^-1 E - h)      all else that is known of the outputs,
    (5)  tilted:  E_t, V_t = moments of cavity x "the largest is t",
    (6)  site:    S' = V_t^-1 - V_c^-1,  h' = V_t^-1 E_t - V_c^-1 E_c,

of which a share (the damping) enters. The assumed variance of the targets starts wide and shrinks. Pixels that
equations confirm are left out of the algebra for as long as these hold: what remains is small, is solved in double
precision and no more moved by what is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import join_blocks
from attacks.analytic.maxpool.determined_pixels import confirm_pixels
from attacks.analytic.maxpool.edge_prior import DensePrior
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.maximum_moments import condition_on_maximum
from attacks.analytic.maxpool.pixel_levels import PixelLevels
from attacks.analytic.maxpool.pixel_subset import PixelSubset
from attacks.analytic.maxpool.spd_linalg import Factor, clamp_eigenvalues, eigenvalues

SINGLE_PRECISION_NOISE = 1e-6
"""Relative noise down to which single precision tells outputs apart, at half the cost."""
MIN_NOISE_SHARE = 0.2
"""Share of the error below which the assumed noise of pixels' outputs does not fall: wrong positions were believed."""
CONFIRMING_ERROR = 2e-2
"""Error from which on single pixels may be confirmed."""
CHEAP_UNKNOWNS = 512
"""Numbers up to which double precision costs nothing worth saving."""
MIN_CAVITY_SHARE = 1e-3
"""Share of a cell's precision that must come from elsewhere for its site to be formed anew: less is rounding."""
FIRST_DAMPING, LEVEL_DAMPING = 0.7, 0.5
"""Share of the new sites that enters in the first iteration, and of the pixels' new sites in any."""
REFIT_FROM = 5
"""Iteration from which on a prior is made of what is known: earlier it is too little."""
REFINEMENTS = 4
"""Steps of iterative refinement after a factorization."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How an expectation propagation proceeds.

    Attributes:
        deviation: of a pixel in [0, 1], for the prior.
        levels: how many values a pixel may take, or None for any.
        iterations: at most.
        damping: share of the new sites that enters.
        noise: variance of the outputs' equations at the start, relative to their mean square.
        factor: what it is multiplied by in each iteration.
        least: where it stops.
        gradient: deviation of the gradient's equations, as a share of the outputs'; both relative to their sizes.
    """

    deviation: float = 0.27
    levels: int | None = 256
    iterations: int = 30
    damping: float = 0.6
    noise: float = 1e-2
    factor: float = 0.6
    least: float = 1e-6
    gradient: float = 1.0


@dataclass(frozen=True)
class PropagationState:
    """Where an expectation propagation stands.

    Attributes:
        site_precision: S, of every cell's site on its outputs (O, K, P, P).
        site_shift: h, precision times mean of it (O, K, P).
        selection: q, the probability of every position (O, K, P).
        mean: of X (I, H, W).
        variance: of X (I, H, W).
        level_sites: precision, and precision times mean, of every pixel's site on its levels (2, I, H, W).
        confirmed: pixels that are taken for certain (H, W).
        error: of the pooled outputs, relative to them.
    """

    site_precision: Tensor
    site_shift: Tensor
    selection: Tensor
    mean: Tensor
    variance: Tensor
    level_sites: Tensor
    confirmed: Tensor
    error: float = math.inf

    @classmethod
    def first(cls, equations: Equations) -> PropagationState:
        """Return the state where nothing is known."""
        selection = equations.uniform_selection
        flat = selection.new_zeros(*selection.shape, selection.shape[-1])
        x = selection.new_zeros(equations.layer.shape)
        return cls(flat, torch.zeros_like(selection), selection, x, x + 1, torch.stack([x, x]), x[0] > 0)


def propagate(
    equations: Equations,
    prior: GaussianPrior,
    schedule: Schedule,
    levels: PixelLevels | None = None,
    refit: Callable[[Tensor, Tensor], DensePrior] | None = None,
) -> Iterator[PropagationState]:
    """Yield one state after the other, until the schedule ends or rounding is in the way.

    Args:
        equations: of the layer.
        prior: what is expected of X.
        schedule: how to proceed.
        levels: of the pixels, or None where they may take any value.
        refit: makes a prior of mean (I, H, W) and covariance (N, N) of X, which takes the place of `prior` from
            iteration `REFIT_FROM` on; only without levels.
    """
    state, noise = PropagationState.first(equations), schedule.noise
    mean, covariance = state.mean, state.mean.new_zeros(0, 0)
    open_pixels = PixelSubset.of(equations.layer.cell_layer, state.confirmed)
    for iteration in range(schedule.iterations):
        if iteration:
            noise = _next_noise(schedule, noise, state.error, bounded=levels is not None and iteration > 1)
            expected = prior if refit is None or iteration < REFIT_FROM else refit(mean, covariance)
            moments = _posterior_moments(equations, expected, state, schedule, noise, open_pixels)
        else:
            moments = prior.moments
        if moments is None:
            return
        mean, covariance = moments[0].view(equations.layer.shape), moments[1]
        damping = schedule.damping if iteration else FIRST_DAMPING
        patches = open_pixels.patch_covariances(covariance)
        site_precision, site_shift, selection = update_sites(equations, state, mean, patches, noise, damping)
        variance = open_pixels.scatter(torch.zeros_like(mean), covariance.diagonal()).clamp_min(1e-12)
        level_sites = state.level_sites
        if levels is not None:
            made = torch.stack(levels.match_moments(mean, variance, *level_sites))
            level_sites = level_sites.lerp(made, LEVEL_DAMPING)
        off = (equations.layer.pooled_outputs(mean) - equations.target).square()
        error = float(equations.mean_over_targets(off).sqrt() / equations.output_scale)
        confirmed = state.confirmed
        state = PropagationState(site_precision, site_shift, selection, mean, variance, level_sites, confirmed, error)
        if levels is not None and error < CONFIRMING_ERROR:
            state = _confirm_pixels(equations, state, levels)
            if not torch.equal(confirmed, state.confirmed):
                open_pixels = PixelSubset.of(equations.layer.cell_layer, state.confirmed)
        yield state


def _next_noise(schedule: Schedule, noise: float, error: float, *, bounded: bool) -> float:
    """Return the assumed variance of the targets, which falls from step to step.

    It stays near the error or above where that is to bound it (`bounded`).

    It falls below what single precision can do only once the outputs are as near as that.
    """
    single = SINGLE_PRECISION_NOISE
    least = schedule.least if error < single**0.5 else max(schedule.least, single)
    behind = (MIN_NOISE_SHARE * error) ** 2 if bounded else 0.0
    return max(noise * schedule.factor, least, behind)


def _confirm_pixels(equations: Equations, state: PropagationState, levels: PixelLevels) -> PropagationState:
    """Return the state with the pixels taken for certain that the equations confirm on their nearest levels."""
    x = levels.nearest(state.mean)
    confirmed = confirm_pixels(equations, x, levels.step)
    return replace(state, confirmed=confirmed, mean=torch.where(confirmed, x, state.mean))


# ---- the product of all sites ----------------------------------------------------------------------------------------
def _posterior_moments(
    equations: Equations,
    prior: GaussianPrior | DensePrior,
    state: PropagationState,
    schedule: Schedule,
    noise: float,
    open_pixels: PixelSubset,
) -> tuple[Tensor, Tensor] | None:
    """Return mean (I, H W) of X, and covariance (n, n) of what is not certain; None where rounding is in the way."""
    from_gradient = gradient_precision(equations, state, schedule.gradient * noise**0.5)
    if isinstance(prior, GaussianPrior):
        prior = replace(prior, sites=state.level_sites)
    precision = PosteriorPrecision(equations, prior, state, from_gradient, open_pixels)
    return precision.moments(single=noise >= SINGLE_PRECISION_NOISE)


@dataclass(frozen=True)
class GradientPrecision:
    """What the gradient's equations say of X.

    Attributes:
        inverse: inverse covariance of each filter's equations (O, M, M).
        maps: T, from one channel of X to its part of each filter's gradient (O, kh * kw, H * W).
        gradient: G (O, M).
    """

    inverse: Tensor
    maps: Tensor
    gradient: Tensor

    @property
    def shift(self) -> Tensor:
        """Precision times mean (I, H W)."""
        return self._pull_back(self.gradient)

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the precision times X (I, H W)."""
        return self._pull_back(torch.einsum("oin,an->oai", self.maps, x).flatten(1))

    def _pull_back(self, gradient: Tensor) -> Tensor:
        weighted = (self.inverse @ gradient[..., None]).view(len(gradient), -1, self.maps.shape[1])
        return torch.einsum("oin,oai->an", self.maps, weighted)

    def dense(self, dtype: torch.dtype, pixels: Tensor) -> Tensor:
        """Return the precision itself of the numbers of some pixels of the plane (n, n)."""
        maps = self.maps[..., pixels].to(dtype)
        count, channels = maps.shape[1], self.inverse.shape[1] // maps.shape[1]
        inverse = self.inverse.to(dtype).view(-1, channels, count, channels, count)
        flat, blocks = maps.flatten(0, 1), maps.new_empty(channels, channels, len(pixels), len(pixels))
        for i in range(channels):
            for j in range(i + 1):
                blocks[i, j] = flat.mT @ (inverse[:, i, :, j] @ maps).flatten(0, 1)
                if i != j:
                    blocks[j, i] = blocks[i, j].mT
        return join_blocks(blocks)


def gradient_precision(equations: Equations, state: PropagationState, noise: float) -> GradientPrecision:
    """Return what the gradient's equations say, with the covariance of what open cells may add.

    Only the directions in which an open cell's patches differ are lost, and those of cells on an unknown side of the
    activation's bend; all other combinations hold up to `noise`, relative to the gradient's root mean square.

    Args:
        equations: of the layer.
        state: the selection and the moments of X so far.
        noise: assumed variance of the gradient, relative to its square.
    """
    layer, signal, selection = equations.layer, equations.signal, state.selection
    cells = layer.patches(state.mean)[layer.cells]  # (K, P, M)
    mean = torch.einsum("okp,kpm->okm", selection, cells)
    open_cells = (signal[..., None] * selection.sqrt())[..., None] * (cells - mean[:, :, None])
    open_cells = open_cells.flatten(1, 2)  # (O, K P, M)
    other_side = (signal * (equations.side_factor - 1))[..., None] * mean  # (O, K, M)
    floor = max(noise, equations.gradient_noise) * equations.gradient.square().mean().sqrt()
    undecided = (signal.square() * (1 - selection.square().sum(-1))).sum(1)
    variance = undecided * state.variance.mean() + floor**2
    eye = torch.eye(open_cells.shape[-1]).to(open_cells)
    covariance = open_cells.mT @ open_cells + other_side.mT @ other_side + variance[:, None, None] * eye
    inverse = torch.linalg.inv(covariance)  # (O, M, M)
    maps = layer.gradient_map(layer.scatter(selection * signal[..., None])).unflatten(0, (len(signal), -1))
    return GradientPrecision(inverse, maps, equations.gradient)


@dataclass(frozen=True)
class PosteriorPrecision:
    """The precision of X given the prior, all sites and the gradient.

    Attributes:
        equations: of the layer.
        prior: of X, with the sites of the pixels' levels.
        state: with the sites of the cells.
        from_gradient: what the gradient says, or None.
        open_pixels: those that are not taken for certain, n numbers.
    """

    equations: Equations
    prior: GaussianPrior | DensePrior
    state: PropagationState
    from_gradient: GradientPrecision | None
    open_pixels: PixelSubset

    @property
    def shift(self) -> Tensor:
        """Precision times mean (I, H W)."""
        cells = self.equations.layer.cell_layer
        pulled = cells.backpropagate(self.state.site_shift.transpose(1, 2).flatten(0, 1)).flatten(1)
        shift = pulled + self.prior.shift
        return shift if self.from_gradient is None else shift + self.from_gradient.shift

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the precision times X (I, H W)."""
        cells, positions = self.equations.layer.cell_layer, self.state.site_shift.shape[-1]
        outputs = cells.linear_outputs(x.view(self.equations.layer.shape))
        outputs = outputs.unflatten(0, (-1, positions)).transpose(1, 2)
        weighted = (self.state.site_precision @ outputs[..., None])[..., 0]
        result = cells.backpropagate(weighted.transpose(1, 2).flatten(0, 1)).flatten(1) + self.prior @ x
        return result if self.from_gradient is None else result + self.from_gradient @ x

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the precision of what is not certain (n, n)."""
        positions, pixels = self.state.site_shift.shape[-1], self.open_pixels.pixels
        filters = self.equations.layer.cell_layer.filters.to(dtype).unflatten(0, (-1, positions))  # (O, P, M)
        raised = torch.einsum("okpr,orm->kopm", self.state.site_precision.to(dtype), filters).flatten(1, 2)
        matrix = self.open_pixels.quadratic_form(filters.flatten(0, 1).mT @ raised)
        matrix += self.prior.to(dtype).restrict_to(pixels).dense
        return matrix if self.from_gradient is None else matrix.add_(self.from_gradient.dense(dtype, pixels))

    def moments(self, *, single: bool) -> tuple[Tensor, Tensor] | None:
        """Return the mean (I, H W), and the covariance (n, n) of what is not certain.

        Args:
            single: whether to try single precision first. The mean is refined in double precision either way.
        """
        shift, subset = self.shift, self.open_pixels
        start = subset.scatter(self.state.mean, torch.zeros(subset.count).to(shift)).flatten(1)
        if not subset.count:
            return start, shift.new_zeros(0, 0)
        single = single and subset.count > CHEAP_UNKNOWNS
        for dtype in (torch.float32, torch.float64) if single else (torch.float64,):
            factor = Factor.of(self.dense(dtype))
            if factor is None:
                continue
            x, left = start, subset.gather(shift - self @ start)
            for _ in range(REFINEMENTS):
                step = factor.solve(left.to(dtype)).to(x)
                x = subset.scatter(x, subset.gather(x) + step)
                left = subset.gather(shift - self @ x)
            if left.norm() <= 1e-9 * shift.norm():
                return x, factor.inverse()
        return None


# ---- the sites of the cells ------------------------------------------------------------------------------------------
def update_sites(
    equations: Equations, state: PropagationState, mean: Tensor, patches: Tensor, noise: float, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Form the cells' sites anew, by (4) to (6). Where nothing in a cell is open, its site stays as it is.

    Args:
        equations: of the layer.
        state: with the sites so far.
        mean: of X (I, H, W).
        patches: covariance of all that a cell sees (K, M, M).
        noise: variance of the targets, relative to the outputs' mean square.
        damping: share of the new sites that enters.

    Returns:
        S (O, K, P, P), h (O, K, P), and the probabilities of the positions (O, K, P).
    """
    scale = equations.output_scale.square()
    outputs, covariance = _output_moments(equations, mean, patches)
    tiny = 1e-5 * noise * scale * torch.eye(outputs.shape[-1]).to(outputs)
    inverse = torch.linalg.inv(covariance + tiny)
    # (4)
    cavity = clamp_eigenvalues(inverse - state.site_precision, 1e-6 / scale)
    cavity_covariance = torch.linalg.inv(cavity)
    shift = (inverse @ outputs[..., None])[..., 0] - state.site_shift
    cavity_mean = (cavity_covariance @ shift[..., None])[..., 0]
    # (5)
    variance = (noise * scale + equations.target_std**2)[..., None]
    selection, tilted_mean, tilted = condition_on_maximum(equations, cavity_mean, cavity_covariance, variance)
    # (6)
    precision = torch.linalg.inv(tilted + tiny) - cavity
    precision = clamp_eigenvalues(precision, torch.zeros_like(variance), 1 / variance)
    shift = ((cavity + precision) @ tilted_mean[..., None] - cavity @ cavity_mean[..., None])[..., 0]
    least = eigenvalues(inverse - state.site_precision)[..., :1]
    sure = least > MIN_CAVITY_SHARE * inverse.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    is_open = covariance.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True) > 0
    share = damping * (sure & is_open).to(least)
    selection = torch.where(sure, selection, state.selection)
    return state.site_precision.lerp(precision, share[..., None]), state.site_shift.lerp(shift, share), selection


def _output_moments(equations: Equations, mean: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (O, K, P) and covariance (O, K, P, P) of the outputs without the bias, cell by cell."""
    cells, (_, positions) = equations.layer.cell_layer, equations.layer.cells.shape
    filters = cells.filters.unflatten(0, (-1, positions))  # (O, P, M)
    outputs = cells.linear_outputs(mean).unflatten(0, (-1, positions)).transpose(1, 2)
    through = cells.filters @ patches.to(mean)  # (K, O P, M)
    through = through.unflatten(1, (-1, positions)).transpose(0, 1)  # (O, K, P, M)
    return outputs, through @ filters[:, None].mT
