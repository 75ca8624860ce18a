"""Whether an update is a multiple of what the model makes of its images: right pictures, and another scale."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView

ROUNDING = 1e-4
"""Relative error up to which a multiple is one to rounding."""
NEGLIGIBLE = 1e-3
"""Share of the update's length below which a tensor says nothing of its factor."""


def describe_scale(view: ServerView, truth: Truth, tolerance: float) -> str:
    """Say of which multiple an update is that the model does not make of its images as stated; empty where of none.

    Args:
        view: of the update, which the view's settings do not explain.
        truth: what the client fed.
        tolerance: relative error up to which they would.
    """
    with torch.no_grad():
        predicted = predict(view, truth.candidate())
    pairs = [(dense(predicted[name]).double(), dense(value).double()) for name, value in view.update.items()]
    whole = sum(float(sent.square().sum()) for _, sent in pairs)
    if not 0 < whole < float("inf"):
        return ""
    factor, left = _fit(pairs)
    if left <= tolerance**2 * whole:
        return _describe_factor(view, factor, (left / whole) ** 0.5)
    parts = [pair for pair in pairs if float(pair[1].square().sum()) > NEGLIGIBLE**2 * whole]
    fits = [_fit([pair]) for pair in parts]
    if len(parts) < 2 or sum(left for _, left in fits) > tolerance**2 * whole or min(fits)[0] <= 0:
        return ""
    return (
        f"each tensor is a multiple of what the model makes of them, by {min(fits)[0]:.3g} to {max(fits)[0]:.3g}: step "
        "sizes by layer, LARS or LAMB, or clipping by tensor"
    )


def _fit(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the factor by which predictions come nearest to what was sent, and the square of what is left."""
    size = sum(float(mine.square().sum()) for mine, _ in pairs)
    factor = sum(float((mine * sent).sum()) for mine, sent in pairs) / size if size else 0.0
    return factor, sum(float((sent - factor * mine).square().sum()) for mine, sent in pairs)


def _describe_factor(view: ServerView, factor: float, error: float) -> str:
    near = "to rounding" if error < ROUNDING else f"to {error:.1g} of its length"
    if factor <= 0:
        return f"it is {factor:.3g} times what the model makes of them: the sign is turned, give weights before - after"
    how = view.method
    fits = f" (lr: {how.lr * factor:.3g} fits)" if isinstance(how, FedAvg) and how.optimizer == "sgd" else ""
    return (
        f"it is {factor:.3g} times what the model makes of them, {near}: another step size{fits}, a gradient "
        "clipped to a norm, a loss scale, a sum in place of a mean or the other way round (over examples, steps or "
        "clients), an average of weights, or a loss that weighs examples"
    )
