"""Copies of networks that `copy.deepcopy` refuses, because a layer holds a weight that was computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a network that can be copied again, whatever it has computed.

    `torch.nn.utils.weight_norm` and `spectral_norm` compute a layer's weight anew before every call and keep it in the
    layer. What autograd computed can't be copied, so the copy's layers forget it after each call.

    Args:
        model: any; never changed.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    }
    result = copy.deepcopy(model, dict(computed))
    for module in result.modules():
        kept = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        if kept:
            module.register_forward_hook(_restore_hook(kept))
    return result


def _restore_hook(kept: dict[str, Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that puts tensors back that the call computed."""

    def restore(module: nn.Module, _args: Any, _output: Any) -> None:
        for name, value in kept.items():
            if vars(module).get(name) is not value:
                vars(module)[name] = value

    return restore
