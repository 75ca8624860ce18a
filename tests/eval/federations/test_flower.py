"""Updates of a Flower app are recorded as they are, and none that gives something away goes on."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Result, Strategy
from support.flower_grid import FIRST_NODE, LocalGrid

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations import flower
from eval.federations.flower import AuditMod, AuditStrategy
from eval.federations.flower_messages import SentWeights, UnreadableError, UpdateReader
from eval.federations.response import LeakageError, Responder
from eval.federations.screening import Screening

APP = Path(__file__).parents[2] / "federations" / "flower_app"
CONFIG = {"local-epochs": 1, "batch-size": 32}
LEAKING, HARMLESS = FIRST_NODE, FIRST_NODE + 1
SECRET = "a cat"


@dataclass
class OnePicture:
    """A screener that finds updates of one example leaking, the first few times, and takes down what it saw."""

    model: Callable[[], nn.Module]
    verdict: Literal["leaked", "failed"] = "leaked"
    times: int = 1000

    def __post_init__(self) -> None:
        self.seen: list[RecordedUpdate] = []

    def __call__(self, recorded: RecordedUpdate) -> Screening:
        self.seen.append(recorded)
        bad = recorded.training.examples == 1 and len(self.of(LEAKING)) <= self.times
        if bad:
            return Screening(verdict=self.verdict, reason=SECRET)
        return Screening(verdict="not shown to leak", reason="nothing is shown")

    def of(self, node: int) -> list[RecordedUpdate]:
        return [recorded for recorded in self.seen if recorded.origin["client"] == str(node)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(APP))
    return importlib.import_module("flower_app.task")


@pytest.fixture
def app(task: Any) -> ClientApp:
    return importlib.import_module("flower_app.client_app").app


@pytest.fixture
def screener(task: Any) -> OnePicture:
    return OnePicture(task.Net)


def start(grid: LocalGrid, task: Any, strategy: Strategy | None = None, rounds: int = 1) -> Result:
    return (strategy or FedAvg(fraction_evaluate=0.0)).start(
        grid=grid,
        initial_arrays=ArrayRecord(task.Net().state_dict()),
        train_config=ConfigRecord({"lr": 0.05}),
        num_rounds=rounds,
    )


def audited(app: ClientApp, screener: OnePicture, on_leak: str = "withhold", **settings: Any) -> LocalGrid:
    mod = AuditMod(Responder(screen=screener, on_leak=on_leak), **settings)  # type: ignore[arg-type]
    return LocalGrid(flower.with_mod(app, mod), run_config=CONFIG)


def reply_of(grid: LocalGrid, node: int) -> Message:
    return next(reply for reply in grid.replies if reply.metadata.src_node_id == node)


def states(record: ArrayRecord) -> dict[str, Tensor]:
    return dict(record.to_torch_state_dict())


# ---- clients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verdict", ["leaked", "failed"])
def test_what_must_not_leave_is_an_error_and_the_round_goes_on(app, task, verdict):
    grid = audited(app, OnePicture(task.Net, verdict))
    result = start(grid, task)
    withheld, sent = reply_of(grid, LEAKING), reply_of(grid, HARMLESS)
    assert withheld.error.code == flower.WITHHELD
    assert SECRET not in withheld.error.reason
    torch.testing.assert_close(states(result.arrays), states(sent.content["arrays"]), rtol=0, atol=0)


def test_the_mean_stays_where_it_is_if_nobody_may_send(app, task):
    grid = audited(app, OnePicture(task.Net))
    grid.contexts.pop(HARMLESS)
    initial = ArrayRecord(task.Net().state_dict())
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    result = strategy.start(grid=grid, initial_arrays=initial, train_config=ConfigRecord({"lr": 0.05}), num_rounds=2)
    assert [reply.has_error() for reply in grid.replies] == [True, True]
    assert not result.train_metrics_clientapp


def test_an_update_is_recorded_as_it_was_made(app, task, screener):
    grid = audited(app, screener)
    start(grid, task)
    (recorded,) = screener.of(HARMLESS)
    net = task.Net()
    net.load_state_dict(recorded.before)
    task.train(net, task.load_data(1, 32), epochs=1, lr=0.05)
    torch.testing.assert_close(dict(recorded.after), dict(net.state_dict()), rtol=0, atol=0)
    beside = recorded.origin["beside the update, not looked at"]
    assert beside == "metrics/train_loss, metrics/num-examples (2 numbers, 29 characters)"
    assert recorded.training == TrainingFacts(optimizer="sgd", lr=0.05, steps=2, epochs=1, batch_size=32, examples=64)
    assert {name: recorded.origin[name] for name in ("framework", "side", "run", "client", "round")} == {
        "framework": "flower", "side": "client", "run": "7", "client": str(HARMLESS), "round": "1",
    }  # fmt: skip
    assert "seen of the optimizer: steps, lr, optimizer" in recorded.origin["facts"]


def test_a_batch_is_no_larger_than_all_examples(app, task, screener):
    start(audited(app, screener), task)
    assert screener.of(LEAKING)[0].training.batch_size == 1


def test_facts_that_are_given_go_first(app, task, screener):
    start(audited(app, screener, training=TrainingFacts(lr=0.5, batch_size=8)), task)
    training = screener.of(HARMLESS)[0].training
    assert (training.lr, training.batch_size, training.optimizer) == (0.5, 8, "sgd")


def test_noise_replaces_the_arrays_and_keeps_their_form(app, task):
    screener = OnePicture(task.Net, times=1)
    grid = audited(app, screener, "noise")
    start(grid, task)
    sent, made = reply_of(grid, LEAKING).content["arrays"], screener.of(LEAKING)[0].after
    assert list(sent) == list(made)
    assert {array.dtype for array in sent.values()} == {"float32"}
    assert all(not torch.equal(value, made[name]) for name, value in states(sent).items())


@pytest.mark.parametrize("on_leak", ["warn", "withhold"])
def test_what_may_leave_leaves_as_it_was(app, task, screener, on_leak):
    grid = audited(app, screener, on_leak)
    start(grid, task)
    node = LEAKING if on_leak == "warn" else HARMLESS
    sent, (recorded,) = reply_of(grid, node), screener.of(node)
    torch.testing.assert_close(states(sent.content["arrays"]), dict(recorded.after), rtol=0, atol=0)


def test_a_client_that_stopped_trains_no_more(app, task, screener):
    grid = audited(app, screener, "stop")
    start(grid, task, rounds=3)
    assert [reply.has_error() for reply in grid.replies if reply.metadata.src_node_id == LEAKING] == [True] * 3
    assert len(screener.of(LEAKING)) == 1
    assert len(screener.of(HARMLESS)) == 3


def echo(content: Callable[[RecordDict], RecordDict]) -> Callable[[Message, Context], Message]:
    return lambda message, context: Message(content(message.content), reply_to=message)


def with_bytes(content: RecordDict) -> RecordDict:
    return RecordDict({"arrays": content["arrays"], "further": ConfigRecord({"model": b"all of it"})})


STRANGE: dict[str, Callable[[RecordDict], RecordDict]] = {
    "two records": lambda content: RecordDict({"a": content["arrays"], "b": content["arrays"]}),
    "bytes": with_bytes,
    "bytes alone": lambda content: RecordDict({"further": ConfigRecord({"model": b"all of it"})}),
    "list of bytes": lambda content: RecordDict({**content, "further": ConfigRecord({"model": [b"all of it"]})}),
    "bytes by a name that another record has": lambda content: RecordDict(
        {**content, "a": ConfigRecord({"model": "text"}), "b": ConfigRecord({"model": b"all of it"})}
    ),
    "differences": lambda content: RecordDict(
        {"arrays": ArrayRecord({k: 0.01 * v for k, v in content["arrays"].to_torch_state_dict().items()})}
    ),
    "large differences": lambda content: RecordDict(
        {"arrays": ArrayRecord({k: torch.randn_like(v) for k, v in content["arrays"].to_torch_state_dict().items()})}
    ),
    "metrics of a picture": lambda content: RecordDict({**content, "metrics": MetricRecord({"x": [0.5] * 784})}),
    "config of a picture": lambda content: RecordDict({**content, "more": ConfigRecord({"x": [7] * 784})}),
    "text of a picture": lambda content: RecordDict({**content, "more": ConfigRecord({"x": "0.5, " * 784})}),
    "many names": lambda content: RecordDict({**content, "m": MetricRecord({f"pixel {i}": 0.5 for i in range(784)})}),
    "metrics alone": lambda content: RecordDict({"metrics": MetricRecord({"x": [0.5] * 784})}),
    "new names": lambda content: RecordDict({"arrays": ArrayRecord([np.ones(3)])}),
    "other shapes": lambda content: RecordDict({"arrays": ArrayRecord({k: torch.ones(2) for k in content["arrays"]})}),
}


@pytest.mark.parametrize("case", STRANGE)
@pytest.mark.parametrize("on_leak", ["withhold", "stop", "noise", "warn"])
def test_what_can_not_be_audited_does_not_leave(task, screener, case, on_leak):
    grid = audited(echo(STRANGE[case]), screener, on_leak)  # type: ignore[arg-type]
    sent = RecordDict({"arrays": ArrayRecord(task.Net().state_dict()), "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(sent, HARMLESS, "train")])
    assert reply.has_error() == (on_leak != "warn")
    assert not screener.seen


def test_weights_without_any_to_compare_with_do_not_leave(task, screener):
    grid = audited(echo(lambda _: RecordDict({"arrays": ArrayRecord(task.Net().state_dict())})), screener)  # type: ignore[arg-type]
    (reply,) = grid.send_and_receive([Message(RecordDict(), HARMLESS, "query")])
    assert reply.has_error()


def test_replies_without_arrays_pass(screener):
    metrics = MetricRecord({"accuracy": 0.5, "num-examples": 3})
    grid = audited(echo(lambda _: RecordDict({"metrics": metrics})), screener)  # type: ignore[arg-type]
    (reply,) = grid.send_and_receive([Message(RecordDict(), HARMLESS, "evaluate")])
    assert reply.content["metrics"] == metrics


def test_errors_of_the_app_pass(screener):
    grid = audited(lambda message, _: Message(Error(3, "no data"), reply_to=message), screener)  # type: ignore[arg-type]
    (reply,) = grid.send_and_receive([Message(RecordDict(), HARMLESS, "train")])
    assert reply.error.reason == "no data"


# ---- servers ---------------------------------------------------------------------------------------------------------
def guarded(strategy: Strategy, screener: OnePicture, on_leak: str = "withhold") -> AuditStrategy:
    return AuditStrategy(strategy, Responder(screen=screener, on_leak=on_leak), run_config=CONFIG)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_a_server_leaves_a_leaking_update_out_of_the_mean(app, task, screener, kind):
    grid = LocalGrid(app, run_config=CONFIG)
    result = start(grid, task, guarded(kind(fraction_evaluate=0.0), screener))
    assert not any(reply.has_error() for reply in grid.replies)
    (harmless,), (recorded,) = screener.of(HARMLESS), screener.of(LEAKING)
    torch.testing.assert_close(states(result.arrays), dict(harmless.after), rtol=0, atol=0)
    assert {recorded.origin[name] for name in ("side", "client", "round")} == {"server", str(LEAKING), "1"}
    assert recorded.training == TrainingFacts(lr=0.05, epochs=1, batch_size=1, examples=1)


def test_a_server_goes_on_over_rounds_behind_any_strategy(app, task, screener):
    strategy = guarded(FedAdam(fraction_evaluate=0.0), screener)
    result = start(LocalGrid(app, run_config=CONFIG), task, strategy, rounds=2)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert len(screener.seen) == 4
    # FedAdam sends float64, which the client's network rounds when it loads it
    assert all(value.dtype == torch.float32 for recorded in screener.seen for value in recorded.before.values())


def test_a_server_that_stops_ends_the_run(app, task, screener):
    with pytest.raises(LeakageError):
        start(LocalGrid(app, run_config=CONFIG), task, guarded(FedAvg(fraction_evaluate=0.0), screener, "stop"))


def test_a_server_counts_noisy_updates(app, task):
    screener = OnePicture(task.Net, times=1)
    result = start(LocalGrid(app, run_config=CONFIG), task, guarded(FedAvg(fraction_evaluate=0.0), screener, "noise"))
    (harmless,) = screener.of(HARMLESS)
    assert not torch.equal(states(result.arrays)["fc3.bias"], harmless.after["fc3.bias"])


def test_evaluation_is_the_other_strategys(app, task, screener):
    grid = LocalGrid(app, run_config=CONFIG)
    strategy = guarded(FedAvg(), screener)
    arrays = ArrayRecord(task.Net().state_dict())
    assert len(list(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))) == 2
    assert strategy.aggregate_evaluate(1, []) is None


# ---- records of apps that know nothing of an audit -------------------------------------------------------------------
def test_recorded_updates_are_audited_later(app, task, screener, tmp_path):
    grid = LocalGrid(flower.with_mod(app, flower.record_mod(tmp_path)), run_config=CONFIG)
    start(grid, task, rounds=2)
    assert not any(reply.has_error() for reply in grid.replies)
    found = flower.audit_recorded(tmp_path, screener)
    places = {path.relative_to(tmp_path).as_posix(): screening.must_not_leave for path, screening in found.items()}
    assert places == {
        f"run-7/round-{round}/client-{node}.npz": node == LEAKING for round in (1, 2) for node in (LEAKING, HARMLESS)
    }


def test_names_that_the_server_chose_make_no_paths(task, tmp_path):
    grid = LocalGrid(flower.with_mod(echo(lambda content: content), flower.record_mod(tmp_path / "in")))
    config = ConfigRecord({"server-round": "../../../x"})
    for _ in range(2):
        sent = RecordDict({"arrays": ArrayRecord(task.Net().state_dict()), "config": config})
        grid.send_and_receive([Message(sent, HARMLESS, "train")])
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert len(list((tmp_path / "in").rglob("client-*.npz"))) == 2


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("no luck"), SystemExit("no luck")])
def test_any_error_of_the_model_ends_in_the_policy(task, tmp_path, error):
    def build() -> nn.Module:
        raise error

    for on_leak in ("withhold", "noise", "stop", "warn"):
        mod = flower.audit_mod(build, input_shape=(3, 32, 32), on_leak=on_leak, out=tmp_path / on_leak)
        grid = LocalGrid(flower.with_mod(echo(lambda content: content), mod))
        sent = RecordDict({"arrays": ArrayRecord(task.Net().state_dict())})
        (reply,) = grid.send_and_receive([Message(sent, HARMLESS, "train")])
        assert reply.has_error() == (on_leak != "warn")
        assert "no luck" not in str(reply.error if reply.has_error() else "")
        (page,) = (tmp_path / on_leak).rglob("report.html")
        assert f"{type(error).__name__}: no luck" in page.read_text()


def test_what_can_not_be_recorded_is_sent_all_the_same(task, tmp_path):
    grid = LocalGrid(flower.with_mod(echo(STRANGE["two records"]), flower.record_mod(tmp_path)))  # type: ignore[arg-type]
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": ArrayRecord([np.ones(2)])}), HARMLESS, "train")])
    assert reply.has_content()
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_an_error(tmp_path, screener):
    with pytest.raises(FileNotFoundError, match="expected recorded updates"):
        flower.audit_recorded(tmp_path, screener)


def test_two_messages_are_an_update(app, task):
    grid = LocalGrid(app, run_config=CONFIG)
    sent = RecordDict({"arrays": ArrayRecord(task.Net().state_dict()), "config": ConfigRecord({"lr": 0.05})})
    message = Message(sent, LEAKING, "train")
    (reply,) = grid.send_and_receive([message])
    facts = TrainingFacts(optimizer="sgd", steps=1)
    recorded = flower.recorded_update(message, reply, training=facts)
    assert recorded.training == TrainingFacts(optimizer="sgd", lr=0.05, steps=1, examples=1)
    assert recorded.origin["client"] == str(LEAKING)
    torch.testing.assert_close(dict(recorded.after), states(reply.content["arrays"]), rtol=0, atol=0)


def test_lists_of_arrays_keep_their_order(task):
    arrays = [value.numpy() for value in task.Net().state_dict().values()]
    message = Message(RecordDict({"fitins.parameters": ArrayRecord(arrays)}), LEAKING, "train")
    reply = Message(RecordDict({"fitres.parameters": ArrayRecord([a + 1 for a in arrays])}), reply_to=message)
    recorded = flower.recorded_update(message, reply)
    assert list(recorded.before) == [str(i) for i in range(len(arrays))]
    torch.testing.assert_close([*recorded.before.values()], [torch.from_numpy(array) for array in arrays])


# ---- facts of training -----------------------------------------------------------------------------------------------
def facts(config: dict[str, Any], *, run_config: dict[str, Any] | None = None, **metrics: float) -> TrainingFacts:
    arrays = ArrayRecord({"w": torch.ones(1)})
    sent = SentWeights.of(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}))
    reply = RecordDict(
        {"arrays": arrays, "metrics": MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})}
    )
    return UpdateReader(run_config=run_config or {}).read(sent, reply, origin={}).training


def test_facts_are_read_under_usual_names():
    read = facts({"learning_rate": 0.1, "local-steps": 3, "optimizer": "AdamW", "weight-decay": 0.01}, num_examples=7)
    assert read == TrainingFacts(optimizer="adamw", lr=0.1, steps=3, weight_decay=0.01, examples=7)


def test_the_message_goes_before_the_run_config():
    read = facts({"lr": 0.1}, run_config={"lr": 0.2, "local-epochs": 4, "name": "an app"})
    assert read == TrainingFacts(lr=0.1, epochs=4)


def test_values_that_can_be_no_fact_are_none():
    assert facts({"lr": "cosine", "batch-size": -1, "epochs": [1, 2]}) == TrainingFacts()
    odd = {"lr": math.inf, "momentum": 7.0, "local-epochs": math.inf, "batch-size": math.nan, "optimizer": "newton"}
    assert facts(odd) == TrainingFacts()
    for number in (math.nan, math.inf, 0, -1, [3, 4]):
        assert facts({}, num_examples=number) == TrainingFacts()  # type: ignore[arg-type]
    assert facts({}, num_examples=3.0) == TrainingFacts(examples=3)


def test_fedprox_is_plain_in_its_first_step_alone():
    assert facts({"proximal-mu": 0.1, "optimizer": "sgd", "local-steps": 1}).optimizer == "sgd"
    assert facts({"proximal-mu": 0.1, "optimizer": "sgd", "local-steps": 2}).optimizer is None
    assert facts({"proximal-mu": 0.0, "optimizer": "sgd", "local-steps": 2}).optimizer == "sgd"


def test_arrays_that_are_no_numbers_are_refused():
    broken = ArrayRecord({"w": torch.ones(1)})
    broken["w"].data = b"nothing"
    with pytest.raises(UnreadableError, match="'w'"):
        UpdateReader().read(SentWeights.of(RecordDict({"a": broken})), RecordDict({"a": broken}), origin={})
