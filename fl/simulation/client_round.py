"""One client's round on real data, and what each side has of it afterwards: the server's view and the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl.client import Client, LocalInput, LocalResult, LocalTraining, gather_batches, local_update
from fl.defense import UnknownDefense, overrides
from fl.gradient import DEFENSE_DRAWS
from fl.local import sampling
from fl.local.hook_results import expect_batch
from fl.method import Download
from fl.runtime.module_copies import deep_copy
from fl.seeds import stream
from fl.simulation.nonfinite_updates import check_form
from fl.tensors import Payloads, Tensors, dense, detached_copies, flatten
from fl.types import Batch, Draws, Order, Phase, Scope, Task, Trace, Truth, Upload, frozen
from fl.view import ServerView, ThreatModel

if TYPE_CHECKING:
    from fl.data.augment import Augmentation


@dataclass(frozen=True)
class ClientState:
    """What a client keeps between rounds.

    Attributes:
        private: its own parameters.
        memory: what its method remembers.
        buffers: those of the model that it keeps.
        personal: "parameters" and "buffers" of a model that it predicts by and nothing else depends on
            (`Method.personal_method`); empty without one.
    """

    private: Tensors = field(default_factory=dict)
    memory: Payloads = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    personal: Payloads = field(default_factory=dict)

    def to_contiguous(self) -> ClientState:
        """Return this state with contiguous tensors (see the function `to_contiguous`)."""
        memory, personal = ({k: to_contiguous(v) for k, v in part.items()} for part in (self.memory, self.personal))
        return replace(self, private=to_contiguous(self.private), memory=memory, personal=personal)


def to_contiguous(values: Tensors) -> Tensors:
    """Return contiguous tensors.

    Layout steers rounding, and a state read back from a file has that of none but these.
    """
    return {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in values.items()}


@dataclass(frozen=True)
class Round:
    """One client's round: what it sends, keeps and fed, and its result before the defense touched the update.

    Attributes:
        trace: what was fed; empty where another process trained the client.
        accuracy: share of the client's test images classified right after training, where it was asked for.
    """

    upload: Upload
    state: ClientState
    trace: Trace
    result: LocalResult
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundKey:
    """Names one round of one client: every random number of it is a function of these.

    Attributes:
        seed: of the experiment.
        client: number of the client, from 0.
        round: number of the round, from 0.
    """

    seed: int = 0
    client: int = 0
    round: int = 0

    def stream(self, purpose: str) -> torch.Generator:
        """Return the random numbers for a purpose."""
        return stream(self.seed, purpose, self.client, self.round)


FIRST_ROUND = RoundKey()
"""The first round of client 0 under seed 0."""


@dataclass(frozen=True)
class PreparedRound:
    """One client's round before training: all that enters it.

    Attributes:
        client: the rule.
        state: what the client kept.
        download: what the server sent.
        trace: what the client feeds.
        buffers: of the model, all of them.
        weight: what its upload counts in the server's mean (`Method.aggregation_weight`).
        key: which round of which client it is.
        noise: for the defense.
        phases: of the training.
    """

    client: Client
    state: ClientState
    download: Download
    trace: Trace
    buffers: dict[str, Tensor]
    weight: float
    key: RoundKey
    noise: torch.Generator
    phases: tuple[Phase, ...]


def local_input(client: Client, state: ClientState, download: Download, round: int) -> LocalInput:
    """Return what the client's local training starts from in this round."""
    return LocalInput(
        shared=download.shared,
        private=state.private,
        buffers={**client.task.buffers, **download.buffers, **state.buffers},
        received=download.received,
        memory=state.memory,
        round=round,
    )


def prepare(
    client: Client,
    state: ClientState,
    download: Download,
    data: Batch,
    *,
    augment: Augmentation | None = None,
    key: RoundKey = FIRST_ROUND,
    phases: tuple[Phase, ...] | None = None,
) -> PreparedRound:
    """Gather all that enters a client's round.

    Args:
        client: the rule.
        state: what the client kept.
        download: what the server sent.
        data: the client's training images.
        augment: how these are changed, batch by batch, before they are fed; None leaves them.
        key: which round of which client it is.
        phases: of the training; None takes those of the method in this round.
    """
    phases = client.method.phases(client.task, key.round) if phases is None else phases
    order = sampling.plan_batches(phases, len(data), key.stream("order"))
    return PreparedRound(
        client=client,
        state=state,
        download=download,
        trace=_feed(client, data, order, key.stream("draws"), augment),
        buffers=local_input(client, state, download, key.round).buffers,
        weight=client.method.aggregation_weight(len(data)),
        key=key,
        noise=key.stream("defense"),
        phases=phases,
    )


