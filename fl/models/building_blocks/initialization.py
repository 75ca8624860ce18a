"""Initial parameters from an explicit generator, equal to what PyTorch draws from its global one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fl.models.building_blocks.layers import Normalize

WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def initialize(model: nn.Module, generator: torch.Generator) -> None:
    """Fill `model` as PyTorch's constructors do, module by module in order of registration.

    With `torch.Generator().manual_seed(s)` the result equals `torch.manual_seed(s)` followed by construction, bit for
    bit: weights uniform in +-1/sqrt(fan_in) (Kaiming with a = sqrt(5)), then biases in the same range; normalization
    layers start as the identity.

    Raises:
        ValueError: a module holds parameters or buffers of its own and is of no known kind.
    """
    for weight, bias in _weights(model):
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        if bias is not None:
            bound = 1 / math.sqrt(nn.init._calculate_fan_in_and_fan_out(weight)[0])
            nn.init.uniform_(bias, -bound, bound, generator=generator)


def initialize_uniform(model: nn.Module, generator: torch.Generator, bound: float) -> None:
    """Fill every weight and bias of `model` uniformly in +-bound, in order of registration.

    Raises:
        ValueError: as `initialize`.
    """
    for weight, bias in _weights(model):
        nn.init.uniform_(weight, -bound, bound, generator=generator)
        if bias is not None:
            nn.init.uniform_(bias, -bound, bound, generator=generator)


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield weight and bias of each layer that is drawn at random; resets the layers that are not."""
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED):
            yield module.weight, module.bias
        elif isinstance(module, NORMS):
            module.reset_parameters()
        elif isinstance(module, Normalize):
            module.reset_buffers()
        elif any(held.numel() for held in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ValueError(
                f"expected layers with a known start, got {type(module).__name__} at {name!r}; override initialize, or "
                "give the network by a function that returns it, task.model: module:function"
            )
