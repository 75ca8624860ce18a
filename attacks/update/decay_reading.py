"""Reads off an update how much of the weights its client's weight decay took, whatever was stated.

With W the weights that were sent, decay makes s * W of an update, the same share s in every matrix, and gradients make
the rest. Two things tell s without the inputs. Where nothing flows (a unit at rest, a pixel that is black in every
input) a number moves by s times itself, and many such ratios lie within the rounding of one. And the gradient of a
layer that is given one vector an example is a sum of as many outer products as examples were fed, so that
update - s * W has that rank for no other s: variable projection (Golub and Pereyra, SIAM Journal on Numerical Analysis
10, 1973) finds it.

A reading counts only where one of the two holds to the rounding of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.update.float_rounding import coarse_form
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import training_phases
from attacks.update.update_matrices import UpdateMatrix, update_matrices, vector_parts
from fl.defense import Defense, UnknownDefense
from fl.methods.fedavg import FedAvg
from fl.parametrization import Parametrization
from fl.tensors import dense
from fl.view import ServerView

MOST_RATIOS = 2**18
"""Numbers of an update whose ratios are asked."""
MIN_RATIOS, MIN_DENSITY = 64, 8.0
"""Equal ratios that are no chance, and how much denser they lie than others around."""
FEW_SPACINGS, COMMON_ROUNDING = 64.0, 1 / 16
"""Share of one of several steps below which rounding takes more or less than that from most numbers, and how much it
may be, both in spacings after 1."""
SIGMAS = 4.0
"""Standard errors that are no surprise."""
MIN_FREE = 4
"""How much a matrix's smaller side must exceed the rank that is tested."""
MAX_PASSES = 12
"""Passes of the projection, or of the fit of a weight decay to a share."""
CONVERGED = 1e-12
"""Relative change that ends them."""
LARGEST_SHARE = 0.5
"""A larger one is no weight decay of a round."""
DIGITS = 3
"""Digits in which people write a weight decay."""
FIRST_DECAY = 1e-6
"""The smallest weight decay that is tried."""
LARGEST_DECAY = 1e9
"""The largest one."""


@dataclass(frozen=True)
class DecayReading:
    """What an update shows of weight decay.

    Attributes:
        share: of the weights, that it took in all local steps.
        error: standard error of that, or a bound where rounding may be one-sided.
        spared: tensors that it was not applied to: those at rest, and biases and scales where a bias shows it.
    """

    share: float
    error: float
    spared: tuple[str, ...] = ()

    def contradicts(self, share: float) -> bool:
        """Return whether the share that was stated is another."""
        return abs(self.share - share) > SIGMAS * self.error


def with_decay_read_off(view: ServerView) -> tuple[ServerView, str]:
    """Return a view with the weight decay that its update shows, where that is another than stated, and a note.

    Where decay spares tensors, what it made of the others in one step is taken off the view's update.

    Args:
        view: what the server saw; it is returned as it is under a known defense, or if training was not plain.
    """
    method = view.method
    if type(method) is not FedAvg or (reading := read_decay(view)) is None:
        return view, ""
    stated = _share_of(view, method.weight_decay)
    partly = bool(reading.spared) and bool(reading.share) and _is_one_step(view)
    if stated is None or not (reading.contradicts(stated) or partly):
        return view, ""
    found = _decay_of_share(view, reading)
    if found is None or (found == 0 < method.weight_decay and coarse_form(view)):  # which rounds small numbers to 0
        return view, ""
    sized = view.threat.knows_optimizer and not view.scale_unknown
    name = f"weight decay of {found:g}" if sized else f"weight decay by {reading.share:.3g} of the weights"
    said = f"where {method.weight_decay:g} was stated" if method.weight_decay else "which was not stated"
    note = f"{name} was read off the update and taken off it, {said}" if found else f"no weight decay shows, {said}"
    if not partly:
        return replace(view, method=replace(method, weight_decay=found)), note
    other = {n: value for n, value in view.update.items() if n in reading.spared or n not in view.shared}
    taken = {
        n: v - (reading.share * dense(view.shared[n]).double()).to(v) for n, v in _all_dense(view) if n not in other
    }
    note = f"{note}; it spares {len(reading.spared)} of {len(view.update)} tensors, such as {reading.spared[0]}"
    update = {name: taken.get(name, value) for name, value in view.update.items()}
    return replace(view, update=update, method=replace(method, weight_decay=0.0)), note


