"""Random numbers that a network draws in its forward: from torch, Python or NumPy, or from a generator of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

OWN_GENERATORS = {"random", "numpy.random.mtrand"}
"""Modules whose objects are generators with a state of Python and of NumPy's older kind."""


def draws_masks(module: nn.Module) -> bool:
    """Return whether a module of PyTorch leaves numbers out at random in training mode, as it is set.

    Those are dropout, attention, and recurrent layers of several levels, which draw between these.
    """
    if isinstance(module, nn.RNNBase):
        return module.num_layers > 1 and module.dropout > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


@contextmanager
def preserve_global_rng(device: torch.device) -> Iterator[None]:
    """Leaves the generators that a whole process shares as they were, whatever a user's model draws from them."""
    # looked up and not imported: nobody can have drawn from what nobody has imported
    python, numpy = sys.modules.get("random"), sys.modules.get("numpy.random")
    states = [
        (put, get())
        for put, get in (
            (getattr(python, "setstate", None), getattr(python, "getstate", None)),
            (getattr(numpy, "set_state", None), getattr(numpy, "get_state", None)),
        )
        if put is not None and get is not None
    ]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for put, state in states:
                put(state)


@contextmanager
def watch_draws(*models: nn.Module, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether random numbers were drawn since; shared generators are put back at the end.

    Seen are the generators that a process shares, those that are attributes of a network's modules, and those that
    their forward finds among the globals of its file.

    Args:
        *models: the networks that will run, themselves and no copies of them.
        device: that they run on.
    """
    own = [generator for model in models for generator in _own_generators(model)]
    with preserve_global_rng(device):
        before = _states(own, device)
        yield lambda: _states(own, device) != before


def find_drawing_modules(model: nn.Module, run: Callable[[], object], device: torch.device) -> list[str]:
    """Return the modules whose own forward draws random numbers while a network runs, in words, as `drawing_places`."""
    return list(drawing_places(model, run, device).values())


def drawing_places(model: nn.Module, run: Callable[[], object], device: torch.device) -> dict[str, str]:
    """Return in words the modules whose own forward draws random numbers while a network runs, by name.

    Args:
        model: the network that runs, itself and no copy of it; its hooks are as before at the end.
        run: runs it; what it raises is raised.
        device: that it runs on.
    """
    own, found = _own_generators(model), dict[str, str]()
    within, states = [""], list[list[str]]()  # names of the modules that run, the innermost last
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}

    def note() -> None:
        states.append(_states(own, device))
        if states[-1] != states.pop(0):
            name = within[-1]
            found[name] = (
                f"{name!r} ({kinds[name]})"
                if name
                else f"the forward of {kinds[name]} (functional dropout, or a VAE's noise, say)"
            )

    def enter(name: str) -> None:
        note()
        within.append(name)

    def leave() -> None:
        note()
        within.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name), prepend=True))
        hooks.append(module.register_forward_hook(lambda *_: leave()))
    try:
        with preserve_global_rng(device):
            states.append(_states(own, device))
            run()
            note()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _states(own: Sequence[Any], device: torch.device) -> list[str]:
    """Return the states of the generators that a process shares, and of some more."""
    python, numpy = sys.modules.get("random"), sys.modules.get("numpy.random")
    torch_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    shared = [torch_state.numpy().tobytes().hex()]
    shared += [repr(python.getstate())] if python is not None else []
    shared += [_numpy_words(numpy.get_state())] if numpy is not None else []
    return [*shared, *map(_state_of, own)]


def _own_generators(model: nn.Module) -> list[Any]:
    """Return the generators that modules hold or that their forward names."""
    found: list[Any] = []
    for module in model.modules():
        held = list(vars(module).values())
        own = getattr(type(module), "forward", None) if not isinstance(module, torch.jit.ScriptModule) else None
        forward = getattr(own, "__wrapped__", own)  # of TorchScript there is no code in Python
        code = getattr(forward, "__code__", None)
        if forward is not None and code is not None:
            held += [forward.__globals__[name] for name in code.co_names if name in forward.__globals__]
        found += [value for value in held if _is_generator(value)]
    return found


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator | np.random.Generator):
        return True
    return type(value).__module__ in OWN_GENERATORS and (hasattr(value, "getstate") or hasattr(value, "get_state"))


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes()).hex()
    if isinstance(generator, np.random.Generator):
        return _numpy_words(generator.bit_generator.state)
    return repr(generator.getstate()) if hasattr(generator, "getstate") else _numpy_words(generator.get_state())


def _numpy_words(state: object) -> str:
    """Return a state of NumPy's in full, whose repr would leave out the middle of long arrays."""
    if isinstance(state, np.ndarray):
        return str(state.tobytes().hex())
    if isinstance(state, dict):
        return repr([(name, _numpy_words(value)) for name, value in state.items()])
    return repr([_numpy_words(value) for value in state]) if isinstance(state, tuple) else repr(state)
