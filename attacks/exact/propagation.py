"""Pixels behind the first convolution, by expectation propagation over its pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.exact.equations import Equations, Prior, System
from attacks.exact.layer import joined


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How an expectation propagation proceeds.

    Attributes:
        deviation: of a pixel in [0, 1], for the prior.
        iterations: at most.
        damping: share of the new sites that enters.
        noise: variance of the forward equations at the start, relative to their mean square.
        factor: what it is multiplied by in each iteration.
        late: where it is small enough to trust prior and gradient less and more, tenfold each.
        least: where it stops.
        joint_from: iteration from which cells that are still open block only their own directions of the gradient's
            equations, and not the whole filter.
    """

    deviation: float = 0.27
    iterations: int = 46
    damping: float = 0.6
    noise: float = 1e-2
    factor: float = 0.6
    late: float = 3e-7
    least: float = 2e-9
    joint_from: int = 6


@dataclass(frozen=True)
class State:
    """Where an expectation propagation stands.

    Attributes:
        precision: of every cell's site on its outputs (O, K, P, P).
        shift: precision times mean of it (O, K, P).
        shares: probability of every position (O, K, P).
        mean: of X (I, H, W).
        variance: of X, averaged over pixels.
        left: standard deviation of each filter's gradient equations (O,).
        error: of the pooled outputs, relative to them.
    """

    precision: Tensor
    shift: Tensor
    shares: Tensor
    mean: Tensor
    variance: float
    left: Tensor
    error: float = math.inf

    @classmethod
    def first(cls, known: Equations) -> State:
        """Nothing known."""
        shares = known.start
        flat = shares.new_zeros(*shares.shape, shares.shape[-1])
        x = shares.new_zeros(known.layer.shape)
        return cls(flat, torch.zeros_like(shares), shares, x, 1.0, known.gradient_scale)


def image_prior(shape: tuple[int, int, int], mean: Tensor, std: Tensor, deviation: float) -> Prior:
    """Smooth images of no particular kind, in a network's normalised units.

    Pixels correlate by .93 to the power of their distance and by .9 between channels; nothing is trained.

    Args:
        shape: (I, H, W).
        mean: of the normalisation (I,).
        std: of the normalisation (I,).
        deviation: standard deviation of a pixel in [0, 1].
    """
    channels, height, width = shape
    rows, columns = torch.arange(height).to(mean), torch.arange(width).to(mean)
    y, x = rows.repeat_interleave(width), columns.repeat(height)
    distance = ((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).sqrt()
    pixels = 0.98 * 0.93**distance + 0.02 * torch.eye(height * width).to(mean)
    between = torch.full((channels, channels), 0.9).to(mean).fill_diagonal_(1.0)
    scale = deviation / std
    between = between * scale[:, None] * scale
    return Prior(torch.linalg.inv(between), torch.linalg.inv(pixels), (0.5 - mean) / std)


def propagate(known: Equations, prior: Prior, schedule: Schedule) -> Iterator[State]:
    """One state after the other.

    The forward equations of one filter in one cell say that the largest of P jointly Gaussian outputs is the target: a
    mixture over which one it is, the others truncated. Each is replaced by a Gaussian of the same first two moments,
    given all others (Minka, 2001). The gradient's equations are Gaussian given the positions' probabilities.
    """
    state = State.first(known)
    for iteration in range(schedule.iterations):
        noise = max(schedule.noise * schedule.factor**iteration, schedule.least)
        trust = 10.0 if noise < schedule.late else 1.0
        matrix, right = _forward(known, prior.weakened(1 / trust), state)
        if iteration:
            added, told = _gradient(known, state, 1e-4 / trust, joint=iteration >= schedule.joint_from)
            matrix, right = matrix.add_(added), right + told
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed):
            return
        mean = torch.cholesky_solve(right.flatten()[:, None], factor)[:, 0].view(known.layer.shape)
        whole = torch.cholesky_inverse(factor)
        damping = schedule.damping if iteration else 0.7
        precision, shift, shares = _sites(known, state, mean, whole, noise, damping)
        left = known.deviation(mean, shares, known.residual(mean, shares))
        missed = (known.layer.pooled_outputs(mean) - known.target).square()
        error = float(known.average(missed).sqrt() / known.forward_scale)
        state = State(precision, shift, shares, mean, float(whole.diagonal().mean()), left, error)
        yield state


def _forward(known: Equations, prior: Prior, state: State) -> tuple[Tensor, Tensor]:
    """Prior and sites: precision of X (N, N), and precision times mean (I, H W)."""
    windows = known.layer.windows
    filters = windows.filters.unflatten(0, (-1, state.shift.shape[-1]))  # (O, P, M)
    raised = torch.einsum("okpr,orm->kopm", state.precision, filters).flatten(1, 2)
    matrix = windows.form(windows.filters.mT @ raised)
    matrix += torch.kron(prior.channels, prior.pixels)
    right = windows.pull(state.shift.transpose(1, 2).flatten(0, 1)).flatten(1) + prior.right
    return matrix, right


