"""Stochastic depth: a module that leaves out the branch of a residual block as a whole, or passes it on scaled.

No class of PyTorch does so; it is known by what it returns (timm's DropPath, torchvision's StochasticDepth, one's
own). Of one step on one example the update tells which branches were left out: none of their weights moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fl.runtime.module_copies import copy_model
from fl.runtime.random_state import drawing_places, preserve_global_rng
from fl.runtime.user_code import RUN_ERRORS
from fl.seeds import stream

MOST_DRAWS = 2000
"""How often a module is asked until it has both left its input out and passed it on."""


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
        Those that the update tells: behind weights that only they pass on.
    """
    scales = find_drop_paths(model, inputs)
    if not scales or not any(value.any() for value in update.values()):
        return {}
    whole = _reached(model, inputs, dict.fromkeys(scales, 1.0))
    found = {}
    for name, scale in scales.items():
        left = _reached(model, inputs, {**dict.fromkeys(scales, 1.0), name: 0.0})
        branch = [weight for weight in whole - left if weight in update]
        if branch:
            moved = any(bool(update[weight].any()) for weight in branch)
            found[name] = torch.tensor(scale if moved else 0.0)
    return found


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
            scale = _scale(model.get_submodule(name), torch.ones_like(taken[0]))
            if scale is not None:
                scales[name] = scale
    return scales


def _scale(module: nn.Module, ones: Tensor) -> float | None:
    """Return by what a module multiplies what it does not leave out; None where it does anything else."""
    own, scales, left_out = copy_model(module), set[float](), False
    with torch.no_grad(), preserve_global_rng(ones.device), suppress(*RUN_ERRORS):
        for _ in range(MOST_DRAWS):
            made: Any = own(ones)
            if not isinstance(made, Tensor) or made.shape != ones.shape or len(made.unique()) != 1:
                return None
            value = float(made.flatten()[0])
            left_out |= value == 0
            scales |= {value} - {0.0}
            if len(scales) > 1:
                return None
            if left_out and scales:
                return scales.pop()
    return None


def _reached(model: nn.Module, inputs: Tensor, factors: Mapping[str, float]) -> set[str]:
    """Return the parameters that what a network returns depends on, where modules multiply by such factors."""
    probe = copy_model(model).eval()
    for name, factor in factors.items():
        parent, _, last = name.rpartition(".")
        setattr(probe.get_submodule(parent), last, _Factor(factor))
    draw = stream(0, "drop-paths")
    picture = torch.rand(inputs.shape, generator=draw).to(inputs)
    weights = {name: value for name, value in probe.named_parameters() if value.requires_grad}
    with torch.enable_grad(), suppress(*RUN_ERRORS):
        made = probe(picture)
        tensors: Sequence[Tensor] = [made] if isinstance(made, Tensor) else []
        total = sum((part * torch.rand(part.shape, generator=draw).to(part)).sum() for part in tensors)
        if isinstance(total, Tensor) and total.requires_grad:
            gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
            pairs = zip(weights, gradients, strict=True)
            return {name for name, gradient in pairs if gradient is not None and bool(gradient.any())}
    return set()
