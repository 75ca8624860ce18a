"""What a linear layer is given while the network around it runs, whichever way it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def inputs_of_linear(model: nn.Module, weight: str) -> Iterator[list[Tensor]]:
    """Yield a list that gets what the linear layer of a weight is given, each time the network runs.

    It stays empty where no module has this parameter as its weight (one that a function in the forward takes, or of
    which a parametrization makes the weight), and where it is given something else than rows of the weight's width.

    Args:
        model: the network, with which the list is filled until the context ends.
        weight: name of the parameter.
    """
    owner, _, own = weight.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    given: list[Tensor] = []
    matrix = getattr(module, own, None)
    if module is None or own != "weight" or not isinstance(matrix, Tensor) or matrix.ndim != 2:
        yield given
        return

    def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        value = args[0] if args else next(iter(named.values()), None)
        if isinstance(value, Tensor) and value.ndim and value.shape[-1] == matrix.shape[1]:
            given.append(value)

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield given
    finally:
        handle.remove()
