"""How a federation is scored beyond the usual: clients that never take part, fine-tuning, one test for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from fl.client import Client
from fl.defense import Unknown
from fl.seeds import derive
from fl.simulation.client_round import train
from fl.types import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fl.simulation.federation import Federation

FURTHER = ("tuned", "unseen", "unseen_tuned", "global")
"""Names of the scores that a protocol may ask for."""

Measure = Literal["loss", "movement", "similarity", "divergence", "embeddings", "confidence", "server"]
"""What a protocol may ask for beside accuracies (see `fl.simulation.diagnostics`)."""

NOTHING_SENT = "the server sends nothing, so that clients that never took part have no trained network"
"""Why "unseen" is missing."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Who never takes part, and what is scored beside the model that the server sends.

    Attributes:
        outsiders: the last so many clients never take part.
        fine_tune: every client adapts what it received for so many epochs (`Method.tuning`) and is scored once more;
            0 leaves that out.
        whole: images on which every participant's model is scored, too.
        measures: what is taken beside accuracies.

    Raises:
        ValueError: a number below 0.
    """

    outsiders: int = 0
    fine_tune: int = 0
    whole: Batch | None = None
    measures: tuple[Measure, ...] = ()

    def __post_init__(self) -> None:
        for key in ("outsiders", "fine_tune"):
            if getattr(self, key) < 0:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")


def scores(run: Federation) -> dict[str, tuple[float, ...]]:
    """Shares of images classified right under the federation's protocol, client by client; only those it asks for.

    A score is missing where nothing can be scored: `NOTHING_SENT`.

    Returns:
        "unseen": by what outsiders receive, of all their images, training part included: they trained on none (zACC of
        HyperFedZero; accuracy on a domain left out). "tuned" and "unseen_tuned": of the own test images, after
        fine-tuning, of participants and of outsiders. "global": participants' models on the images of all.
    """
    asked, found = run.protocol, dict[str, tuple[float, ...]]()
    if run.outsiders and run.download(run.outsiders[0]).numbers():
        found["unseen"] = tuple(_unseen(run, number) for number in run.outsiders)
    if asked.fine_tune:
        found["tuned"] = tuple(tuned(run, number) for number in run.participants)
        if run.outsiders:
            found["unseen_tuned"] = tuple(tuned(run, number) for number in run.outsiders)
    if asked.whole is not None:
        found["global"] = _global(run, run.participants, asked.whole)
    return found


def tuned(run: Federation, number: int) -> float:
    """Accuracy on client `number`'s test images after it fine-tuned what it would receive now; changes nothing.

    What is tuned stays with the client, so no defence enters but the network of one, nor a private method's clipping
    and noise (`Method.unreleased`). The accuracy is a figure of the experiment, which no client sends: a guarantee of
    what clients send does not cover it.
    """
    method = run.client.method.unreleased()
    client = Client(run.client.base, method, Unknown(wrapped=run.client.defense))
    phases = method.tuning(client.task, run.protocol.fine_tune)
    start = run.start(number, client=client, seed=derive(run.seed, "tuning"), phases=phases)
    start = replace(start, round=max(start.round, method.first_round))  # a loss may be another before
    return run.scored(train(start), client).accuracy or 0.0


def _unseen(run: Federation, number: int) -> float:
    return run.score(number, everything(run, number), adapted=False)


def everything(run: Federation, number: int) -> Batch:
    """All images of a client, training and test."""
    own = run.data[number]
    return Batch(torch.cat([own.train.inputs, own.test.inputs]), torch.cat([own.train.labels, own.test.labels]))


def _global(run: Federation, numbers: Iterable[int], images: Batch) -> tuple[float, ...]:
    """Equal models are scored once: most methods send the same to all, who keep nothing."""
    known, found = dict[tuple[int, ...], float](), []
    held = []  # so that no address is used twice
    for number in numbers:
        down, state = run.served(number), run.clients[number]
        parts = [*down.shared.values(), *down.buffers.values(), *state.private.values(), *state.buffers.values()]
        parts += [value for part in state.personal.values() for value in part.values()]
        if run.client.method.adapting() is not None:  # what is scored is made of a client's images, too
            parts.append(run.clients[number])  # type: ignore[arg-type]
        held.append(parts)
        key = tuple(map(id, parts))
        if key not in known:
            known[key] = run.score(number, images)
        found.append(known[key])
    return tuple(found)


def without_outsiders(protocol: Protocol, clients: int) -> int:
    """How many of `clients` take part.

    Raises:
        ValueError: none would.
    """
    if protocol.outsiders >= clients:
        raise ValueError(f"expected fewer outsiders than the {clients} clients, got {protocol.outsiders}")
    return clients - protocol.outsiders
