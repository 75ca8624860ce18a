"""Distances between what an attacker predicts and what it observed: all without units."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.tensors import Tensors, inner, squared_distance



def cosine(predicted: Tensors, observed: Tensors, weights: dict[str, float]) -> Tensor:
    """1 - cos of the angle between two updates, over all tensors jointly, in [0, 2] (IG, Geiping et al. 2020, Eq. 4)."""
    dot, mine, theirs = [], [], []
    for name, value in observed.items():
        w = weights[name] ** 2
        dot.append(inner(predicted[name], value) * w)
        mine.append(inner(predicted[name], predicted[name]) * w)
        theirs.append(inner(value, value) * w)
    lengths = torch.stack(mine).sum() * torch.stack(theirs).sum()
    tiny = torch.finfo(lengths.dtype).tiny
    return 1 - torch.stack(dot).sum() / (lengths + tiny).sqrt()


def squared(predicted: Tensors, observed: Tensors, weights: dict[str, float]) -> Tensor:
    """Squared distance relative to the observed update's own size (DLG, Zhu et al. 2019, Eq. 4, made unit-free)."""
    distance, theirs = [], []
    for name, value in observed.items():
        w = weights[name] ** 2
        distance.append(squared_distance(predicted[name], value) * w)
        theirs.append(inner(value, value) * w)
    whole = torch.stack(theirs).sum()
    return torch.stack(distance).sum() / (whole + torch.finfo(whole.dtype).tiny)


OBJECTIVES = {"cosine": cosine, "l2": squared}
