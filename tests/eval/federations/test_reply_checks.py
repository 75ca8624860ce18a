"""What a reply may hold beside an update, and arrays that are not what they are called."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.federations.reply_checks import (
    MAX_CHARACTERS,
    MAX_NUMBERS,
    Beside,
    UnreadableError,
    refuse_differences,
    refuse_multiples,
    refuse_no_weights,
    refuse_non_finite,
    refuse_unseen,
    refuse_weights,
)
from fl.seeds import stream


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (None, ""),
        ({"a": 1, "b": ["x", (2.5, True)], "c": np.float32(1)}, ""),
        ({"loss": torch.tensor(1.0), "accuracy": np.array(0.5)}, ""),
        ({"a": {"b": [1, np.ones(2)]}}, "a/b/1"),
        (torch.ones(2), "Tensor"),
        (np.array("a text that is as long as you like"), "ndarray"),
        ({"a": b""}, "a"),
        ({"a": object()}, "a"),
        ({"a": {1, 2}}, "a"),
        ({"a": 1j}, "a"),
    ],
)
def test_what_is_neither_number_nor_text_is_found_wherever_it_lies(value: object, place: str) -> None:
    assert Beside.of(value).unseen == place


def test_numbers_and_characters_are_counted() -> None:
    found = Beside.of({"metrics": {"loss": 0.5, "curve": [1.0, [2, True]]}, "note": "fine"})
    assert (found.numbers, found.characters) == (4, len("metricslosscurvenotefine"))
    assert found.words == "metrics/loss, metrics/curve, note (4 numbers, 24 characters)"
    assert not found.excess
    assert not Beside.of({}).words


@pytest.mark.parametrize(
    "value",
    [
        [0.5] * (MAX_NUMBERS + 1),
        [[1], *[[2, 3]] * MAX_NUMBERS],
        {str(i): {"x": i} for i in range(MAX_NUMBERS + 1)},
        [np.array([0.5])] * (MAX_NUMBERS + 1),
        2 ** (64 * MAX_NUMBERS + 1),
        "a" * (MAX_CHARACTERS + 1),
        ["a"] * (MAX_CHARACTERS + 1),
        {"a" * (MAX_CHARACTERS + 1): {}},
        {("a" * MAX_CHARACTERS,): 1},
    ],
    ids=["list", "deep list", "mapping", "arrays of one", "whole number", "text", "texts", "name", "other name"],
)
def test_more_than_metrics_and_names_is_refused(value: object) -> None:
    with pytest.raises(UnreadableError, match=r"the reply holds .* no attack looks at it"):
        refuse_unseen({"metrics": {"img": value}})


def test_as_much_as_may_leave_leaves() -> None:
    assert refuse_unseen([0.5] * MAX_NUMBERS).numbers == MAX_NUMBERS
    assert refuse_unseen("a" * MAX_CHARACTERS).characters == MAX_CHARACTERS


def weights(scale: float = 1.0) -> dict[str, Tensor]:
    draw = stream(0, "weights")
    return {"w": scale * torch.randn(30, 20, generator=draw), "n": torch.tensor(3)}


def change(scale: float) -> dict[str, Tensor]:
    draw = stream(0, "change")
    return {"w": scale * torch.randn(30, 20, generator=draw), "n": torch.tensor(0)}


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 100.0])
def test_differences_are_no_weights(scale: float) -> None:
    with pytest.raises(UnreadableError, match="seem to be differences or gradients"):
        refuse_differences(weights(), change(scale))
    after = {name: value + change(min(scale, 1.0))[name] for name, value in weights().items()}
    refuse_differences(weights(), after)


def test_weights_are_no_differences() -> None:
    after = {name: value + change(0.01)[name] for name, value in weights().items()}
    with pytest.raises(UnreadableError, match="seem to be weights"):
        refuse_weights(weights(), after)
    for scale in (0.0, 1e-6, 1e-2, 1.0, 100.0):
        refuse_weights(weights(), change(scale))
    decayed = {name: -0.1 * value for name, value in weights().items()}
    refuse_weights(weights(), decayed)


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    fine = {"w": torch.ones(2), "count": torch.ones(2, dtype=torch.int64)}
    refuse_non_finite(fine, "what came back")
    for odd in (float("nan"), float("inf")):
        with pytest.raises(UnreadableError, match=r"finite numbers in what came back, .* in 'b' \(2 of 3\)"):
            refuse_non_finite({**fine, "b": torch.tensor([odd, 0.0, odd])}, "what came back")


def test_nothing_and_whole_numbers_in_the_place_of_weights_are_refused() -> None:
    refuse_no_weights(weights(), weights())
    with pytest.raises(UnreadableError, match="the client sent no update"):
        refuse_no_weights(weights(), {})
    with pytest.raises(UnreadableError, match="expected the weights before training, got none"):
        refuse_no_weights({}, weights())
    for kind in (torch.int8, torch.int64, torch.bool):
        with pytest.raises(UnreadableError, match=r"expected floating-point numbers in what came back, got \w+ in 'w'"):
            refuse_no_weights(weights(), {"w": weights()["w"].to(kind)})


@pytest.mark.parametrize("factor", [3.0, 32.0, 0.1])
def test_multiples_of_weights_are_no_weights(factor: float) -> None:
    after = {name: value + change(0.01)[name] for name, value in weights().items()}
    with pytest.raises(UnreadableError, match="times what was sent"):
        refuse_multiples(weights(), {name: factor * value for name, value in after.items()})
    refuse_multiples(weights(), after)
    refuse_multiples(weights(), {name: 0.9 * value for name, value in after.items()})
    refuse_multiples(weights(), change(100.0))
    refuse_multiples({"w": torch.zeros(3)}, {"w": torch.ones(3)})
