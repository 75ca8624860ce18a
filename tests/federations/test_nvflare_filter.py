"""The filter of NVFlare jobs on made-up results of tasks: what it passes on, replaces and blocks."""

import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("nvflare")

from nvflare import FilterType
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.fl_exception import UnsafeJobError
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.workspace import Workspace
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants
from nvflare.app_common.executors.learner_executor import LearnerExecutor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.private.fed.app.fl_conf import create_privacy_manager

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.screening import Screener, Screening, Verdict
from hyperleak.nvflare import LeakageFilter

SETTINGS: dict[str, Any] = {"model": "torch.nn:Identity", "input_shape": [1, 2, 2]}
WEIGHTS = {"w": np.array([[1.1, 2.3], [-0.7, 0.4]], np.float32), "b": np.array([0.3, -0.2], np.float32)}


class Verdicts:
    """Takes the place of the audit: says what a test wants and keeps what it was asked about."""

    def __init__(self) -> None:
        self.verdict: Verdict = "not shown to leak"
        self.noise_helps = False
        self.seen: list[RecordedUpdate] = []
        self.make_model: Callable[[], nn.Module] = nn.Identity

    def screen(self, screener: Screener, recorded: RecordedUpdate) -> Screening:
        self.seen.append(recorded)
        self.make_model = screener.model
        verdict = "not shown to leak" if self.noise_helps and len(self.seen) > 1 else self.verdict
        return Screening(verdict=verdict, reason=f"{verdict} by a test")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    found = Verdicts()
    monkeypatch.setattr(Screener, "__call__", lambda screener, recorded: found.screen(screener, recorded))
    return found


class Engine:
    """As much of NVFlare's engine as a filter asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = SimpleNamespace(get_run_dir=lambda job: str(folder / job))
        self.components: dict[str, object] = {}
        self.events: list[str] = []

    def get_workspace(self) -> object:
        return self.workspace

    def get_component(self, name: str) -> object:
        return self.components.get(name)

    def fire_event(self, event: str, context: FLContext) -> None:
        self.events.append(event)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def context(engine: Engine, *, site: str = "site-1", task: str = "t1", server: bool = False) -> FLContext:
    made = FLContextManager(engine, "server" if server else site, "job").new_context()
    made.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.SERVER_JOB if server else ProcessType.CLIENT_JOB, sticky=False)
    made.set_prop(FLContextKey.TASK_ID, task, sticky=False)
    if server:
        made.set_peer_context(FLContextManager(None, site, "job").new_context())
    return made


def task_of(data: Mapping[str, object], round: int = 4) -> Shareable:
    task = DXO(DataKind.WEIGHTS, data=dict(data)).to_shareable()
    task.set_header(AppConstants.CURRENT_ROUND, round)
    return task


def announce(filter_: LeakageFilter, task: Shareable, where: FLContext) -> None:
    """Do what NVFlare does between the filters of a task's data and its execution."""
    where.set_prop(FLContextKey.TASK_DATA, task, sticky=False)
    filter_.handle_event(EventType.AFTER_TASK_DATA_FILTER, where)
    where.set_prop(FLContextKey.TASK_DATA, None, sticky=False)


def result_of(kind: str, data: Mapping[str, object], **meta: object) -> Shareable:
    return DXO(kind, data=dict(data), meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 3, **meta}).to_shareable()


def moved(kind: str, as_tensors: bool = False) -> dict[str, Any]:
    """What a client sends whose weights have all grown by 1."""
    data = {name: value + 1 if kind == DataKind.WEIGHTS else np.ones_like(value) for name, value in WEIGHTS.items()}
    return {name: torch.from_numpy(value) for name, value in data.items()} if as_tensors else data


