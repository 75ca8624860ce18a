"""A server that trains parameters of its own: one step at a time, its optimizer's state among what it keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from fl.local.optimizers import OptimState, clip_gradients, optimize
from fl.tensors import Tensors
from fl.types import Phase

STEP, FIRST, SECOND = "step.", "first.", "second."
"""Prefixes of what is kept of each parameter: how many steps it took, and its moments."""


def server_step(phase: Phase, params: Tensors, grads: Tensors, kept: Tensors) -> tuple[Tensors, Tensors]:
    """Take one step of `phase.optimizer` on the parameters that have a gradient, as torch.optim takes it.

    Every parameter counts its own steps, so one without a gradient (the embedding of a client that did not take part)
    stays as it is, moments included.

    Args:
        phase: its groups and optimizer; how long it lasts does not matter.
        params: by name; all of them come back.
        grads: of those that move; clipped group by group.
        kept: what the last step left, by name; empty before the first.

    Returns:
        The parameters after the step, and what to keep: both new, nothing that came in is changed.
    """
    owners = phase.assign(grads)
    moved, kept = dict(params), dict(kept)
    for name, grad in clip_gradients({n: grads[n] for n in owners}, owners).items():
        group = {name: replace(owners[name], max_norm=None)}  # clipped above, with the rest of its group
        moments = [{name: kept[p + name]} if p + name in kept else {} for p in (FIRST, SECOND)]
        count = int(kept[STEP + name]) if STEP + name in kept else 0  # type: ignore[arg-type]
        state = OptimState(count, *moments)
        new, state = optimize(phase, group, {name: params[name]}, {name: grad}, state)
        moved[name] = new[name]
        kept[STEP + name] = torch.tensor(state.step)
        kept |= {p + name: part[name] for p, part in ((FIRST, state.first), (SECOND, state.second)) if name in part}
    return moved, kept
