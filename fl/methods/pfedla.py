"""pFedLA: for every client a hypernetwork on the server says how much each client counts in each of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fl.method import ServerState, methods
from fl.methods.bases.personal_models import PersonalModels, last_model
from fl.methods.hypergenfl import layer_of, layers
from fl.models.hypernetworks.server_hypernetwork import (
    EMBEDDINGS,
    HYPERNETWORK,
    ServerHypernetwork,
    server_head_bias,
    server_head_weight,
)
from fl.ranges import Count, CountFrom0, Length, StepSize, Width
from fl.tensors import Tensors, add_scaled, dense, dot, weighted_sum
from fl.types import Task, Upload

EMBEDDING = "embedding"
"""Name of the client's embedding (E,), beside the parameters of its hypernetwork."""


@methods.register("pfedla")
@dataclass(frozen=True, kw_only=True)
class PFedLA(PersonalModels):
    """Layer-wised personalized federated learning (Ma et al., CVPR 2022, Figure 2).

    The server keeps each client's last model, a hypernetwork for each client and an embedding with it. Client i starts
    from a mean of all these models, in layer l with the shares alpha_i^l that its hypernetwork makes: a perceptron of
    three layers, then for each l a linear one to as many numbers as there are clients, ReLU, divided by their sum. It
    sends how its model changed, and its hypernetwork and embedding take a step of gradient descent for what that says
    of the mean, the models in it being constants. What travels is as much as with FedAvg.

    From the abstract and the figure are the order of these steps, a hypernetwork per client and shares per layer; the
    rest of the paper could not be checked. Perceptron, ReLU, the heads' start at U(0, 1) and zero, and all constants
    are those of an unofficial implementation (KarhouTam/pFedLA). Our choices: the step goes down the loss, so that the
    mean moves to what clients learned, while that code goes against it; a layer is a module that holds parameters, and
    running statistics go with it; a model is the one the client ended with; where ReLU leaves nothing of a layer the
    client gets its own; all hypernetworks start alike, embeddings from N(0, 1). HeurpFedLA, in which clients keep some
    layers to themselves, is not here.

    The hypernetworks have a number for every two clients and layer for each unit of their last layer: 2.6 GB for 400
    clients with a ResNet-20, which checkpoints hold, too.

    Attributes:
        embedding: size E of the embeddings.
        hidden: units of the perceptron's layers.
        server_lr: step size of hypernetworks and embeddings.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "the server makes each client's network from everybody's, layer by layer, and learns for each client whose "
        "layers help it."
    )

    embedding: Width = 100
    hidden: Annotated[tuple[Width, ...], Length(1)] = (100, 100, 100)
    server_lr: StepSize = 5e-3
    epochs: CountFrom0 | None = 10
    batch_size: Count | None = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.server_lr < math.inf:
            raise ValueError(f"expected server_lr >= 0, got {self.server_lr}")

    @classmethod
    def example(cls) -> PFedLA:
        """Return a tiny hypernetwork, two epochs of two steps, everything on."""
        tiny = cls(embedding=3, hidden=(5, 5), server_lr=0.1)
        return replace(tiny, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def generator(self, server: ServerState) -> ServerHypernetwork:
        """Return the hypernetworks' form: from an embedding to one number for each client, layer by layer."""
        shapes = {name: torch.Size([server.clients]) for name in layers(server)}
        return ServerHypernetwork(shapes=shapes, embedding=self.embedding, hidden=self.hidden, last_activation=True)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, the hypernetwork that all begin with, and an embedding for each client."""
        server = super().init_server(params, task, clients, generator)
        like = dense(next(iter(server.shared.values())))
        network = self.generator(server).initial_parameters(generator, like)
        for name in layers(server):  # positive, so that ReLU leaves something
            drawn = torch.rand(tuple(network[server_head_weight(name)].shape), generator=generator)
            network |= {server_head_weight(name): drawn.to(like), server_head_bias(name): torch.zeros(clients).to(like)}
        embeddings: Tensors = {
            str(i): torch.randn(self.embedding, generator=generator).to(like) for i in range(clients)
        }
        return replace(server, own={HYPERNETWORK: network, EMBEDDINGS: embeddings})

    def model(self, server: ServerState, client: int, task: Task) -> Tensors:
        """Return the mean of all models, each layer with the shares of its own."""
        models, shares = [last_model(server, number) for number in range(server.clients)], self.shares(server, client)
        alone = torch.eye(server.clients)[client]  # buffers of modules without parameters
        weights = {name: shares.get(layer_of(name), alone).tolist() for name in models[client]}
        return {name: dense(weighted_sum([model[name] for model in models], row)) for name, row in weights.items()}

    def shares(self, server: ServerState, client: int) -> dict[str, Tensor]:
        """Return the share of every client in each layer of the client's model (clients,), by layer; they sum to 1."""
        positive = {name: value.relu() for name, value in self._generate_shares(server, client).items()}
        alone = torch.eye(server.clients)[client]
        return {name: v / v.sum() if v.any() else alone.to(v) for name, v in positive.items()}

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the state with the models that arrived, and with their clients' hypernetworks one step on."""
        after = super().aggregate(server, uploads, task)
        moved = {_hypernetwork_payload(upload.client): self._train_hypernetwork(server, upload) for upload in uploads}
        return replace(after, own=after.own | moved)

    def _generate_shares(self, server: ServerState, client: int) -> dict[str, Tensor]:
        """Return what the client's hypernetwork makes of its embedding, before ReLU."""
        own = _client_hypernetwork(server, client)
        return self.generator(server).generate(own, dense(own[EMBEDDING]))

    def _train_hypernetwork(self, server: ServerState, upload: Upload) -> Tensors:
        """Return the client's hypernetwork and embedding after a step."""
        own, shares = _client_hypernetwork(server, upload.client), self.shares(server, upload.client)
        models = [last_model(server, number) for number in range(server.clients)]
        slopes: Tensors = {}
        for name, made in self._generate_shares(server, upload.client).items():
            update = {n: upload.update[n] for n in layers(server)[name]}
            slope = torch.stack([dot(update, model) for model in models])  # of the shares
            slope = (slope - shares[name] @ slope) / made.relu().sum()  # of what is divided by its sum
            slopes[name] = torch.where(made > 0, slope, 0.0)
        network = {name: value for name, value in own.items() if name != EMBEDDING}
        grads, back = self.generator(server).pull_back(network, dense(own[EMBEDDING]), slopes)
        return add_scaled(own, {**grads, EMBEDDING: back}, -self.server_lr)


def _client_hypernetwork(server: ServerState, client: int) -> Tensors:
    """Return the parameters of the client's hypernetwork, and its embedding."""
    first = {**server.own[HYPERNETWORK], EMBEDDING: server.own[EMBEDDINGS][str(client)]}
    return server.own.get(_hypernetwork_payload(client), first)


def _hypernetwork_payload(client: int) -> str:
    """Return the payload of `ServerState.own` with the client's hypernetwork after its first step."""
    return f"{HYPERNETWORK}.{client}"
