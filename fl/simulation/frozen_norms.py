"""Batch norm that stays in evaluation mode while the network around it trains, as people freeze its statistics."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keep_frozen_norms(model: nn.Module) -> None:
    """Let the normalizations of a network that trains stay in evaluation mode where its user put them into that.

    `model.train()`, which every client calls, would put them back; a client that freezes them evaluates them after it.

    Args:
        model: in the modes of its user; changed in place.
    """
    if not model.training:
        return
    for module in model.modules():
        if isinstance(module, _NormBase) and not module.training:
            module.train = _stay  # type: ignore[assignment, method-assign]


def _stay(mode: bool = True) -> None:
    """Take no mode, in place of a module's `train`."""
