"""The plain federation loop: sample clients, train them, aggregate, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fl.client import Client
from fl.method import Download, ServerState
from fl.seeds import stream
from fl.simulate import ClientState, Round, Truth, observe, train_client
from fl.tensors import Tensors
from fl.types import Batch, Scope, ServerView, ThreatModel


@dataclass(frozen=True)
class ClientData:
    """One client's images."""

    train: Batch
    test: Batch


@dataclass
class Federation:
    """Clients, a server, and the rounds they have run.

    Every random number is a function of the seed, the round and the client, so a run that stops and goes on gives
    the numbers of one that did not.

    Attributes:
        client: task, method and defence.
        data: images of every client.
        seed: of the experiment.
        rate: share of clients that take part in a round, in (0, 1].
        server: the server's state.
        clients: what every client keeps.
    """

    client: Client
    data: Sequence[ClientData]
    seed: int = 0
    rate: float = 1.0
    server: ServerState = field(init=False)
    clients: list[ClientState] = field(init=False)
    private_init: Tensors = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"expected rate in (0, 1], got {self.rate}")
        if not self.data:
            raise ValueError("expected at least 1 client, got none")
        method, task = self.client.method, self.client.task
        params = method.initial(task, stream(self.seed, "init"))
        scopes = self.client.scopes({**params, **task.buffers})
        self.private_init = {k: v for k, v in params.items() if scopes[k] is Scope.PRIVATE}
        buffers = {k: v for k, v in task.buffers.items() if scopes[k] is Scope.PRIVATE}
        memory = method.init_memory(params, task)
        # every client starts from the same private tensors, as the published methods do
        self.clients = [ClientState(self.private_init, memory, buffers) for _ in self.data]
        self.server = method.init_server(params, task, len(self.data), stream(self.seed, "server"))

    def sampled(self, round: int) -> list[int]:
        """The clients of a round, in order."""
        count = max(1, int(self.rate * len(self.data) + 0.5))
        chosen = torch.randperm(len(self.data), generator=stream(self.seed, "clients", round))[:count]
        return sorted(chosen.tolist())

    def download(self, number: int) -> Download:
        """What client `number` receives now."""
        return self.client.method.broadcast(self.server, number, self.client.task)

    def train(self, number: int) -> Round:
        """One client's round, without any effect on the federation."""
        return train_client(
            self.client,
            self.clients[number],
            self.download(number),
            self.data[number].train,
            number=number,
            round=self.server.round,
            seed=self.seed,
        )

    def run_round(self, numbers: Iterable[int] | None = None) -> list[Round]:
        """One round of the sampled clients, or of those given; returns what each of them did."""
        chosen = self.sampled(self.server.round) if numbers is None else list(numbers)
        rounds = [self.train(number) for number in chosen]
        for number, done in zip(chosen, rounds, strict=True):
            self.clients[number] = done.state
        self.server = self.client.method.aggregate(self.server, [r.upload for r in rounds], self.client.task)
        return rounds

    def observe(
        self,
        number: int,
        *,
        threat: ThreatModel | None = None,
        data: Batch | None = None,
        client: Client | None = None,
        history: tuple[ServerView, ...] = (),
    ) -> tuple[ServerView, Truth]:
        """The server's view of what client `number` would send now, and the truth; changes nothing.

        Args:
            number: of the client.
            threat: what the server knows beside.
            data: images to train on instead of the client's own (a single image, say).
            client: another local rule over the same parameters (one step instead of a full round, say).
            history: earlier views of the same client, for a threat model that keeps some.
        """
        view, truth, _ = observe(
            client or self.client,
            self.clients[number],
            self.download(number),
            self.data[number].train if data is None else data,
            threat=threat,
            number=number,
            round=self.server.round,
            seed=self.seed,
            private_init=self.private_init,
            history=history,
        )
        return view, truth

    def accuracy(self, numbers: Iterable[int] | None = None, *, tuned: bool = False) -> list[float]:
        """Share of each client's test images classified right.

        Args:
            numbers: which clients; all by default.
            tuned: score the model after one more round of local training, not what the server sends now (with the
                client's own private tensors).
        """
        chosen = range(len(self.data)) if numbers is None else numbers
        return [self._accuracy(number, tuned) for number in chosen]

    def _accuracy(self, number: int, tuned: bool) -> float:
        state, download = self.clients[number], self.download(number)
        shared, buffers = download.shared, download.buffers
        if tuned:
            done = self.train(number)
            state = done.state
            shared = done.result.trained(shared)
            buffers = done.result.buffers
        params = self.client.method.parametrisation.lift({**shared, **state.private})
        every = {**self.client.task.buffers, **buffers, **state.buffers}
        return accuracy(self.client, params, every, self.data[number].test)


def accuracy(client: Client, params: Tensors, buffers: dict[str, torch.Tensor], data: Batch, size: int = 256) -> float:
    """Share of `data` classified right by the client's network in evaluation mode, in [0, 1]."""
    evaluator = replace(client.method, train_mode=False)
    network = Client(client.base, evaluator, client.defense).network(params, buffers)
    right = 0
    with torch.no_grad():
        for start in range(0, len(data), size):
            logits = client.method.logits(network, data.inputs[start : start + size])
            right += int((logits.argmax(-1) == data.labels[start : start + size]).sum())
    return right / len(data)
