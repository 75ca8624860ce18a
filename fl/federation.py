"""The federation loop: sample clients, train them with an engine, aggregate, evaluate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fl.aggregated_view import combine_views
from fl.client import Client
from fl.engines import EngineName, choose
from fl.engines.sequential import Engine
from fl.local.hook_results import expect_made
from fl.method import ServerState
from fl.parametrization import Parametrization
from fl.simulation.client_round import Round, observe, prepare, to_contiguous
from fl.simulation.diagnostics import TrainingDiagnostics
from fl.simulation.federation_state import ClientData, FederationState, accepts_channels_last, n_sampled
from fl.simulation.nonfinite_updates import check_finite
from fl.simulation.round_record import Participation, Record
from fl.simulation.scores import scores
from fl.simulation.uploads import Uploads
from fl.types import Batch, Truth
from fl.view import ServerView, ThreatModel

if TYPE_CHECKING:
    pass


__all__ = ["ClientData", "Federation", "FederationState", "accepts_channels_last", "n_sampled"]


@dataclass
class Federation(FederationState):
    """Clients, a server, and the rounds they have run.

    Attributes:
        engine: how clients are trained: "auto", "loop", "factored" or "vmap" (see `fl.engines`).
        workers: processes to spread them over.
    """

    engine: EngineName = "auto"
    workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Engine = choose(self.engine, self.client, self.workers)

    def run_round(self, numbers: Iterable[int] | None = None, *, evaluate: bool = False) -> list[Round]:
        """Run one round of the sampled clients, or of those given; returns what each of them did.

        Those that take part no more (`Method.exclusion_reason`) are not asked, so a round may be nobody's. All of it is
        kept, the images fed included; `step` keeps figures only.

        Args:
            numbers: of the clients.
            evaluate: whether each client's model is scored right after training.
        """
        return list(self._round(numbers, evaluate))

    def _round(self, numbers: Iterable[int] | None, evaluate: bool) -> Iterator[Round]:
        """Run one round, client by client; the federation moves on once the last has been taken."""
        wanted = self.sampled_clients(self.server.round) if numbers is None else list(numbers)
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"expected different clients, got {wanted}")
        chosen = [number for number in wanted if not self.client.method.exclusion_reason(self.server, number)]
        method, task = self.client.method, self.client.task
        self.server = method.begin_round(self.server, chosen, task)
        uploads, states, finite = Uploads(method), list(self.clients), dict[int, torch.Tensor]()
        for number, done in zip(chosen, self._engine.train(self, chosen, evaluate=evaluate), strict=True):
            check_finite([done.upload], self.server.round, finite)
            states[number] = done.state.to_contiguous()
            uploads.add(done.upload)
            yield done
        asked_for = evaluate and "server" in self.protocol.diagnostics
        self.server_metrics = method.server_metrics(self.server, uploads.kept, task) if asked_for else None
        after = method.aggregate(self.server, uploads.kept, task)
        expect_made(self.client.rule_name, "aggregate", ServerState, after)
        self.clients = states
        self.server = replace(
            after, shared=to_contiguous(after.shared), own={k: to_contiguous(v) for k, v in after.own.items()}
        )

    def step(self, *, everyone: bool = False, evaluate: bool = True) -> Record:
        """Run one round, and return its figures.

        Args:
            everyone: all participants train, whatever the fraction.
            evaluate: take accuracies, too.
        """
        began = time.perf_counter()
        numbers = self.participants if everyone else None
        before = TrainingDiagnostics.snapshot(self) if evaluate else None
        parts = [Participation.of(done) for done in self._round(numbers, evaluate)]
        return self.record(parts, evaluate=evaluate, since=began, before=before)

    def record(
        self,
        parts: Sequence[Participation] = (),
        *,
        evaluate: bool = True,
        since: float | None = None,
        before: TrainingDiagnostics | None = None,
    ) -> Record:
        """Return the federation as it stands, in figures.

        Args:
            parts: what the clients did in the round just over.
            evaluate: take accuracies.
            since: when the clock started (`time.perf_counter`).
            before: how the models stood before the round, where that is asked for.
        """
        began = time.perf_counter() if since is None else since
        local = tuple(part.accuracy for part in parts if part.accuracy is not None)
        made, figures, down = self.client.method.parametrization, list[dict[str, float]](), 0
        told = type(made).diagnostics is not Parametrization.diagnostics
        for number in self.participants if told else self.sampled_clients(self.server.round):
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
            measured=(before or TrainingDiagnostics()).compute(self) if evaluate else {},
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
        """Return the server's view of what client `number` would send now, and the truth; changes nothing.

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
        group = self.group_of(number, client.defense.group_size)
        if any(max(len(past.parts), 1) != len(group) for past in history):
            raise ValueError(f"expected earlier views of the clients {list(group)} together, got others")
        given = [None] * len(group) if data is None else [data] if isinstance(data, Batch) else list(data)
        if len(given) != len(group):
            raise ValueError(f"expected images for each of the clients {list(group)}, got {len(given)} batch(es)")
        seen, weights = [], []
        for member, images in zip(group, given, strict=True):
            if reason := self.client.method.exclusion_reason(self.server, member):
                raise ValueError(f"expected a client that still sends updates, got one that does not: {reason}")
            own = self.data[member]
            images = own.train if images is None else images
            start = prepare(
                client,
                self.clients[member],
                self.download(member),
                images,
                augment=own.augment if augment else None,
                key=self.round_key(member),
            )
            view, truth, done = observe(start, threat=threat, private_init=self.private_init, history=history)
            seen.append((view, truth))
            weights.append(done.upload.weight)
        return seen[0] if len(group) == 1 else combine_views(seen, weights)

    def accuracy(self, numbers: Iterable[int] | None = None, *, tuned: bool = False) -> list[float]:
        """Return the share of each client's test images classified right.

        Args:
            numbers: which clients; all participants by default.
            tuned: score the model after one more round of local training, not what the server sends now (with the
                client's own private tensors).
        """
        chosen = list(self.participants if numbers is None else numbers)
        if not tuned:
            return self._engine.accuracy(self, chosen)
        return [done.accuracy or 0.0 for done in self._engine.train(self, chosen, evaluate=True)]
