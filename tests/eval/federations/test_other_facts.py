"""Facts that are wrong in a plausible way hide no leak that the update itself points to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import nn

from attacks.base import Attack, Reconstruction, Result, build
from attacks.prefix_inversion import confirm_whole
from attacks.search_control import SearchControl, StoppedError, limited_by
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.other_facts import of_fitted_step_size
from eval.federations.screening import Screener, Screening
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.view import ServerView

pytestmark = pytest.mark.usefixtures("own_time")

ADAM = TrainingFacts(optimizer="adam", lr=1e-2, steps=1, examples=1)
SGD = support.PLAIN


def screened(model: nn.Module, update: RecordedUpdate, seconds: float = 5.0, **facts: object) -> Screening:
    stated = replace(update, training=replace(update.training, **facts))  # type: ignore[arg-type]
    return Screener(model=lambda: model, input_shape=support.SHAPE, seconds=seconds)(stated)


@pytest.mark.parametrize(
    "facts",
    [
        {"examples": 4},  # a loader's last batch is shorter
        {"examples": 2, "steps": 2, "batch_size": 1},  # gradients were accumulated
        {"examples": 2, "steps": None, "epochs": 4, "batch_size": 2},
    ],
)
def test_another_number_of_examples_is_told_by_the_rank(facts: dict[str, object]) -> None:
    model = support.dense_network()
    update = support.recorded(model, 2)
    found = screened(model, update, **facts)
    assert found.verdict == "leaked"
    assert "whatever was stated, it is that of one step on 2 examples" in found.notes


@pytest.mark.parametrize("facts", [{"examples": 4}, {"examples": 2, "steps": None, "epochs": 4, "batch_size": 2}])
def test_what_could_not_be_checked_under_such_facts_is_not_decided(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object]
) -> None:
    """They come before and after those that were stated, under which all that was found is held to the update."""

    def ended(attack: Attack, view: ServerView, above: ServerView | None, result: Result) -> Result:
        if isinstance(result, Reconstruction) and view.batch_size == 2 and len(view.schedule or ()) == 1:
            raise StoppedError("the time limit")
        return confirm_whole(attack, view, above, result)

    model = support.dense_network()
    update = support.recorded(model, 2)
    monkeypatch.setattr("attacks.checked_run.confirm_whole", ended)
    found = screened(model, update, **facts)
    assert (found.verdict, found.must_not_leave) == ("not decided", True)
    assert "could not be held to the update" in found.reason
    assert "(analytic, where it is that of one step on 2 examples)" in found.reason


@pytest.mark.parametrize(
    ("made", "stated", "words"),
    [
        (ADAM, {"lr": 1e-3}, "it is that of one step of adam at lr 0.01"),
        (ADAM, {"lr": None}, "it is that of one step of adam at lr 0.01"),
        (ADAM, {"optimizer": "sgd"}, "it is that of one step of adam at lr 0.01"),
        (SGD, {"optimizer": "adam", "lr": 1e-3}, "it is that of one step of SGD"),
        (SGD, {"optimizer": "adam", "lr": 1e-3, "steps": None, "epochs": 1}, "it is that of one step of SGD"),
        (
            SGD,
            {"optimizer": "adamw", "lr": 1e-3, "steps": None, "epochs": 5, "examples": 600, "batch_size": 32},
            "it is that of one step of SGD on one example",
        ),
        (SGD, {"optimizer": "rmsprop", "lr": 1e-3, "examples": 4}, "it is that of one step of SGD on one example"),
    ],
)
def test_another_optimizer_or_step_size_is_told_by_sizes(
    made: TrainingFacts, stated: dict[str, object], words: str
) -> None:
    model = support.network()
    found = screened(model, support.recorded(model, 1, made), **stated)
    assert found.verdict == "leaked"
    assert f"whatever was stated, {words}" in found.notes


def test_what_was_stated_rightly_is_tried_as_it_is() -> None:
    model = support.dense_network()
    for made in (SGD, replace(ADAM, lr=1e-2)):
        found = screened(model, support.recorded(model, 1, made))
        assert found.verdict == "leaked"
        assert not any("where it is" in name for name in found.tried)


@pytest.mark.parametrize("made", [replace(SGD, steps=3), replace(ADAM, steps=3), SGD])
def test_guesses_show_nothing_of_what_they_do_not_explain(made: TrainingFacts) -> None:
    model = support.network()
    update = support.recorded(model, 3, made, noise=1e-4 if made == SGD else 0.0)
    for facts in ({}, {"optimizer": "adam", "lr": 1e-3, "steps": 1, "examples": 1}, {"lr": None}):
        found = screened(model, update, 2.0, **facts)  # type: ignore[arg-type]
        assert not found.exposures, found.exposures


def test_several_steps_of_unknown_sizes_are_said_to_be_taken_for_others() -> None:
    model = support.network()
    update = support.recorded(model, 2, replace(SGD, steps=3))
    notes = screened(model, update, 2.0, lr=None, steps=3).notes
    assert any(note.startswith("several steps of unknown sizes were attacked as one") for note in notes)


def several_steps(model: nn.Module, rates: Sequence[float], **settings: float) -> RecordedUpdate:
    """Steps of SGD on one picture, stated as steps of size 0.1."""
    (inputs, labels), trained = support.examples(1), copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, **settings)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, trained)]
    return RecordedUpdate(before=states[0], after=states[1], training=replace(SGD, steps=len(rates)))


@pytest.mark.parametrize(
    ("settings", "stated", "words"),
    [
        ({}, {}, "its step size is 0.02"),
        ({}, {"lr": None}, "its step size is 0.02"),
        ({"momentum": 0.9}, {"lr": 0.02}, "its step size is 0.02 and its momentum 0.9"),
        ({}, {"momentum": 0.9}, "its step size is 0.02 and its momentum 0"),
    ],
)
def test_the_step_size_of_several_steps_is_that_of_an_update_of_its_size(
    settings: dict[str, float], stated: dict[str, object], words: str
) -> None:
    model = support.dense_network()
    found = screened(model, several_steps(model, [0.02] * 3, **settings), 8.0, **stated)  # type: ignore[arg-type]
    assert (found.verdict, found.exposures[-1].kind) == ("leaked", "images")
    assert f"whatever was stated, {words}" in found.notes


@pytest.mark.parametrize("lr", [None, 0.1])
def test_a_size_that_was_fitted_confirms_no_mean_of_a_batch_that_was_stated_as_one(lr: float | None) -> None:
    """Of one layer and two classes nothing but the size of the update tells a picture from another."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(196, 2)).eval()
    inputs, trained = support.examples(4)[0], copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), torch.ones(4, dtype=torch.int64)).backward()
        optimizer.step()
    states = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, trained)]
    update = RecordedUpdate(before=states[0], after=states[1], training=replace(SGD, steps=3))
    assert not screened(model, update, lr=lr).exposures


