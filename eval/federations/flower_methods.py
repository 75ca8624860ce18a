"""Methods of ours as Flower apps: a round in Flower is a round of `fl.federation.Federation`, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor

from eval.federations.flower import ClientFunction
from fl.client import Client
from fl.defense import Defense
from fl.method import Download, Method, ServerState
from fl.seeds import stream
from fl.simulation.client_round import ClientState, RoundKey, prepare, train
from fl.simulation.federation_state import ClientData, FederationState
from fl.tensors import Payloads, Tensors, Value, dense, flatten
from fl.types import Task, Upload

ARRAYS, CONFIG, METRICS, WEIGHT, ROUND = "arrays", "config", "metrics", "num-examples", "server-round"
"""Names that Flower's FedAvg expects or sets."""
STATE = "hyperleak-client"
"""The record of a run's state in which a client keeps its private tensors from round to round."""
PARTITION = "partition-id"
"""The entry of a node's config that says which client it is."""
KEPT = ("private", "memory", "buffers", "personal")
PER_CLIENT_RULES = {
    "broadcast": "its server sends each client something else",
    "begin_round": "its server keeps account of who takes part",
    "exclusion_reason": "its server excludes clients",
}
"""Hooks of a method that say what a strategy of Flower can't, and why."""


class MethodStrategy(FedAvg):
    """Takes the weighted mean of all clients' weights, and makes of it what a method's server makes.

    Attributes:
        method: of ours.
        task: of all clients.
        server: its state between rounds.
    """

    def __init__(self, method: Method, task: Task, server: ServerState) -> None:
        every = server.clients
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=every, min_available_nodes=every, weighted_by_key=WEIGHT
        )
        self.method = method
        self.task = task
        self.server = server

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return what the method's server sends next; None where no client sent anything."""
        given = list(replies)
        mean, metrics = super().aggregate_train(server_round, given)
        uploads = [] if mean is None else [self._joined_upload(mean, given)]
        self.server = self.method.aggregate(self.server, uploads, self.task)
        return (None if mean is None else sent_arrays(self.server)), metrics

    def _joined_upload(self, mean: ArrayRecord, replies: Sequence[Message]) -> Upload:
        """Return the one upload that stands for all: their mean has the weight of all (`fl.simulation.uploads`)."""
        weights = [_weight(reply) for reply in replies if not reply.has_error()]
        after = _tensors(mean)
        update = {name: dense(value) - after[name].to(dense(value)) for name, value in self.server.shared.items()}
        buffers = {
            name: value - after[name].to(value) if name in after else torch.zeros_like(value)
            for name, value in self.server.buffers.items()
        }
        return Upload(0, sum(weights), update, buffers=buffers)  # type: ignore[arg-type]


def client_app(
    method: Method,
    task: Task,
    data: Sequence[ClientData] | Callable[[int], ClientData],
    *,
    defense: Defense | None = None,
    seed: int = 0,
    mods: Sequence[Callable[[Message, Context, ClientFunction], Message]] = (),
) -> ClientApp:
    """Return an app whose nodes train by a method's local rule; node i is client `partition-id` of its config.

    What a client keeps to itself from round to round lies in the state of the node's run and is not sent.

    Args:
        method: whose server needs no more than the mean (`Method.aggregates_mean_only`) and treats clients alike.
        task: of all clients, the same as the server's.
        data: each client's images, or what returns those of client number i.
        defense: of the clients.
        seed: of the federation, the same as the server's; the same numbers are drawn as in ours.
        mods: of the app, such as `audit_mod(...)`.

    Raises:
        ValueError: the method's server does something that a mean can't; says what.
    """
    _check(method)
    client = Client(task, method, defense or Defense())
    app = ClientApp(mods=list(mods))

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        number = _client_number(context)
        own = data(number) if callable(data) else data[number]
        begun = FederationState(client, [own], seed)
        round = int(message.content.config_records[CONFIG][ROUND]) - 1
        download = _download(begun, message.content.array_records[ARRAYS])
        start = prepare(
            client,
            _kept_state(context) or begun.clients[0],
            download,
            begun.data[0].train,
            augment=own.augment,
            key=RoundKey(seed=seed, client=number, round=round),
        )
        done = train(start)
        _keep_state(context, done.state)
        return Message(_reply(download, done.upload), reply_to=message)

    return app


