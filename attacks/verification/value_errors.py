"""How far each number that a network is given may be off, where the rounding of an update is all that speaks of it.

The numbers x of one example are least squares of the update,

    min over d and s of |W (J d + s u - r)|^2,

with u what one step on x makes, J its Jacobian there, r what u leaves of the observed update, and W one over the
standard deviation of each of the update's numbers. The factor s is free: nothing here hangs on the step size. The
solution d is by how much x misses the likeliest numbers, and (J^T W^2 J)^-1, of d and s together, their covariance. An
error that tensors share, or that only some of them have, counts by what it does to x, and not by the worst tensor.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.network.autograd_support import AUTOGRAD_ERRORS
from attacks.result import Reconstruction
from attacks.update.float_rounding import LEAST_SPACING, rounding_and_grid
from attacks.update.observed_update import ObservedUpdate
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.training_phases import training_phases
from attacks.verification.comparison import MAX_BORNE_OUT_LABELS, comparison
from attacks.verification.update_comparison import UpdateComparison
from fl.predict import predict
from fl.tensors import dense
from fl.types import Candidate
from fl.view import ServerView

MAX_NUMBERS = 1024
"""Numbers of an example whose covariance is worked out, at most: each takes a forward and a backward derivative."""
MAX_PRODUCT = 10**8
"""That count times the update's, at most: of more the derivatives would take minutes."""
DEVIATIONS = 5.0
"""Standard deviations that a number may be off by."""


def value_errors(view: ServerView, result: Reconstruction, asked: Tensor | None = None) -> Tensor | None:
    """Return by how much each number of an example may be off, by how the update was rounded and computed.

    Args:
        view: of one example.
        result: has it as `inputs` (1, C, H, W), near enough to make the update to its rounding.
        asked: which numbers may be off, if the others are known (1, C, H, W); None for all.

    Returns:
        (1, C, H, W), in the unit of the inputs. None where nobody knows how the update was rounded, where the inputs do
        not make it to that, or where their covariance is not worked out.
    """
    inputs = result.inputs
    if inputs is None or len(inputs) != 1 or view.sent_as or view.private:
        return None
    sent = sum(dense(value).numel() for value in view.update.values())
    places = torch.arange(inputs.numel()) if asked is None else asked.flatten().nonzero().flatten().cpu()
    if len(places) > MAX_NUMBERS or len(places) * sent > MAX_PRODUCT:
        return None
    question = comparison(view, replace(result, verified=True))
    guesses = () if question is None else itertools.islice(question.guesses, MAX_BORNE_OUT_LABELS)
    guess = next((one for one in guesses if question and question.check.is_explained_to_rounding(*one)), None)
    if question is None or guess is None:
        return None
    try:
        return _least_squares_errors(question.check, *guess, places)
    except AUTOGRAD_ERRORS:  # of operations that can't be differentiated twice nobody can ask
        return None


def _least_squares_errors(check: UpdateComparison, inputs: Tensor, labels: Tensor, places: Tensor) -> Tensor | None:
    """Return how far the likeliest numbers lie away, and standard deviations beside that; None without an inverse.

    They are 0 of numbers at other places than those given.
    """
    weights = _weights(check, inputs, labels)
    names, double = list(weights), check.predictor.in_double
    whole = inputs.to(check.view.device, torch.float64).detach().flatten()
    places = places.to(whole.device)
    at = whole[places].requires_grad_()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        example = whole.index_copy(0, places, at).view(inputs.shape)
        made = predict(double, Candidate(example, labels.to(check.view.device)))
        sent = ObservedUpdate(double).in_double(made)
        unit = rescale_to_unit({**sent})[1]
        flat = torch.cat([(dense(made[n]) / unit * weights[n]).flatten() for n in names])
        probe = torch.zeros_like(flat).requires_grad_()
        (pulled,) = torch.autograd.grad(flat, at, probe, create_graph=True, materialize_grads=True)
    update = torch.cat([(check.observed[n] * weights[n]).flatten() for n in names])
    step = torch.cat([(sent[n] / unit * weights[n]).flatten() for n in names])
    factor = float(step @ update / (step @ step))
    left, count = update - factor * step, at.numel()
    normal = flat.new_zeros(count + 1, count + 1)  # of the inputs' numbers, and the factor at last
    heard = flat.new_zeros(count + 1)

    def pull(values: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(flat, at, values, retain_graph=True, materialize_grads=True)
        return factor * found.flatten()

    for number in range(count):
        direction = torch.zeros_like(at)
        direction.view(-1)[number] = factor
        (pushed,) = torch.autograd.grad(pulled, probe, direction, retain_graph=True, materialize_grads=True)
        normal[number, :count] = pull(pushed)
    normal[count, :count] = normal[:count, count] = pull(step)
    normal[count, count], heard[:count], heard[count] = step @ step, pull(left), step @ left
    scale = normal.diagonal().sqrt()
    if not bool((scale > 0).all()):
        return None
    root, failed = torch.linalg.cholesky_ex(normal / scale / scale[:, None])
    if int(failed):
        return None
    off = torch.cholesky_solve((heard / scale)[:, None], root).flatten() / scale
    spread = torch.cholesky_inverse(root).diagonal().sqrt() / scale
    missed = float((left @ left - heard @ off).clamp(min=0) / max(1, int((update != 0).sum()) - count - 1))
    error = off.abs() + DEVIATIONS * max(1.0, missed) ** 0.5 * spread
    return torch.zeros_like(whole).index_copy(0, places, error[:count]).view(inputs.shape).to(inputs.device)


def _weights(check: UpdateComparison, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return one over the standard deviation of each number of the update, in the unit of `check.observed`.

    That computing has a share in is asked by changes of the last digit, tensor by tensor; 0 where nothing moves.
    """
    computed = check.bounds.computing_errors(inputs, labels)
    steps = max(sum(len(phase) for phase in training_phases(check.view)[1] or ()), 1)
    found = {}
    for name, rounding in rounding_and_grid(check.view).items():
        observed = check.observed[name]
        size = float(observed.square().mean().sqrt())
        by_computing = max(computed[name] / observed.numel() ** 0.5, LEAST_SPACING * size)
        deviation = (rounding * steps / check.unit).square().add(by_computing**2).sqrt()
        found[name] = torch.where(deviation > 0, 1 / deviation, 0.0)
    return found