def filtered(filter_: LeakageFilter, result: Shareable, where: FLContext) -> DXO:
    announce(filter_, task_of(WEIGHTS), where)
    return from_shareable(filter_.process(result, where))


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_leaking_update_is_replaced(
    kind: str, as_tensors: bool, server: bool, verdicts: Verdicts, engine: Engine
) -> None:
    verdicts.verdict = "leaked"
    sent = moved(kind, as_tensors)
    passed = filtered(LeakageFilter(**SETTINGS), result_of(kind, sent), context(engine, server=server))
    assert passed.data_kind == kind
    assert passed.meta[MetaKey.NUM_STEPS_CURRENT_ROUND] == 2.0**-20
    assert passed.get_filter_history() == ["LeakageFilter"]
    for name, value in passed.data.items():
        assert type(value) is type(sent[name])
        assert value.dtype == sent[name].dtype
        assert np.array_equal(value, WEIGHTS[name] if kind == DataKind.WEIGHTS else np.zeros_like(WEIGHTS[name]))


def test_harmless_update_passes_as_it_is(verdicts: Verdicts, engine: Engine) -> None:
    sent = moved(DataKind.WEIGHTS)
    result = result_of(DataKind.WEIGHTS, sent, hyperleak_training={"lr": 0.1})
    passed = filtered(LeakageFilter(**SETTINGS), result, context(engine))
    assert all(passed.data[name] is value for name, value in sent.items())
    assert passed.meta == {MetaKey.NUM_STEPS_CURRENT_ROUND: 3}


def test_audit_is_told_how_the_update_was_made(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS, training={"optimizer": "sgd", "lr": 0.5, "batch_size": 8})
    result = result_of(DataKind.WEIGHT_DIFF, moved(DataKind.WEIGHT_DIFF), hyperleak_training={"lr": 0.1})
    filtered(filter_, result, context(engine))
    (recorded,) = verdicts.seen
    facts = recorded.training
    assert (facts.optimizer, facts.lr, facts.batch_size, facts.steps, facts.epochs) == ("sgd", 0.1, 8, 3, None)
    assert {name: value.tolist() for name, value in recorded.before.items()} == {
        name: value.tolist() for name, value in WEIGHTS.items()
    }
    assert all(torch.allclose(value, -torch.ones_like(value)) for value in recorded.difference().values())
    said = {"client": "site-1", "round": "4", "job": "job", "seen by": "client", "weight in the mean": "3"}
    assert said.items() <= recorded.origin.items()


def test_steps_of_the_settings_count(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS, training={"steps": 7})
    filtered(filter_, result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))
    assert verdicts.seen[0].training.steps == 7


def take_steps(times: int, rate: Callable[[int], float]) -> None:
    """Train as a client's trainer does, in a thread of its own, as NVFlare's client API has it."""

    def train() -> None:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, weight_decay=0.5)
        for number in range(times):
            optimizer.param_groups[0]["lr"] = rate(number)
            weight.grad = torch.ones(2)
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def after_training(filter_: LeakageFilter, where: FLContext, train: Callable[[], None], **meta: object) -> None:
    """Carry a task out as a client does, and filter its result."""
    announce(filter_, task_of(WEIGHTS), where)
    filter_.handle_event(EventType.BEFORE_TASK_EXECUTION, where)
    train()
    filter_.handle_event(EventType.AFTER_TASK_EXECUTION, where)
    filter_.process(result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS), **meta), where)


def test_optimizer_is_seen_at_work(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS, training={"optimizer": "adam", "steps": 9, "batch_size": 4})
    after_training(filter_, context(engine), lambda: take_steps(2, lambda _: 0.25))
    after_training(filter_, context(engine), lambda: None)
    after_training(filter_, context(engine), lambda: take_steps(1, lambda _: 0.25), hyperleak_training={"lr": 0.5})
    seen, unseen, told = (one.training for one in verdicts.seen)
    assert (seen.optimizer, seen.lr, seen.weight_decay, seen.steps, seen.batch_size) == ("sgd", 0.25, 0.5, 2, 4)
    assert (unseen.optimizer, unseen.lr, unseen.steps, unseen.batch_size) == ("adam", None, 9, 4)
    assert (told.optimizer, told.lr) == ("sgd", 0.5)


