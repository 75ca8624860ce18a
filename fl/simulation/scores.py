"""How a federation is scored beyond the usual: held-out clients, fine-tuning, one test for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fl.client import Client
from fl.defense import UnknownDefense
from fl.seeds import derive_seed
from fl.simulation.client_round import train
from fl.simulation.federation_state import FederationState
from fl.types import Batch


def scores(run: FederationState) -> dict[str, tuple[float, ...]]:
    """Return the shares of images classified right under the federation's protocol, client by client.

    Only those it asks for.

    A score is missing where nothing can be scored: `NOTHING_SENT`.

    Returns:
        "unseen": by what held-out clients receive, of all their images, training part included: they trained on none
        (zACC of HyperFedZero; accuracy on a domain left out). "tuned" and "unseen_tuned": of the own test images, after
        fine-tuning, of participants and of held-out clients. "global": participants' models on the images of all.
    """
    asked, found = run.protocol, dict[str, tuple[float, ...]]()
    if run.held_out_clients and run.download(run.held_out_clients[0]).numbers():
        found["unseen"] = tuple(_accuracy_held_out(run, number) for number in run.held_out_clients)
    if asked.fine_tune_epochs:
        found["tuned"] = tuple(accuracy_tuned(run, number) for number in run.participants)
        if run.held_out_clients:
            found["unseen_tuned"] = tuple(accuracy_tuned(run, number) for number in run.held_out_clients)
    if asked.global_test is not None:
        found["global"] = _accuracy_global(run, run.participants, asked.global_test)
    return found


def accuracy_tuned(run: FederationState, number: int) -> float:
    """Return accuracy on client `number`'s test images after it fine-tuned what it would receive now; changes nothing.

    What is tuned stays with the client, so no defense enters but the network of one, nor a private method's clipping
    and noise (`Method.fine_tuning_method`). The accuracy is a figure of the experiment, which no client sends: a
    guarantee of what clients send does not cover it.
    """
    method = run.client.method.fine_tuning_method()
    client = Client(run.client.base, method, UnknownDefense(wrapped=run.client.defense))
    phases = method.fine_tuning_phases(client.task, run.protocol.fine_tune_epochs)
    start = run.start(number, client=client, seed=derive_seed(run.seed, "tuning"), phases=phases)
    key = replace(start.key, round=max(start.key.round, method.first_round))  # a loss may be another before
    start = replace(start, key=key)
    return run.with_accuracy(train(start), client).accuracy or 0.0


def _accuracy_held_out(run: FederationState, number: int) -> float:
    return run.score(number, all_images(run, number), adapted=False)


def all_images(run: FederationState, number: int) -> Batch:
    """Return all images of a client, training and test."""
    own = run.data[number]
    return Batch(torch.cat([own.train.inputs, own.test.inputs]), torch.cat([own.train.labels, own.test.labels]))


def _accuracy_global(run: FederationState, numbers: Iterable[int], images: Batch) -> tuple[float, ...]:
    """Score equal models once: most methods send the same to all, who keep nothing."""
    known, found = dict[tuple[int, ...], float](), []
    held = []  # so that no address is used twice
    for number in numbers:
        down, state = run.prediction_download(number), run.clients[number]
        parts = [*down.shared.values(), *down.buffers.values(), *state.private.values(), *state.buffers.values()]
        parts += [value for part in state.personal.values() for value in part.values()]
        if run.client.method.adaptation_method() is not None:  # what is scored is made of a client's images, too
            parts.append(run.clients[number])  # type: ignore[arg-type]
        held.append(parts)
        key = tuple(map(id, parts))
        if key not in known:
            known[key] = run.score(number, images)
        found.append(known[key])
    return tuple(found)
