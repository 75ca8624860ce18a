"""How far a view's prediction of the update is from the update itself, given the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attacks.update.observed_update import ObservedUpdate
from eval.metrics.score import relative_error
from fl.client import Client, LocalTraining, gather_batches, local_update
from fl.defense import Defense, overrides
from fl.method import Download
from fl.predict import predict
from fl.seeds import stream
from fl.simulation.client_round import ClientState, local_input
from fl.tensors import Tensors, Value, dense
from fl.types import Trace, Truth
from fl.view import ServerView

MISMATCH = 1e-2
"""Relative error from which on a captured update is not what the model makes of the images."""


def forward_error(view: ServerView, truth: Truth, client: Client, state: ClientState, download: Download) -> float:
    """Return how far the attacker's own model of training is from what was observed, given the truth.

    No one can predict noise, so where the defense draws any, both are taken without it: training is run once more on
    the client's side, and the defense itself says what is expected of it.
    """
    with torch.no_grad():
        predicted, observed = predict(view, truth.candidate()), view.update
        if _draws(client.defense, observed):
            undefended = _noiseless(truth.trace, client, state, download, view.round)
            observed = client.defense.transform_update(undefended, None)
    return relative_error(predicted, {name: observed[name] for name in predicted})


def prediction_error(
    view: ServerView, truth: Truth, *, scaled: bool = False, rounding: Mapping[str, Tensor] | None = None
) -> float | None:
    """Return how far the view's prediction from the truth is from a captured update.

    Args:
        view: what the server knows.
        truth: what the client fed.
        scaled: whether the step size is unknown: what gradients make of the prediction is then taken times the positive
            factor that fits best.
        rounding: how far numbers of the update may be off for having been rounded, by name; only what is beyond that
            counts.

    Returns:
        The relative error; None where it can't be told, as the defense draws noise, private tensors are not known, or
        nothing says which images are whose in a group.
    """
    hidden = set(view.private) - set(truth.private)
    if view.parts and view.schedule is None:
        return None
    if hidden or _draws(view.defense, view.update) or overrides(view.defense, "transform_batch"):
        return None
    with torch.no_grad():
        predicted = predict(view, truth.candidate())
        if scaled:
            predicted = _at_fitted_step(view, predicted)
    near = {
        name: within_rounding(predicted[name], value, (rounding or {}).get(name)) for name, value in view.update.items()
    }
    return relative_error(near, view.update)


def _at_fitted_step(view: ServerView, predicted: Tensors) -> Tensors:
    """Return a prediction at the step size that fits the view's update best.

    What weight decay takes of the weights is known as a share of them, whatever the step size.
    """
    observed = ObservedUpdate(view)
    mine = {name: dense(value).double() for name, value in observed.without_decay(predicted).items()}
    seen = {name: dense(value).double() for name, value in observed.change.items()}
    norm = sum((mine[name] * mine[name]).sum().item() for name in seen)
    if not norm > 0:
        return predicted
    factor = max(0.0, sum((mine[name] * value).sum().item() for name, value in seen.items()) / norm)
    return {name: factor * mine[name] + (dense(view.update[name]).double() - value) for name, value in seen.items()}


def prediction_shift(view: ServerView, truth: Truth, rounding: Mapping[str, Tensor]) -> float:
    """Return how far the prediction moves, relative to the update, where the weights before are off by their rounding.

    A client may have begun at finer weights than were kept. They are drawn once, evenly within their rounding.

    Args:
        view: what the server knows.
        truth: what the client fed.
        rounding: how far each number of the weights before may be off, by name.
    """
    noise = stream(0, "rounding of weights")
    moved = dict(view.shared)
    for name in sorted(rounding.keys() & moved.keys()):
        start = dense(moved[name])
        drawn = 2 * torch.rand(start.shape, generator=noise, dtype=torch.float64) - 1
        moved[name] = (start.double() + (drawn * rounding[name].cpu()).to(start.device)).to(start)
    with torch.no_grad():
        first, last = predict(view, truth.candidate()), predict(replace(view, shared=moved), truth.candidate())
    off = {name: dense(view.update[name]).double() + dense(last[name]) - dense(first[name]) for name in view.update}
    return relative_error(off, view.update)


def within_rounding(predicted: Value, sent: Value, bound: Tensor | None) -> Value:
    """Return what was sent where a prediction is as near to it as rounding allows, and else nearer by that much."""
    if bound is None:
        return predicted
    off = dense(predicted).double() - dense(sent).double()
    return dense(sent).double() + off.sign() * (off.abs() - bound.to(off)).clamp(min=0)


def _draws(defense: Defense, update: Tensors) -> bool:
    """Return whether the defense may draw noise on the way to this update."""
    noise = stream(0, "probe")
    untouched = noise.get_state()
    defense.transform_update(update, noise)
    return not torch.equal(noise.get_state(), untouched) or overrides(defense, "gradient")


def _noiseless(trace: Trace, client: Client, state: ClientState, download: Download, number: int) -> Tensors:
    """Return what the client would have sent in round `number` without its defense's noise."""
    start = local_input(client, state, download, number)
    training = LocalTraining(draws=trace.draws, track_statistics=True)
    return local_update(client, start, gather_batches(trace.inputs, trace.labels, trace.order), training).sent()
