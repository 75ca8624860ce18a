"""Functional optimisers: the arithmetic of torch.optim on named, possibly structured parameters, differentiable."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fl.tensors import LowRank, Tensors, add, combine, norm, scaled, times
from fl.types import Group, Phase


@dataclass(frozen=True)
class OptimState:
    """What an optimiser carries from one step to the next."""

    step: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def optimise(
    phase: Phase, groups: dict[str, Group], params: Tensors, grads: Tensors, state: OptimState
) -> tuple[Tensors, OptimState]:
    """One step of `phase.optimizer`: clip each group, add the decay, move.

    AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2) shrinks the parameters by lr * weight_decay instead of adding
    the decay to the gradient.
    """
    grads = clipped(grads, groups)
    decays = {name: groups[name].weight_decay for name in grads}
    apart = phase.optimizer == "adamw"
    directions = grads if apart else {n: add(g, params[n], decays[n]) if decays[n] else g for n, g in grads.items()}
    update, state = _sgd(phase, directions, state) if phase.optimizer == "sgd" else _adam(directions, state)
    moved = dict(params)
    for name, change in update.items():
        lr = groups[name].lr
        left = times(params[name], 1 - lr * decays[name]) if apart and decays[name] else params[name]
        moved[name] = add(left, change, -lr)
    return moved, state


def clipped(grads: Tensors, groups: dict[str, Group]) -> Tensors:
    """As `clip_grad_norm_`, group by group."""
    result = dict(grads)
    for group in {id(g): g for g in groups.values()}.values():
        if group.max_norm is None:
            continue
        mine = {name: g for name, g in grads.items() if groups[name] is group}
        if mine:
            factor = torch.clamp(group.max_norm / (norm(mine) + 1e-6), max=1.0)
            result.update(scaled(mine, factor))
    return result


def _sgd(phase: Phase, directions: Tensors, state: OptimState) -> tuple[Tensors, OptimState]:
    if phase.momentum == 0:
        return directions, state
    buffer = directions if state.step == 0 else combine(directions, state.first, phase.momentum)
    update = combine(directions, buffer, phase.momentum) if phase.nesterov else buffer
    return update, OptimState(state.step + 1, buffer)


def _adam(
    directions: Tensors, state: OptimState, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> tuple[Tensors, OptimState]:
    step = state.step + 1
    first: Tensors = {}
    second: Tensors = {}
    update: Tensors = {}
    for name, g in directions.items():
        if isinstance(g, LowRank):
            raise TypeError(f"expected dense gradients for Adam, got a structured one for {name!r}: use SGD")
        before = state.first.get(name, torch.zeros_like(g)), state.second.get(name, torch.zeros_like(g))
        m = add(before[0] * betas[0], g, 1 - betas[0])
        v = add(before[1] * betas[1], g * g, 1 - betas[1])
        assert isinstance(m, torch.Tensor)
        assert isinstance(v, torch.Tensor)
        first[name], second[name] = m, v
        # the square root of 0 has no derivative: start it one rounding above
        root = (v / (1 - betas[1] ** step) + torch.finfo(v.dtype).tiny).sqrt()
        update[name] = m / (1 - betas[0] ** step) / (root + eps)
    return update, OptimState(step, first, second)
