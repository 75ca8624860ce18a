"""A server that keeps the last model of every client, and makes what it sends to each of them from all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fl.method import Download, ServerState
from fl.methods.fedavg import FedAvg
from fl.tensors import Tensors, dense, sub, weighted_sum
from fl.types import Task, Upload


@dataclass(frozen=True, kw_only=True)
class PersonalModels(FedAvg):
    """A base of methods with a model for each client, all kept by the server; `model` says what each is sent.

    A model is its shared parameters, and running statistics with them; integer buffers stay as they were at first. A
    client that never takes part receives the plain mean of all models. Memory and checkpoints hold them all.
    """

    def model(self, server: ServerState, client: int, task: Task) -> Tensors:
        """Return the model that client number `client` starts its round from, by the names of `last_model`."""
        raise TypeError(f"{type(self).__name__} does not say what a client starts from: define model()")

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the client's model, or the mean of all for one that never takes part."""
        if client < server.clients:
            found = self.model(server, client, task)
        else:
            every = [last_model(server, number) for number in range(server.clients)]
            found = weighted_model(every, [1 / server.clients] * server.clients)
        return as_download(server, found)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the state in which the models that arrived replace those kept for their clients."""
        arrived = {_model_payload(u.client): final_model(self.broadcast(server, u.client, task), u) for u in uploads}
        return replace(server, own=server.own | arrived, round=server.round + 1)


def last_model(server: ServerState, client: int) -> Tensors:
    """Return the model that `client` ended its last round with: shared parameters, and buffers that are no integers.

    Before its first round that is the one that the server began with.
    """
    return server.own.get(_model_payload(client), {**server.shared, **floating_buffers(server.buffers)})


def floating_buffers(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that are averaged: integer ones count steps."""
    return {name: value for name, value in buffers.items() if value.is_floating_point()}


def weighted_model(models: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the sum of `models`, each times its weight."""
    used = [(model, weight) for model, weight in zip(models, weights, strict=True) if weight != 0]
    found, shares = [model for model, _ in used], [weight for _, weight in used]
    return {name: dense(weighted_sum([model[name] for model in found], shares)) for name in found[0]}


def as_download(server: ServerState, model: Tensors) -> Download:
    """Return a model by names of `last_model`, to send it."""
    return Download(
        {name: model[name] for name in server.shared},
        {name: dense(model.get(name, value)) for name, value in server.buffers.items()},
    )


def final_model(sent: Download, upload: Upload) -> Tensors:
    """Return the model that a client ended with, by names of `last_model`."""
    statistics = {name: value - upload.buffers[name] for name, value in floating_buffers(sent.buffers).items()}
    return {**{name: sub(value, upload.update[name]) for name, value in sent.shared.items()}, **statistics}


def _model_payload(client: int) -> str:
    """Return the payload of `ServerState.own` with the client's last model."""
    return f"model.{client}"
