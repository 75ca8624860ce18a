"""Pixels behind the first convolution, by expectation propagation over its pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.maxpool.confirmed_pixels import confirmed
from attacks.analytic.maxpool.conv_pool_layer import Layer, joined
from attacks.analytic.maxpool.equations import Equations, Prior
from attacks.analytic.maxpool.pixel_levels import Levels
from attacks.analytic.maxpool.pixel_subset import Part
from attacks.analytic.maxpool.spd_linalg import Factor, inverted
from attacks.analytic.maxpool.spectrum import bounded, eigenvalues

SINGLE = 1e-6
"""Relative noise down to which single precision tells outputs apart, at half the cost."""
BEHIND = 0.2
"""Share of the error below which the assumed noise of pixels' outputs does not fall: wrong positions were believed."""
NEARLY = 2e-2
"""Error from which on single pixels may be confirmed."""
FEW = 512
"""Numbers up to which double precision costs nothing worth saving."""
OWN = 1e-3
"""Share of a cell's precision that must come from elsewhere for its site to be formed anew: less is rounding."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How an expectation propagation proceeds.

    Attributes:
        deviation: of a pixel in [0, 1], for the prior.
        levels: how many values a pixel may take, or None for any.
        iterations: at most.
        damping: share of the new sites that enters.
        noise: variance of the forward equations at the start, relative to their mean square.
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
class State:
    """Where an expectation propagation stands.

    Attributes:
        precision: of every cell's site on its outputs (O, K, P, P).
        shift: precision times mean of it (O, K, P).
        shares: probability of every position (O, K, P).
        mean: of X (I, H, W).
        variance: of X (I, H, W).
        levels: precision, and precision times mean, of every pixel's site on its levels (2, I, H, W).
        held: pixels that are taken for certain (H, W).
        error: of the pooled outputs, relative to them.
    """

    precision: Tensor
    shift: Tensor
    shares: Tensor
    mean: Tensor
    variance: Tensor
    levels: Tensor
    held: Tensor
    error: float = math.inf

    @classmethod
    def first(cls, known: Equations) -> State:
        """Nothing known."""
        shares = known.start
        flat = shares.new_zeros(*shares.shape, shares.shape[-1])
        x = shares.new_zeros(known.layer.shape)
        return cls(flat, torch.zeros_like(shares), shares, x, x + 1, torch.stack([x, x]), x[0] > 0)


def image_prior(layer: Layer, mean: Tensor, std: Tensor, deviation: float) -> Prior:
    """Smooth images of no particular kind, in a network's normalised units.

    Pixels correlate by .93 to the power of their distance and by .9 between channels; nothing is trained.

    Args:
        layer: whose input they are.
        mean: of the normalisation (I,).
        std: of the normalisation (I,).
        deviation: standard deviation of a pixel in [0, 1].
    """
    distance = _distances(layer, mean)
    return _prior(_colours(layer, std, deviation), layer, _with_own(0.93**distance, 0.02), (0.5 - mean) / std)


def choice_prior(layer: Layer, mean: Tensor, std: Tensor) -> Prior:
    """As `image_prior`, of smoother images with less noise: for the choice among levels that equations leave open.

    Correlation is Matern's of 3/2 with a length of 8 pixels, a thousandth of the variance a pixel's own. Of four
    correlations and several lengths it made the corners of 4,000 images of CIFAR-10 likeliest, given the pixels around.
    """
    distance = 3**0.5 * _distances(layer, mean) / 8
    smooth = (1 + distance) * torch.exp(-distance)
    return _prior(_colours(layer, std, 0.3), layer, _with_own(smooth, 1e-3), (0.5 - mean) / std)


def feature_prior(known: Equations) -> Prior:
    """Channels that know nothing of each other, a little smooth, as large as the layer's outputs suggest."""
    channels = known.layer.shape[0]
    size = known.forward_scale.square() / known.layer.filters.square().sum(1).mean()
    eye = torch.eye(channels).to(size)
    near = _with_own(0.7 ** _distances(known.layer, size), 0.05)
    return _prior(eye * size, known.layer, near, torch.zeros(channels).to(size))


def _colours(layer: Layer, std: Tensor, deviation: float) -> Tensor:
    """Covariance between channels (I, I), of a pixel whose standard deviation in [0, 1] is `deviation`."""
    channels = layer.shape[0]
    between = torch.full((channels, channels), 0.9).to(std).fill_diagonal_(1.0)
    scale = deviation / std
    return between * scale[:, None] * scale