def test_what_is_not_seen_of_a_working_optimizer_is_not_known(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS, training={"lr": 0.1})
    after_training(filter_, context(engine), lambda: take_steps(2, lambda number: 0.1 * (number + 1)))
    assert verdicts.seen[0].training.lr is None


def test_steps_outside_of_the_task_do_not_count(verdicts: Verdicts, engine: Engine) -> None:
    filter_, where = LeakageFilter(**SETTINGS), context(engine)
    filter_.handle_event(EventType.BEFORE_TASK_EXECUTION, where)
    take_steps(5, lambda _: 0.1)  # of a task that ended in an error
    after_training(filter_, where, lambda: take_steps(1, lambda _: 0.1))
    take_steps(3, lambda _: 0.1)
    assert verdicts.seen[0].training.steps == 1


def test_weights_before_are_those_that_came_whatever_training_does(verdicts: Verdicts, engine: Engine) -> None:
    filter_, where = LeakageFilter(**SETTINGS), context(engine)
    own = {name: value.copy() for name, value in WEIGHTS.items()}
    announce(filter_, task_of(own), where)
    for value in own.values():
        value += 1
    filter_.process(result_of(DataKind.WEIGHTS, own), where)
    assert np.array_equal(verdicts.seen[0].before["w"], WEIGHTS["w"])


def test_filter_in_the_other_chain_leaves_the_weights(verdicts: Verdicts, engine: Engine) -> None:
    """A site's privacy policy names filters that hear of no events."""
    looking, auditing, where = LeakageFilter(**SETTINGS), LeakageFilter(**SETTINGS), context(engine)
    looking.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    task = task_of(WEIGHTS)
    assert looking.process(task, where) is task
    auditing.process(result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), where)
    assert verdicts.seen[0].origin["round"] == "4"


def test_server_knows_what_each_site_was_sent(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS)
    other = {name: value + 5 for name, value in WEIGHTS.items()}
    for site, data in (("site-1", WEIGHTS), ("site-2", other)):
        announce(filter_, task_of(data), context(engine, site=site, task=f"task of {site}", server=True))
    for site in ("site-2", "site-1"):
        where = context(engine, site=site, task=f"task of {site}", server=True)
        filter_.process(result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), where)
    assert [one.origin["client"] for one in verdicts.seen] == ["site-2", "site-1"]
    assert [float(one.difference()["b"][0]) for one in verdicts.seen] == pytest.approx([4, -1])
    assert verdicts.seen[0].origin["seen by"] == "server"


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_noise_is_added_in_the_form_that_came(kind: str, verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict, verdicts.noise_helps = "leaked", True
    sent = moved(kind)
    passed = filtered(LeakageFilter(**SETTINGS, on_leak="noise"), result_of(kind, sent), context(engine))
    assert passed.meta[MetaKey.NUM_STEPS_CURRENT_ROUND] == 3
    for name, value in passed.data.items():
        assert value.dtype == sent[name].dtype
        assert np.abs(value - sent[name]).max() > 0
        assert np.abs(value - sent[name]).max() < 20


def test_warned_of_update_passes(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "leaked"
    sent = moved(DataKind.WEIGHTS)
    passed = filtered(LeakageFilter(**SETTINGS, on_leak="warn"), result_of(DataKind.WEIGHTS, sent), context(engine))
    assert passed.data["w"] is sent["w"]


def test_failed_audit_counts_as_a_leak(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "failed"
    passed = filtered(LeakageFilter(**SETTINGS), result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))
    assert np.array_equal(passed.data["w"], WEIGHTS["w"])


def test_stop_ends_the_job_from_a_client(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "leaked"
    filter_ = LeakageFilter(**SETTINGS, on_leak="stop")
    with pytest.raises(UnsafeJobError, match="leaked"):
        filtered(filter_, result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))


def test_stop_ends_the_job_from_the_server(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "leaked"
    filter_ = LeakageFilter(**SETTINGS, on_leak="stop")
    with pytest.raises(ContentBlockedException, match="leaked"):
        filtered(filter_, result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine, server=True))
    assert EventType.FATAL_SYSTEM_ERROR in engine.events


PICTURE = [number / 784 for number in range(784)]


def beside_the_update(held: object) -> Shareable:
    result = result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS))
    result["other"] = held
    return result