def train(start: PreparedRound) -> Round:
    """Run a prepared round by the local rule."""
    trace = start.trace
    training = LocalTraining(phases=start.phases, draws=trace.draws, generator=start.noise, track_statistics=True)
    with torch.no_grad():
        result = local_update(
            start.client,
            local_input(start.client, start.state, start.download, start.key.round),
            gather_batches(trace.inputs, trace.labels, trace.order),
            training,
        )
    return finish(start, result)


def finish(start: PreparedRound, result: LocalResult) -> Round:
    """Return what a client sends and keeps, from the result of its training."""
    client, buffers = start.client, start.buffers
    with torch.no_grad():
        sent = client.defense.transform_update(result.sent(), start.noise)
    asked = {**start.download.shared, **{k: v for k, v in result.sent().items() if k not in result.update}}
    check_form(start.key.client, start.weight, sent, asked)
    shared = {name for name, scope in client.scopes(buffers).items() if scope is Scope.SHARED}
    _check_buffers(buffers, result.buffers)
    upload = Upload(
        client=start.key.client,
        weight=start.weight,
        update={name: sent[name] for name in result.update},
        extra={p: {name: sent[f"{p}/{name}"] for name in part} for p, part in result.extra.items()},
        buffers={name: buffers[name] - result.buffers[name] for name in sorted(shared)},
    )
    own = {k: v for k, v in result.buffers.items() if k not in shared}
    return Round(
        upload, ClientState(result.private, result.memory, own, _train_personal_model(start)), start.trace, result
    )


def _check_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse buffers that take another shape as a model is trained.

    Raises:
        ValueError: names the first of them.
    """
    for name, value in before.items():
        if after[name].shape != value.shape:
            raise ValueError(
                f"expected buffers that keep their shapes in training, got {name!r} of {tuple(value.shape)} before and "
                f"{tuple(after[name].shape)} after (an observer of quantization that has seen nothing yet, say): call "
                "the model once on any inputs first"
            )


def _train_personal_model(start: PreparedRound) -> Payloads:
    """Return the client's personal model after the round, trained on the batches of the other; empty without one."""
    method, before = start.client.method.personal_method(), start.state.personal
    if method is None or not before:
        return {}
    client = Client(start.client.base, method, UnknownDefense(wrapped=start.client.defense))
    with torch.no_grad():
        result = local_update(
            client,
            LocalInput(
                shared={},
                private=before["parameters"],
                buffers={name: dense(value) for name, value in before.get("buffers", {}).items()},
                received={"sent": start.download.shared},
                round=start.key.round,
            ),
            gather_batches(start.trace.inputs, start.trace.labels, start.trace.order),
            LocalTraining(draws=start.trace.draws, track_statistics=True),
        )
    return {"parameters": {name: dense(value) for name, value in result.private.items()}, "buffers": {**result.buffers}}


def _feed(client: Client, data: Batch, order: Order, generator: torch.Generator, augment: Augmentation | None) -> Trace:
    """Return the images a client feeds.

    As they are, or batch by batch where augmentation or the defense change them.
    """
    own: list[Tensor] = []
    if augment is not None or overrides(client.defense, "transform_batch"):
        fed, index, changed = [], [], []
        position = 0
        for steps in order:
            phase = []
            for step in steps:
                batches = []
                for chosen in step:
                    batch = data.take(chosen) if augment is None else augment(data.take(chosen), generator)
                    own.append(batch.inputs)
                    instead = client.defense.transform_batch(batch, client.task, generator)
                    batch = expect_batch(client.defense.name, instead, batch)
                    fed.append(batch)
                    index.append(chosen)
                    batches.append(position + torch.arange(len(batch)))
                    position += len(batch)
                phase.append(tuple(batches))
            changed.append(tuple(phase))
        # an empty tensor among them would change the layout in memory: only where there is nothing else
        parts = fed or [data.take(torch.empty(0, dtype=torch.int64))]
        inputs, labels = (torch.cat(part) for part in zip(*((b.inputs, b.labels) for b in parts), strict=True))
        order, indices = tuple(changed), torch.cat([*index, torch.empty(0, dtype=torch.int64)])
    else:
        flat = [chosen for steps in order for step in steps for chosen in step]
        indices = torch.cat([*flat, torch.empty(0, dtype=torch.int64)]).unique()
        inputs, labels = data.inputs[indices], data.labels[indices]
        order = tuple(
            tuple(tuple(torch.searchsorted(indices, chosen) for chosen in step) for step in steps) for steps in order
        )
    whole = Batch(inputs, labels)
    originals = torch.cat(own) if own and overrides(client.defense, "transform_batch") else None
    draws: Draws = tuple(tuple({} for _ in steps) for steps in order)
    if client.draws:  # else the batches need not be taken out here, too
        draws = tuple(tuple(client.draw(whole.take(step[0]), generator) for step in steps) for steps in order)
    return Trace(order, inputs, labels, indices, draws, originals)


