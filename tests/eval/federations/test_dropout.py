"""Masks of dropout are read off an update of one example, and what can't be is left to the layers' own equations."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.screening import Screener, Screening
from fl.simulation.dropout_masks import Mask, silence

pytestmark = pytest.mark.usefixtures("own_time")


class Functional(nn.Module):
    """A network that drops without a module."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(196, hidden), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1)).relu()
        return self.second(nn.functional.dropout(hidden, 0.5, self.training))


class Attending(nn.Module):
    """A network whose attention drops by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(14, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1, 2))
        return self.head(self.attend(tokens, tokens, tokens)[0].mean(1))


def dense(*after: nn.Module, outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), *after, nn.Linear(24, outputs))


def made(build: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return build().train()  # type: ignore[operator]


def recorded(model: nn.Module, count: int = 1) -> RecordedUpdate:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(2)
        return support.recorded(model, count)


def screened(model: nn.Module, update: RecordedUpdate, seconds: float = 5.0) -> Screening:
    return Screener(model=lambda: model, input_shape=support.SHAPE, seconds=seconds)(update)


DENSE = {
    "hidden": lambda: dense(nn.Dropout(0.5)),
    "two": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(196, 32), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(32, 24), nn.Tanh(), nn.AlphaDropout(0.0), nn.Dropout(0.2), nn.Linear(24, 10)),
    ),
}


@pytest.mark.parametrize("kind", DENSE)
def test_masks_are_read_and_confirm_the_picture(kind: str) -> None:
    model = made(DENSE[kind])
    update = recorded(model)
    found = screened(model, update)
    assert found.reason == "an image is recovered, and the update confirms it (analytic)"
    assert any(note.startswith("masks of dropout were read off the update: 3") for note in found.notes)


def test_masks_are_those_that_were_drawn() -> None:
    model = made(DENSE["hidden"])
    update = recorded(model)
    silenced = silence(model, support.SHAPE, update.difference())
    mask = silenced.model.get_submodule("3")
    assert isinstance(mask, Mask)
    assert set(mask.values.tolist()) == {0.0, 2.0}
    inputs, labels = support.examples(1)
    again = copy.deepcopy(silenced.model)
    nn.functional.cross_entropy(again(inputs), labels).backward()
    for name, value in again.named_parameters():
        torch.testing.assert_close(0.1 * value.grad, update.difference()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", DENSE)
def test_another_rule_is_contradicted_under_known_masks_too(kind: str) -> None:
    model = made(DENSE[kind])
    update = recorded(model)
    halves = {
        name: value - 0.5 * (value - update.after[name]) if name.endswith("weight") else update.after[name]
        for name, value in update.before.items()
    }
    found = screened(model, replace(update, after=halves), 2.0)
    assert (found.verdict, found.exposures) == ("not decided", ())
    assert found.reason.startswith("nobody can say what it shows")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: dense(nn.AlphaDropout(0.5)), "what 1 takes is recovered up to a factor: 196 numbers (analytic)"),
        (Functional, "what first takes is recovered up to a factor: 196 numbers (analytic)"),
        (
            lambda: nn.Sequential(
                *(nn.Conv2d(1, 4, 5), nn.Dropout(0.25), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
                *(nn.Linear(100, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 10)),
            ),
            "what 5 takes is recovered up to a factor: 100 numbers (cascade)",
        ),
    ],
)
def test_masks_that_nobody_knows_leave_layers_their_own_equations(build: object, words: str) -> None:
    model = made(build)
    found = screened(model, recorded(model))
    assert (found.verdict, found.reason) == ("leaked", words)
    assert any("that nobody can draw again" in note or "which nobody can draw again" in note for note in found.notes)
    assert not any(exposure.kind == "images" for exposure in found.exposures)


@pytest.mark.parametrize(
    "build", [DENSE["hidden"], Functional, lambda: Functional(2), lambda: Functional(1), Attending]
)
def test_several_examples_are_attacked_and_not_mistaken_for_one(build: object) -> None:
    model = made(build)
    update = recorded(model, 4)
    for stated in (4, 1):
        found = screened(model, replace(update, training=replace(update.training, examples=stated)), 2.0)
        assert not found.exposures
        if found.verdict != "not shown to leak":
            assert (found.verdict, stated) == ("not decided", 1)
            assert "is made of 4 inputs at least, and 1 were stated" in found.reason
        assert found.tried


@pytest.mark.parametrize("kind", ["dropout", "norm"])
@pytest.mark.parametrize("loader", [False, True])
def test_a_part_in_evaluation_mode_is_in_none_other(kind: str, loader: bool) -> None:
    """A client may freeze dropout, or statistics, in a network that it trains otherwise."""
    model = made(lambda: dense(nn.Dropout(0.5) if kind == "dropout" else nn.BatchNorm1d(24)))
    model[3].eval()
    update = recorded(model)
    settings = {"mean": (0.0,), "std": (1.0,)} if loader else {}
    found = Screener(model=lambda: model, input_shape=support.SHAPE, seconds=5, **settings)(update)  # type: ignore[arg-type]
    assert (found.verdict, found.exposures[-1].kind) == ("leaked", "images")
    assert not any("dropout" in note for note in found.notes)


def test_dropout_that_draws_in_evaluation_mode_is_read_as_drawing() -> None:
    model = made(DENSE["hidden"]).eval()
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).train()
    found = screened(model, recorded(model))
    assert (found.verdict, found.exposures[-1].kind) == ("leaked", "images")
    assert any(note.startswith("masks of dropout were read off") for note in found.notes)


def test_a_mode_that_was_stated_is_that_of_all_parts() -> None:
    model = made(DENSE["hidden"])
    update = recorded(model)
    stated = replace(update, training=replace(update.training, train_mode=True))
    found = screened(model.eval(), stated)
    assert any(note.startswith("masks of dropout were read off") for note in found.notes)
    frozen = replace(update, training=replace(update.training, train_mode=False))
    assert not any("dropout" in note for note in screened(model.train(), frozen).notes)


def test_two_outputs_look_like_one_example_and_prove_nothing() -> None:
    """What flows back into two outputs has one direction whatever they are given."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(196, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(nn.functional.dropout(x.flatten(1), 0.2, self.training))

    model, (inputs, _) = made(Head), support.examples(4)
    trained = copy.deepcopy(model)
    with torch.random.fork_rng():
        nn.functional.cross_entropy(trained(inputs), torch.tensor([0, 1, 0, 0])).backward()
    after = {name: (value - 0.1 * value.grad).detach() for name, value in trained.named_parameters()}
    update = RecordedUpdate(before=dict(model.state_dict()), after=after, training=support.PLAIN)
    assert screened(model, update).verdict == "not shown to leak"


def test_a_network_that_drops_nothing_stays_as_it_is() -> None:
    for model in (made(lambda: dense()), made(lambda: dense(nn.Dropout(0.0)))):
        silenced = silence(model, support.SHAPE, None)
        assert silenced.replayable
        assert not silenced.note
    trained = made(lambda: dense(nn.Dropout(0.5)))
    found = screened(copy.deepcopy(trained).eval(), support.recorded(trained.eval()))
    assert not any("dropout" in note for note in found.notes)
