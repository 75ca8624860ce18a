"""The federation loop: sample clients, train them with an engine, aggregate, evaluate."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from fl.aggregated_view import Division, combine
from fl.client import Client
from fl.engines import EngineName, choose
from fl.engines.base import Engine
from fl.method import Download, ServerState
from fl.parametrization import Parametrisation
from fl.seeds import derive, stream
from fl.simulation.accuracy import Model, adapt, predictor, share_right
from fl.simulation.client_round import ClientState, Round, Start, observe, prepare, settled, train
from fl.simulation.diagnostics import Course
from fl.simulation.nonfinite_updates import check_finite
from fl.simulation.protocol import Protocol, scores, without_outsiders
from fl.simulation.round_record import Participation, Record
from fl.simulation.uploads import Uploads
from fl.tensors import Payloads, Tensors
from fl.types import Batch, Phase, Scope, Truth, frozen
from fl.view import ServerView, ThreatModel

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

    def laid_out(self) -> ClientData:
        """The same images with channels innermost in memory, which convolutions on a CPU are fastest with."""
        first, second = (
            Batch(part.inputs.to(memory_format=torch.channels_last), part.labels) for part in (self.train, self.test)
        )
        return replace(self, train=first, test=second)


def asked(rate: float, participants: int) -> int:
    """How many of the participants are asked for an update in a round, at least 1."""
    return max(1, int(rate * participants + 0.5))


def takes_any_layout(client: Client, like: torch.Tensor) -> bool:
    """Whether the client's network runs on images with channels innermost: one that flattens by `view` does not."""
    model = copy.deepcopy(client.task.model).eval()
    some = torch.zeros(2, *client.task.input_shape, dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad():
            model(some.to(memory_format=torch.channels_last))
    except RuntimeError:
        return False
    return True


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
        engine: how clients are trained: "auto", "loop", "factored" or "vmap" (see `fl.engines`).
        workers: processes to spread them over.
        protocol: who never takes part, and which further scores are taken.
        server: the server's state.
        clients: what every client keeps.
        participants: numbers of the clients that may take part.
        outsiders: numbers of those that never do.
        stepped: numbers of the server's last step, where the protocol asks for them (`Method.server_numbers`).
    """

    client: Client
    data: Sequence[ClientData]
    seed: int = 0
    rate: float = 1.0
    engine: EngineName = "auto"
    workers: int = 1
    protocol: Protocol = field(default_factory=Protocol)
    server: ServerState = field(init=False)
    clients: list[ClientState] = field(init=False)
    private_init: Tensors = field(init=False)
    participants: range = field(init=False)
    outsiders: range = field(init=False)
    stepped: dict[str, list[float]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"expected rate in (0, 1], got {self.rate}")
        if not self.data:
            raise ValueError("expected at least 1 client, got none")
        count = without_outsiders(self.protocol, len(self.data))
        self.participants, self.outsiders = range(count), range(count, len(self.data))
        if takes_any_layout(self.client, self.data[0].train.inputs):
            self.data = [own.laid_out() for own in self.data]
        self._engine: Engine = choose(self.engine, self.client, self.workers)
        method, task = self.client.method, self.client.task
        params = method.initial(task, stream(self.seed, "init"))
        scopes = self.client.scopes({**params, **task.buffers})
        self.private_init = {k: v for k, v in params.items() if scopes[k] is Scope.PRIVATE}
        buffers = {k: v for k, v in task.buffers.items() if scopes[k] is Scope.PRIVATE}
        memory = method.init_memory(params, task)
        # every client starts from the same private tensors, as the published methods do
        self.clients = [ClientState(self.private_init, memory, buffers) for _ in self.data]
        if method.beside() is not None:
            personal: Payloads = {"parameters": params, "buffers": dict(task.buffers)}
            every = [replace(self.clients[number], personal=personal) for number in self.participants]
            self.clients[: len(every)] = every
        self.server = method.init_server(params, task, len(self.participants), stream(self.seed, "server"))

    def sampled(self, round: int) -> list[int]:
        """The clients of a round, in order."""
        every = len(self.participants)
        chosen = torch.randperm(every, generator=stream(self.seed, "clients", round))[: asked(self.rate, every)]
        return sorted(chosen.tolist())

    def download(self, number: int) -> Download:
        """What client `number` receives now."""
        return self.client.method.broadcast(self.server, number, self.client.task)

    def served(self, number: int) -> Download:
        """What client number `number` would predict by now, of the server's."""
        return self.client.method.serve(self.server, number, self.client.task)

    def start(
        self,
        number: int,
        *,
        client: Client | None = None,
        seed: int | None = None,
        phases: tuple[Phase, ...] | None = None,
    ) -> Start:
        """All that enters one client's round, or one by another local rule, seed or phases.

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
            number=number,
            round=self.server.round,
            seed=self.seed if seed is None else seed,
            phases=phases,
        )

    def train(self, number: int) -> Round:
        """One client's round by the local rule itself, without any effect on the federation."""
        return train(self.start(number))

    def run_round(self, numbers: Iterable[int] | None = None, *, evaluate: bool = False) -> list[Round]:
        """One round of the sampled clients, or of those given; returns what each of them did.

        Those that take part no more (`Method.silent`) are not asked, so a round may be nobody's. All of it is kept, the
        images fed included; `step` keeps figures only.

        Args:
            numbers: of the clients.
            evaluate: whether each client's model is scored right after training.
        """
        return list(self._round(numbers, evaluate))

    def _round(self, numbers: Iterable[int] | None, evaluate: bool) -> Iterator[Round]:
        """One round, client by client; the federation moves on once the last has been taken."""
        wanted = self.sampled(self.server.round) if numbers is None else list(numbers)
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"expected different clients, got {wanted}")
        chosen = [number for number in wanted if not self.client.method.silent(self.server, number)]
        method, task = self.client.method, self.client.task
        self.server = method.select(self.server, chosen, task)
        uploads, states, finite = Uploads(method), list(self.clients), dict[int, torch.Tensor]()
        for number, done in zip(chosen, self._engine.train(self, chosen, evaluate=evaluate), strict=True):
            check_finite([done.upload], self.server.round, finite)
            states[number] = done.state.settled()
            uploads.add(done.upload)
            yield done
        asked_for = evaluate and "server" in self.protocol.measures
        self.stepped = method.server_numbers(self.server, uploads.kept, task) if asked_for else None
        after = method.aggregate(self.server, uploads.kept, task)
        self.clients = states
        self.server = replace(after, shared=settled(after.shared), own={k: settled(v) for k, v in after.own.items()})

    def step(self, *, everyone: bool = False, evaluate: bool = True) -> Record:
        """One round, in figures.

        Args:
            everyone: all participants train, whatever the rate.
            evaluate: take accuracies, too.
        """
        began = time.perf_counter()
        numbers, before = self.participants if everyone else None, Course.before(self) if evaluate else None
        parts = [Participation.of(done) for done in self._round(numbers, evaluate)]
        return self.record(parts, evaluate=evaluate, since=began, before=before)

    def record(
        self,
        parts: Sequence[Participation] = (),
        *,
        evaluate: bool = True,
        since: float | None = None,
        before: Course | None = None,
    ) -> Record:
        """The federation as it stands, in figures.

        Args:
            parts: what the clients did in the round just over.
            evaluate: take accuracies.
            since: when the clock started (`time.perf_counter`).
            before: how the models stood before the round, where that is asked for.
        """
        began = time.perf_counter() if since is None else since
        local = tuple(part.accuracy for part in parts if part.accuracy is not None)
        made, figures, down = self.client.method.parametrisation, list[dict[str, float]](), 0
        told = type(made).diagnostics is not Parametrisation.diagnostics
        for number in self.participants if told else self.sampled(self.server.round):
            sent = self.download(number)  # a server may make a model for each: one by one, no more than are needed
            figures.append(made.diagnostics({**sent.shared, **self.clients[number].private}))
            down = max(down, sent.numbers())
        every = self.accuracy() if evaluate else None
        return Record(
            round=self.server.round,
            clients=tuple(part.client for part in parts),
            accuracy=None if every is None else tuple(every),
            accuracy_local=local or None,
            diagnostics={key: sum(one[key] for one in figures) / len(figures) for key in figures[0]},
            numbers_up=max((part.numbers for part in parts), default=0),
            numbers_down=down,
            further=scores(self) if evaluate else {},
            measured=(before or Course()).measured(self) if evaluate else {},
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """End worker processes, if there are any."""
        self._engine.close()

    def observe(
        self,
        number: int,
        *,
        threat: ThreatModel | None = None,
        data: Batch | Sequence[Batch] | None = None,
        client: Client | None = None,
        augment: bool = True,
        history: tuple[ServerView, ...] = (),
    ) -> tuple[ServerView, Truth]:
        """The server's view of what client `number` would send now, and the truth; changes nothing.

        Under secure aggregation it is that of the client's group (`group_of`).

        Args:
            number: of the client.
            threat: what the server knows beside.
            data: images to train on instead of the client's own (a single image, say); of a group every client's, in
                the order of `group_of`.
            client: another local rule over the same parameters (one step instead of a full round, say).
            augment: whether images are augmented as in training.
            history: earlier views of the same client, for a threat model that keeps some.

        Raises:
            ValueError: the client, or one of its group, sends nothing any more; there is no such group; or images are
                not given for each of a group; or earlier views are not of as many clients.
        """
        client = client or self.client
        group = self.group_of(number, client.defense.group)
        if any(max(len(past.parts), 1) != len(group) for past in history):
            raise ValueError(f"expected earlier views of the clients {list(group)} together, got others")
        given = [None] * len(group) if data is None else [data] if isinstance(data, Batch) else list(data)
        if len(given) != len(group):
            raise ValueError(f"expected images for each of the clients {list(group)}, got {len(given)} batch(es)")
        seen, weights = [], []
        for member, images in zip(group, given, strict=True):
            if reason := self.client.method.silent(self.server, member):
                raise ValueError(f"expected a client that still sends updates, got one that does not: {reason}")
            own = self.data[member]
            images = own.train if images is None else images
            view, truth, done = observe(
                client,
                self.clients[member],
                self.download(member),
                images,
                augment=own.augment if augment else None,
                threat=threat,
                number=member,
                round=self.server.round,
                seed=self.seed,
                private_init=self.private_init,
                history=history,
            )
            seen.append((view, truth))
            weights.append(done.upload.weight)
        return seen[0] if len(group) == 1 else combine(seen, weights)

    def group_of(self, number: int, size: int) -> range:
        """The clients that are aggregated with client `number` in groups of `size` (see `fl.aggregated_view.Division`).

        Raises:
            ValueError: a round has fewer clients than the group, or the client never takes part.
        """
        every = len(self.participants)
        return Division(size=size, participants=every, asked=asked(self.rate, every)).of(number)

    def accuracy(self, numbers: Iterable[int] | None = None, *, tuned: bool = False) -> list[float]:
        """Share of each client's test images classified right.

        Args:
            numbers: which clients; all participants by default.
            tuned: score the model after one more round of local training, not what the server sends now (with the
                client's own private tensors).
        """
        chosen = list(self.participants if numbers is None else numbers)
        if not tuned:
            return self._engine.accuracy(self, chosen)
        return [done.accuracy or 0.0 for done in self._engine.train(self, chosen, evaluate=True)]

    def score(self, number: int, images: Batch | None = None, *, adapted: bool = True) -> float:
        """Accuracy of what client `number` would get now, with its own private tensors, on its test images or others.

        Args:
            number: of the client.
            images: what to classify instead.
            adapted: after the method's own adaptation to the client's training images, where it has one.
        """
        images = self.data[number].test if images is None else images
        return self._score(self.client, number, images, self.clients[number], self.served(number), adapted)

    def model(self, number: int, *, adapted: bool = True) -> Model:
        """The model by which client `number` predicts now: of what the server sends and of what the client keeps.

        Args:
            number: of the client.
            adapted: after the method's own adaptation to the client's training images, where it has one.
        """
        state, down = self.clients[number], self.served(number)
        return predictor(self.client, *(self._adapted(number, self.client, state, down) if adapted else (state, down)))

    def scored(self, done: Round, client: Client | None = None) -> Round:
        """A client's round with the accuracy of the model it ended with, by its own local rule or another."""
        number = done.upload.client
        shared = {name: value for name, value in done.result.buffers.items() if name not in done.state.buffers}
        ended = Download(done.result.trained(self.download(number).shared), shared)
        found = self._score(client or self.client, number, self.data[number].test, done.state, ended)
        return replace(done, accuracy=found)

    def _score(
        self, client: Client, number: int, images: Batch, state: ClientState, down: Download, adapted: bool = True
    ) -> float:
        if adapted:
            state, down = self._adapted(number, client, state, down)
        return share_right(client, state, down, images)

    def _adapted(self, number: int, client: Client, state: ClientState, down: Download) -> tuple[ClientState, Download]:
        own, at, seed = self.data[number], self.server.round, derive(self.seed, "adapting")
        return adapt(client, state, down, own.train, augment=own.augment, number=number, round=at, seed=seed)
