"""What an audit of a captured update takes for true of a client's training, in words for a note."""

from __future__ import annotations

from collections.abc import Mapping

from fl.method import Method
from fl.methods.fedavg import FedAvg


def describe_training(method: Method, *, loss: str, examples: int | None, scale_unknown: bool = False) -> str:
    """Return what that no more is shown rests on: facts that an update neither bears out nor contradicts.

    Args:
        method: of the client.
        loss: its name, or "" where it is not known here.
        examples: of one update, if known.
        scale_unknown: whether nobody stated the size of its one step.
    """
    if not isinstance(method, FedAvg):
        return say_what_it_rests_on({"method": method.name, "loss": loss or None, "examples": examples})
    length = {"steps": method.steps} if method.steps is not None else {"epochs": method.epochs}
    size = method.batch_size if examples is None or method.batch_size is None else min(method.batch_size, examples)
    return say_what_it_rests_on(
        {
            **({"loss": loss} if loss else {}),
            "optimizer": method.optimizer,
            "lr": None if scale_unknown else method.lr,
            "momentum": method.momentum,
            "weight_decay": method.weight_decay,
            **length,
            "examples": examples,
            "batch_size": examples if size is None else size,
        }
    )


def say_what_it_rests_on(facts: Mapping[str, float | str | None]) -> str:
    """Return the note on facts, by name; None is one that nobody knows."""
    words = ", ".join(f"{name} {_say_fact(value)}" for name, value in facts.items())
    return f"that no more is shown rests on {words}: a wrong one can hide what leaks"


def _say_fact(value: float | str | None) -> str:
    return "not known" if value is None else value if isinstance(value, str) else f"{value:g}"
