"""A federation between two rounds: its clients, its server, and what either would do now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fl.aggregated_view import AggregationGroups
from fl.client import Client
from fl.local.hook_results import expect_made
from fl.method import Download, ServerState
from fl.models.building_blocks.model_checks import FORWARD_ERRORS
from fl.runtime.module_copies import deep_copy
from fl.seeds import derive_seed, stream
from fl.simulation.accuracy import Predictor, adapt, predictor, predictor_accuracy
from fl.simulation.client_round import ClientState, PreparedRound, Round, RoundKey, prepare, train
from fl.simulation.protocol import Protocol, n_participants
from fl.tensors import Payloads, Tensors
from fl.types import Batch, Phase, Scope, frozen

if TYPE_CHECKING:
    from fl.data.augment import Augmentation


@dataclass(frozen=True)
class ClientData:
    """One client's images.

    Attributes:
        train: what it trains on.
        test: what it is scored on.
        augment: how training images are changed before they are fed; None leaves them.
    """

    train: Batch
    test: Batch
    augment: Augmentation | None = None

    def channels_last(self) -> ClientData:
        """Return these images with channels innermost in memory, which convolutions on a CPU are fastest with."""
        first, second = (
            Batch(part.inputs.to(memory_format=torch.channels_last), part.labels) for part in (self.train, self.test)
        )
        return replace(self, train=first, test=second)


def n_sampled(client_fraction: float, participants: int) -> int:
    """Return how many of the participants are asked for an update in a round, at least 1."""
    return max(1, int(client_fraction * participants + 0.5))


def accepts_channels_last(client: Client, like: torch.Tensor) -> bool:
    """Return whether the client's network runs on images with channels innermost.

    One that flattens by `view` does not, nor one that was exported for a batch of one.
    """
    model = deep_copy(client.task.model).eval()
    some = torch.zeros(2, *client.task.input_shape, dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad():
            model(some.to(memory_format=torch.channels_last))
    except FORWARD_ERRORS:
        return False
    return True


@dataclass
class FederationState:
    """Clients and a server as they stand between two rounds.

    Every random number is a function of the seed, the round and the client, so a run that stops and goes on gives
    the numbers of one that did not.

    Attributes:
        client: task, method and defense.
        data: images of every client.
        seed: of the experiment.
        client_fraction: share of clients that take part in a round, in (0, 1].
        protocol: who never takes part, and which further scores are taken.
        server: the server's state.
        clients: what every client keeps.
        private_init: what all clients' private tensors started from.
        participants: numbers of the clients that may take part.
        held_out_clients: numbers of those that never do.
        server_metrics: numbers of the server's last step, where the protocol asks for them (`Method.server_metrics`).
    """

    client: Client
    data: Sequence[ClientData]
    seed: int = 0
    client_fraction: float = 1.0
    protocol: Protocol = field(default_factory=Protocol)
    server: ServerState = field(init=False)
    clients: list[ClientState] = field(init=False)
    private_init: Tensors = field(init=False)
    participants: range = field(init=False)
    held_out_clients: range = field(init=False)
    server_metrics: dict[str, list[float]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not 0 < self.client_fraction <= 1:
            raise ValueError(f"expected client_fraction in (0, 1], got {self.client_fraction}")
        if not self.data:
            raise ValueError("expected at least 1 client, got none")
        count = n_participants(self.protocol, len(self.data))
        self.participants, self.held_out_clients = range(count), range(count, len(self.data))
        if accepts_channels_last(self.client, self.data[0].train.inputs):
            self.data = [own.channels_last() for own in self.data]
        method, task = self.client.method, self.client.task
        params = method.initial_parameters(task, stream(self.seed, "init"))
        scopes = self.client.scopes({**params, **task.buffers})
        self.private_init = {k: v for k, v in params.items() if scopes[k] is Scope.PRIVATE}
        buffers = {k: v for k, v in task.buffers.items() if scopes[k] is Scope.PRIVATE}
        memory = method.init_memory(params, task)
        # every client starts from the same private tensors, as the published methods do
        self.clients = [ClientState(self.private_init, memory, buffers) for _ in self.data]
        if method.personal_method() is not None:
            personal: Payloads = {"parameters": params, "buffers": dict(task.buffers)}
            every = [replace(self.clients[number], personal=personal) for number in self.participants]
            self.clients[: len(every)] = every
        self.server = method.init_server(params, task, len(self.participants), stream(self.seed, "server"))

    def sampled_clients(self, round: int) -> list[int]:
        """Return the clients of a round, in order."""
        every = len(self.participants)
        chosen = torch.randperm(every, generator=stream(self.seed, "clients", round))[
            : n_sampled(self.client_fraction, every)
        ]
        return sorted(chosen.tolist())

    def group_of(self, number: int, size: int) -> range:
        """Return the clients aggregated with client `number` (`fl.aggregated_view.AggregationGroups`).

        Raises:
            ValueError: a round has fewer clients than the group, or the client never takes part.
        """
        every = len(self.participants)
        return AggregationGroups(size=size, participants=every, asked=n_sampled(self.client_fraction, every)).of(number)

    def download(self, number: int) -> Download:
        """Return what client `number` receives now."""
        method = self.client.method
        sent = method.broadcast(self.server, number, self.client.task)
        return expect_made(self.client.rule_name, "broadcast", Download, sent)

    def prediction_download(self, number: int) -> Download:
        """Return what client number `number` would predict by now, of the server's."""
        return self.client.method.serve(self.server, number, self.client.task)

    def round_key(self, number: int, seed: int | None = None) -> RoundKey:
        """Return what names the round that client `number` would do now, under another seed if one is given."""
        return RoundKey(seed=self.seed if seed is None else seed, client=number, round=self.server.round)

    def start(
        self,
        number: int,
        *,
        client: Client | None = None,
        seed: int | None = None,
        phases: tuple[Phase, ...] | None = None,
    ) -> PreparedRound:
        """Return all that enters one client's round, or one by another local rule, seed or phases.

        What the federation's network holds frozen and another rule trains starts as it stands there.
        """
        own, state, rule = self.data[number], self.clients[number], client or self.client
        still = frozen(self.client.task.model)
        thawed = {name: value for name, value in rule.task.parameters.items() if name in still}
        return prepare(
            rule,
            replace(state, private={**state.private, **thawed}),
            self.download(number),
            own.train,
            augment=own.augment,
            key=self.round_key(number, seed),
            phases=phases,
        )

    def train(self, number: int) -> Round:
        """Run one client's round by the local rule itself, without any effect on the federation."""
        return train(self.start(number))

    def model(self, number: int, *, adapted: bool = True) -> Predictor:
        """Return the model by which client `number` predicts now.

        Of what the server sends and of what the client keeps.

        Args:
            number: of the client.
            adapted: after the method's own adaptation to the client's training images, where it has one.
        """
        state, down = self.clients[number], self.prediction_download(number)
        return predictor(self.client, *(self._adapt(number, self.client, state, down) if adapted else (state, down)))

    def score(self, number: int, images: Batch | None = None, *, adapted: bool = True) -> float:
        """Accuracy of what client `number` would get now, with its own private tensors, on its test images or others.

        Args:
            number: of the client.
            images: what to classify instead.
            adapted: after the method's own adaptation to the client's training images, where it has one.
        """
        images = self.data[number].test if images is None else images
        return self._score(self.client, number, images, self.clients[number], self.prediction_download(number), adapted)

    def with_accuracy(self, done: Round, client: Client | None = None) -> Round:
        """Return a client's round with the accuracy of the model it ended with, by its own local rule or another."""
        number = done.upload.client
        shared = {name: value for name, value in done.result.buffers.items() if name not in done.state.buffers}
        ended = Download(done.result.trained(self.download(number).shared), shared)
        found = self._score(client or self.client, number, self.data[number].test, done.state, ended)
        return replace(done, accuracy=found)

    def _score(
        self, client: Client, number: int, images: Batch, state: ClientState, down: Download, adapted: bool = True
    ) -> float:
        if adapted:
            state, down = self._adapt(number, client, state, down)
        return predictor_accuracy(client, state, down, images)

    def _adapt(self, number: int, client: Client, state: ClientState, down: Download) -> tuple[ClientState, Download]:
        own, key = self.data[number], self.round_key(number, derive_seed(self.seed, "adapting"))
        return adapt(client, state, down, own.train, augment=own.augment, key=key)
