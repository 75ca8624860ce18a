"""Says what a peel leaves open where a small residual of one layer's equations proves nothing by itself.

Notation as in `rank_one_equations`. Three cases:

- **Few equations.** One row of dW0, of the only unit that is active, has a v whatever it holds. Then the heads have to
  fit as well, and at the activations that this v makes. Heads without biases tell the length of a by db0 alone.
- **Several steps of one direction.** With db0_t = c_t d the first layer's equations have no residual, and their v is
  the mean of the v_t weighted by the c_t: far from all of them if these cancel, and far from the first where training
  runs away. What moved v by W0^T d in a step moved W0 v + b0 by (|v|^2 + 1) d, so that the heads' mean activations are
  off those that the mean v makes with the weights as sent. From how far, it follows how far v is off.
- **Activations that nothing compares with.** Where the heads give none, only the whole way that v went is known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.hypernetworks.hypernet_view import HypernetView
from attacks.hypernetworks.rank_one_equations import HypernetUpdate
from fl.models.hypernetworks.hyperfl_hypernetwork import TRUNK_BIAS, TRUNK_WEIGHT
from fl.tensors import dense

MIN_ROWS = 3.0
"""Rows of an outer product, counted by what they weigh, from which on noise would show as a residual."""


def route_disagreement(update: HypernetUpdate, embedding: Tensor | None, heads: Tensor) -> float:
    """Return the relative distance of the activations that both layers give; 1 where one says nothing.

    The equations of one layer leave a factor open between tensors, which an unknown defense may have shortened apart.
    """
    if embedding is None or not bool(heads.any()):
        return 1.0
    trunk = update.hidden(embedding)
    return float((trunk - heads).norm() / torch.maximum(trunk.norm(), heads.norm()))


def left_by_routes(
    hypernet: HypernetView, embedding: Tensor | None, heads: Tensor, misfits: tuple[float, float]
) -> tuple[float, float]:
    """Return how far the activations of first layer and heads, each with the embedding, may be off, relative to them.

    The embedding that comes with the heads' activations is handed out as well, so that it has to be borne out.

    Args:
        hypernet: the view.
        embedding: as found, or None.
        heads: the activations that the heads give.
        misfits: what the equations of the first layer and those of the heads leave.
    """
    update = hypernet.update
    trunk, head = misfits
    if embedding is None:
        return trunk, head
    rows, apart = update.trunk_rows(), route_disagreement(update, embedding, heads)
    if not update.bias:
        head = _worst(head, min(apart, update.back_residual(heads) if update.back_rows() >= MIN_ROWS else 1.0))
    if rows < MIN_ROWS:
        trunk = _worst(trunk, head, apart)
    elif update.precision.one_step:
        return trunk, _worst(head, trunk / math.sqrt(rows - 1))  # noise, of which the mean over rows is taken
    if update.precision.one_step:
        return trunk, _worst(head, trunk)
    of_trunk, of_heads = _drift(hypernet, embedding, heads)
    return _worst(trunk, of_trunk), _worst(head, trunk, of_heads)


def _drift(hypernet: HypernetView, embedding: Tensor, heads: Tensor) -> tuple[float, float]:
    """Estimate how far the means over several steps, by first layer and by heads, are from the start of the round."""
    update = hypernet.update
    pace, back = hypernet.embedding_pace, dense(update.change[TRUNK_BIAS])
    weight = dense(update.shared[TRUNK_WEIGHT]).double()
    moved = pace * (weight.mT @ back)
    ratio = float((weight @ moved).norm() / ((embedding @ embedding + 1) * back.norm()))
    trunk = update.hidden(embedding)
    least = float(torch.minimum(trunk.norm(), heads.norm()))
    apart = float((trunk - heads).norm()) / least if least else math.inf
    if apart <= 1:
        return apart * ratio, apart * (1 + ratio)
    # not so far that the ratio means anything, or no length fits: then their directions are compared
    direction = update.leading_direction()
    cosine = float(trunk @ direction / trunk.norm()) if bool(trunk.any()) else 0.0
    turned = math.sqrt(max(0.0, 1 - cosine**2))
    way = float(moved.norm() / embedding.norm()) + min(pace, 1.0) / 2 * float(back @ back)
    return _worst(turned * ratio, way), 1.0


def _worst(*errors: float) -> float:
    """Return the largest, which is infinite where one of them can't be told."""
    return math.inf if any(map(math.isnan, errors)) else max(errors)
