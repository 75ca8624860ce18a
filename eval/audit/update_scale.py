"""Whether an update is a multiple of what the model makes of its images: right pictures, and another scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attacks.update.observed_update import ObservedUpdate
from eval.io.text import join_words
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.tensors import Tensors, dense
from fl.types import Truth
from fl.view import ServerView

ROUNDING = 1e-4
"""Relative error up to which a multiple is one to rounding."""
NEGLIGIBLE = 1e-3
"""Share of the update's length below which a tensor says nothing of its factor."""
MOST_LEFT = 0.25
"""Share of what one factor leaves that tensors' own may leave (of squares), or they are no reason: noise, say."""
TURNED_HINT = "give weights before - after (were both exchanged?)"
OTHER_LABELS = ", or the labels are others: with two classes, or one output, these turn it as well"
DECAY = "weight decay that was not stated, or stated otherwise"
MOST_NAMED = 3
"""Tensors that are named, at most."""


def describe_scale(
    view: ServerView, truth: Truth, tolerance: float, rounding: Mapping[str, Tensor] | None = None
) -> str:
    """Say what an update that the model does not make of its images as stated is a multiple of; empty where of nothing.

    Args:
        view: of the update, which the view's settings do not explain.
        truth: what the client fed.
        tolerance: relative error up to which they would.
        rounding: how far numbers of the update may be off for having been rounded, by name.
    """
    with torch.no_grad():
        predicted = predict(view, truth.candidate())
    observed = ObservedUpdate(view)
    ways = [(predicted, view.update)]  # decay is a share of the weights, whatever gradients are multiplied by
    ways += [(observed.without_decay(predicted), observed.change)] if observed.decay_shares else []
    said = next((said for made, sent in ways if (said := _describe(view, made, sent, tolerance, rounding))), "")
    return said or _describe_decay(view, *ways[-1], tolerance, rounding)


def _describe(
    view: ServerView, predicted: Tensors, sent: Tensors, tolerance: float, rounding: Mapping[str, Tensor] | None
) -> str:
    """Say which multiple of the prediction was sent; empty where none."""
    pairs = {name: (dense(predicted[name]).double(), dense(value).double()) for name, value in sent.items()}
    whole = sum(float(sent.square().sum()) for _, sent in pairs.values())
    if not 0 < whole < float("inf"):
        return ""
    bounds = {name: (rounding or {}).get(name) for name in pairs}
    factor, left = _fit([(*pair, bounds[name]) for name, pair in pairs.items()])
    if left <= tolerance**2 * whole:
        return _describe_factor(view, factor, (left / whole) ** 0.5)
    large = [name for name, (_, sent) in pairs.items() if float(sent.square().sum()) > NEGLIGIBLE**2 * whole]
    fits = {name: _fit([(*pairs[name], bounds[name])]) for name in large}
    rest = _fit([(*pairs[name], bounds[name]) for name in pairs if name not in large], factor)[1]
    own = sum(left for _, left in fits.values())
    if len(large) < 2 or max(own, rest) > tolerance**2 * whole or own > MOST_LEFT * left:
        return ""
    return _describe_factors({name: factor for name, (factor, _) in fits.items()})


def _describe_decay(
    view: ServerView, predicted: Tensors, sent: Tensors, tolerance: float, rounding: Mapping[str, Tensor] | None
) -> str:
    """Say which share of the weights was sent beside a multiple of what is predicted; empty where none fits."""
    mine, seen = ({n: dense(v).double() for n, v in values.items() if n in sent} for values in (predicted, sent))
    whole = {name: dense(view.shared[name]).double() for name in sent if name in view.shared}
    matrices = {name: value for name, value in whole.items() if value.ndim > 1}
    size = sum(float(value.square().sum()) for value in seen.values())
    alone = _fit([(mine[name], value, (rounding or {}).get(name)) for name, value in seen.items()])[1]
    for weights, where in ((whole, ""), (matrices, " in the matrices alone")):
        start = {name: weights.get(name, torch.zeros_like(value)) for name, value in seen.items()}
        first, second, moved = (torch.cat([v[n].flatten() for n in seen]) for v in (mine, start, seen))
        units = [max(float(column.norm()), 1e-300) for column in (first, second)]
        columns = torch.stack([first / units[0], second / units[1]], 1)
        found = torch.linalg.lstsq(columns, moved[:, None], driver="gelsd").solution.flatten().tolist()
        factor, share = (value / unit for value, unit in zip(found, units, strict=True))
        parts = [(mine[n], value - share * start[n], (rounding or {}).get(n)) for n, value in seen.items()]
        left = _fit(parts, factor)[1]
        if factor > 0 and share > 0 and left <= min(tolerance**2 * size, MOST_LEFT * alone):
            times = "" if abs(factor - 1) <= tolerance else f"{factor:.3g} times "
            return f"it is {times}what the model makes of them with {share:.2g} of the weights beside{where}: {DECAY}"
    return ""


def typical_factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return by what most of an update is a multiple of a prediction: the median over tensors, weighed by their length.

    Args:
        pairs: what is predicted and what was sent, of each tensor.
    """
    found = sorted((_fit([(mine, sent, None)])[0], float(sent.norm())) for mine, sent in pairs)
    half = sum(length for _, length in found) / 2
    reached = accumulate(length for _, length in found)
    return next((factor for (factor, _), so_far in zip(found, reached, strict=True) if so_far >= half), 1.0)


def _fit(parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], factor: float | None = None) -> tuple[float, float]:
    """Return the factor by which predictions come nearest to what was sent, and the square of what is left.

    Args:
        parts: what is predicted and what was sent, with how far rounding may put the latter off.
        factor: where it is known.
    """
    size = sum(float(mine.square().sum()) for mine, _, _ in parts)
    if factor is None:
        factor = sum(float((mine * sent).sum()) for mine, sent, _ in parts) / size if size else 0.0
    off = [((sent - factor * mine).abs(), bound) for mine, sent, bound in parts]
    beyond = [error if bound is None else (error - bound.to(error)).clamp(min=0) for error, bound in off]
    return factor, sum(float(error.square().sum()) for error in beyond)


def _describe_factor(view: ServerView, factor: float, error: float) -> str:
    near = "to rounding" if error < ROUNDING else f"to {error:.1g} of its length"
    if factor <= 0:
        turned = f"it is {factor:.3g} times what the model makes of them: the sign is turned, {TURNED_HINT}"
        return f"{turned}{OTHER_LABELS}" if view.task.loss.sends_back_one_direction(view.task.output_shape) else turned
    how = view.method
    fits = f" (lr: {how.lr * factor:.3g} fits)" if isinstance(how, FedAvg) and how.optimizer == "sgd" else ""
    return (
        f"it is {factor:.3g} times what the model makes of them, {near}: another step size{fits}, a gradient "
        "clipped to a norm, a loss scale, a sum in place of a mean or the other way round (over examples, steps or "
        "clients), an average of weights, or a loss that weighs examples"
    )


def _describe_factors(factors: Mapping[str, float]) -> str:
    """Say what tensors are multiples of, each of its own."""
    least, most = min(factors.values()), max(factors.values())
    turned = [name for name, factor in factors.items() if factor < 0]
    sign = ""
    if len(turned) == len(factors):
        sign = f"; the sign of all is turned, {TURNED_HINT}"
    elif turned:
        sign = f"; the sign of {join_words(turned[:MOST_NAMED])} is turned, and that of others is not"
    return (
        f"each tensor is a multiple of what the model makes of them, by {least:.3g} to {most:.3g}: step sizes by "
        f"layer, LARS or LAMB, or clipping by tensor{sign}"
    )
