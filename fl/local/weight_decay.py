"""What weight decay alone does to a parameter in a round: known to the server, whatever the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fl.local.optimizers import OptimState, optimize
from fl.tensors import LowRank, Tensors, add, dense
from fl.types import Group, Phase, Schedule


def decay_shares(phases: Sequence[Phase], schedule: Schedule | None, names: Iterable[str]) -> dict[str, float]:
    """Return the share of each parameter that local SGD or AdamW takes off by weight decay alone.

    SGD is linear in gradients and parameters, and AdamW's decay never enters its normalized steps, so
    `update = share * before + what the gradients make`. The share is what the phases' own optimizer takes off the
    number 1 when every gradient is zero.

    Args:
        phases: local training, in order.
        schedule: batch sizes, phase by phase and step by step; None if unknown.
        names: of parameters.

    Returns:
        By name, 0 where nothing decays; names whose share can't be told are left out: Adam, RMSprop and Adagrad mix the
        decay into their normalized steps, and an unknown schedule leaves the number of steps open where `Phase.steps`
        does not say it.
    """
    counts = [phase.steps for phase in phases] if schedule is None else [len(steps) for steps in schedule]
    kept: dict[tuple[int | None, ...], float | None] = {}
    shares = {}
    for name in names:
        owners = [next((i for i, g in enumerate(phase.groups) if g.covers(name)), None) for phase in phases]
        key = tuple(owners)
        if key not in kept:
            kept[key] = _remaining_share(phases, counts, owners)
        left = kept[key]
        if left is not None:
            shares[name] = 1.0 - left
    return shares


def without_decay(
    update: Tensors,
    shared: Tensors,
    shares: Mapping[str, float],
    surrogate: Callable[[Tensors], Tensors] | None = None,
) -> Tensors:
    """Return an update without the part that weight decay alone makes, in the form (structured or dense) it has.

    Args:
        update: an observed or predicted one, by name.
        shared: the parameters it starts from.
        shares: by name, as `decay_shares` gives them; tensors that it or the update lacks stay as they are.
        surrogate: what a known defense lets through of the decay's part; None is all of it.
    """
    made: Tensors = {}
    for name, share in shares.items():
        if share and name in update:
            base = dense(shared[name])  # equal bases cancel
            made[name] = (LowRank.of(base) if isinstance(update[name], LowRank) else base) * share
    if made and surrogate is not None:
        made = surrogate(made)
    return {name: add(value, made[name], -1.0) if name in made else value for name, value in update.items()}


def _remaining_share(
    phases: Sequence[Phase], counts: Sequence[int | None], owners: Sequence[int | None]
) -> float | None:
    """Return what is left of 1 after all phases, for a parameter in group `owners[p]` of phase p."""
    value = 1.0
    for phase, count, owner in zip(phases, counts, owners, strict=True):
        if owner is None or phase.groups[owner].weight_decay == 0:
            continue
        if count is None or phase.optimizer not in {"sgd", "adamw"}:
            return None
        value *= _remaining_share_of_phase(phase, phase.groups[owner], count)
    return value


def _remaining_share_of_phase(phase: Phase, group: Group, count: int) -> float:
    """Return what steps without gradients leave of the number 1, in time that hardly grows with their number."""
    if not count:
        return 1.0
    start, after_one = _step_without_gradient(phase, group, torch.ones(1), OptimState())
    if phase.optimizer == "adamw" or not phase.momentum:
        return float(start) ** count
    # from the second step on each is the same linear map of the parameter and its momentum
    later = OptimState(after_one.step, {"": torch.tensor([0.0, 1.0], dtype=torch.float64)})
    parameter, after = _step_without_gradient(phase, group, torch.tensor([1.0, 0.0]), later)
    step = torch.stack([parameter, dense(after.first[""])])
    first = torch.stack([start, dense(after_one.first[""])])
    return float((torch.linalg.matrix_power(step, count - 1) @ first)[0])


def _step_without_gradient(phase: Phase, group: Group, at: Tensor, state: OptimState) -> tuple[Tensor, OptimState]:
    """Return what a step along decay alone makes of numbers, each as a parameter of its own, and the state after it."""
    params, after = optimize(phase, {"": group}, {"": at.double()}, {"": torch.zeros_like(at).double()}, state)
    return dense(params[""]), after
