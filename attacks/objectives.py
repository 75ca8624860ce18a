"""Distances between what an attacker predicts and what it observed: all without units."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl.tensors import Tensors, inner, squared_distance

Weights = Mapping[str, float | Tensor]
"""How much each tensor counts, on both sides."""


def cosine(predicted: Tensors, observed: Tensors, weights: Weights) -> Tensor:
    """1 - cos of the angle between two updates, over all tensors jointly, in [0, 2] (IG, Geiping et al. 2020, Eq. 4).

    Taken as half the squared distance of the two directions: 1 minus a cosine would be nothing but rounding long
    before the images agree.
    """
    mine, theirs = _length({k: predicted[k] for k in observed}, weights), _length(observed, weights)
    parts = [squared_distance(predicted[k], v, weights[k] / mine, weights[k] / theirs) for k, v in observed.items()]
    return torch.stack(parts).sum() / 2


def squared(predicted: Tensors, observed: Tensors, weights: Weights) -> Tensor:
    """Squared distance relative to the observed update's own size (DLG, Zhu et al. 2019, Eq. 4, made unit-free)."""
    theirs = _length(observed, weights)
    parts = [squared_distance(predicted[k], v, weights[k] / theirs, weights[k] / theirs) for k, v in observed.items()]
    return torch.stack(parts).sum()


def _length(values: Tensors, weights: Weights) -> Tensor:
    whole = torch.stack([inner(v, v) * weights[k] ** 2 for k, v in values.items()]).sum()
    return (whole + torch.finfo(whole.dtype).tiny).sqrt()


OBJECTIVES = {"cosine": cosine, "l2": squared}