def in_the_header(held: object, code: str = ReturnCode.OK) -> Shareable:
    result = result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS))
    result.set_header("other", held)
    result.set_return_code(code)
    return result


def rows_of(engine: Engine, round: int) -> list[dict[str, Any]]:
    path = engine.folder / f"job/hyperleak/round-{round}/screenings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


COLLECTION = {"main": DXO(DataKind.WEIGHTS, data=dict(WEIGHTS))}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (DXO(DataKind.FL_MODEL, data={"params": WEIGHTS}).to_shareable(), "DXO/data/params/w"),
        (DXO(DataKind.APP_DEFINED, data={"weights": [WEIGHTS["w"]]}).to_shareable(), "DXO/data/weights/0"),
        (DXO(DataKind.COLLECTION, data=COLLECTION).to_shareable(), "DXO/data/main"),
        (DXO(DataKind.WEIGHTS, data={}, meta={"c": WEIGHTS["w"]}).to_shareable(), "DXO/meta/c"),
        (Shareable({"weights": WEIGHTS}), "weights/w"),
        (Shareable({"weights": b"12"}), "weights"),
        (result_of(DataKind.WEIGHTS, {"other": WEIGHTS["w"]}), "'other', which the weights before do not"),
        (result_of(DataKind.WEIGHTS, {"w": WEIGHTS["b"]}), r"another shape .* \(2,\) for \(2, 2\)"),
        (
            result_of(DataKind.WEIGHTS, {"w": WEIGHTS["w"].astype(np.uint8)}),
            "'w' encoded, torch.uint8 for",
        ),
        (result_of(DataKind.WEIGHTS, {"w": object()}), "expected an array under 'w', got object"),
        (result_of(DataKind.WEIGHTS, WEIGHTS, **{MetaKey.PROCESSED_ALGORITHM: "HE"}), "encoded by HE"),
        (result_of(DataKind.WEIGHTS, WEIGHTS, hyperleak_training={"rate": 1}), "got 'rate'"),
        (result_of(DataKind.WEIGHTS, WEIGHTS, hyperleak_training={"lr": float("nan")}), "lr: expected a number"),
        (result_of(DataKind.WEIGHTS, WEIGHTS, hyperleak_training={"examples": "many"}), "examples: expected"),
        (result_of(DataKind.WEIGHTS, WEIGHTS, hyperleak_training=WEIGHTS["w"]), "got ndarray"),
        (result_of(DataKind.WEIGHTS, {"w": 0.01 * WEIGHTS["w"]}), "seem to be differences"),
        (result_of(DataKind.WEIGHT_DIFF, {"w": 1.01 * WEIGHTS["w"]}), "seem to be weights"),
        (DXO(DataKind.METRICS, data={"m": PICTURE}).to_shareable(), "holds 784 numbers, .* 'DXO/data/m'"),
        (DXO(DataKind.APP_DEFINED, data={"m": str(PICTURE)}).to_shareable(), "text of .* under 'DXO/data/m'"),
        (Shareable({"values": {"m": PICTURE}}), "784 numbers"),
        (beside_the_update(PICTURE), "under 'other'"),
        (in_the_header(PICTURE), "the header of the result holds 784 numbers"),
        (in_the_header(WEIGHTS["w"]), "the header of the result holds 'other'"),
        (in_the_header(WEIGHTS["w"], ReturnCode.EXECUTION_EXCEPTION), "the header of the result holds 'other'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_audited_is_blocked(result: Shareable, reason: str, verdicts: Verdicts, engine: Engine) -> None:
    filter_, where = LeakageFilter(**SETTINGS), context(engine)
    announce(filter_, task_of(WEIGHTS), where)
    with pytest.raises(ContentBlockedException, match=reason):
        filter_.process(result, where)
    assert not verdicts.seen
    (row,) = rows_of(engine, 4)
    assert re.search(reason, row["reason"])
    assert (row["verdict"], row["client"]) == ("failed", "site-1")


@pytest.mark.parametrize(
    "held",
    [PICTURE, [[x] for x in PICTURE], str(PICTURE), {str(x): "" for x in PICTURE}, 3**20_000],
    ids=["list", "lists", "text", "names", "whole number"],
)
def test_what_the_meta_holds_beside_is_not_passed_on_unseen(held: object, verdicts: Verdicts, engine: Engine) -> None:
    result = result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS), held=held, loss=0.5)
    passed = filtered(LeakageFilter(**SETTINGS), result, context(engine))
    assert np.array_equal(passed.data["w"], WEIGHTS["w"])
    assert passed.meta.keys() == {"loss", MetaKey.NUM_STEPS_CURRENT_ROUND, MetaKey.FILTER_HISTORY}
    assert not verdicts.seen
    assert "the meta of the update holds" in rows_of(engine, 4)[0]["reason"]