def observe(
    start: PreparedRound,
    *,
    threat: ThreatModel | None = None,
    private_init: Tensors | None = None,
    history: tuple[ServerView, ...] = (),
) -> tuple[ServerView, Truth, Round]:
    """Run a prepared round and split it: what the server sees, and the truth it does not.

    The view shares no memory with the client: overwriting the client's tensors changes nothing in it.

    Args:
        start: the round.
        threat: what the server knows beside the update.
        private_init: what the client's private tensors started from in its first round, for a server that knows it.
        history: the server's earlier views of the same client, oldest first, for one that keeps some.

    Returns:
        The server's view, the truth, and the round.

    Raises:
        ValueError: the threat model keeps earlier views, and there are none.
    """
    threat = threat or ThreatModel()
    if threat.history_rounds and not history and start.key.round:
        raise ValueError(
            f"expected the earlier views as history under a threat model with history_rounds={threat.history_rounds}"
        )
    done = train(start)
    truth = _truth(start, done.trace, threat)
    view = replace(
        _view(start, done, threat, truth),
        private_init=detached_copies(private_init) if private_init and threat.knows_private_init else None,
        history=history[-threat.history_rounds :] if threat.history_rounds else (),
    )
    return view, truth, done


def _truth(start: PreparedRound, trace: Trace, threat: ThreatModel) -> Truth:
    """Return what the client fed and kept to itself."""
    client, state = start.client, start.state
    known = client.method.initial_memory_is_known and start.key.round == 0
    hidden: Tensors = {**state.private, **({} if known else flatten(state.memory, "memory/"))}
    if not client.method.train_mode:  # running statistics only matter where batch statistics are not used
        hidden.update({name: value for name, value in state.buffers.items() if value.is_floating_point()})
    if threat.knows_defense and not threat.knows_randomness:
        hidden.update(_defense_draws(trace.draws))
    return Truth(
        trace=trace,
        private=hidden,
        extractor=_generated_weights(client, {**start.download.shared, **state.private}),
    )


def _view(start: PreparedRound, done: Round, threat: ThreatModel, truth: Truth) -> ServerView:
    """Return what the server has of a round by itself, without what it kept of earlier ones."""
    download, trace, upload = start.download, done.trace, done.upload
    sent = {**upload.update, **flatten(upload.extra)}
    return ServerView(
        method=start.client.method,
        defense=start.client.defense,
        task=public_task(start.client),
        threat=threat,
        shared=download.shared,
        update=detached_copies({n: value for n, value in sent.items() if not start.client.defense.withholds(n)}),
        private={name: value.shape for name, value in truth.private.items()},
        schedule=sampling.batch_sizes(trace.order) if threat.knows_schedule and threat.knows_batch_size else None,
        batch_size=len(trace.inputs) if threat.knows_batch_size else None,
        labels=trace.labels.clone() if threat.knows_labels else None,
        buffers=download.buffers,
        buffers_after={k: download.buffers[k] - v for k, v in upload.buffers.items()} if threat.sees_buffers else None,
        received=download.received,
        order=_clone_order(trace.order) if threat.knows_order else None,
        draws=_clone_draws(trace.draws) if threat.knows_randomness else None,
        round=start.key.round,
    )


def public_task(client: Client) -> Task:
    """Return the client's task without what it keeps to itself: private initial weights and buffers are zero."""
    model = deep_copy(client.base.model)
    known = frozen(model)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in known and client.method.scope(name, client.task) is not Scope.SHARED:
                value.zero_()
    return replace(client.base, model=model)


def _generated_weights(client: Client, params: Tensors) -> dict[str, Tensor]:
    made = getattr(client.method.parametrization, "generates", None)
    if made is None:
        return {}
    with torch.no_grad():
        weights = client.method.parametrization.network(client.method.parametrization.lift(params), client.task)
    return {name: weights[name] for name in made(client.task)}


def _defense_draws(draws: Draws) -> dict[str, Tensor]:
    """Return what the defense drew, step by step, as private tensors of the client."""
    steps = {f"draws/{p}/{s}": drawn for p, steps in enumerate(draws) for s, drawn in enumerate(steps)}
    return {
        f"{step}/{name}": x
        for step, drawn in steps.items()
        for name, x in drawn.items()
        if name.startswith(DEFENSE_DRAWS)
    }


def _clone_order(order: Order) -> Order:
    return tuple(tuple(tuple(index.clone() for index in step) for step in steps) for steps in order)


def _clone_draws(draws: Draws) -> Draws:
    return tuple(tuple({k: v.clone() for k, v in step.items()} for step in steps) for steps in draws)
