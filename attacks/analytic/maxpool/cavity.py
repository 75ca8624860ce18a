"""Which position of each cell was passed on, each filter's decided by what all the others say of the input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import Layer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.expectation_propagation import conditioned, feature_prior
from attacks.analytic.maxpool.pixel_subset import Part

DAMPING, TEMPERATURE = 0.3, 2.5
"""Share of the new probabilities that enters, and what the gradient's evidence for them is divided by: with 0.7 and 1
four grey images stop with a sixth of their positions wrong."""
ROUNDS = 90
"""At most: four images took 57, two 15 to 35."""
FORWARD = 1e-3
"""Variance of the forward equations, relative to their mean square."""
FREE = 0.02
"""Least share of a filter's equations that is taken to be left over once the input has followed them."""
MANY = 2**26
"""Numbers in the largest of a guess's arrays up to which the search is made: half a gigabyte each. A guess
took four to six times its largest array in all."""


def affordable(known: Equations) -> bool:
    """Whether a layer is small enough to be searched in this way."""
    (count, cells, positions), (_, height, width) = known.start.shape, known.layer.shape
    patches = known.start.numel() * known.gradient.shape[1]
    pairs = count * math.prod(known.layer.windows.kernel) ** 2 * max(cells, positions**2)
    return max(patches, pairs, (height * width) ** 2) <= MANY


@dataclass(frozen=True)
class Guess:
    """Where the search stands.

    Attributes:
        x: (I, H, W), given all filters.
        shares: probability of every position (O, K, P).
        noise: variance of each filter's gradient equations (O,), by what its cells leave open.
    """

    x: Tensor
    shares: Tensor
    noise: Tensor


def guesses(known: Equations, rounds: int = ROUNDS) -> Iterator[Guess]:
    """One after the other, `rounds` at most.

    An input fitted to the gradients of all filters bears out whatever positions were supposed for each of them, and the
    more so the more unknowns there are: with four images, seven tenths of a filter's equations are its own doing. So
    the positions of a filter are decided by the input that the other filters' gradients tell, with its uncertainty
    (the cavity of expectation propagation, here of 25 equations a channel at once). As the gradient's equations are the
    same for all channels, that takes one inverse of the size of a plane, whatever the number of channels.
    """
    prior = feature_prior(known)
    smooth = prior.pixels * prior.channels[0, 0]
    noise = known.gradient_scale.square().maximum(known.floor**2)
    guess = Guess(known.layer.weight.new_zeros(known.layer.shape), known.start, noise)
    windows = Windows.of(known.layer)
    for _ in range(rounds):
        without = Without.of(known, guess, smooth, windows)
        if without is None:
            return
        shares = guess.shares.lerp(without.decided(guess.shares), DAMPING)
        guess = Guess(without.x, shares, without.noise(shares))
        yield guess


@dataclass(frozen=True)
class Windows:
    """What the search needs of the layer alone: its cells as seen in one channel, with patches of m numbers.

    Attributes:
        plane: one position per cell, of a single channel.
        every: all numbers of a plane.
        forms: products of the filters at two positions of a cell, summed over channels (O, P, P, m * m).
    """

    plane: Layer
    every: Part
    forms: Tensor

    @classmethod
    def of(cls, layer: Layer) -> Windows:
        """Of a layer."""
        windows, (channels, height, width) = layer.windows, layer.shape
        plane = replace(windows, weight=windows.weight[:, :1], shape=(1, height, width))
        filters = windows.filters.view(len(layer.weight), -1, channels, math.prod(windows.kernel))
        forms = torch.einsum("opim,orin->oprmn", filters, filters).flatten(3)
        return cls(plane, Part.of(plane, layer.weight.new_zeros(height, width, dtype=torch.bool)), forms)


