"""Per-sample clipping and Gaussian noise (DP-SGD): one gradient, two ways to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fl.client import LossGradient
from fl.gradient import DEFENSE_DRAWS, autograd_derivative, draws_for_buffers, func_derivative
from fl.parametrization import Parametrization
from fl.privacy import ghost_clipping
from fl.privacy.gaussian_noise import Noise
from fl.tensors import Tensors, dense, norm, scale_tensors
from fl.types import Batch

NORM_STABILIZER = 1e-6
"""Added to a norm before dividing by it, as in Opacus and `clip_grad_norm_`: it only ever shrinks the result."""

ClipTarget = Literal["parameters", "weights"]
NoiseSource = torch.Generator | Noise | None


@dataclass(frozen=True, kw_only=True)
class Privatization:
    """How the gradients of a step are clipped and made noisy.

    Attributes:
        clip: bound on the norm of one sample's gradient, > 0.
        noise_multiplier: standard deviation of the noise on the sum, in units of `clip`, >= 0.
        denominator: what the sum is divided by, > 0. It must be public: the expected batch size under Poisson sampling.
            None takes the size of the batch, which is public only where all batches have one size.
        clip_target: what is clipped and gets the noise: the gradient of all "parameters" that move together, or that of
            the network's "weights" they make, in which case the noisy sum is pulled back to the parameters.

    Raises:
        ValueError: a setting out of its range; says which.
    """

    clip: float
    noise_multiplier: float
    denominator: float | None = None
    clip_target: ClipTarget = "parameters"

    def __post_init__(self) -> None:
        if self.clip <= 0:
            raise ValueError(f"expected clip > 0, got {self.clip}")
        if self.noise_multiplier < 0:
            raise ValueError(f"expected noise_multiplier >= 0, got {self.noise_multiplier}")
        if self.denominator is not None and self.denominator <= 0:
            raise ValueError(f"expected a public denominator > 0, got {self.denominator}")

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the sum."""
        return self.clip * self.noise_multiplier

    def divisor(self, batch: Batch) -> float:
        """Return what the sum over `batch` is divided by.

        Raises:
            ValueError: the batch is empty, and there is no denominator.
        """
        if self.denominator is None and not len(batch):
            raise ValueError("expected a public denominator > 0 for a batch of 0 images, got None")
        return float(len(batch) if self.denominator is None else self.denominator)


def private_gradient(
    grad: LossGradient, params: Tensors, batch: Batch, privatization: Privatization, noise: NoiseSource
) -> Tensors:
    """Return the gradient of DP-SGD (Abadi et al., CCS 2016, Algorithm 1): clip each sample's, sum, add noise, divide.

    Differentiable in parameters and batch. A sample whose gradient is not finite counts as zero. What is pulled back to
    a generator's parameters is the sum, since that is linear: of one batch, heads get one outer product, until noise
    is added to it, which has full rank and makes everything dense.

    Args:
        grad: of the method's loss.
        params: where to take it.
        batch: the samples; it may be empty.
        privatization: how each gradient is clipped, and what is added to their sum.
        noise: where the noise is drawn from; None leaves it out.

    Raises:
        ValueError: for a loss or a model that couples samples, or an empty batch without denominator.
    """
    grad.check_per_sample()
    divisor = privatization.divisor(batch)
    weights = grad.weights(params)
    if len(batch):
        sums = _sum_clipped(grad, params, _per_sample_gradients(grad, weights, batch), privatization)
    else:
        sums = _zero_gradients(grad, weights)
    return scale_tensors(_noisy_sum(grad, params, sums, privatization, noise), 1 / divisor)


def opacus_gradient(
    grad: LossGradient, params: Tensors, batch: Batch, privatization: Privatization, noise: NoiseSource
) -> Tensors:
    """Return `private_gradient` for training, by ghost clipping and Opacus' rules for layers.

    Equal, faster, without a graph.

    Arguments and errors are those of `private_gradient`. The method's loss may look at the network's outputs only.

    Raises:
        ValueError: further, for a network whose layers don't say all (see `fl.privacy.ghost_clipping.obstacle`).
    """
    grad.check_per_sample()
    divisor = privatization.divisor(batch)
    if reason := ghost_clipping.obstacle(grad):
        raise ValueError(f"expected a network of known layers, but {reason}: use private_gradient")
    with torch.no_grad():
        weights = grad.weights(params)
        sums = _zero_gradients(grad, weights)
        by_weights = (
            privatization.clip_target == "weights" or type(grad.client.method.parametrization) is Parametrization
        )
        if len(batch) and by_weights:
            sums = _ghost_sums(grad, weights, batch, privatization.clip)
        elif len(batch):
            sums = _sum_clipped(grad, params, ghost_clipping.per_sample_gradients(grad, weights, batch), privatization)
        return scale_tensors(_noisy_sum(grad, params, sums, privatization, noise), 1 / divisor)