def _distances(layer: Layer, like: Tensor) -> Tensor:
    """Between the pixels of an image (H W, H W)."""
    _, height, width = layer.alone
    rows, columns = torch.arange(height).to(like), torch.arange(width).to(like)
    y, x = rows.repeat_interleave(width), columns.repeat(height)
    return ((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).sqrt()


def _with_own(smooth: Tensor, own: float) -> Tensor:
    """Correlations where a share of each pixel is its own."""
    return (1 - own) * smooth + own * torch.eye(len(smooth)).to(smooth)


def _prior(between: Tensor, layer: Layer, pixels: Tensor, mean: Tensor) -> Prior:
    """From the covariance between channels and the correlation of pixels."""
    apart = torch.block_diag(*[inverted(pixels)] * layer.images)  # images know nothing of each other
    return Prior(torch.linalg.inv(between).contiguous(), apart.contiguous(), mean)


def propagate(known: Equations, prior: Prior, schedule: Schedule, levels: Levels | None = None) -> Iterator[State]:
    """One state after the other.

    The forward equations of one filter in one cell say that the largest of P jointly Gaussian outputs is the target: a
    mixture over which one it is, the others truncated. Each is replaced by a Gaussian of the same first two moments,
    given all others (Minka, 2001), and so is each pixel's being on one of its levels. The gradient's equations are
    Gaussian given the positions' probabilities. Pixels that equations confirm are left out of the algebra for as long
    as these hold: what remains is small, is solved in double precision and no more moved by what is known.
    """
    state, noise = State.first(known), schedule.noise
    part = Part.of(known.layer.windows, state.held)
    for iteration in range(schedule.iterations):
        if iteration:  # below what single precision can do only once the outputs are as near as that
            least = schedule.least if state.error < SINGLE**0.5 else max(schedule.least, SINGLE)
            behind = (BEHIND * state.error) ** 2 if levels is not None and iteration > 1 else 0.0
            noise = max(noise * schedule.factor, least, behind)
        told = gradient(known, state, schedule.gradient * noise**0.5) if iteration else None
        if iteration:
            precision = Precision(known, replace(prior, sites=state.levels), state, told, part)
            solved = precision.solved(single=noise >= SINGLE)
        else:
            solved = prior.alone
        if solved is None:
            return
        mean, covariance = solved[0].view(known.layer.shape), solved[1]
        variance = part.filled(torch.zeros_like(mean), covariance.diagonal()).clamp_min(1e-12)
        damping = schedule.damping if iteration else 0.7
        made, shift, shares = sites(known, state, mean, part.covariances(covariance), noise, damping)
        on = state.levels
        if levels is not None:
            on = on.lerp(torch.stack(levels.sites(mean, variance, *on)), 0.5)
        missed = (known.layer.pooled_outputs(mean) - known.target).square()
        error = float(known.average(missed).sqrt() / known.forward_scale)
        before, state = state.held, State(made, shift, shares, mean, variance, on, state.held, error)
        if levels is not None and error < NEARLY:
            state = _surer(known, state, levels)
            part = part if torch.equal(before, state.held) else Part.of(known.layer.windows, state.held)
        yield state


def _surer(known: Equations, state: State, levels: Levels) -> State:
    """The same with those pixels taken for certain that equations confirm on their nearest levels."""
    x = levels.nearest(state.mean)
    held = confirmed(known, x, levels.step)
    return replace(state, held=held, mean=torch.where(held, x, state.mean))


@dataclass(frozen=True)
class Told:
    """What the gradient's equations say: the inverse covariance of each filter's (O, M, M), and the maps they are of.

    The maps (O, kh * kw, H * W) are those from one channel of X to its part of each filter's gradient.
    """

    inverse: Tensor
    maps: Tensor
    gradient: Tensor

    @property
    def right(self) -> Tensor:
        """Precision times mean (I, H W)."""
        return self._pulled(self.gradient)

    def __matmul__(self, x: Tensor) -> Tensor:
        """The precision times X (I, H W)."""
        return self._pulled(torch.einsum("oin,an->oai", self.maps, x).flatten(1))

    def _pulled(self, gradient: Tensor) -> Tensor:
        weighted = (self.inverse @ gradient[..., None]).view(len(gradient), -1, self.maps.shape[1])
        return torch.einsum("oin,oai->an", self.maps, weighted)

    def dense(self, dtype: torch.dtype, pixels: Tensor) -> Tensor:
        """The precision itself of some pixels' numbers (n, n)."""
        maps = self.maps[..., pixels].to(dtype)
        count, channels = maps.shape[1], self.inverse.shape[1] // maps.shape[1]
        inverse = self.inverse.to(dtype).view(-1, channels, count, channels, count)
        flat, blocks = maps.flatten(0, 1), maps.new_empty(channels, channels, len(pixels), len(pixels))
        for i in range(channels):
            for j in range(i + 1):
                blocks[i, j] = flat.mT @ (inverse[:, i, :, j] @ maps).flatten(0, 1)
                if i != j:
                    blocks[j, i] = blocks[i, j].mT
        return joined(blocks)


@dataclass(frozen=True)
class Precision:
    """Of X, given the prior, the sites on the outputs, and what the gradient says, or None."""

    known: Equations
    prior: Prior
    state: State
    told: Told | None
    part: Part

    @property
    def right(self) -> Tensor:
        """Precision times mean (I, H W)."""
        windows = self.known.layer.windows
        right = windows.pull(self.state.shift.transpose(1, 2).flatten(0, 1)).flatten(1) + self.prior.right
        return right if self.told is None else right + self.told.right

    def __matmul__(self, x: Tensor) -> Tensor:
        """The precision times X (I, H W)."""
        windows, positions = self.known.layer.windows, self.state.shift.shape[-1]
        outputs = windows.convolved(x.view(self.known.layer.shape)).unflatten(0, (-1, positions)).transpose(1, 2)
        weighted = (self.state.precision @ outputs[..., None])[..., 0]
        result = windows.pull(weighted.transpose(1, 2).flatten(0, 1)).flatten(1) + self.prior @ x
        return result if self.told is None else result + self.told @ x

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The precision of what is not certain (n, n)."""
        windows = self.known.layer.windows
        filters = windows.filters.to(dtype).unflatten(0, (-1, self.state.shift.shape[-1]))  # (O, P, M)
        raised = torch.einsum("okpr,orm->kopm", self.state.precision.to(dtype), filters).flatten(1, 2)
        matrix = self.part.form(filters.flatten(0, 1).mT @ raised)
        matrix += self.prior.to(dtype).at(self.part.pixels).dense
        return matrix if self.told is None else matrix.add_(self.told.dense(dtype, self.part.pixels))

    def solved(self, *, single: bool) -> tuple[Tensor, Tensor] | None:
        """Mean (I, H W), and covariance (n, n) of what is not certain, in single precision where that will do."""
        right, part = self.right, self.part
        start = part.filled(self.state.mean, torch.zeros(part.count).to(right)).flatten(1)
        if not part.count:
            return start, right.new_zeros(0, 0)
        for dtype in (torch.float32, torch.float64) if single and part.count > FEW else (torch.float64,):
            factor = Factor.of(self.dense(dtype))
            if factor is None:
                continue
            x, left = start, part.taken(right - self @ start)
            for _ in range(4):
                moved = factor.solve(left.to(dtype)).to(x)
                x = part.filled(x, part.taken(x) + moved)
                left = part.taken(right - self @ x)
            if left.norm() <= 1e-9 * right.norm():
                return x, factor.inverse()
        return None


def gradient(known: Equations, state: State, noise: float) -> Told:
    """The gradient's equations with the covariance of what open cells may add.

    Only the directions in which an open cell's patches differ are lost, and those of cells whose signal is in doubt;
    all other combinations hold up to `noise`, relative to the gradient's root mean square.
    """
    layer, signal = known.layer, known.signal
    cells = layer.patches(state.mean)[layer.cells]  # (K, P, M)
    mean = torch.einsum("okp,kpm->okm", state.shares, cells)
    spread = (signal[..., None] * state.shares.sqrt())[..., None] * (cells - mean[:, :, None])
    spread = spread.flatten(1, 2)  # (O, K P, M)
    bent = (signal * (known.doubt - 1))[..., None] * mean  # (O, K, M)
    floor = max(noise, known.noise) * known.gradient.square().mean().sqrt()
    loose = (signal.square() * (1 - state.shares.square().sum(-1))).sum(1) * state.variance.mean() + floor**2
    eye = torch.eye(spread.shape[-1]).to(spread)
    inverse = torch.linalg.inv(spread.mT @ spread + bent.mT @ bent + loose[:, None, None] * eye)  # (O, M, M)
    maps = layer.correlation(layer.placed(state.shares * signal[..., None])).unflatten(0, (len(signal), -1))
    return Told(inverse, maps, known.gradient)


def sites(
    known: Equations, state: State, mean: Tensor, patches: Tensor, noise: float, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """New sites (O, K, P, P) and (O, K, P), and the probabilities of the positions (O, K, P).

    `patches` is the covariance of all that a cell sees (K, M, M). Where nothing in it is open, sites stay as they are.
    """
    scale = known.forward_scale.square()
    outputs, spread = _outputs(known, mean, patches)
    tiny = 1e-5 * noise * scale * torch.eye(outputs.shape[-1]).to(outputs)
    inverse = torch.linalg.inv(spread + tiny)
    cavity = bounded(inverse - state.precision, 1e-6 / scale)
    hidden = torch.linalg.inv(cavity)
    centre = (hidden @ ((inverse @ outputs[..., None])[..., 0] - state.shift)[..., None])[..., 0]
    variance = (noise * scale + known.loose**2)[..., None]
    shares, tilted, covariance = conditioned(known, centre, hidden, variance)
    precision = bounded(torch.linalg.inv(covariance + tiny) - cavity, torch.zeros_like(variance), 1 / variance)
    shift = ((cavity + precision) @ tilted[..., None] - cavity @ centre[..., None])[..., 0]
    own = eigenvalues(inverse - state.precision)[..., :1]
    sure = own > OWN * inverse.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    seen = spread.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True) > 0
    moved = damping * (sure & seen).to(own)
    shares = torch.where(sure, shares, state.shares)
    return state.precision.lerp(precision, moved[..., None]), state.shift.lerp(shift, moved), shares


def _outputs(known: Equations, mean: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (O, K, P) and covariance (O, K, P, P) of the outputs without the bias, cell by cell."""
    windows, (_, positions) = known.layer.windows, known.layer.cells.shape
    filters = windows.filters.unflatten(0, (-1, positions))  # (O, P, M)
    outputs = windows.convolved(mean).unflatten(0, (-1, positions)).transpose(1, 2)
    through = windows.filters @ patches.to(mean)  # (K, O P, M)
    through = through.unflatten(1, (-1, positions)).transpose(0, 1)  # (O, K, P, M)
    return outputs, through @ filters[:, None].mT


def conditioned(known: Equations, centre: Tensor, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (O, K, P), mean (O, K, P) and covariance (O, K, P, P) given that the largest is the target."""
    target = known.height[..., None]
    chances, means, covariances = [], [], []
    for p in range(centre.shape[-1]):
        variance = hidden[..., p, p] + noise[..., 0]
        column = hidden[..., p]
        given = centre + column / variance[..., None] * (target - centre[..., p, None])
        rest = hidden - column[..., :, None] * column[..., None, :] / variance[..., None, None]
        moved, shrunk, log = _below(given, rest, target, noise)
        log[..., p] = 0.0
        moved[..., p] = given[..., p]
        shrunk[..., p] = 1.0
        density = -0.5 * (target[..., 0] - centre[..., p]) ** 2 / variance - 0.5 * variance.log()
        chances.append(density + log.sum(-1))
        means.append(moved)
        covariances.append(shrunk[..., :, None] * rest * shrunk[..., None, :])
    shares = torch.softmax(torch.stack(chances, -1), -1)
    every, spread = torch.stack(means, -2), torch.stack(covariances, -3)  # (O, K, P, P), (O, K, P, P, P)
    mean = (shares[..., None] * every).sum(-2)
    apart = every - mean[..., None, :]
    covariance = (shares[..., None, None] * (spread + apart[..., :, None] * apart[..., None, :])).sum(-3)
    if bool(known.seen.all()):
        return shares, mean, covariance
    moved, shrunk, _ = _below(centre, hidden, target, noise)  # a target not seen bounds all positions, no more
    cut = shrunk[..., :, None] * hidden * shrunk[..., None, :]
    seen = known.seen[..., None]
    shares = torch.where(seen, shares, known.start)
    return shares, torch.where(seen, mean, moved), torch.where(seen[..., None], covariance, cut)


def _below(mean: Tensor, covariance: Tensor, bound: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each output truncated at `bound` by itself: new mean, factor on the deviation, log-probability."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12 * noise)
    deviation = (variance + noise).sqrt()
    at = ((bound - mean) / deviation).clamp(-30, 30)
    log = torch.special.log_ndtr(at)
    ratio = torch.exp(-0.5 * at**2 - 0.5 * math.log(2 * math.pi) - log)
    part = variance / (variance + noise)
    moved = mean - deviation * ratio * part
    return moved, (1 - at * ratio - ratio**2).clamp(1e-6, 1).sqrt(), log