@dataclass(frozen=True)
class Without:
    """What is expected of the input without each filter's own gradient, o in [0, O).

    With T_o the map from a channel to its part of filter o's gradient (kh kw equations of variance v_o) and C a
    channel's covariance given all filters, what filter o adds is taken off again by the matrix inversion lemma.

    Attributes:
        known: the layer's equations.
        x: mean given all filters (I, H, W).
        covariance: C, the same for all channels (H W, H W).
        through: T C (O, kh kw, H W).
        within: T C T^T (O, kh kw, kh kw).
        inner: (v - T C T^T)^-1 (O, kh kw, kh kw).
        left: what the mean leaves of the gradient (O, kh kw, I).
        variance: v (O,).
        windows: of the layer.
    """

    known: Equations
    x: Tensor
    covariance: Tensor
    through: Tensor
    within: Tensor
    inner: Tensor
    left: Tensor
    variance: Tensor
    windows: Windows

    @classmethod
    def of(cls, known: Equations, guess: Guess, smooth: Tensor, windows: Windows) -> Without | None:
        """From a guess and the precision of a plane (H W, H W) that is expected; None where rounding is in the way."""
        layer, channels = known.layer, known.layer.shape[0]
        count = len(guess.noise)
        maps = layer.correlation(layer.placed(guess.shares * known.signal[..., None])).unflatten(0, (count, -1))
        weighted = maps / guess.noise[:, None, None]
        factor, failed = torch.linalg.cholesky_ex(maps.flatten(0, 1).mT @ weighted.flatten(0, 1) + smooth)
        if bool(failed):
            return None
        gradient = known.gradient.view(count, channels, -1).mT
        x = torch.cholesky_solve(weighted.flatten(0, 1).mT @ gradient.flatten(0, 1), factor)  # (H W, I)
        covariance = torch.cholesky_inverse(factor)
        through = maps @ covariance
        within = through @ maps.mT
        ridge = (1 + 1e-9) * guess.noise[:, None, None] * torch.eye(maps.shape[1]).to(maps)
        inner = torch.linalg.inv(ridge - within)
        left = gradient - maps @ x
        return cls(known, x.mT.reshape(layer.shape), covariance, through, within, inner, left, guess.noise, windows)

    @cached_property
    def cells(self) -> Tensor:
        """The patches of every cell without the filter's own gradient (O, K, P, M)."""
        layer, count = self.known.layer, len(self.through)
        moved = (self.through.mT @ (self.inner @ self.left)).mT  # (O, I, H W)
        apart = (self.x.flatten(1) - moved).reshape(-1, *layer.shape[1:])
        seen = replace(layer, shape=apart.shape).patches(apart).unflatten(1, (count, -1))  # type: ignore[arg-type]
        return seen.transpose(0, 1)[:, layer.cells].contiguous()

    @cached_property
    def spread(self) -> Tensor:
        """Covariance of what is left of each filter's gradient (O, kh kw, kh kw), by the input's alone."""
        return self.within + self.within @ self.inner @ self.within

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """Mean (O, K, P) and covariance (O, K, P, P) of the outputs without the bias."""
        layer, (count, equations, _), windows = self.known.layer, self.through.shape, self.windows
        mean = torch.einsum("okpm,om->okp", self.cells, layer.filters)
        common = windows.every.covariances(self.covariance)  # (K, m, m)
        planes = self.through.reshape(-1, *layer.shape[1:])
        seen = replace(windows.plane, shape=planes.shape).patches(planes)  # type: ignore[arg-type]
        own = seen.view(len(common), count, equations, -1)
        added = torch.einsum("koam,oab,kobn->okmn", own, self.inner, own)
        spread = torch.einsum("oprm,okm->okpr", windows.forms, (common + added).flatten(2))
        tiny = 1e-9 * self.known.forward_scale.square() * torch.eye(mean.shape[2]).to(mean)
        return mean, spread + tiny

    def noise(self, shares: Tensor) -> Tensor:
        """Variance of each filter's equations (O,): what open cells may add, and no less than what is left of them."""
        known, (_, equations, channels) = self.known, self.left.shape
        patches = torch.einsum("okp,okpm->okm", shares, self.cells).square().sum(-1)
        apart = torch.einsum("okp,okp->ok", shares, self.cells.square().sum(-1)) - patches
        size = equations * channels
        apart = apart.clamp_min(0) + size * self.covariance.diagonal().mean() * (1 - shares.square().sum(-1))
        own = self.within.diagonal(dim1=1, dim2=2).mean(1) / self.variance
        missed = self.left.square().sum((1, 2)) / (size * (1 - own).clamp_min(FREE))
        return ((known.signal.square() * apart).sum(1) / size + known.floor**2).maximum(missed)

    def decided(self, shares: Tensor) -> Tensor:
        """New probabilities (O, K, P), cell after cell, each given the others'."""
        known, cells, (count, equations, _) = self.known, self.cells, self.left.shape
        variance = (FORWARD * known.forward_scale.square() + known.loose**2)[..., None]
        outside = conditioned(known, *self.outputs, variance)[0].clamp_min(1e-300).log()
        inverse = torch.linalg.inv(self.noise(shares)[:, None, None] * torch.eye(equations).to(cells) + self.spread)
        whitened = (cells.view(count, -1, equations) @ inverse.mT).view_as(cells)
        within = known.signal[..., None, None].square() * (whitened @ cells.mT)  # (O, K, P, P)
        square = 0.5 * within.diagonal(dim1=2, dim2=3)
        left = (self.left + self.within @ (self.inner @ self.left)).mT.flatten(1)[..., None]  # (O, M, 1)
        shares = shares.clone()
        for k in range(cells.shape[1]):
            signal, before = known.signal[:, k, None], shares[:, k, :, None]
            along = signal * (whitened[:, k] @ left)[..., 0] + (within[:, k] @ before)[..., 0]  # without this cell
            now = torch.softmax((along - square[:, k]) / TEMPERATURE + outside[:, k], -1)[..., None]
            left.baddbmm_(cells[:, k].mT, signal[..., None] * (before - now))
            shares[:, k] = now[..., 0]
        return shares
