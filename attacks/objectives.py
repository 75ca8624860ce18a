"""Distances between what an attacker predicts and what it observed: all without units."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.tensors import LowRank, Tensors, norm, scaled, split, squared_distance


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
    mine = 1 / norm({name: predicted[name] for name in observed})
    return _distance(predicted, observed, mine) / 2


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


OBJECTIVES = {"cosine": cosine, "l2": squared}