def _all_dense(view: ServerView) -> list[tuple[str, Tensor]]:
    return [(name, dense(value)) for name, value in view.update.items()]


def _is_one_step(view: ServerView) -> bool:
    return sum(len(phase) for phase in training_phases(view)[1] or ()) == 1


def read_decay(view: ServerView) -> DecayReading | None:
    """Return what an update shows of weight decay; None where nothing tells it.

    Args:
        view: what the server saw.
    """
    kinds = {phase.optimizer for phase in training_phases(view)[0]}
    hidden = view.private or view.parts or type(view.client.defense) not in {Defense, UnknownDefense}
    if kinds - {"sgd", "adamw"} or hidden or type(view.method.parametrization) is not Parametrization:
        return None
    matrices = update_matrices(view)
    eps = torch.finfo(view.dtype).eps
    steps = sum(len(phase) for phase in training_phases(view)[1] or ())
    found = _read_where_nothing_flows(matrices, eps)
    if found is None and kinds == {"sgd"}:
        parts = vector_parts(matrices)
        found = next(filter(None, (_read_by_rank(one, rank) for one in parts for rank in _ranks(view))), None)
    if found is None or not -SIGMAS * found.error <= found.share < LARGEST_SHARE:
        return None
    if steps > 1 and abs(found.share) < FEW_SPACINGS * eps * steps:
        found = replace(found, error=math.hypot(found.error, COMMON_ROUNDING * eps * steps))
    if "adamw" in kinds:  # which multiplies by 1 - share, as that is rounded
        found = replace(found, error=math.hypot(found.error, eps / 4))
    if not found.contradicts(0.0):
        return replace(found, share=0.0)
    return replace(found, spared=_spared(view, matrices, found))


def _ranks(view: ServerView) -> Iterator[int]:
    """Yield how many outer products a gradient may be the sum of: of one example, and of all that were fed."""
    yield 1
    _, schedule = training_phases(view)
    fed = sum(size for phase in schedule or () for step in phase for size in step) or view.batch_size or 1
    if fed > 1:
        yield fed