def fastest_gradient(grad: LossGradient, params: Tensors, batch: Batch) -> Callable[..., Tensors]:
    """Return `opacus_gradient` where it applies and nobody asks for a graph, else `private_gradient`."""
    asked = pytree.tree_leaves((params, batch.inputs, batch.labels)) if torch.is_grad_enabled() else []
    stacked = grad.derivative is not autograd_derivative
    if stacked or any(value.requires_grad for value in asked) or ghost_clipping.obstacle(grad):
        return private_gradient
    return opacus_gradient


def _zero_gradients(grad: LossGradient, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    client = grad.client
    names = client.method.parametrization.sources(client.task, grad.live)
    return {name: torch.zeros_like(weights[name]) for name in names}


def _per_sample_gradients(grad: LossGradient, weights: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return the samples' gradients with respect to the network's weights (B, ...); each meets its own row of draws."""
    meant = draws_for_buffers(grad.model, grad.step.draws)
    rows = {n: x for n, x in grad.step.draws.items() if n.removeprefix(DEFENSE_DRAWS) in meant and len(x) == len(batch)}

    def one(image: Tensor, label: Tensor, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        draws = {**grad.step.draws, **{name: row[None] for name, row in drawn.items()}}
        single = replace(grad, step=replace(grad.step, draws=draws))
        return single.of_weights(weights, Batch(image[None], label[None]), func_derivative)

    return vmap(one)(batch.inputs, batch.labels, rows)


def _clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return what each sample's gradient is multiplied by (B,): 0 where it is not finite."""
    return torch.where(norms.isfinite(), torch.clamp(clip / (norms + NORM_STABILIZER), max=1.0), 0.0)


def _sum_clipped(
    grad: LossGradient, params: Tensors, samples: dict[str, Tensor], privatization: Privatization
) -> dict[str, Tensor]:
    """Return the sum of the weights' gradients (B, ...), each clipped by its own norm or by that of the parameters'."""
    at_weights = privatization.clip_target == "weights"
    norms = vmap(lambda one: norm(one if at_weights else grad.pull(params, one)))(samples)
    fine, factors = norms.isfinite(), _clip_factors(norms, privatization.clip)
    watched = torch.is_grad_enabled() or grad.derivative is not autograd_derivative
    if watched or not bool(fine.all()):  # zero times no number is no number
        samples = {k: torch.where(fine.view(-1, *[1] * (g.ndim - 1)), g, 0.0) for k, g in samples.items()}
    return {name: torch.tensordot(factors, value, 1) for name, value in samples.items()}


def _ghost_sums(grad: LossGradient, weights: dict[str, Tensor], batch: Batch, clip: float) -> dict[str, Tensor]:
    layers = ghost_clipping.layer_passes(grad, weights, batch)
    norms = torch.stack([layer.squared_norms() for layer in layers]).sum(0).sqrt()
    if not bool(norms.isfinite().all()):  # zero times no number is no number: go without these samples
        fine = norms.isfinite().nonzero().flatten()
        return _ghost_sums(grad, weights, batch.take(fine), clip) if len(fine) else _zero_gradients(grad, weights)
    factors = _clip_factors(norms, clip)
    found = {name: value for layer in layers for name, value in layer.weighted_sums(factors).items()}
    return {name: found[name] for name in _zero_gradients(grad, weights)}  # the order in which noise is drawn


def _noisy_sum(
    grad: LossGradient, params: Tensors, sums: dict[str, Tensor], privatization: Privatization, noise: NoiseSource
) -> Tensors:
    """Return the sum of the weights' clipped gradients as that of the parameters, with noise on every entry."""
    std = privatization.std
    if privatization.clip_target == "weights":
        return grad.pull(params, _add_noise(sums, std, noise))
    pulled = grad.pull(params, sums)
    if noise is None or std == 0:
        return pulled
    return {**_add_noise({name: dense(value) for name, value in pulled.items()}, std, noise)}


def _add_noise(sums: dict[str, Tensor], std: float, noise: NoiseSource) -> dict[str, Tensor]:
    if noise is None or std == 0:
        return sums
    if isinstance(noise, Noise):
        return {name: sums[name] + draw * std for name, draw in noise.like(sums).items()}
    noisy = {}
    for name, value in sums.items():
        draw = torch.randn(value.shape, generator=noise, dtype=value.dtype).to(value.device)
        noisy[name] = value + draw * std
    return noisy
