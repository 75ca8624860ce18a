"""Which tensors of an update are not what the model makes of its images, where the others are: turned or exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import torch
from torch import Tensor

from eval.audit.update_scale import NEGLIGIBLE, typical_factor
from eval.io.text import join_words
from eval.metrics.update_prediction_error import within_rounding
from fl.predict import predict
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView

MOST_NAMED = 4
"""Tensors that are named, at most."""
CLEARLY_OFF = 3.0
"""Tolerances beyond which a tensor is that is told from those that fit."""
LEAST_FITTING = 0.1
"""Share of the update's length that must fit, for the rest to be what is wrong."""


def describe_mismatches(
    view: ServerView,
    truth: Truth,
    tolerance: float,
    rounding: Mapping[str, Tensor] | None = None,
    *,
    scaled: bool = False,
) -> str:
    """Say which tensors do not fit the images that the others fit; empty where most do not.

    Args:
        view: of the update, which the view's settings do not explain.
        truth: what the client fed.
        tolerance: relative error of a tensor up to which it fits.
        rounding: how far numbers of the update may be off for having been rounded, by name.
        scaled: whether the step size is unknown, and read off what most tensors are a multiple of.
    """
    with torch.no_grad():
        made = {name: dense(value).double() for name, value in predict(view, truth.candidate()).items()}
    sent = {name: dense(value).double() for name, value in view.update.items()}
    if scaled:
        factor = typical_factor((made[name], value) for name, value in sent.items())
        made = {name: factor * value for name, value in made.items()}
    whole = sum(float(value.square().sum()) for value in sent.values()) ** 0.5
    if not 0 < whole < float("inf"):
        return ""

    def fits(own: str, name: str, change: Callable[[Tensor], Tensor] = lambda value: value, within: float = 1) -> bool:
        """Return whether what was sent under one name, changed, is what is made under another."""
        bound = (rounding or {}).get(own)
        near = within_rounding(made[name], change(sent[own]), None if bound is None else change(bound))
        off = float((dense(near) - change(sent[own])).norm())
        return off <= within * tolerance * (float(sent[own].norm()) + NEGLIGIBLE * whole)

    odd = [name for name in sent if not fits(name, name)]
    if any(fits(name, name, within=CLEARLY_OFF) for name in odd):
        return ""  # as of noise: nothing sets these apart from the others
    turned = [name for name in odd if _is_square(sent[name]) and fits(name, name, lambda value: value.transpose(0, 1))]
    pairs = [(a, b) for a, b in combinations(odd, 2) if made[a].shape == made[b].shape and fits(a, b) and fits(b, a)]
    still = [name for name in odd if not bool(sent[name].any())]
    other = [name for name in odd if name not in {*turned, *still} and not any(name in pair for pair in pairs)]
    right = sum(float(sent[name].square().sum()) for name in sent if name not in other) ** 0.5
    if not odd or right < LEAST_FITTING * whole or len(other) > max(1, len(sent) // 2):
        return ""
    told = [f"{join_words(turned[:MOST_NAMED])} turned (transpose it)"] if turned else []
    told += [f"{a} and {b} exchanged" for a, b in pairs[:MOST_NAMED]]
    told += [f"{join_words(still[:MOST_NAMED])} not moved (frozen? let your function freeze them)"] if still else []
    told += [f"{join_words(other[:MOST_NAMED])} of other numbers"] if other else []
    return f"it is what the model makes of them but for some tensors: {'; '.join(told)}"


def _is_square(value: Tensor) -> bool:
    return value.ndim >= 2 and value.shape[0] == value.shape[1]
