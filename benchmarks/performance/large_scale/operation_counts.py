"""Operations, and bytes read and written, of a client's step and of a search's iteration: counted, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import attacks
from benchmarks.performance.large_scale.federation_costs import BATCH, perceptron
from benchmarks.performance.noise_data import federation
from benchmarks.performance.profile_loops import operations
from fl.methods.fedavg import FedAvg
from fl.view import ServerView

WIDTHS = (900, 1_800)
"""Of the networks whose difference tells what a parameter costs."""
STEPS, ITERATIONS = 4, 3
"""How many more steps and iterations one of two calls has than the other."""


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators read and write; those that only look at one otherwise move none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator, and call it."""
        out = func(*args, **(kwargs or {}))
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            moved = pytree.tree_leaves((args, kwargs, out))
            self.count += sum(x.numel() * x.itemsize for x in moved if isinstance(x, Tensor))
        return out


def moved_bytes(call: Callable[[], object]) -> int:
    """Return the bytes that a call reads and writes."""
    with MovedBytes() as found:
        call()
    return found.count


def counts() -> dict[str, dict[str, float]]:
    """Return what a step of a client and an iteration of `ig` take for each parameter of a perceptron.

    Returns:
        "step": with `BATCH` images, "iteration": of one image, "client": what a client's round takes beside its steps;
        each with "operations" (multiplications and additions) and "bytes" for each parameter.
    """
    torch.set_num_threads(1)
    small, large = (_of_width(width) for width in WIDTHS)
    more = large.pop("parameters") - small.pop("parameters")
    found: dict[str, dict[str, float]] = {}
    for (what, unit), value in large.items():
        found.setdefault(what, {})[unit] = (value - small[what, unit]) / more
    return found


def _of_width(width: int) -> dict[Any, float]:
    task = perceptron(width)
    found: dict[Any, float] = {"parameters": sum(value.numel() for value in task.parameters.values())}

    def rounds(steps: int) -> Callable[[], object]:
        method = FedAvg(lr=0.01, steps=steps, batch_size=BATCH)
        run = federation(task, method, clients=1, each=BATCH, engine="loop")
        return lambda: run.step(evaluate=False)

    view = federation(task, FedAvg(steps=1, batch_size=None), clients=1, each=1, engine="loop").observe(0)[0]
    for unit, count in (("operations", operations), ("bytes", moved_bytes)):
        one, many = count(rounds(1)), count(rounds(1 + STEPS))
        found["step", unit] = (many - one) / STEPS
        found["client", unit] = one - found["step", unit]
        begun, gone = count(_search(view, 1)), count(_search(view, 1 + ITERATIONS))
        found["iteration", unit] = (gone - begun) / ITERATIONS
    return found


def _search(view: ServerView, iterations: int) -> Callable[[], object]:
    attack = attacks.build({"name": "ig", "iterations": iterations})
    return lambda: attack.run([view], [0])
