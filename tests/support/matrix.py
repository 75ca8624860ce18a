"""The contract's rows and columns: every registered method and every probe, under every registered defense."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support import worlds
from support.probes import PROBES, Probe

from defenses import defenses
from fl.client import Client, LocalInput, LocalTraining, gather_batches, local_update
from fl.defense import Defense, overrides
from fl.federation import Federation
from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView

ROWS: dict[str, Probe] = {name: Probe(method) for name, method in methods.examples()} | PROBES
COLUMNS: dict[str, Defense] = dict(defenses.examples())
CORE_ROWS = ("fedavg", "hyperfl", "hyperfednet", "scaffold")
CORE_COLUMNS = ("none", "prune", "noise")
"""Every method meets these defenses, and these methods meet every defense; the whole product is marked slow."""


@cache
def draws_noise(defense: Defense) -> bool:
    """Whether `defense` adds noise that no one can replay."""
    run = worlds.federation(FedAvg.example(), defense, rounds=0)
    download, data = run.download(0), run.data[0].train
    index = torch.arange(len(data))

    def sent(seed: int) -> list[torch.Tensor]:
        noise = stream(seed, "noise")
        with torch.no_grad():
            start = LocalInput(shared=download.shared, buffers=run.client.task.buffers)
            fed = gather_batches(data.inputs, data.labels, (((index,),) * 4,))
            result = local_update(run.client, start, fed, LocalTraining(generator=noise))
            return [dense(value) for value in defense.transform_update(result.update, noise).values()]

    return not all(torch.equal(x, y) for x, y in zip(sent(0), sent(1), strict=True))


def cells(*, replayable: bool = False) -> list[Any]:
    """The cells of `named`, those beside the core marked slow."""
    return [
        pytest.param(row, column, marks=[] if row in CORE_ROWS or column in CORE_COLUMNS else [pytest.mark.slow])
        for row, column in named(replayable=replayable)
    ]


def star() -> list[Any]:
    """The cells of `named`: every method without a defense and FedAvg under every defense, the others marked slow."""
    return [
        pytest.param(row, column, marks=[] if row == "fedavg" or column == "none" else [pytest.mark.slow])
        for row, column in named()
    ]


def named(*, replayable: bool = False) -> list[tuple[str, str]]:
    """Names of method and defense that go together; `replayable`: only defenses that add no fresh noise."""
    pairs = [(row, column) for row in ROWS for column in COLUMNS]
    pairs = [(row, column) for row, column in pairs if column == "none" or type(ROWS[row].defense) is Defense]
    pairs = [(row, c) for row, c in pairs if not (replayable and draws_noise(COLUMNS[c])) and shares(row)]
    return [(row, column) for row, column in pairs if refusal(row, column) is None]


@cache
def refusal(row: str, column: str) -> str | None:
    """Why the defense says that it can't defend the method's client, or None."""
    if column != "none" and not any(overrides(COLUMNS[column], hook) for hook in ("check", "wrap_model")):
        return refusal(row, "none")  # it has no say in the matter
    try:
        Client(ROWS[row].task, ROWS[row].method, COLUMNS[column])
    except ValueError as error:
        return str(error)
    return None


def shares(row: str) -> bool:
    """Whether a client sends anything at all."""
    return bool(federation(row, "none").download(0).shared)


@cache
def federation(row: str, column: str) -> Federation:
    """The tiny federation after one round; don't run it further."""
    probe = ROWS[row]
    return worlds.federation(probe.method, probe.defense if column == "none" else COLUMNS[column], probe.task)


def observed(row: str, column: str) -> tuple[ServerView, Truth]:
    """A client's second round: the view and the truth."""
    return federation(row, column).observe(1)
