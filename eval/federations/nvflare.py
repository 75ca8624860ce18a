"""A filter of NVFlare that audits every update before it is passed on, on a client or on the server.

On a client it decides what leaves. On the server it decides what enters the mean: what arrived there, the server knows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import nvflare
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor, nn

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts, usable_facts
from eval.audit.user_model import load_user_model
from eval.federations.dxo_payload import (
    Received,
    ReceivedWeights,
    read_tensors,
    weight_of_withheld,
    withhold_meta,
    write_like,
)
from eval.federations.fail_closed import attempt
from eval.federations.optimizer_watch import OptimizerWatch, watch_optimizers
from eval.federations.reply_checks import (
    Beside,
    UnreadableError,
    refuse_differences,
    refuse_unseen,
    refuse_weights,
)
from eval.federations.response import LeakageError, OnLeak, Responder, Response
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screener, Screening

AUDITED = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
"""The kinds of data that are updates."""
TRAINING_KEY = "hyperleak_training"
"""Where in a DXO's meta a trainer may say how it trained; on a client the filter takes it out again."""
FACTS = [field.name for field in fields(TrainingFacts)]
"""What may be said of training."""
SEEN_FACTS = {"optimizer", "lr", "momentum", "weight_decay", "steps"}
"""What is seen of an optimizer of PyTorch; what is not seen of one that took steps is not known."""
RECEIVED_KEY = "_hyperleak_received_"
"""The property of a task's context in which a filter among `task_data_filters` leaves the weights that came."""
SERVER_HEADERS = (ReservedHeaderKey.PEER_CTX, ReservedHeaderKey.PEER_PROPS, "fl_client")
"""What NVFlare's server itself writes into the header of a result that has come."""
UNSEEN = (
    "the weights that {site} was sent with this task were not seen: name the filter among task_data_filters as well, "
    "behind whatever decodes them"
)


