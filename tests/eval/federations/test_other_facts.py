"""Facts that are wrong in a plausible way hide no leak that the update itself points to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import recorded as support
from torch import nn

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.screening import Screener, Screening

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


@pytest.mark.parametrize(
    ("made", "stated", "words"),
    [
        (ADAM, {"lr": 1e-3}, "it is that of one step of adam at lr 0.01"),
        (ADAM, {"lr": None}, "it is that of one step of adam at lr 0.01"),
        (ADAM, {"optimizer": "sgd"}, "it is that of one step of adam at lr 0.01"),
        (SGD, {"optimizer": "adam", "lr": 1e-3}, "it is that of one step of SGD"),
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
        found = screened(model, update, 0.5, **facts)  # type: ignore[arg-type]
        assert not found.exposures, found.exposures


def test_several_steps_of_unknown_sizes_are_said_to_be_taken_for_one() -> None:
    model = support.network()
    update = support.recorded(model, 2, replace(SGD, steps=3))
    notes = screened(model, update, 0.5, lr=None, steps=3).notes
    assert "several steps of unknown sizes were attacked as one; of steps of one size say lr" in notes
