"""Distances between what an attacker predicts and what it observed: all without units."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.update.overflow_safe_scaling import rescale_to_unit
from fl.tensors import LowRank, Tensors, dense, norm, scale_tensors, split_dense, squared_distance, vector_norm


def normalize(observed: Tensors) -> tuple[Tensors, Tensor]:
    """Return an observed update divided by its norm, and the norm (of no dimensions): what the distances below take."""
    size = norm(observed)
    least = torch.finfo(size.dtype).tiny / torch.finfo(size.dtype).eps
    if not bool(least <= size.square() < math.inf):  # squares run under or overflow
        apart, unit = rescale_to_unit(observed)
        if unit != 1:  # else all are zero
            found, own = normalize(apart)
            return found, own * unit
    based = any(isinstance(v, LowRank) and v.scale != 0 for v in observed.values())
    return scale_tensors(
        observed, 1 / float(size) if based else 1 / size
    ), size  # the base of a LowRank takes numbers only


def cosine(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """Return 1 - cos of the angle between two updates, over all tensors, in [0, 2] (IG, Geiping et al. 2020, Eq. 4).

    Taken as half the squared distance of the two directions: 1 minus a cosine would be nothing but rounding long
    before the images agree.

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had; unused, as the angle is the same.
    """
    mine = {name: predicted[name] for name in observed}
    if all(isinstance(value, Tensor) for value in (*mine.values(), *observed.values())):
        distance: Tensor = _SquaredDirectionDistance.apply(split_dense(mine)[0], split_dense(observed)[0])[0]
        return distance / 2
    return _distance(predicted, observed, 1 / norm(mine)) / 2


def l2(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """Return squared distance relative to the observed update's own size (DLG, Zhu et al. 2019, Eq. 4, made unit-free).

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had.
    """
    return _distance(predicted, observed, 1 / size, fixed=True)


def l1(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """Return the sum of absolute differences, relative to that of the observed entries (IG's "l1", but scaled).

    Of an update in factored form this takes the whole matrix.

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had.
    """
    pairs = [(dense(predicted[name]) / size, dense(value)) for name, value in observed.items()]
    apart = torch.stack([(mine - theirs).abs().sum() for mine, theirs in pairs]).sum()
    return apart / torch.stack([theirs.abs().sum() for _, theirs in pairs]).sum()


def layerwise_cosine(predicted: Tensors, observed: Tensors, size: Tensor) -> Tensor:
    """Return mean of `cosine` over the tensors, each by itself; of those that are zero, or rounding, nothing is asked.

    Every other tensor counts as much as any, however small. IG's code has it as "simlocal", summed over the tensors.
    Of an update in factored form it takes the whole matrix.

    Args:
        predicted: by the names of `observed`, or more.
        observed: of norm 1.
        size: the norm it had.
    """
    each, there = [], []
    for name, value in observed.items():
        mine, theirs = dense(predicted[name]) / size, dense(value)
        each.append((_unit_vector(mine) - _unit_vector(theirs)).square().sum() / 2)
        there.append((theirs.square().sum() > torch.finfo(theirs.dtype).eps ** 2).to(theirs))
    asked = torch.stack(there)
    return (torch.stack(each) * asked).sum() / asked.sum().clamp_min(1)


def _unit_vector(value: Tensor) -> Tensor:
    """Return the direction; next to nothing of what is rounding beside a whole update of norm 1."""
    return value * (value.square().sum() + torch.finfo(value.dtype).eps ** 2).rsqrt()


LARGE = 2**20
"""Numbers in a tensor from which it is compared by itself: joining it with others would cost a pass over all."""


def _distance(predicted: Tensors, observed: Tensors, factor: Tensor, *, fixed: bool = False) -> Tensor:
    """Return the squared distance of `factor` times the prediction from what was observed.

    Where no guess changes it, that is `fixed`.
    """
    apart, joint = [], []
    for name, value in observed.items():
        mine = predicted[name]
        if not (isinstance(value, Tensor) and isinstance(mine, Tensor)):
            apart.append(squared_distance(mine, value, factor))
        elif mine.numel() < LARGE:
            joint.append(name)
        else:
            apart.append(_dense_distance(mine, value, factor, fixed=fixed))
    if joint:
        mine, theirs = (split_dense({name: side[name] for name in joint})[0] for side in (predicted, observed))
        apart.append(_dense_distance(mine, theirs, factor, fixed=fixed))
    return torch.stack(apart).sum()


def _dense_distance(mine: Tensor, theirs: Tensor, factor: Tensor, *, fixed: bool) -> Tensor:
    if fixed:
        distance: Tensor = _SquaredDistance.apply(mine, theirs, factor)[0]
        return distance
    return (mine * factor - theirs).square().sum()


class _SquaredDistance(torch.autograd.Function):
    """`|f x - y|^2` for constants f and y: its derivative in one pass, where autograd takes five.

    The difference is an output as well, so that the derivative can be taken of the derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        apart = x * factor - y
        return apart.square().sum(), apart

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[2], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, None, None]:
        factor, apart = ctx.saved_tensors
        own = None if grad is None else apart * (2 * grad * factor)
        if other is None:
            return own, None, None
        return other * factor if own is None else own + other * factor, None, None


class _SquaredDirectionDistance(torch.autograd.Function):
    """`|x / |x| - y|^2` for a constant y: its derivative in closed form.

    By autograd it would take three times as many passes over vectors as long as the network has weights, and these
    passes are half of what a stack of trials costs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = vector_norm(x)
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
            size = vector_norm(x)
            apart = x / size - y
        along = (x * apart).sum() / size**2
        return torch.addcmul(apart, x, -along) * (2 * grad / size), None


Objective = Literal["cosine", "l2", "l1", "simlocal"]
OBJECTIVES = {"cosine": cosine, "l2": l2, "l1": l1, "simlocal": layerwise_cosine}
"""The distances by their names, which are those of `Objective`."""