def _gradient(known: Equations, state: State, noise: float, *, joint: bool) -> tuple[Tensor, Tensor]:
    """The gradient's equations: precision of X (N, N), and precision times mean (I, H W)."""
    floor = max(noise, known.noise) * known.gradient.square().mean().sqrt()
    if joint:
        return _joint_gradient(known, state, floor)
    apart = System.of(known, state.shares, state.left.maximum(floor), known.forward_scale)
    return torch.kron(torch.eye(known.layer.shape[0]).to(apart.plane), apart.plane), apart.from_gradient


def _joint_gradient(known: Equations, state: State, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient's equations with the covariance of what open cells may add: precision of X (N, N) and (I, H W).

    Only the directions in which an open cell's patches differ are lost; all other combinations stay exact.
    """
    layer, signal = known.layer, known.signal
    cells = layer.patches(state.mean)[layer.cells]  # (K, P, M)
    mean = torch.einsum("okp,kpm->okm", state.shares, cells)
    spread = (signal[..., None] * state.shares.sqrt())[..., None] * (cells - mean[:, :, None])
    spread = spread.flatten(1, 2)  # (O, K P, M)
    loose = (signal.square() * (1 - state.shares.square().sum(-1))).sum(1) * state.variance + floor**2
    eye = torch.eye(spread.shape[-1]).to(spread)
    inverse = torch.linalg.inv(spread.mT @ spread + loose[:, None, None] * eye)  # (O, M, M)
    maps = layer.correlation(layer.placed(state.shares * signal[..., None])).unflatten(0, (len(signal), -1))
    channels, count = layer.shape[0], maps.shape[1]
    inverse = inverse.view(-1, channels, count, channels, count)
    told = torch.einsum("oaibj,obj->oai", inverse, known.gradient.unflatten(1, (channels, count)))
    right = torch.einsum("oin,oai->an", maps, told)
    pixels = maps.shape[-1]
    blocks = maps.new_empty(channels, channels, pixels, pixels)
    flat = maps.flatten(0, 1)
    for i in range(channels):
        for j in range(i + 1):
            blocks[i, j] = flat.mT @ (inverse[:, i, :, j] @ maps).flatten(0, 1)
            if i != j:
                blocks[j, i] = blocks[i, j].mT
    return joined(blocks), right


def _sites(
    known: Equations, state: State, mean: Tensor, whole: Tensor, noise: float, damping: float
) -> tuple[Tensor, Tensor, Tensor]:
    """New sites (O, K, P, P) and (O, K, P), and the probabilities of the positions (O, K, P)."""
    scale = known.forward_scale.square()
    outputs, spread = _outputs(known, mean, whole)
    tiny = 1e-11 * scale * torch.eye(outputs.shape[-1]).to(outputs)
    inverse = torch.linalg.inv(spread + tiny)
    cavity = _bounded(inverse - state.precision, 1e-6 / scale)
    hidden = torch.linalg.inv(cavity)
    centre = (hidden @ ((inverse @ outputs[..., None])[..., 0] - state.shift)[..., None])[..., 0]
    variance = (noise * scale + known.loose**2)[..., None]
    shares, tilted, covariance = _tilted(known, centre, hidden, variance)
    precision = _bounded(torch.linalg.inv(covariance + tiny) - cavity, torch.zeros_like(variance), 1 / variance)
    shift = ((cavity + precision) @ tilted[..., None] - cavity @ centre[..., None])[..., 0]
    keep = 1 - damping
    return keep * state.precision + damping * precision, keep * state.shift + damping * shift, shares


def _outputs(known: Equations, mean: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (O, K, P) and covariance (O, K, P, P) of the outputs without the bias, cell by cell."""
    windows, (_, positions) = known.layer.windows, known.layer.cells.shape
    filters = windows.filters.unflatten(0, (-1, positions))  # (O, P, M)
    outputs = windows.convolved(mean).unflatten(0, (-1, positions)).transpose(1, 2)
    through = windows.filters @ windows.covariances(whole)  # (K, O P, M)
    through = through.unflatten(1, (-1, positions)).transpose(0, 1)  # (O, K, P, M)
    return outputs, through @ filters[:, None].mT


def _tilted(known: Equations, centre: Tensor, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _bounded(matrices: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Symmetric matrices with their eigenvalues moved into [low, high]."""
    values, vectors = torch.linalg.eigh(0.5 * (matrices + matrices.mT))
    return (vectors * values.clamp(low, high)[..., None, :]) @ vectors.mT


def _left(known: Equations, x: Tensor, shares: Tensor) -> Tensor:
    """Standard deviation of each filter's gradient equations (O,)."""
    return known.deviation(x, shares, known.residual(x, shares))
