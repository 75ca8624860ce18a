"""Functional optimizers: the arithmetic of torch.optim on named, possibly structured parameters, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl.tensors import LowRank, Tensors, Value, add, add_scaled, mul, norm, scale_tensors
from fl.types import Group, Phase


@dataclass(frozen=True)
class OptimState:
    """What an optimizer carries from one step to the next."""

    step: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def optimize(
    phase: Phase, groups: dict[str, Group], params: Tensors, grads: Tensors, state: OptimState
) -> tuple[Tensors, OptimState]:
    """Take one step of `phase.optimizer`: clip each group, add the decay, move.

    AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2) shrinks the parameters by lr * weight_decay instead of adding
    the decay to the gradient.
    """
    grads = clip_gradients(grads, groups)
    decays = {name: groups[name].weight_decay for name in grads}
    apart = phase.optimizer == "adamw"
    directions = grads if apart else {n: add(g, params[n], decays[n]) if decays[n] else g for n, g in grads.items()}
    update, state = _sgd(phase, directions, state) if phase.optimizer == "sgd" else _adaptive(phase, directions, state)
    moved = dict(params)
    for name, change in update.items():
        lr = groups[name].lr
        left = mul(params[name], 1 - lr * decays[name]) if apart and decays[name] else params[name]
        moved[name] = add(left, change, -lr)
    return moved, state


def clip_gradients(grads: Tensors, groups: dict[str, Group]) -> Tensors:
    """Clip gradients as `clip_grad_norm_` does, group by group."""
    result = dict(grads)
    for group in {id(g): g for g in groups.values()}.values():
        if group.max_norm is None:
            continue
        mine = {name: g for name, g in grads.items() if groups[name] is group}
        if mine:
            factor = torch.clamp(group.max_norm / (norm(mine) + 1e-6), max=1.0)
            result.update(scale_tensors(mine, factor))
    return result


def _sgd(phase: Phase, directions: Tensors, state: OptimState) -> tuple[Tensors, OptimState]:
    if phase.momentum == 0:
        return directions, state
    buffer = directions if state.step == 0 else add_scaled(directions, state.first, phase.momentum)
    update = add_scaled(directions, buffer, phase.momentum) if phase.nesterov else buffer
    return update, OptimState(state.step + 1, buffer)


def _adaptive(phase: Phase, directions: Tensors, state: OptimState) -> tuple[Tensors, OptimState]:
    """Return a step of an adaptive optimizer (one size for every number), with torch.optim's default constants."""
    for name, g in directions.items():
        if isinstance(g, LowRank):
            raise TypeError(
                f"expected dense gradients for {phase.optimizer}, got a structured one for {name!r}: use SGD"
            )
    eps = adaptive_eps(phase)
    if phase.optimizer in {"adam", "adamw"}:
        return _adam(directions, state, eps)
    return _rmsprop(directions, state, eps) if phase.optimizer == "rmsprop" else _adagrad(directions, state, eps)


def adaptive_eps(phase: Phase) -> float:
    """Return what a phase's adaptive optimizer adds to the size that it divides by, torch.optim's where none is set."""
    return phase.eps or (1e-10 if phase.optimizer == "adagrad" else 1e-8)


def _adam(
    directions: Tensors, state: OptimState, eps: float, betas: tuple[float, float] = (0.9, 0.999)
) -> tuple[Tensors, OptimState]:
    """Take directions by Adam (Kingma and Ba, ICLR 2015, Algorithm 1)."""
    step = state.step + 1
    first = _update_moments(directions, state.first, lambda before, g: add(before * betas[0], g, 1 - betas[0]))
    second = _update_moments(directions, state.second, lambda before, g: add(before * betas[1], g * g, 1 - betas[1]))
    update: Tensors = {
        name: first[name] / (1 - betas[0] ** step) / (_safe_sqrt(second[name] / (1 - betas[1] ** step)) + eps)
        for name in directions
    }
    return update, OptimState(step, {**first}, {**second})


def _rmsprop(directions: Tensors, state: OptimState, eps: float, alpha: float = 0.99) -> tuple[Tensors, OptimState]:
    """Return RMSprop steps (Tieleman and Hinton, Coursera lecture 6.5, 2012), neither centered nor with momentum."""
    second = _update_moments(directions, state.second, lambda before, g: add(before * alpha, g * g, 1 - alpha))
    update: Tensors = {name: mul(g, 1 / (_safe_sqrt(second[name]) + eps)) for name, g in directions.items()}
    return update, OptimState(state.step + 1, {}, {**second})


def _adagrad(directions: Tensors, state: OptimState, eps: float) -> tuple[Tensors, OptimState]:
    """Take directions by Adagrad (Duchi et al., JMLR 2011), without decay of the step size."""
    second = _update_moments(directions, state.second, lambda before, g: add(before, g * g))
    update: Tensors = {name: mul(g, 1 / (_safe_sqrt(second[name]) + eps)) for name, g in directions.items()}
    return update, OptimState(state.step + 1, {}, {**second})


def _update_moments(directions: Tensors, moment: Tensors, rule: Callable[[Tensor, Tensor], Value]) -> dict[str, Tensor]:
    """Apply `rule(moment, direction)` to every tensor; moments start at zero."""
    moved = {}
    for name, g in directions.items():
        assert isinstance(g, Tensor)
        value = rule(moment.get(name, torch.zeros_like(g)), g)  # type: ignore[arg-type]
        assert isinstance(value, Tensor)
        moved[name] = value
    return moved


def _safe_sqrt(square: Tensor) -> Tensor:
    """Return the square root, differentiable at 0: that has no derivative, so it starts one rounding above."""
    return (square + torch.finfo(square.dtype).tiny).sqrt()
