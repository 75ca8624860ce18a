"""Parts that stay in evaluation mode while the network around them trains: batch norm with frozen statistics, say."""

from __future__ import annotations

from functools import partial

from torch import nn


def keep_frozen_parts(model: nn.Module) -> None:
    """Let the parts of a network that trains stay in evaluation mode where its user put them into that.

    `model.train()`, which every client calls, would put them back; a client that freezes them evaluates them after it.

    Args:
        model: in the modes of its user; changed in place.
    """
    if not model.training:
        return
    for module in model.modules():
        if not module.training:
            module.train = partial(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Return a module in the mode that it has, in place of its `train`."""
    return module