def test_what_little_lies_beside_an_update_is_named(verdicts: Verdicts, engine: Engine) -> None:
    filtered(LeakageFilter(**SETTINGS), result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS), loss=0.5), context(engine))
    said = verdicts.seen[0].origin["beside the update, not looked at"]
    assert said == "NUM_STEPS_CURRENT_ROUND, loss (2 numbers, 27 characters)"


def test_server_does_not_mind_what_it_writes_into_a_header_itself(verdicts: Verdicts, engine: Engine) -> None:
    result, where = result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine, server=True)
    for name in (ReservedHeaderKey.PEER_CTX, "fl_client"):
        result.set_header(name, object())
    filtered(LeakageFilter(**SETTINGS), result, where)
    assert verdicts.seen


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("no luck"), NameError("no luck"), SystemExit("no luck")])
@pytest.mark.parametrize("on_leak", ["withhold", "warn", "stop", "noise"])
def test_any_error_of_the_model_ends_in_the_policy(
    error: BaseException, on_leak: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        raise error

    monkeypatch.setitem(sys.modules, "odd_model", SimpleNamespace(build=build))
    filter_ = LeakageFilter("odd_model:build", [1, 2, 2], on_leak=on_leak)  # type: ignore[arg-type]
    sent = moved(DataKind.WEIGHTS)
    if on_leak == "stop":
        with pytest.raises(UnsafeJobError, match="no luck"):
            filtered(filter_, result_of(DataKind.WEIGHTS, sent), context(engine))
    else:
        passed = filtered(filter_, result_of(DataKind.WEIGHTS, sent), context(engine))
        assert np.array_equal(passed.data["w"], sent["w"] if on_leak == "warn" else WEIGHTS["w"])
    (row,) = rows_of(engine, 4)
    assert row["verdict"] == "failed"
    assert "no luck" in row["reason"]


def test_reports_that_cannot_be_written_change_nothing(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "leaked"
    (engine.folder / "job").write_text("a file where the folder should be")
    passed = filtered(LeakageFilter(**SETTINGS), result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))
    assert np.array_equal(passed.data["w"], WEIGHTS["w"])


def test_update_is_blocked_where_the_weights_before_were_not_seen(verdicts: Verdicts, engine: Engine) -> None:
    filter_ = LeakageFilter(**SETTINGS)
    announce(filter_, task_of(WEIGHTS), context(engine, task="an earlier one"))
    with pytest.raises(ContentBlockedException, match=r"site-1 .* were not seen: name the filter among task_data"):
        filter_.process(result_of(DataKind.WEIGHTS, WEIGHTS), context(engine))


def test_blocked_results_pass_under_warn(verdicts: Verdicts, engine: Engine) -> None:
    result = Shareable({"weights": WEIGHTS})
    assert LeakageFilter(**SETTINGS, on_leak="warn").process(result, context(engine))["weights"] is WEIGHTS


def test_plain_values_pass(verdicts: Verdicts, engine: Engine) -> None:
    values = {"accuracy": np.float32(0.5), "loss": torch.tensor(2.0), "names": ["a", None], "done": True}
    for result in (DXO(DataKind.METRICS, data=values).to_shareable(), Shareable({"values": values})):
        content = {key: value for key, value in result.items() if key != "__headers__"}
        passed = LeakageFilter(**SETTINGS).process(result, context(engine))
        assert {key: value for key, value in passed.items() if key != "__headers__"} == content


def test_report_of_an_error_holds_nothing_else(verdicts: Verdicts, engine: Engine) -> None:
    result = result_of(DataKind.WEIGHTS, WEIGHTS)
    result.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    result.add_cookie("known", 1)
    passed = LeakageFilter(**SETTINGS).process(result, context(engine))
    assert [*passed] == ["__headers__"]
    assert passed.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert passed.get_cookie("known") == 1


def test_control_variates_are_withheld_as_zeros(verdicts: Verdicts, engine: Engine) -> None:
    variates = {AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {"w": WEIGHTS["w"]}}
    result = result_of(DataKind.WEIGHT_DIFF, moved(DataKind.WEIGHT_DIFF), **variates)
    passed = filtered(LeakageFilter(**SETTINGS), result, context(engine))
    assert not passed.data["w"].any()
    assert not passed.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]["w"].any()
    assert not verdicts.seen, "of which the audit would have seen only part"
    assert (
        "scaffold_c_diff"
        in (Path(engine.get_workspace().get_run_dir("job")) / "hyperleak/round-4/report.html").read_text()
    )


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_aggregator_goes_on_without_what_is_withheld(kind: str, verdicts: Verdicts, engine: Engine) -> None:
    """One of two updates is withheld, then both: ScatterAndGather's aggregator gives the mean of the rest."""
    verdicts.verdict = "leaked"
    changed = moved(kind)
    nothing = {name: WEIGHTS[name] if kind == DataKind.WEIGHTS else 0 * WEIGHTS[name] for name in WEIGHTS}
    for withheld, expected, close in ((1, changed, 1e-6), (2, nothing, 0)):
        aggregator = InTimeAccumulateWeightedAggregator(expected_data_kind=kind)
        where = context(engine, server=True)
        where.set_prop(AppConstants.CURRENT_ROUND, 4)
        aggregator.handle_event(EventType.START_RUN, where)
        for number in range(2):
            result = result_of(kind, changed)
            if number < withheld:
                filter_, on_site = LeakageFilter(**SETTINGS), context(engine)
                announce(filter_, task_of(WEIGHTS), on_site)
                result = filter_.process(result, on_site)
            result.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
            result.set_peer_props({"__identity_name__": f"site-{number}"})
            assert aggregator.accept(result, where)
        mean = from_shareable(aggregator.aggregate(where)).data
        for name, value in expected.items():
            assert np.allclose(mean[name], value, rtol=close, atol=close)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_of_withheld_updates_is_the_model_itself(kind: torch.dtype, verdicts: Verdicts, engine: Engine) -> None:
    """In FedAvg's own sums, for numbers of little precision as well."""
    verdicts.verdict = "leaked"
    weights = {"w": torch.linspace(-1e-3, 1, 50).to(kind).reshape(5, 10)}
    helper = WeightedAggregationHelper()
    for number in range(2):
        filter_, where = LeakageFilter(**SETTINGS), context(engine)
        announce(filter_, task_of(weights), where)
        result = result_of(DataKind.WEIGHTS, {name: value + 1 for name, value in weights.items()})
        passed = from_shareable(filter_.process(result, where))
        helper.add(passed.data, float(passed.meta[MetaKey.NUM_STEPS_CURRENT_ROUND]), f"site-{number}", 0)
    assert torch.equal(helper.get_result()["w"], weights["w"])


