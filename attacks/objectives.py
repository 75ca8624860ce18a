"""Distances between what an attacker predicts and what it observed: all without units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl.tensors import LowRank, Tensors, length, norm, scaled, split, squared_distance


def direction(observed: Tensors) -> tuple[Tensors, Tensor]:
    """An observed update divided by its norm, and the norm (of no dimensions): what the distances below take."""
    size = norm(observed)
    based = any(isinstance(v, LowRank) and v.scale != 0 for v in observed.values())
    return scaled(observed, 1 / float(size) if based else 1 / size), size  # the base of a LowRank takes numbers only


def cosine(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """1 - cos of the angle between two updates, over all tensors jointly, in [0, 2] (IG, Geiping et al. 2020, Eq. 4).

    Taken as half the squared distance of the two directions: 1 minus a cosine would be nothing but rounding long
    before the images agree.

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had; unused, as the angle is the same.
    """
    mine = {name: predicted[name] for name in observed}
    if all(isinstance(value, Tensor) for value in (*mine.values(), *observed.values())):
        distance: Tensor = _Directions.apply(split(mine)[0], split(observed)[0])[0]
        return distance / 2
    return _distance(predicted, observed, 1 / norm(mine)) / 2


def squared(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """Squared distance relative to the observed update's own size (DLG, Zhu et al. 2019, Eq. 4, made unit-free).

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had.
    """
    return _distance(predicted, observed, 1 / size)


def _distance(predicted: Tensors, observed: Tensors, factor: Tensor) -> Tensor:
    """Squared distance of `factor` times the prediction from what was observed."""
    alike = {k: v for k, v in observed.items() if isinstance(v, Tensor) and isinstance(predicted[k], Tensor)}
    apart = [squared_distance(predicted[k], v, factor) for k, v in observed.items() if k not in alike]
    if alike:
        (mine, _), (theirs, _) = split({k: predicted[k] for k in alike}), split(alike)
        apart.append((mine * factor - theirs).square().sum())
    return torch.stack(apart).sum()


class _Directions(torch.autograd.Function):
    """`|x / |x| - y|^2` for a constant y: its derivative in closed form.

    By autograd it would take three times as many passes over vectors as long as the network has weights, and these
    passes are half of what a stack of trials costs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = length(x)
        apart = x / size - y
        return apart.square().sum(), apart, size

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, apart, size = output
        ctx.save_for_backward(*inputs, apart, size)
        ctx.mark_non_differentiable(apart, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        x, y, apart, size = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: by x, not only by what is multiplied here
            size = length(x)
            apart = x / size - y
        along = (x * apart).sum() / size**2
        return torch.addcmul(apart, x, -along) * (2 * grad / size), None


OBJECTIVES = {"cosine": cosine, "l2": squared}
