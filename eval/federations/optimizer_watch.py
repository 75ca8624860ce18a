"""Watches the optimizers of PyTorch while a client trains, so that how it trains need not be asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fl.runtime.user_code import RUN_ERRORS
from fl.types import OPTIMIZERS

FREE_SETTINGS = {"params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable"}
"""Settings that `TrainingFacts` have, and those that change no number."""
SETTINGS = ("lr", "momentum", "weight_decay")


@dataclass
class OptimizerWatch:
    """What was seen of optimizers.

    Attributes:
        thread: the thread whose optimizers count; None counts those of all.
        steps: how many steps were taken.
        optimizers: those that took them.
        settings: of all their parameter groups at all steps, each once.
        carried_over: whether one of them came with a state (momentum) of earlier steps.
        unclear: whether settings of one could not be read.
    """

    thread: int | None
    steps: int = 0
    optimizers: list[Optimizer] = field(default_factory=list)
    settings: list[tuple[Any, ...]] = field(default_factory=list)
    carried_over: bool = False
    unclear: bool = False

    def begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Take down what a step will be taken with; nothing in it may disturb the training that is watched."""
        if not self._counts():
            return
        try:
            self._take_down(optimizer)
        except RUN_ERRORS:
            self.unclear = True

    def _take_down(self, optimizer: Optimizer) -> None:
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.carried_over |= any(optimizer.state.values())
        for group in optimizer.param_groups:
            found = tuple(_to_number(group.get(name)) for name in SETTINGS)
            if found not in self.settings:
                self.settings.append(found)

    def end_step(self, *_: Any) -> None:
        """Count a step."""
        if self._counts():
            self.steps += 1

    def _counts(self) -> bool:
        return self.thread in {None, threading.get_ident()}

    def facts(self) -> dict[str, Any]:
        """Return what is certain: settings that were the same throughout, of one optimizer that began afresh.

        Returns:
            Any of "steps", "lr", "optimizer", "momentum" and "weight_decay"; {} where no optimizer of PyTorch took a
            step. "optimizer" is None where it is none of `fl.types.OPTIMIZERS` as it comes.
        """
        if not self.steps:
            return {}
        if self.unclear:
            return {"optimizer": None}
        rates, *others = ({setting[i] for setting in self.settings} for i in range(len(SETTINGS)))
        found: dict[str, Any] = {"steps": self.steps} if len(self.optimizers) == 1 else {}
        if len(rates) == 1:
            found["lr"] = next(iter(rates))
        alike = len(self.optimizers) == 1 and all(len(values) == 1 for values in others)
        name = type(self.optimizers[0]).__name__.lower()
        if not alike or self.carried_over or self._is_unusual() or name not in OPTIMIZERS:
            return {**found, "optimizer": None}
        momentum, decay = (next(iter(values)) for values in others)
        return {**found, "optimizer": name, "momentum": momentum, "weight_decay": decay}

    def _is_unusual(self) -> bool:
        """Return whether a constant of an optimizer is another than it comes with, or can't be compared with that."""
        try:
            return any(map(_has_unusual_constant, self.optimizers))
        except RUN_ERRORS:
            return True


def _has_unusual_constant(optimizer: Optimizer) -> bool:
    usual = {name: one.default for name, one in signature(type(optimizer)).parameters.items()}
    free = {*FREE_SETTINGS, "momentum"} if isinstance(optimizer, SGD) else FREE_SETTINGS
    known = usual.keys() - free
    return any(bool(group[name] != usual[name]) for group in optimizer.param_groups for name in known & group.keys())


def _to_number(value: Any) -> float:
    """Convert a setting, which may be a tensor or not be there at all."""
    return float(value or 0)


@contextmanager
def watch_optimizers(*, all_threads: bool = False) -> Iterator[OptimizerWatch]:
    """Watch the optimizers that take steps inside of the `with` block, in this thread or in all."""
    watch = OptimizerWatch(None if all_threads else threading.get_ident())
    hooks = (register_optimizer_step_pre_hook(watch.begin_step), register_optimizer_step_post_hook(watch.end_step))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()
