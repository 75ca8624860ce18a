"""Dropout in training mode: a client draws its masks anew in each step, and nobody can draw them again.

Whether a module draws is its own mode's to say: a client may freeze a part of a network in training mode by `eval()`.

Of one step on one example the update tells them where a linear layer takes what dropout returns: no gradient flows into
the weights of an input that is zero. Elsewhere each layer still obeys its own equations, whatever is drawn above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fl.runtime.module_copies import copy_model
from fl.runtime.random_state import watch_draws
from fl.runtime.user_code import RUN_ERRORS
from fl.simulation.capture_checks import floating_weight


@dataclass(frozen=True)
class Silenced:
    """A network without random numbers in training mode.

    Attributes:
        model: a copy of the network.
        names: of the modules that drew; empty where none did.
        masked: whether all masks that were drawn are known, and stand in their place.
        evaluating: whether it draws in training mode all the same, so that it has to be in evaluation mode.
    """

    model: nn.Module
    names: tuple[str, ...] = ()
    masked: bool = False
    evaluating: bool = False

    @property
    def replayable(self) -> bool:
        """Whether a step on an example can be taken again as the client took it."""
        return self.masked or not (self.names or self.evaluating)

    @property
    def note(self) -> str:
        """What a reader has to know of it; "" for nothing."""
        if self.replayable:
            return f"masks of dropout were read off the update: {', '.join(self.names)}" if self.names else ""
        unheld = "what a layer's own equations tell was not held against the layers above it"
        if self.evaluating:
            return (
                "the network draws random numbers in its forward, which nobody can draw again: an image that is "
                f"recovered is as these left it (turned, shifted or noisy, say), and {unheld}"
            )
        return f"dropout in training mode draws masks that nobody can draw again: {unheld}"


class Mask(nn.Module):
    """Multiplies features (B, ...) by numbers that stay."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        """Return the features with those at zero left out."""
        return x * self.values.to(x)


def in_client_mode(model: nn.Module, stated: bool | None) -> nn.Module:
    """Return a network with its modules in the modes in which a client trained it.

    Args:
        model: as its user builds it, in whatever modes.
        stated: the mode that was stated. Where it is not the network's own, the client has put all modules into it.
    """
    return model if stated in {None, model.training} else copy_model(model).train(stated)


def equals_evaluation(model: nn.Module) -> bool:
    """Return whether a network without dropout computes as in evaluation mode, since parts of it are put into that.

    Of PyTorch's modules it is then batch normalization alone that the mode matters to.
    """
    modes = {module.training for module in model.modules()}
    return len(modes) > 1 and not any(module.training for module in model.modules() if isinstance(module, _NormBase))


def silence(model: nn.Module, shape: Sequence[int] | None, update: Mapping[str, Tensor] | None) -> Silenced:
    """Return a network in training mode without dropout, or with the masks that an update tells.

    Args:
        model: whose modules are in the modes in which the client trained.
        shape: of one example; None where no example can be made up.
        update: of one step on one example, by the names of the model; None where it is of more.
    """
    own = copy_model(model)
    dropping = {name: module for name, module in own.named_modules() if _draws(module)}
    drawing = {name: module for name, module in dropping.items() if module.training}
    shares = {name: module.p for name, module in drawing.items() if _puts_zeros(module)}
    for module in dropping.values():
        setattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
    gray = None if shape is None else torch.full((1, *shape), 0.5).to(floating_weight(own))
    if gray is not None and _draws_numbers(own, gray):
        return Silenced(own, tuple(drawing), evaluating=True)
    masks = _read_masks(own, gray, update, shares) if gray is not None and update is not None else {}
    if not drawing or masks.keys() != drawing.keys():
        return Silenced(own, tuple(drawing))
    for name, mask in masks.items():
        parent, _, last = name.rpartition(".")
        setattr(own.get_submodule(parent), last, Mask(mask))
    return Silenced(own, tuple(drawing), masked=True)


def _draws(module: nn.Module) -> bool:
    """Return whether a module of PyTorch draws a mask in training mode: dropout, attention and recurrent layers."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, int | float) and share > 0


def _puts_zeros(module: nn.Module) -> TypeGuard[_DropoutNd]:
    """Return whether a module leaves numbers out by zeros, so that an update shows which: alpha dropout does not."""
    return isinstance(module, _DropoutNd) and not isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout)


def _draws_numbers(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a network draws random numbers in the modes of its modules; False where it does not run."""
    probe = copy_model(model)
    with torch.no_grad(), watch_draws(probe, device=inputs.device) as has_drawn:
        try:
            probe(inputs)
        except RUN_ERRORS:  # of batch normalization, say, which takes no single example
            return False
        return has_drawn()


def _read_masks(
    model: nn.Module, inputs: Tensor, update: Mapping[str, Tensor], shares: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return the masks of those modules whose output a linear layer takes as it is.

    Args:
        model: without dropout.
        inputs: one example that it takes.
        update: of one step on one example.
        shares: what each module of dropout leaves out, by name.
    """
    returned: dict[str, list[Tensor]] = {name: [] for name in shares}
    taken: dict[str, Tensor] = {}

    def mark(name: str, output: Tensor) -> Tensor:
        returned[name].append(output.clone())  # kept, so that its place in memory is no other's
        return returned[name][-1]

    def take(name: str, given: Sequence[Tensor]) -> None:
        if given:
            taken.setdefault(name, given[0])

    probe = copy_model(model).eval()
    for name, layer in probe.named_modules():
        if name in shares:
            layer.register_forward_hook(lambda _, __, output, name=name: mark(name, output))
        elif isinstance(layer, nn.Linear) and f"{name}.weight" in update:
            layer.register_forward_pre_hook(lambda _, given, name=name: take(name, given))
    with torch.no_grad(), suppress(*RUN_ERRORS):  # why it does not run is said where it has to
        probe(inputs)
    found = {}
    for name, outputs in returned.items():
        layers = [layer for layer, value in taken.items() if len(outputs) == 1 and _is_same(outputs[0], value)]
        if layers:
            kept = (update[f"{layers[0]}.weight"] != 0).any(0)
            found[name] = kept.view(outputs[0].shape[1:]) / (1 - shares[name])
    return found


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are one, of whatever shapes."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.numel() == second.numel()
