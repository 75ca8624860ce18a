"""Stochastic depth: a module that leaves out the branch of a residual block as a whole, or passes it on scaled.

No class of PyTorch does so; it is known by what it returns (timm's DropPath, torchvision's StochasticDepth, one's
own). Of one step on one example the update tells which branches were left out: none of their weights moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl.runtime.module_copies import copy_model
from fl.runtime.random_state import drawing_places, preserve_global_rng
from fl.runtime.user_code import RUN_ERRORS
from fl.seeds import stream

MOST_DRAWS = 2000
"""How often a module is asked until it has both left its input out and passed it on."""

MOST_OPEN = 6
"""Modules that weights do not tell apart; all their combinations are tried."""


class _Factor(nn.Module):
    """Multiplies by one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input."""
        return x * self.value


def read_drop_paths(model: nn.Module, inputs: Tensor, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return by what each module that leaves out a branch multiplied it, 0 or a scale, by its name.

    Args:
        model: whose modules are in the modes in which the client trained, without dropout.
        inputs: one example that it takes.
        update: of one step on one example, without weight decay.

    Returns:
        Those that the update tells, by weights that only they pass on, and those that make no difference then.
    """
    scales = find_drop_paths(model, inputs)
    if not scales or not any(value.any() for value in update.values()):
        return {}
    all_passed = dict.fromkeys(scales, 1.0)
    whole = _run(model, inputs, all_passed).reached & update.keys()
    behind = {name: whole - _run(model, inputs, {**all_passed, name: 0.0}).reached for name in scales}
    moved = {weight for weight in whole if bool(update[weight].any())}
    passed = {name for name, branch in behind.items() if branch & moved}
    unmoved = {name: branch for name, branch in behind.items() if branch and name not in passed}
    left_out = {  # nothing else that may have been left out keeps some weight of theirs from moving
        name
        for name, branch in unmoved.items()
        if branch - set[str]().union(*(other for one, other in unmoved.items() if one != name))
    }
    told = dict.fromkeys(passed, 1.0) | dict.fromkeys(left_out, 0.0)
    told |= _left_out_alike(model, inputs, all_passed | told, {n: unmoved[n] for n in unmoved if n not in left_out})
    return {name: torch.tensor(scales[name] * told[name]) for name in scales if name in told}


def _left_out_alike(
    model: nn.Module, inputs: Tensor, factors: Mapping[str, float], open_branches: Mapping[str, set[str]]
) -> dict[str, float]:
    """Return 0 for modules of which no weight tells which one left out what they share; nothing where it matters.

    One inside another's branch, or behind another, makes no difference where that was left out.

    Args:
        model: as of `read_drop_paths`.
        inputs: likewise.
        factors: of all modules, of those that are open 1.
        open_branches: weights that such a module passes on, by its name; none of them moved.
    """
    if not 0 < len(open_branches) <= MOST_OPEN:
        return {}
    unmoved = set[str]().union(*open_branches.values())
    runs = [
        _run(model, inputs, {**factors, **dict(zip(open_branches, states, strict=True))})
        for states in itertools.product((0.0, 1.0), repeat=len(open_branches))
    ]
    possible = [run.outputs for run in runs if not run.reached & unmoved]
    alike = all(torch.equal(outputs, possible[0]) for outputs in possible)
    return dict.fromkeys(open_branches, 0.0) if alike else {}


def find_drop_paths(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """Return the modules that either return zeros or their input times one number, by name, with that number.

    Args:
        model: whose modules are in the modes in which the client trained.
        inputs: one example that it takes.
    """
    if not any(module.training for module in model.modules()):
        return {}
    probe, given, places = copy_model(model), dict[str, list[Tensor]](), dict[str, str]()
    for name, module in probe.named_modules():
        if name and not [*module.children(), *module.parameters()]:
            module.register_forward_pre_hook(lambda _, args, name=name: given.setdefault(name, []).append(args[0]))
    with torch.no_grad(), suppress(*RUN_ERRORS, IndexError):
        places = drawing_places(probe, lambda: probe(inputs), inputs.device)
    scales = {}
    for name in places:
        taken = given.get(name, [])
        if len(taken) == 1 and isinstance(taken[0], Tensor) and taken[0].is_floating_point():
            scale = _scale(model.get_submodule(name), taken[0])
            if scale is not None:
                scales[name] = scale
    return scales


def _scale(module: nn.Module, like: Tensor) -> float | None:
    """Return by what a module multiplies what it does not leave out; None where it does anything else.

    Args:
        module: that draws random numbers.
        like: of the shape that it takes.
    """
    own, scale, left_out = copy_model(module), 0.0, False
    given = 0.5 + torch.rand(like.shape, generator=stream(0, "drop-path")).to(like)
    with torch.no_grad(), preserve_global_rng(like.device), suppress(*RUN_ERRORS):
        for _ in range(MOST_DRAWS):
            made: Any = own(given.clone())
            if not isinstance(made, Tensor) or made.shape != given.shape:
                return None
            if not bool(made.any()):
                left_out = True
            else:
                scale = scale or float(made.sum() / given.sum())
                if not torch.allclose(made, scale * given, rtol=1e-2, atol=0.0):
                    return None
            if left_out and scale:
                return scale
    return None


@dataclass(frozen=True)
class _Run:
    """One pass of a network.

    Attributes:
        outputs: what it returned; empty where that is no tensor.
        reached: names of the trained parameters that it depends on.
    """

    outputs: Tensor
    reached: set[str]


def _run(model: nn.Module, inputs: Tensor, factors: Mapping[str, float]) -> _Run:
    """Return a pass on a random picture, in evaluation mode, where modules multiply by such factors."""
    probe = copy_model(model).eval()
    for name, factor in factors.items():
        parent, _, last = name.rpartition(".")
        setattr(probe.get_submodule(parent), last, _Factor(factor))
    draw = stream(0, "drop-paths")
    picture = torch.rand(inputs.shape, generator=draw).to(inputs)
    weights = {name: value for name, value in probe.named_parameters() if value.requires_grad}
    with torch.enable_grad(), suppress(*RUN_ERRORS):
        made = probe(picture)
        if isinstance(made, Tensor) and made.requires_grad:
            total = (made * torch.rand(made.shape, generator=draw).to(made)).sum()
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
            pairs = zip(weights, gradients, strict=True)
            reached = {name for name, gradient in pairs if gradient is not None and bool(gradient.any())}
            return _Run(made.detach(), reached)
    return _Run(inputs.new_empty(0), set())
