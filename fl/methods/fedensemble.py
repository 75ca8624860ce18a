"""Fed-ensemble: several networks go round among the clients, one to each in a round, and answer together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fl.method import Download, ServerState, methods
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.network import Network
from fl.parametrization import Parametrization
from fl.ranges import Count, CountFrom0, Range, StepSize, Weight
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Task, Upload

TURNS, SEED = "turns", "seed"
"""A further payload of `ServerState.own`, and the name in it of what every client's turns are drawn from."""


@methods.register("fedensemble")
@dataclass(frozen=True, kw_only=True)
class FedEnsemble(FedAvg):
    """Fed-ensemble, generalization by ensembles of models (Shi et al., 2021).

    The server holds `members` networks, which start from different values. In a round each client receives and trains
    one, and the server takes FedAvg's mean of each network over the clients that had it; one that nobody had stays. In
    `members` rounds a client trains each once, in an order drawn anew for every client and every so many rounds.
    Predictions are the mean of all members' softmax. For that a client needs all of them; the numbers that a round
    sends count the one.

    Constants are those of the authors' settings for CIFAR-10. We read code, not paper. Theirs lets step sizes fall by
    1 % every ten rounds, adds a proximal term with a weight of 1e-8, and finds out by a mixture of Gaussians which
    network a client's result belongs to, clients counting alike; here the server goes by what it sent, and clients
    count by their images.

    Attributes:
        members: how many networks; 1 is FedAvg.
        lr: step size of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "as fedavg with several networks: each client trains one at a time, and all of them answer together."
    )

    members: Annotated[int, Range(1, 1000)] = 5
    lr: StepSize = 5e-3
    weight_decay: Weight = 1e-3
    epochs: CountFrom0 | None = 10
    batch_size: Count | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members < 1:
            raise ValueError(f"expected members >= 1, got {self.members}")
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': a generator would need members of its own")

    @classmethod
    def example(cls) -> FedEnsemble:
        """Return two networks, two epochs of two steps, everything on."""
        return cls(members=2, lr=0.1, momentum=0.5, max_norm=1.0, epochs=2, batch_size=2)

    def member(self, server: ServerState, client: int) -> int:
        """Return which network client number `client` trains in this round."""
        age, turn = divmod(server.round, self.members)
        seed = int(dense(server.own[TURNS][SEED]))
        return int(torch.randperm(self.members, generator=stream(seed, TURNS, client, age))[turn])

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return the task's own network, and others whose layers are drawn as PyTorch does."""
        server = super().init_server(params, task, clients, generator)
        own: dict[str, Tensors] = {TURNS: {SEED: torch.randint(2**31, (), generator=generator)}}
        for k in range(self.members):
            own[_member_payload(k)] = {
                **(_redraw_parameters(server.shared, task, generator) if k else server.shared),
                **server.buffers,
            }
        return replace(server, shared={}, buffers={}, own=own)

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the network whose turn it is."""
        return _split_state(server.own[_member_payload(self.member(server, client))], task)

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """Return all networks: of every tensor one with another dimension before its own, over the members."""
        if self.members == 1:
            return self.broadcast(server, client, task)
        every = [server.own[_member_payload(k)] for k in range(self.members)]
        return _split_state({name: torch.stack([dense(one[name]) for one in every]) for name in every[0]}, task)

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return the logarithms of the members' mean probabilities (B, K); of one network, what it returns."""
        shapes = {name: value.shape for name, value in network.model.named_parameters()}
        if all(value.shape == shapes[name] for name, value in network.weights.items()):
            return network(inputs)
        answers = [_member_network(network, k)(inputs).softmax(-1) for k in range(self.members)]
        return torch.stack(answers).mean(0).log()

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return FedAvg's mean, network by network."""
        own = dict(server.own)
        for k in range(self.members):
            sent = _split_state(own[_member_payload(k)], task)
            mine = [upload for upload in uploads if self.member(server, upload.client) == k]
            moved = super().aggregate(replace(server, shared=sent.shared, buffers=sent.buffers), mine, task)
            own[_member_payload(k)] = {**moved.shared, **moved.buffers}
        return replace(server, own=own, round=server.round + 1)


def _member_payload(member: int) -> str:
    return f"member.{member}"


def _redraw_parameters(params: Tensors, task: Task, generator: torch.Generator) -> Tensors:
    """Return parameters of the same network, drawn anew."""
    model = copy.deepcopy(task.model).cpu()  # numbers are drawn on the CPU, wherever they go
    initialize(model, generator)
    drawn = dict(model.named_parameters())
    return {name: drawn[name].detach().to(dense(value).device) for name, value in params.items()}


def _split_state(member: Tensors, task: Task) -> Download:
    """Return a network's parameters and buffers."""
    buffers = {name: dense(value) for name, value in member.items() if name in task.buffers}
    return Download({name: value for name, value in member.items() if name not in buffers}, buffers)


def _member_network(network: Network, member: int) -> Network:
    """Return one network of several."""
    weights, buffers = ({n: v[member] for n, v in tensors.items()} for tensors in (network.weights, network.buffers))
    return Network(network.model, weights, buffers)