def test_update_in_half_precision_is_withheld_in_it_and_counts_as_a_step(verdicts: Verdicts, engine: Engine) -> None:
    verdicts.verdict = "leaked"
    halved = {name: value.astype(np.float16) for name, value in moved(DataKind.WEIGHTS).items()}
    passed = filtered(LeakageFilter(**SETTINGS), result_of(DataKind.WEIGHTS, halved), context(engine))
    assert passed.data["w"].dtype == np.float16
    assert passed.meta[MetaKey.NUM_STEPS_CURRENT_ROUND] == 1


def test_model_may_be_a_component(verdicts: Verdicts, engine: Engine) -> None:
    engine.components["net"] = nn.Linear(2, 2)
    settings = SETTINGS | {"model": "net"}
    filtered(LeakageFilter(**settings), result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))
    assert isinstance(verdicts.make_model(), nn.Linear)
    assert verdicts.make_model() is not engine.components["net"]


def test_component_that_is_no_model_is_refused(verdicts: Verdicts, engine: Engine) -> None:
    settings = SETTINGS | {"model": "nothing"}
    filtered(LeakageFilter(**settings), result_of(DataKind.WEIGHTS, moved(DataKind.WEIGHTS)), context(engine))
    with pytest.raises(ValueError, match=r"expected module:function or the id of a model component, got 'nothing'"):
        verdicts.make_model()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"training": {"rate": 0.1}}, r"expected of optimizer, .* in `training`, got 'rate'"),
        ({"screening": {"time": 1}}, r"expected of .* seconds, .* in `screening`, got 'time'"),
        ({"screening": {"seconds": 0}}, "expected seconds > 0"),
        ({"training": {"lr": float("inf")}}, "lr: expected a number"),
        ({"training": {"optimizer": "newton"}}, "optimizer: expected 'sgd'"),
        ({"on_leak": "ask"}, "expected on_leak .* got 'ask'"),
    ],
)
def test_unknown_setting_is_refused_when_the_job_is_read(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LeakageFilter(**SETTINGS, **setting)


def test_site_may_name_the_filter_in_its_privacy_policy(tmp_path: Path) -> None:
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    entry = {"path": "hyperleak.nvflare.LeakageFilter", "args": SETTINGS}
    chains = {"task_data_filters": [entry], "task_result_filters": [entry]}
    policy = {"format_version": 2, "scopes": [{"name": "all", "properties": {}, **chains}], "default_scope": "all"}
    (tmp_path / "local/privacy.json").write_text(json.dumps(policy))
    scope = create_privacy_manager(Workspace(str(tmp_path), "site-1"), names_only=False).get_scope(None)
    (looking,), (auditing,) = scope.task_data_filters["in"], scope.task_result_filters["out"]
    assert isinstance(looking, LeakageFilter)
    assert isinstance(auditing, LeakageFilter)
    assert looking.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN


def test_job_api_writes_the_settings(tmp_path: Path) -> None:
    """Its config names the class where it lies; `set_app_packages` keeps parts of these packages out of the job."""
    job = FedJob(name="job", min_clients=1)
    job.set_app_packages(["eval"])
    job.to_server(FedAvg(num_clients=1, persistor_id=""))
    job.to_clients(LearnerExecutor("learner"), tasks=["train"])
    made = LeakageFilter(**SETTINGS, training={"lr": 0.1}, on_leak="stop")
    job.to_clients(made, filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_client.json")
    ((entry,),) = [chain["filters"] for chain in json.loads(config.read_text())["task_result_filters"]]
    assert entry["args"] == SETTINGS | {"training": {"lr": 0.1}, "on_leak": "stop"}
    assert entry["path"] == "eval.federations.nvflare.LeakageFilter"
    assert not [*tmp_path.rglob("custom/*")]
