"""Audits inside of a Flower federation: a mod for clients, a strategy for servers, and a mod that only keeps updates.

What must not leave is answered by an error in its place. Strategies of Flower leave errors out of their mean and go on
with the other replies. Unchanged weights would pull that mean back and say that a client had trained; no answer at all
would keep the server waiting until its timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.fail_closed import attempt
from eval.federations.file_names import as_file_name, free_file
from eval.federations.flower_messages import (
    SentWeights,
    UpdateReader,
    carries_numbers,
    round_of,
    with_arrays,
)
from eval.federations.optimizer_watch import OptimizerWatch, watch_optimizers
from eval.federations.response import LeakageError, OnLeak, Responder
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screener, Screening
from fl.inputs.form import Inputs

ClientFunction = Callable[[Message, Context], Message]

WITHHELD = 6
"""Flower's code for a mod whose precondition does not hold (`ErrorCode.MOD_FAILED_PRECONDITION`)."""
STATE = "hyperleak"
"""The record of a run's state in which a client keeps that it has stopped."""
OUT = "hyperleak-audit"
"""The folder of reports where none is named, in the folder of the process."""
log = logging.getLogger("flwr.hyperleak")  # below Flower's own logger, whose lines its processes show


@dataclass(frozen=True)
class Exchange:
    """What a client was sent and what it answered.

    Attributes:
        sent: the weights it started from.
        reply: its answer, with content.
        origin: where the update comes from.
        watch: what was seen of the optimizer; None where nobody could look.
    """

    sent: SentWeights
    reply: Message
    origin: Mapping[str, str]
    watch: OptimizerWatch | None = None

    def read(self, training: TrainingFacts, run_config: Mapping[str, Any]) -> RecordedUpdate:
        """Return the update that was sent.

        Raises:
            UnreadableError: there is none that can be audited.
        """
        reader = UpdateReader(training=training, run_config=run_config)
        watched = {} if self.watch is None else self.watch.facts()
        return reader.read(self.sent, self.reply.content, origin=self.origin, watched=watched)

    def may_go_on(self, respond: Responder, training: TrainingFacts, run_config: Mapping[str, Any]) -> bool:
        """Return whether the reply may go on; where noise is the policy, its arrays are replaced.

        What can't be read can't be screened, and is answered like any screening that fails.

        Raises:
            LeakageError: the policy is to stop, and the reply must not go on.
        """
        if respond.reports is not None:
            folder = respond.reports.folder / f"run-{as_file_name(self.origin['run'])}"
            respond = replace(respond, reports=replace(respond.reports, folder=folder))

        def unread(words: str) -> RecordedUpdate:
            nonlocal respond
            failed = Screening(verdict="failed", reason=f"the reply can't be screened: {words}")
            respond = replace(respond, screen=lambda _: failed)
            return RecordedUpdate(before={}, after={}, origin=self.origin)

        recorded = attempt(lambda: self.read(training, run_config), unread)
        response = respond(recorded)
        log.info("round %s, client %s: %s", self.origin.get("round", "?"), self.origin["client"], response.words)
        if response.action == "withhold" or not response.changed:
            return response.action == "send"
        return attempt(lambda: with_arrays(self.reply.content, recorded, response.after), lambda _: False)


@dataclass(frozen=True)
class AuditMod:
    """Audits what a `ClientApp` sends before it leaves: `ClientApp(mods=[audit_mod(...)])`.

    It belongs first among mods, to see what the others have done to a reply. Metrics are not audited. In the place of
    an update that must not leave it answers by an error, whose reason says nothing of what was found: the server reads
    it. Under "stop" it answers so to all further messages of the run.

    Attributes:
        respond: screens an update and decides what is to be done with it.
        training: facts of training that neither messages, nor the app's config, nor PyTorch's optimizer tell.
    """

    respond: Responder
    training: TrainingFacts = field(default_factory=TrainingFacts)

    def __call__(self, message: Message, context: Context, call_next: ClientFunction) -> Message:
        """Pass a message on to the app, and its reply back as far as it may leave."""
        if STATE in context.state.config_records:
            return _refuse(message, "this client sends nothing more in this run")
        reply, exchange = _pass_on(message, context, call_next)
        if exchange is None:
            return reply
        try:
            goes = exchange.may_go_on(self.respond, self.training, context.run_config)
        except LeakageError:
            context.state[STATE] = ConfigRecord({"stopped": True})
            return _refuse(message, "withheld by the client, which sends nothing more in this run")
        return reply if goes else _refuse(message, "withheld by the client")


