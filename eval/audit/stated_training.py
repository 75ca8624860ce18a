"""What an audit of a captured update takes for true of a client's training, in words for a note."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attacks.update.adaptive_first_step import read_step_size
from eval.audit.captured_files import CapturedUpdate
from eval.audit.recorded_update import TrainingFacts
from fl.capture import ClientSettings
from fl.method import Method, methods
from fl.methods.fedavg import FedAvg


def describe_training(
    method: Method, *, loss: str, examples: int | None, scale_unknown: bool = False, mode: str = ""
) -> str:
    """Return what that no more is shown rests on: facts that an update neither bears out nor contradicts.

    Args:
        method: of the client.
        loss: its name, or "" where it is not known here.
        examples: of one update, if known.
        scale_unknown: whether nobody stated the size of its one step.
        mode: of batch normalization; "" where there is none.
    """
    if not isinstance(method, FedAvg):
        known = {"method": method.name, "loss": loss or None, "examples": examples}
        return say_what_it_rests_on({**known, **say_mode(mode)})
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
            **say_mode(mode),
        }
    )


def say_mode(mode: str) -> dict[str, str]:
    """Return the mode of batch normalization as one of the facts; nothing where there is none."""
    return {"batch normalization in": f"{mode} mode"} if mode else {}


def say_what_it_rests_on(facts: Mapping[str, float | str | None]) -> str:
    """Return the note on facts, by name; None is one that nobody knows."""
    words = ", ".join(f"{name} {_say_fact(value)}" for name, value in facts.items())
    return f"that no more is shown rests on {words}: a wrong one can hide what leaks"


def _say_fact(value: float | str | None) -> str:
    return "not known" if value is None else value if isinstance(value, str) else f"{value:g}"


def with_open_step_size(
    client: ClientSettings, captured: CapturedUpdate, stated: Mapping[str, Any] | None
) -> tuple[ClientSettings, CapturedUpdate, list[str]]:
    """Return client and update as far as the step size is known, with notes on what was read or assumed.

    Args:
        client: how it trains.
        captured: the update, in the model's names.
        stated: the settings of the client's method as somebody stated them; None where nobody did.
    """
    client, notes = _with_read_step_size(client, captured, stated)
    if _leaves_step_size_open(client.method, stated, captured.training):
        captured = replace(captured, scale_unknown=True)
    return client, captured, notes or _assumed_notes(stated)


def _leaves_step_size_open(
    how: Method | None, stated: Mapping[str, Any] | None, training: TrainingFacts | None
) -> bool:
    """Return whether it is one step of plain SGD whose size nobody stated: the update then is known up to a factor.

    Args:
        how: the client trains.
        stated: what was said of that.
        training: what the file says of it, which counts where nothing else is stated.
    """
    if stated is None:
        return training is not None and training.scale_unknown
    plain = type(how) is FedAvg and (how.optimizer, how.steps, how.weight_decay) == ("sgd", 1, 0)
    return plain and "lr" not in stated


def _with_read_step_size(
    client: ClientSettings, captured: CapturedUpdate, stated: Mapping[str, Any] | None
) -> tuple[ClientSettings, list[str]]:
    """Return the client with the step size that the first step of an adaptive optimizer shows, where none was stated.

    It is said in a note; there is none where nothing was read.
    """
    how = client.method
    if stated is None or not isinstance(how, FedAvg) or how.optimizer == "sgd" or how.steps != 1:
        return client, []
    if "lr" in stated or how.weight_decay:
        return client, []
    lr = read_step_size(captured.update, how.optimizer)
    if not 0 < lr < math.inf:
        return client, []
    note = f"lr: {lr:g} was read off the update, whose largest step it is"
    return replace(client, method=replace(how, lr=lr)), [note]


def _assumed_notes(stated: Mapping[str, Any] | None) -> list[str]:
    """Return what of local training was not stated, and so is a default."""
    if stated is None:
        return []
    how = methods.build(dict(stated))
    known = methods.spec(how)
    open_size = _leaves_step_size_open(how, stated, None)
    assumed = [f"lr: {known['lr']:g}"] if "lr" in known and "lr" not in stated and not open_size else []
    if known.get("epochs") is not None and "epochs" not in stated:
        assumed.append(f"epochs: {known['epochs']} in batches of at most {known.get('batch_size')}")
    return [f"not stated by --method, so the method's defaults count: {', '.join(assumed)}"] if assumed else []