def _read_where_nothing_flows(matrices: list[UpdateMatrix], eps: float) -> DecayReading | None:
    """Return the share by which many numbers moved alike; None where no ratio stands out."""
    stride = max(1, sum(one.moved.numel() for one in matrices) // MOST_RATIOS)
    ratios, errors = [], []
    for one in matrices:
        moved, start = (value.flatten()[::stride].double() for value in (one.moved, one.start))
        large = (start != 0) & (start.abs() >= start.abs().median())
        ratios.append((moved / start)[large])
        errors.append((replace(one, moved=moved, start=start).rounding / start.abs())[large])
    ratio = torch.cat([*ratios, torch.zeros(0, dtype=torch.float64)]).sort().values
    if len(ratio) < MIN_RATIOS:
        return None
    width = 4 * float(torch.cat(errors).median())  # rounding puts a ratio off by sqrt(3) standard deviations at most
    count = torch.searchsorted(ratio, ratio + width, right=True) - torch.arange(len(ratio), device=ratio.device)
    best = int(count.argmax())
    inside, middle = int(count[best]), float(ratio[best]) + width / 2
    ends = ratio.new_tensor([middle - 8 * width, middle + 8 * width])
    around = int(torch.searchsorted(ratio, ends).diff())
    if inside < MIN_RATIOS or inside < MIN_DENSITY * max((around - inside) / 15, 1.0):
        return None
    share = float(ratio[best : best + inside].median())
    # next to the grid's own step numbers are rounded all to one side
    error = width if abs(share) < 8 * eps else width / math.sqrt(inside)
    return DecayReading(share, error)


def _read_by_rank(part: UpdateMatrix, rank: int) -> DecayReading | None:
    """Return the decay share that leaves the rest of a matrix's update of low rank, to rounding; None without one."""
    if min(part.moved.shape) < rank + MIN_FREE or not bool(part.moved.any()):
        return None
    along = float((part.moved * part.start).sum() / part.start.square().sum().clamp_min(1e-300))
    fits = [_project(part, rank, start) for start in (0.0, along)]
    share, residual, size = min(fits, key=lambda fit: fit[1])
    expected = part.expected_error
    if not residual <= 2 * expected or not size > 0:
        return None
    return DecayReading(share, expected / math.sqrt(part.moved.numel()) / size)


def _project(part: UpdateMatrix, rank: int, share: float) -> tuple[float, float, float]:
    """Return the share that variable projection comes to, what it leaves, and how long the weights are there."""
    residual, size = math.inf, 0.0
    for _ in range(MAX_PASSES):
        u, _, v = torch.linalg.svd(part.moved - share * part.start, full_matrices=False)
        moved, start = (_outside(value, u[:, :rank], v[:rank]) for value in (part.moved, part.start))
        size = float(start.norm())
        if not size:
            return share, math.inf, 0.0
        last, share = share, float((moved * start).sum()) / size**2
        residual = float((moved - share * start).norm())
        if abs(share - last) <= CONVERGED:
            break
    return share, residual, size


def _outside(value: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return a matrix without its part in the columns of u (m, r) and the rows of v (r, n)."""
    value = value - u @ (u.mT @ value)
    return value - (value @ v.mT) @ v


def _spared(view: ServerView, matrices: list[UpdateMatrix], reading: DecayReading) -> tuple[str, ...]:
    """Return the tensors that decay was not applied to.

    The update of a layer's bias is a sum of the columns that its weight's consists of, decay aside: what lies outside
    of them tells the bias's own share.
    """
    still = [name for name, value in _all_dense(view) if not bool(value.any()) and bool(dense(view.shared[name]).any())]
    shares = [found for one in vector_parts(matrices) if (found := _bias_share(one, reading))]
    plain = sum(abs(share) < reading.share / 2 for share, _ in shares)
    vectors = [name for name, value in _all_dense(view) if value.ndim < 2] if 2 * plain > len(shares) else []
    return tuple(dict.fromkeys([*still, *vectors]))


def _bias_share(part: UpdateMatrix, reading: DecayReading) -> tuple[float, float] | None:
    """Return the share that decay took of a bias, and its error; None where that is not told."""
    if part.bias is None:
        return None
    u, sizes, _ = torch.linalg.svd(part.moved - reading.share * part.start, full_matrices=False)
    rank = int((sizes > 2 * part.expected_error).sum())
    moved, start = (value - u[:, :rank] @ (u[:, :rank].mT @ value) for value in part.bias)
    if len(start) - rank < MIN_FREE or not bool(start.any()):
        return None
    share = float(moved @ start) / float(start.square().sum())
    error = replace(part, moved=part.bias[0], start=part.bias[1]).expected_error / float(start.norm())
    return (share, error) if SIGMAS * error < reading.share / 2 else None


def _share_of(view: ServerView, weight_decay: float) -> float | None:
    """Return the share that a weight decay takes in the view's local training, or None where that is not known."""
    changed = ObservedUpdate(replace(view, method=replace(view.method, weight_decay=weight_decay)))  # type: ignore[call-arg]
    return None if changed.unknown_decay else max(changed.decay_shares.values(), default=0.0)


def _decay_of_share(view: ServerView, reading: DecayReading) -> float | None:
    """Return the weight decay that takes a share, in few digits where they do; None where none does."""
    if not reading.share:
        return 0.0
    decay = FIRST_DECAY
    for _ in range(MAX_PASSES):
        share = _share_of(view, decay)
        if share is None or not 0 < share < 1:
            return None
        # what is left is a power of one step's, which is nearly linear in the decay
        factor = math.log1p(-reading.share) / math.log1p(-share)
        decay *= factor
        if abs(factor - 1) <= CONVERGED:
            break
    if decay > LARGEST_DECAY:
        return None
    plain = float(f"{decay:.{DIGITS}g}")
    return plain if not reading.contradicts(_share_of(view, plain) or 0.0) else decay