def test_no_step_size_is_fitted_once_the_time_is_up() -> None:
    model = support.dense_network()
    update, method = several_steps(model, [0.02] * 3), FedAvg(lr=0.1, steps=3, batch_size=None)
    view = from_update(model, update.difference(), input_shape=support.SHAPE, method=method, batch_size=1)
    found = build("analytic")(view)
    assert of_fitted_step_size(update.training, update.training, view, found) is not None
    with limited_by(SearchControl(time_limit=0.0)), pytest.raises(StoppedError):
        of_fitted_step_size(update.training, update.training, view, found)


def test_a_schedule_that_cannot_be_stated_is_not_called_safe() -> None:
    model = support.dense_network()
    update = several_steps(model, [0.3, 0.1, 0.02])
    for stated in ({}, {"lr": None}):
        found = screened(model, update, 1.0, **stated)  # type: ignore[arg-type]
        assert (found.verdict, found.exposures) == ("not decided", ())
        assert found.reason.startswith("nobody can say what it shows")


@pytest.mark.parametrize("build", [support.dense_network, support.network])
def test_signs_with_sizes_of_tensors_or_rows_are_no_picture(build: Callable[[], nn.Module]) -> None:
    """Pixels above zero leave signs an outer product, as if the picture were of one color."""
    model = build()
    plain = support.recorded(model)
    for is_of_rows in (False, True):
        change = {}
        for name, value in plain.difference().items():
            sizes = value.abs().flatten(1).mean(1) if is_of_rows and value.ndim > 1 else value.abs().mean()
            change[name] = value.sign() * sizes.view(-1, *[1] * (value.ndim - 1))
        after = {name: value - change[name] for name, value in plain.before.items()}
        for facts in ({}, {"optimizer": None}, {"optimizer": "adam"}):
            found = screened(model, replace(plain, after=after), 2.0, **facts)  # type: ignore[arg-type]
            assert found.must_not_leave
            assert not any(one.kind == "images" or "takes is recovered" in one.words for one in found.exposures), facts