def server_app(
    method: Method,
    task: Task,
    *,
    clients: int,
    rounds: int,
    seed: int = 0,
    wrap: Callable[[Strategy], Strategy] = lambda strategy: strategy,
    finish: Callable[[Result], None] = lambda result: None,
) -> ServerApp:
    """Return an app that serves a method: all clients take part in every round.

    Args:
        method: as for `client_app`.
        task: of all clients.
        clients: how many there are.
        rounds: to run.
        seed: of the federation.
        wrap: what to put around the strategy, such as `audit_strategy`.
        finish: gets the result at the end, to keep its arrays.

    Raises:
        ValueError: the method's server does something that a mean can't; says what.
    """
    _check(method)
    known = Client(task, method, Defense()).task  # what the method makes of the network: FedBABU freezes its head
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        params = method.initial_parameters(known, stream(seed, "init"))
        server = method.init_server(params, known, clients, stream(seed, "server"))
        strategy = wrap(MethodStrategy(method, known, server))
        finish(strategy.start(grid=grid, initial_arrays=sent_arrays(server), num_rounds=rounds))

    return app


def sent_arrays(server: ServerState) -> ArrayRecord:
    """Return what a server sends: shared parameters and buffers, but for those of integers, which never change."""
    buffers = {name: value for name, value in server.buffers.items() if value.is_floating_point()}
    return _record({**server.shared, **buffers})


def _check(method: Method) -> None:
    if not method.aggregates_mean_only:
        raise ValueError(
            f"expected a method whose server needs no more than the clients' mean, got {method.name}: its server looks "
            "at single updates, which Flower's FedAvg does not hand on; simulate it by `fl.federation.Federation`"
        )
    for hook, why in PER_CLIENT_RULES.items():
        if getattr(type(method), hook) is not getattr(Method, hook):
            raise ValueError(
                f"expected a method whose server treats all clients alike, got {method.name}: {why}; simulate it by "
                "`fl.federation.Federation`"
            )


def _client_number(context: Context) -> int:
    if PARTITION not in context.node_config:
        raise ValueError(
            f"expected {PARTITION} in the node's config, which says which client it is; start the SuperNode with "
            f"--node-config '{PARTITION}=0'"
        )
    return int(context.node_config[PARTITION])


def _download(begun: FederationState, record: ArrayRecord) -> Download:
    """Return what the server sent as our own clients get it."""
    arrays = _tensors(record)
    shared: Tensors = {name: arrays[name] for name in begun.server.shared}
    buffers = {name: arrays.get(name, value) for name, value in begun.server.buffers.items()}
    return Download(shared, buffers)


def _reply(download: Download, upload: Upload) -> RecordDict:
    """Return a client's weights after training, and the weight that they have in the mean."""
    after = {name: dense(value) - dense(upload.update[name]) for name, value in download.shared.items()}
    buffers = {n: v - upload.buffers[n] for n, v in download.buffers.items() if v.is_floating_point()}
    return RecordDict({ARRAYS: _record({**after, **buffers}), METRICS: MetricRecord({WEIGHT: upload.weight})})


def _kept_state(context: Context) -> ClientState | None:
    """Return what the client kept in its last round of this run; None before its first."""
    record = context.state.array_records.get(STATE)
    if record is None:
        return None
    kept: dict[str, Payloads] = {part: {} for part in KEPT}
    for key, value in _tensors(record).items():
        part, _, rest = key.partition("/")
        payload, _, name = rest.rpartition("/")
        kept[part].setdefault(payload, {})[name] = value
    private, buffers = (kept[part].get("", {}) for part in ("private", "buffers"))
    plain = {name: dense(value) for name, value in buffers.items()}
    return ClientState(private, kept["memory"], plain, kept["personal"])


def _keep_state(context: Context, state: ClientState) -> None:
    parts: dict[str, Mapping[str, Value]] = {
        "private": state.private,
        "memory": flatten(state.memory),
        "buffers": state.buffers,
        "personal": flatten(state.personal),
    }
    flat = {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
    context.state[STATE] = _record(flat)


def _record(values: Mapping[str, Value]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.array(dense(value).detach().cpu().numpy())) for name, value in values.items()})


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def _weight(reply: Message) -> float:
    (metrics,) = reply.content.metric_records.values()
    return float(metrics[WEIGHT])