@dataclass(frozen=True)
class RecordMod:
    """Keeps every update of a `ClientApp` in a folder and sends it as it is: `ClientApp(mods=[record_mod("updates")])`.

    Attributes:
        folder: for the files, one an update.
        training: facts that neither messages, nor the app's config, nor PyTorch's optimizer tell.
    """

    folder: Path
    training: TrainingFacts = field(default_factory=TrainingFacts)

    def __call__(self, message: Message, context: Context, call_next: ClientFunction) -> Message:
        """Pass a message on to the app, and its reply back as it is."""
        reply, exchange = _pass_on(message, context, call_next)
        if exchange is None:
            return reply
        attempt(
            lambda: _keep(exchange.read(self.training, context.run_config), self.folder),
            lambda words: log.warning("client %s: not recorded: %s", context.node_id, words),
        )
        return reply


class AuditStrategy(Strategy):
    """Audits what each client sent before another strategy aggregates it.

    An update that must not be used is left out of the replies that the other strategy gets; the server has received it
    all the same. Under "stop" the run ends by a `LeakageError`.

    Attributes:
        strategy: the one that samples, aggregates and evaluates.
        respond: screens an update and decides what is to be done with it.
        training: facts of training that neither messages nor the app's config tell.
        run_config: of the app (`context.run_config`), for facts of training.
    """

    def __init__(
        self,
        strategy: Strategy,
        respond: Responder,
        *,
        training: TrainingFacts | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.strategy = strategy
        self.respond = respond
        self.training = training or TrainingFacts()
        self.run_config = dict(run_config or {})
        self._sent: dict[int, SentWeights] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the other strategy's messages, and remember what each node is sent."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._sent = {message.metadata.dst_node_id: SentWeights.of(message.content) for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return what the other strategy makes of the replies that may be used."""
        return self.strategy.aggregate_train(server_round, [r for r in replies if self._may_be_used(server_round, r)])

    def _may_be_used(self, server_round: int, reply: Message) -> bool:
        if reply.has_error() or not carries_numbers(reply.content):
            return True
        node = reply.metadata.src_node_id
        sent = self._sent.get(node, SentWeights({}, {}))
        origin = {**_origin("server", reply, node), "round": str(server_round)}
        return Exchange(sent, reply, origin).may_go_on(self.respond, self.training, self.run_config)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the other strategy's messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return what the other strategy makes of the replies."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the other strategy's summary, and that its clients' updates are audited."""
        self.strategy.summary()
        log.info("\t└──> Audited before %s; on leak: %s", type(self.strategy).__name__, self.respond.on_leak)


def audit_mod(
    model: Callable[[], nn.Module],
    *,
    input_shape: Sequence[int] | Inputs,
    on_leak: OnLeak = "withhold",
    training: TrainingFacts | None = None,
    out: str | Path | None = OUT,
    record: bool = False,
    **screening: Any,
) -> AuditMod:
    """Return a mod that audits what a `ClientApp` sends before it leaves.

    Args:
        model: makes the network that the app trains, such as its class.
        input_shape: of one input, such as (3, 32, 32), or an example of inputs that no shape describes.
        on_leak: "withhold" answers by an error in the place of an update that must not leave, or can't be audited.
            "stop" does so from then on in the whole run, "noise" adds noise until nothing is found, "warn" only says
            so.
        training: facts of training that neither messages, nor the app's config, nor PyTorch's optimizer tell.
        out: folder for the reports, a page a round; None writes none.
        record: whether updates are kept there, too.
        **screening: `mean`, `std`, `loss`, `output`, `head`, `input_range`, `categories`, `seconds`, `allowed` and
            `seed` of `Screener`.
    """
    screen = Screener(model=model, input_shape=input_shape, **screening)
    return AuditMod(_responder(screen, on_leak, out, record), training or TrainingFacts())


def audit_strategy(
    strategy: Strategy,
    model: Callable[[], nn.Module],
    *,
    on_leak: OnLeak = "withhold",
    training: TrainingFacts | None = None,
    run_config: Mapping[str, Any] | None = None,
    out: str | Path | None = OUT,
    **screening: Any,
) -> AuditStrategy:
    """Return a strategy that audits what each client sent before another aggregates it.

    Args:
        strategy: any strategy of `flwr.serverapp.strategy`.
        model: makes the network that clients train, such as its class.
        on_leak: "withhold" leaves an update out of the mean, "stop" ends the run, "noise" adds noise until nothing is
            found, "warn" only says so.
        training: facts of training that neither messages nor the app's config tell, such as the clients' optimizer.
        run_config: of the app (`context.run_config`), which has facts of training.
        out: folder for the reports, a page a round; None writes none.
        **screening: `input_shape`, and whatever else of `Screener`'s settings.
    """
    respond = _responder(Screener(model=model, **screening), on_leak, out, record=False)
    return AuditStrategy(strategy, respond, training=training, run_config=run_config)


def record_mod(folder: str | Path, *, training: TrainingFacts | None = None) -> RecordMod:
    """Return a mod that keeps every update of a `ClientApp` in a folder and audits nothing.

    Args:
        folder: for files that `audit_recorded` and `hyperleak audit update` read.
        training: facts of training that neither messages, nor the app's config, nor PyTorch's optimizer tell.
    """
    return RecordMod(Path(folder).absolute(), training or TrainingFacts())


def with_mod(app: ClientApp, mod: Callable[[Message, Context, ClientFunction], Message]) -> ClientApp:
    """Return an app that passes all messages of another through a mod: for an app whose code stays as it is."""
    return _AppWithMod(app, mod)


class _AppWithMod(ClientApp):
    def __init__(self, app: ClientApp, mod: Callable[[Message, Context, ClientFunction], Message]) -> None:
        super().__init__()
        self.app = app
        self.mod = mod

    def __call__(self, message: Message, context: Context) -> Message:
        return self.mod(message, context, self.app)


def recorded_update(
    sent: Message,
    reply: Message,
    *,
    training: TrainingFacts | None = None,
    run_config: Mapping[str, Any] | None = None,
) -> RecordedUpdate:
    """Return the update that two messages carry, of an app that knows nothing of an audit.

    Args:
        sent: what the server sent to train on.
        reply: the client's answer.
        training: facts of training that the messages don't tell.
        run_config: of the app.

    Raises:
        UnreadableError: they don't belong together, or carry no single update.
    """
    origin = _origin("messages", sent, sent.metadata.dst_node_id)
    return Exchange(SentWeights.of(sent.content), reply, origin).read(training or TrainingFacts(), run_config or {})


def audit_recorded(folder: str | Path, screen: Callable[[RecordedUpdate], Screening]) -> dict[Path, Screening]:
    """Screen all updates that a folder and those in it hold, and return what was found by file.

    Args:
        folder: that `record_mod` or an audit with `record=True` has filled.
        screen: as a rule a `Screener`.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(Path(folder).rglob("*.npz"))
    if not files:
        raise FileNotFoundError(f"expected recorded updates (.npz) in {folder}, got none")
    return {path: screen(RecordedUpdate.load(path)) for path in files}


def _responder(screen: Screener, on_leak: OnLeak, out: str | Path | None, record: bool) -> Responder:
    reports = None if out is None else RoundReports(folder=Path(out).absolute(), record=record)
    return Responder(screen=screen, on_leak=on_leak, reports=reports)


def _pass_on(message: Message, context: Context, call_next: ClientFunction) -> tuple[Message, Exchange | None]:
    """Return the app's reply, and what was exchanged; None where the reply carries no arrays."""
    sent, origin = SentWeights.of(message.content), _origin("client", message, context.node_id)
    with watch_optimizers() as watch:
        reply = call_next(message, context)
    if reply.has_error() or not carries_numbers(reply.content):
        return reply, None
    return reply, Exchange(sent, reply, origin, watch)


def _origin(side: str, message: Message, node: int) -> dict[str, str]:
    """Return where an update comes from: on which side it was seen, and the run, node and round as far as known."""
    found = {"framework": "flower", "side": side, "run": str(message.metadata.run_id), "client": str(node)}
    number = round_of(message)
    return {**found, "round": number} if number else found


def _keep(recorded: RecordedUpdate, folder: Path) -> None:
    """Save an update in a folder of its run and round."""
    origin = recorded.origin
    place = folder / f"run-{as_file_name(origin['run'])}" / f"round-{as_file_name(origin.get('round', 'unknown'))}"
    place.mkdir(parents=True, exist_ok=True)
    recorded.save(free_file(place / f"client-{as_file_name(origin['client'])}.npz"))


def _refuse(message: Message, words: str) -> Message:
    """Return an error in the place of a reply; the server reads its reason."""
    return Message(Error(code=WITHHELD, reason=f"hyperleak: {words}"), reply_to=message)