class LeakageFilter(DXOFilter):  # type: ignore[misc]
    """A filter that audits updates and lets pass what gives nothing away.

    It belongs at the end of a `task_result` chain. It learns the weights before training from the task, by an event.
    Where a client passes them on to another process unread, or where a site's own privacy policy names it, it has to
    stand in the `task_data` chain as well: there it only looks.

    What is withheld is replaced by the weights that came (or a difference of zeros), which count next to nothing in a
    mean that weighs by steps, as those of FedAvg and ScatterAndGather do. So the round goes on. An empty DXO does not
    do: if all are empty FedAvg empties the global model, and workflows on `BaseFedAvg.aggregate` end the job. Nor does
    a return code: whether a workflow bears it depends on its settings. What cannot be read as an update is blocked by
    an exception, of which NVFlare makes such a code.

    All settings are plain JSON.

    Args:
        model: `module:function` that returns the model, or the id of a component that is one.
        input_shape: shape of one input, such as [3, 32, 32].
        on_leak: "stop" ends the job, "withhold" passes on an unchanged model in the update's place, "noise" adds noise
            until no attack of the audit succeeds, "warn" passes the update on and says so. What could not be audited
            is treated like a leak.
        training: how the site trains, as far as known, by the names of `TrainingFacts` (optimizer, lr, ...).
            What PyTorch's optimizers are seen to do in a client's own process counts more, and most what a trainer
            says of an update in its meta, under "hyperleak_training". Steps that none of them tells are the meta's
            `NUM_STEPS_CURRENT_ROUND`.
        screening: settings of `Screener` by name: seconds, allowed, mean, std, loss, output, head, input_range,
            categories, seed.
        out: folder of the reports, seen from the job's run folder where it is no absolute path.
        record: whether to keep every update there as well, for `hyperleak audit update`.

    Raises:
        ValueError: a setting that is unknown or does not fit.
    """

    def __init__(
        self,
        model: str,
        input_shape: Sequence[int],
        on_leak: OnLeak = "withhold",
        training: Mapping[str, Any] | None = None,
        screening: Mapping[str, Any] | None = None,
        out: str = "hyperleak",
        record: bool = False,
    ) -> None:
        super().__init__(supported_data_kinds=AUDITED, data_kinds_to_filter=None)
        # As they were given: NVFlare's job API reads the settings for the job's config off the object.
        self.model, self.input_shape, self.on_leak, self.training = model, input_shape, on_leak, training
        self.screening, self.out, self.record = screening, out, record
        self._facts = _known("training", training or {}, FACTS)
        TrainingFacts(**self._facts)  # refuses what no client can have
        self._received = ReceivedWeights()
        self._watching, self._watch = ExitStack(), OptimizerWatch(None)
        self._rounds: dict[str, int | None] = {}
        self._component: object = None
        known = [field.name for field in fields(Screener) if field.name not in {"model", "input_shape"}]
        settings = _known("screening", screening or {}, known)
        screener = Screener(model=self._make_model, input_shape=(*input_shape,), **settings)
        self._responder = Responder(screen=screener, on_leak=on_leak)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remember the weights of a task that is carried out (on a client) or sent (on the server), and watch it."""
        super().handle_event(event_type, fl_ctx)
        if self._only_looks():
            return
        if event_type in {EventType.BEFORE_TASK_EXECUTION, EventType.AFTER_TASK_EXECUTION}:  # on clients alone
            self._watching.close()  # also where the task before ended in an error
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            self._watch = self._watching.enter_context(watch_optimizers(all_threads=True))
        if event_type == EventType.AFTER_TASK_DATA_FILTER:
            site, task = _site(fl_ctx), str(fl_ctx.get_prop(FLContextKey.TASK_ID))
            sent = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            self._rounds[site] = _round(sent)
            attempt(
                lambda: self._received.remember(site, task, _weights(sent), _round(sent)),
                lambda words: self.log_debug(fl_ctx, f"the task holds no weights that can be read: {words}"),
            )

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Audit a result, or look at the weights that came with a task.

        Raises:
            ContentBlockedException: the result can neither be audited nor replaced, so it must not be passed on.
            UnsafeJobError: `on_leak` is "stop", and the result must not leave this client.
        """
        if self._only_looks():
            self._leave_for_the_result(shareable, fl_ctx)
            return shareable
        if reason := attempt(lambda: _unseen_content(shareable, _on_server(fl_ctx)), str):
            self._block(reason, fl_ctx)
            return shareable
        if shareable.get_return_code() != ReturnCode.OK:
            return _without_content(shareable)
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Return what is passed on in place of an update, or None for the update as it is."""
        recorded = attempt(lambda: self._record(dxo, fl_ctx), str)
        if isinstance(recorded, str):  # unreadable, or odd facts of training
            self._block(recorded, fl_ctx)
            return None
        responder = self._responder_in(fl_ctx)
        if excess := Beside.of(dxo.meta).excess:
            reason = f"the meta of the update holds {excess}: no attack looks at it"
            part = Screening(verdict="failed", reason=reason)
            responder = replace(responder, screen=lambda _: part)
        try:
            response = responder(recorded)
        except LeakageError as error:
            self._stop(str(error), fl_ctx)
        answer = attempt(lambda: _answer(dxo, recorded, response), str)
        if isinstance(answer, str):
            self._block(answer, fl_ctx)
            return None
        return answer

    def _only_looks(self) -> bool:
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)

    def _leave_for_the_result(self, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Put the weights that came with a task where the filter in the other chain finds them."""
        attempt(
            lambda: fl_ctx.set_prop(
                RECEIVED_KEY,
                Received(read_tensors(_weights(shareable)), _round(shareable)),
                private=True,
                sticky=False,
            ),
            lambda words: self.log_debug(fl_ctx, f"the task holds no weights that can be read: {words}"),
        )

    def _record(self, dxo: DXO, fl_ctx: FLContext) -> RecordedUpdate:
        """Return the update with all that matters for an attack; takes what is said of training out of the meta.

        Raises:
            ValueError: it is none that can be audited, or what is said of training is wrong; says why.
        """
        site = _site(fl_ctx)
        remembered = self._received.take(site, str(fl_ctx.get_prop(FLContextKey.TASK_ID)))
        received = remembered or fl_ctx.get_prop(RECEIVED_KEY)
        meta = dict(dxo.get_meta_props() or {})
        said = meta.pop(TRAINING_KEY, None)
        dxo.remove_meta_props([TRAINING_KEY])
        if received is None:
            raise UnreadableError(UNSEEN.format(site=site))
        if algorithm := meta.get(MetaKey.PROCESSED_ALGORITHM):
            raise UnreadableError(f"the update is encoded by {algorithm}: the filter has to stand before that")
        after = _after(dxo, received.weights)
        before = dict(received.weights)
        if said is not None and not isinstance(said, Mapping):
            raise UnreadableError(
                f"expected facts of training by name under {TRAINING_KEY!r}, got {type(said).__name__}"
            )
        told = _known(TRAINING_KEY, said or {}, FACTS)
        seen, self._watch = usable_facts(self._watch.facts()), OptimizerWatch(None)
        settings = {name: value for name, value in self._facts.items() if not seen or name not in SEEN_FACTS}
        facts = settings | seen | told
        steps = meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)
        if facts.get("steps") is None and isinstance(steps, Real):
            facts |= usable_facts({"steps": float(steps) // 1})
        origin = {
            **self._origin(fl_ctx),
            "round": str(received.round),
            "data kind": str(DataKind(dxo.data_kind).value),
            "weight in the mean": str(steps),
            "filters before": ", ".join(dxo.get_filter_history() or ()),
            "beside the update, not looked at": Beside.of(meta).words,
        }
        said_of_it = {name: words for name, words in origin.items() if words}
        return RecordedUpdate(before=before, after=after, training=TrainingFacts(**facts), origin=said_of_it)

    def _origin(self, fl_ctx: FLContext) -> dict[str, str]:
        """Return where a result comes from."""
        site = _site(fl_ctx)
        return {
            "framework": f"NVFlare {nvflare.__version__}",
            "job": str(fl_ctx.get_job_id("")),
            "client": site,
            "round": str(self._rounds.get(site)),
            "seen by": "server" if _on_server(fl_ctx) else "client",
        }

    def _responder_in(self, fl_ctx: FLContext) -> Responder:
        """Return what audits updates of this job, and where it writes its reports."""

        def find_folder() -> None:
            run = Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id()))
            self._responder = replace(self._responder, reports=RoundReports(folder=run / self.out, record=self.record))
            self._component = None if ":" in self.model else fl_ctx.get_engine().get_component(self.model)

        if self._responder.reports is None:
            attempt(
                find_folder,
                lambda words: self.log_error(fl_ctx, f"no reports can be written: {words}", fire_event=False),
            )
        return self._responder

    def _make_model(self) -> nn.Module:
        if ":" in self.model:
            return load_user_model(self.model).model
        if not isinstance(self._component, nn.Module):
            raise ValueError(f"expected module:function or the id of a model component, got {self.model!r}")
        return copy.deepcopy(self._component)

    def _block(self, reason: str, fl_ctx: FLContext) -> None:
        """Let a result that can't be audited pass under "warn", and otherwise raise what keeps NVFlare from that."""
        failed = Screening(verdict="failed", reason=f"the result can't be audited: {reason}")
        responder = replace(self._responder_in(fl_ctx), screen=lambda _: failed)
        try:
            response = responder(RecordedUpdate(before={}, after={}, origin=self._origin(fl_ctx)))
        except LeakageError as error:
            self._stop(str(error), fl_ctx)
        if response.action == "withhold":
            raise ContentBlockedException(f"blocked, since it could not be audited: {reason}")
        self.log_warning(fl_ctx, f"passed on without an audit: {reason}", fire_event=False)

    def _stop(self, reason: str, fl_ctx: FLContext) -> NoReturn:
        """End the job."""
        if _on_server(fl_ctx):
            self.system_panic(reason, fl_ctx)
            raise ContentBlockedException(reason)
        raise UnsafeJobError(reason)  # the one error of a client's filter upon which the server always ends the job


