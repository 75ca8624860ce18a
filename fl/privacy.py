"""Per-sample clipping and Gaussian noise (DP-SGD): one gradient, two ways to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fl.parametrisation import Parametrisation
from fl.tensors import LowRank, Tensors, Term, Value, dense, norm, scaled, zeros
from fl.types import Batch

if TYPE_CHECKING:
    from fl.client import Gradient

STABILISER = 1e-6
"""Added to a norm before dividing by it, as in Opacus and `clip_grad_norm_`: it only ever shrinks the result."""


def private_gradient(
    grad: Gradient,
    params: Tensors,
    batch: Batch,
    *,
    clip: float,
    noise_multiplier: float,
    generator: torch.Generator | None,
    denominator: float | None = None,
) -> Tensors:
    """The gradient of DP-SGD (Abadi et al., CCS 2016, Algorithm 1): clip each sample's, sum, add noise, divide.

    Differentiable in parameters and batch. A sample's norm is taken over all parameters that move together; outer
    products stay so, one for each sample, until noise is added: noise has full rank and makes everything dense.

    Args:
        grad: of the method's loss.
        params: where to take it.
        batch: the samples; it may be empty.
        clip: bound on the norm of one sample's gradient.
        noise_multiplier: standard deviation of the noise on the sum, in units of `clip`.
        generator: of the noise; None leaves the noise out.
        denominator: what the sum is divided by. It must be public: the expected batch size under Poisson sampling.
            None takes the size of the batch, which is public only where all batches have one size.

    Raises:
        ValueError: for a loss or a model that couples samples, a bad setting, or an empty batch without denominator.
    """
    divisor = _check(grad, batch, clip, noise_multiplier, denominator)
    if not len(batch):
        return _finished(zeros(params, grad.live), clip * noise_multiplier, generator, divisor)

    def bounded(gradient: Tensors) -> Tensors:
        return scaled(gradient, torch.clamp(clip / (norm(gradient) + STABILISER), max=1.0))

    clipped = vmap(bounded)(grad.per_sample(params, batch))
    sums = {name: _summed(value) for name, value in clipped.items()}
    return _finished(sums, clip * noise_multiplier, generator, divisor)


def opacus_gradient(
    grad: Gradient,
    params: Tensors,
    batch: Batch,
    *,
    clip: float,
    noise_multiplier: float,
    generator: torch.Generator | None,
    denominator: float | None = None,
) -> Tensors:
    """`private_gradient` for training plain networks, by Opacus' ghost clipping: equal, faster, not differentiable.

    Arguments and errors are those of `private_gradient`. The method's loss may look at the network's outputs only.

    Raises:
        ValueError: further, for generated weights, whose wrapped generator would see the batch as one sample, and for
            layers that train beside buffers of their own, such as batch norm.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping  # seconds to import, so not before it is used

    divisor = _check(grad, batch, clip, noise_multiplier, denominator)
    _check_plain(grad)
    if not len(batch):
        return _finished(zeros(params, grad.live), clip * noise_multiplier, generator, divisor)
    with torch.enable_grad():
        model = copy.deepcopy(grad.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in grad.live)
            parameter.data.copy_(dense(params[name]))
        for name, buffer in model.named_buffers():
            buffer.copy_(grad.buffers[name])
        ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=clip, loss_reduction="sum", strict=False)
        losses = _losses(grad, ghost(batch.inputs), batch)
        losses.sum().backward(retain_graph=True)
        factors = torch.clamp(clip / (ghost.get_norm_sample() + STABILISER), max=1.0)
        ghost.disable_hooks()
        ghost.zero_grad()
        wanted = {name: p for name, p in model.named_parameters() if name in grad.live}
        sums = torch.autograd.grad((factors.detach() * losses).sum(), list(wanted.values()))
    return _finished(dict(zip(wanted, sums, strict=True)), clip * noise_multiplier, generator, divisor)


def _losses(grad: Gradient, outputs: Tensor, batch: Batch) -> Tensor:
    """The method's loss of each sample (B,), from what the network returned for it."""

    def one(output: Tensor, image: Tensor, label: Tensor) -> Tensor:
        single = Batch(image[None], label[None])
        return grad.client.method.loss(lambda inputs: output[None], single, grad.step)  # type: ignore[arg-type]

    return vmap(one)(outputs, batch.inputs, batch.labels)


def _check(grad: Gradient, batch: Batch, clip: float, noise_multiplier: float, denominator: float | None) -> float:
    grad.check_per_sample()
    if clip <= 0:
        raise ValueError(f"expected clip > 0, got {clip}")
    if noise_multiplier < 0:
        raise ValueError(f"expected noise_multiplier >= 0, got {noise_multiplier}")
    divisor = len(batch) if denominator is None else denominator
    if divisor <= 0:
        raise ValueError(f"expected a public denominator > 0 for a batch of {len(batch)} images, got {denominator}")
    return float(divisor)


def _check_plain(grad: Gradient) -> None:
    """Refuse what Opacus can't tell apart by sample."""
    generator = grad.client.method.parametrisation
    if type(generator) is not Parametrisation:
        got = f"parametrisation {generator.name!r}"
        raise ValueError(f"expected the network's own weights, got {got}: use private_gradient")
    for name, module in grad.model.named_modules():
        moves = any(f"{name}.{key}" in grad.live for key, _ in module.named_parameters(recurse=False))
        if moves and any(True for _ in module.buffers(recurse=False)):
            raise ValueError(f"expected trained layers without buffers, got {name!r}: use private_gradient")


def _summed(value: Value) -> Value:
    """The sum over the first dimension: of outer products, all of them side by side in one value."""
    if isinstance(value, Tensor):
        return value.sum(0)
    if value.base is not None and value.scale != 0:
        raise TypeError("expected per-sample gradients made of outer products only, got one over a base")
    terms = []
    for term in value.terms:
        coef = term.coef[:, None, None] if isinstance(term.coef, Tensor) else term.coef
        left, right = (term.left * coef).flatten(0, 1), term.right.flatten(0, 1)
        terms.append(Term(1.0, left, right))
    return LowRank(None, 0.0, tuple(terms), value.size)


def _finished(sums: Tensors, std: float, generator: torch.Generator | None, divisor: float) -> Tensors:
    """Noise of standard deviation `std` on every entry of the sum, then the mean."""
    if generator is not None and std > 0:
        noisy: Tensors = {}
        for name, value in sums.items():
            matrix = dense(value)
            draw = torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype).to(matrix.device)
            noisy[name] = matrix + draw * std
        sums = noisy
    return scaled(sums, 1 / divisor)
