"""Lets long passes through networks be ended halfway: forward at every module, backward at every parameter.

Whoever bounds the time of some work gives a function that raises an error once it is up. It has to be asked often: one
pass of a large network may take longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

Ask = Callable[[], None]
"""Raises an error where the work has to end."""

_ASK: ContextVar[Ask | None] = ContextVar("ask", default=None)
"""Of the work in this thread."""


@contextmanager
def asked_in_passes(ask: Ask) -> Iterator[None]:
    """While the block runs, passes through networks in this thread call `ask`; of blocks in each other the inner's.

    Args:
        ask: raises an error to end the pass.
    """
    outer = _ASK.get()
    token = _ASK.set(ask)
    hook = register_module_forward_pre_hook(_before_module) if outer is None else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        _ASK.reset(token)


def ask_now() -> None:
    """Ask, as a pass does, where the operations of a network are run one by one."""
    ask = _ASK.get()
    if ask is not None:
        ask()


def _before_module(module: nn.Module, args: tuple[Any, ...]) -> None:
    ask_now()  # which asks nobody in other threads, whose passes come here as well


@contextmanager
def asked_backward(leaves: Iterable[Tensor]) -> Iterator[None]:
    """While the block runs, backward passes to these tensors ask once they are done with one.

    Args:
        leaves: that need a gradient.
    """
    ask = _ASK.get()
    hooks = [] if ask is None else [leaf.register_hook(lambda _: ask()) for leaf in leaves if leaf.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
