"""First steps of clients: those of torch.optim, and sign rules, clippings and step sizes of our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Grads = dict[str, Tensor]
Rule = Callable[[Grads, Grads, float, torch.Generator], Grads]
"""What a client sends, from its weights, their gradient and the step size."""


def by_torch(kind: type[torch.optim.Optimizer], weights: Grads, grads: Grads, lr: float, **settings: Any) -> Grads:
    """Return one step of an optimizer of torch.optim."""
    leaves = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = kind(leaves.values(), lr=lr, **settings)  # type: ignore[call-arg]
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    optimizer.step()
    return {name: weights[name] - leaf.detach() for name, leaf in leaves.items()}


def optim(kind: type[torch.optim.Optimizer], **settings: Any) -> Rule:
    """Return the rule of an optimizer's first step."""
    return lambda weights, grads, lr, draw: by_torch(kind, weights, grads, lr, **settings)


def each(step: Callable[[Tensor, Tensor, torch.Generator], Tensor]) -> Rule:
    """Return the rule that moves every tensor by lr times `step(gradient, weight)`."""

    def rule(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
        return {name: lr * step(grads[name], weights[name], draw) for name in grads}

    return rule


def by_name(factor: Callable[[str, int, torch.Generator], float]) -> Rule:
    """Return the rule of step sizes of their own for tensors, by name and place."""

    def rule(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
        return {name: lr * factor(name, place, draw) * grads[name] for place, name in enumerate(grads)}

    return rule


def lars(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """LARS (You et al. 2017): as long as a thousandth of the weights."""
    return gradient * (float(weight.norm()) / max(float(gradient.norm()), 1e-12)) if bool(weight.any()) else gradient


def lamb(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """LAMB (You et al. 2020): Adam's step, as long as the weights."""
    step = gradient / (gradient.abs() + 1e-6)
    return step * (float(weight.norm()) / max(float(step.norm()), 1e-12))


def shortened(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """Clipped by tensor, at a length below most of them."""
    bound = 10 ** float(torch.empty(()).uniform_(-2, 0, generator=draw))
    return gradient * min(1.0, bound / max(float(gradient.norm()), 1e-12))


def clamped(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """`clip_grad_value_`, at a share of the largest."""
    bound = float(torch.empty(()).uniform_(0.05, 0.9, generator=draw)) * float(gradient.abs().max())
    return gradient.clamp(-bound, bound)


def clamped_alike(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """`clip_grad_value_` at one value for all."""
    bound = 10 ** float(torch.empty(()).uniform_(-4, -0.5, generator=draw))
    return {name: lr * value.clamp(-bound, bound) for name, value in grads.items()}


def centered(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """Gradient centralization (Yong et al. 2020)."""
    if gradient.ndim == 1:
        return gradient
    return gradient - gradient.flatten(1).mean(1).view(-1, *[1] * (gradient.ndim - 1))


def largest(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """Return the largest tenth of a tensor."""
    flat = gradient.abs().flatten()
    bound = flat.kthvalue(max(1, math.ceil(0.9 * flat.numel()))).values
    return gradient * (gradient.abs() >= bound)


def in_bits(gradient: Tensor, weight: Tensor, draw: torch.Generator) -> Tensor:
    """Return each tensor in 4 bits."""
    unit = gradient.abs().max().clamp_min(1e-30) / 7
    return (gradient / unit).round() * unit


def decayed(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """SGD with a decay that nobody named."""
    return {name: lr * (value + 0.05 * weights[name]) for name, value in grads.items()}


RULES: dict[str, Rule] = {
    "Adam": optim(torch.optim.Adam),
    "AdamW": optim(torch.optim.AdamW),
    "NAdam": optim(torch.optim.NAdam),
    "Adamax": optim(torch.optim.Adamax),
    "RMSprop": optim(torch.optim.RMSprop),
    "Adagrad": optim(torch.optim.Adagrad),
    "Adadelta": optim(torch.optim.Adadelta),
    "Rprop": optim(torch.optim.Rprop),
    "Lion, signs": each(lambda g, w, draw: g.sign()),
    "signs, mean size by tensor": each(lambda g, w, draw: g.sign() * g.abs().mean()),
    "LARS": each(lars),
    "LAMB": each(lamb),
    "clipped by tensor": each(shortened),
    "normalized by tensor": each(lambda g, w, draw: g / g.norm().clamp_min(1e-12)),
    "clipped by value": clamped_alike,
    "clipped by value, share of the largest": each(clamped),
    "step sizes by layer": by_name(lambda name, place, draw: 2.0 ** -(place // 2)),
    "biases twice as fast": by_name(lambda name, place, draw: 2.0 if name.endswith("bias") else 1.0),
    "step sizes at random": by_name(lambda name, place, draw: 4.0 ** float(torch.rand((), generator=draw) - 0.5)),
    "centralised": each(centered),
    "largest tenth": each(largest),
    "4 bits": each(in_bits),
    "decay of 0.05": decayed,
}
PLAIN: dict[str, Rule] = {
    "SGD": optim(torch.optim.SGD),
    "SGD with momentum": optim(torch.optim.SGD, momentum=0.9),
    "SGD with Nesterov's momentum": optim(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD, clipped as a whole": lambda weights, grads, lr, draw: by_torch(
        torch.optim.SGD, weights, {n: g * 0.3 for n, g in grads.items()}, lr
    ),
}
