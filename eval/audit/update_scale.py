"""Whether an update is a multiple of what the model makes of its images: right pictures, and another scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eval.io.text import join_words
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView

ROUNDING = 1e-4
"""Relative error up to which a multiple is one to rounding."""
NEGLIGIBLE = 1e-3
"""Share of the update's length below which a tensor says nothing of its factor."""
TURNED_HINT = "give weights before - after (were both exchanged?)"
MOST_NAMED = 3
"""Tensors that are named, at most."""


def describe_scale(
    view: ServerView, truth: Truth, tolerance: float, rounding: Mapping[str, Tensor] | None = None
) -> str:
    """Say of which multiple an update is that the model does not make of its images as stated; empty where of none.

    Args:
        view: of the update, which the view's settings do not explain.
        truth: what the client fed.
        tolerance: relative error up to which they would.
        rounding: how far numbers of the update may be off for having been rounded, by name.
    """
    with torch.no_grad():
        predicted = predict(view, truth.candidate())
    pairs = {name: (dense(predicted[name]).double(), dense(value).double()) for name, value in view.update.items()}
    whole = sum(float(sent.square().sum()) for _, sent in pairs.values())
    if not 0 < whole < float("inf"):
        return ""
    bounds = {name: (rounding or {}).get(name) for name in pairs}
    factor, left = _fit([(*pair, bounds[name]) for name, pair in pairs.items()])
    if left <= tolerance**2 * whole:
        return _describe_factor(view, factor, (left / whole) ** 0.5)
    large = [name for name, (_, sent) in pairs.items() if float(sent.square().sum()) > NEGLIGIBLE**2 * whole]
    fits = {name: _fit([(*pairs[name], bounds[name])]) for name in large}
    still = sum(float(mine.square().sum()) for name, (mine, _) in pairs.items() if name not in large)
    if len(large) < 2 or max(sum(left for _, left in fits.values()), still) > tolerance**2 * whole:
        return ""
    return _describe_factors({name: factor for name, (factor, _) in fits.items()})


def _fit(parts: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[float, float]:
    """Return the factor by which predictions come nearest to what was sent, and the square of what is left.

    Args:
        parts: what is predicted and what was sent, with how far rounding may put the latter off.
    """
    size = sum(float(mine.square().sum()) for mine, _, _ in parts)
    factor = sum(float((mine * sent).sum()) for mine, sent, _ in parts) / size if size else 0.0
    off = [((sent - factor * mine).abs(), bound) for mine, sent, bound in parts]
    beyond = [error if bound is None else (error - bound.to(error)).clamp(min=0) for error, bound in off]
    return factor, sum(float(error.square().sum()) for error in beyond)


def _describe_factor(view: ServerView, factor: float, error: float) -> str:
    near = "to rounding" if error < ROUNDING else f"to {error:.1g} of its length"
    if factor <= 0:
        return f"it is {factor:.3g} times what the model makes of them: the sign is turned, {TURNED_HINT}"
    how = view.method
    fits = f" (lr: {how.lr * factor:.3g} fits)" if isinstance(how, FedAvg) and how.optimizer == "sgd" else ""
    return (
        f"it is {factor:.3g} times what the model makes of them, {near}: another step size{fits}, a gradient "
        "clipped to a norm, a loss scale, a sum in place of a mean or the other way round (over examples, steps or "
        "clients), an average of weights, or a loss that weighs examples"
    )


def _describe_factors(factors: Mapping[str, float]) -> str:
    """Say of which multiples tensors are, each of its own."""
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