def _known(name: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return settings that stand together under a name; a ValueError says which is unknown."""
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"expected of {', '.join(known)} in `{name}`, got {unknown[0]!r}")
    return dict(given)


def _on_server(fl_ctx: FLContext) -> bool:
    return fl_ctx.get_process_type() in {ProcessType.SERVER_JOB, ProcessType.SERVER_PARENT}


def _site(fl_ctx: FLContext) -> str:
    """Return the name of the client that trains."""
    peer = fl_ctx.get_peer_context()
    return str((peer if _on_server(fl_ctx) and peer is not None else fl_ctx).get_identity_name())


def _round(task: Shareable) -> int | None:
    """Return the round that a task says it belongs to, or None."""
    said = task.get_header(AppConstants.CURRENT_ROUND)
    return int(said) if isinstance(said, int) else None


def _weights(shareable: object) -> dict[str, object]:
    """Return the weights that a task holds, as they are.

    Raises:
        UnreadableError: it holds none.
    """
    try:
        dxo = from_shareable(shareable)
    except (AttributeError, ValueError) as error:
        raise UnreadableError(str(error)) from error
    if dxo.data_kind != DataKind.WEIGHTS or dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM) or not dxo.data:
        raise UnreadableError(f"expected plain weights, got {dxo.data_kind}")
    return dict(dxo.data)


def _after(dxo: DXO, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights after training.

    Raises:
        UnreadableError: they are no arrays, or not those of the weights before.
    """
    sent = read_tensors(dxo.data)
    for name, value in sent.items():
        if name not in before:
            raise UnreadableError(f"the update holds {name!r}, which the weights before do not")
        if value.shape != before[name].shape:
            shapes = f"{tuple(value.shape)} for {tuple(before[name].shape)}"
            raise UnreadableError(f"the update has {name!r} in another shape than the weights before, {shapes}")
        if value.is_floating_point() != before[name].is_floating_point():
            kinds = f"{value.dtype} for {before[name].dtype}"
            raise UnreadableError(f"the update has {name!r} encoded, {kinds}: the filter has to stand before that")
    if dxo.data_kind == DataKind.WEIGHTS:
        refuse_differences({name: before[name] for name in sent}, sent)
        return sent
    refuse_weights({name: before[name] for name in sent}, sent)
    return {name: before[name] + value for name, value in sent.items()}


def _unchanged(dxo: DXO, before: Mapping[str, Tensor]) -> DXO:
    """Turn an update into one that changes nothing and counts next to nothing."""
    difference = dxo.data_kind == DataKind.WEIGHT_DIFF
    data = {name: torch.zeros_like(before[name]) if difference else before[name] for name in dxo.data}
    dxo.data = write_like(data, dxo.data)
    steps = weight_of_withheld(read_tensors(dxo.data))  # by the types in which they go out
    dxo.meta = withhold_meta(dxo.meta or {}) | {MetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    return dxo


def _answer(dxo: DXO, recorded: RecordedUpdate, response: Response) -> DXO | None:
    """Return what is passed on in place of an update, or None for the update as it is."""
    if response.action == "withhold":
        return _unchanged(dxo, recorded.before)
    if not response.changed:
        return None
    base = recorded.before if dxo.data_kind == DataKind.WEIGHT_DIFF else {}
    changed = {name: value - base[name] if base else value for name, value in response.after.items()}
    dxo.data = write_like(changed, dxo.data)
    return dxo


def _unseen_content(shareable: Shareable, on_server: bool) -> str:
    """Return "" for a result that is an update by itself, or that holds no more than may leave unseen.

    Raises:
        UnreadableError: it holds more.
    """
    own = SERVER_HEADERS if on_server else ()
    headers = shareable.get(ReservedHeaderKey.HEADERS) or {}
    refuse_unseen({key: value for key, value in headers.items() if key not in own}, "the header of the result")
    if shareable.get_return_code() != ReturnCode.OK:
        return ""
    content, what = {key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS}, "no DXO"
    with suppress(ValueError):
        dxo = from_shareable(shareable)
        what = str(dxo.data_kind)
        if dxo.data_kind in AUDITED and dxo.data:
            content.pop(AppConstants.DXO)
    refuse_unseen(content, f"the result ({what})")
    return ""


def _without_content(shareable: Shareable) -> Shareable:
    """Return a result that reports an error without whatever it holds beside the report."""
    for key in [key for key in shareable if key != ReservedHeaderKey.HEADERS]:
        del shareable[key]
    return shareable
