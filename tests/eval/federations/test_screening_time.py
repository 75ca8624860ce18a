"""Reading an update and asking what hides it are bounded as attacks are, and the reason says what was not done."""

from __future__ import annotations

import time

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn

from attacks.search_control import check_time_limit
from attacks.update import quantization_grids
from defenses.signsgd import SignSGD
from eval.audit.recorded_update import RecordedUpdate
from eval.federations import screening
from eval.federations.screening import Screener
from fl.seeds import stream
from fl.tensors import dense


class Recurrent(nn.Module):
    """An LSTM on rows of a picture, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(14, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.lstm(images.flatten(1, 2))[0][:, -1])
        return logits


def signs_of(model: nn.Module) -> RecordedUpdate:
    update = support.recorded(model)
    sent = SignSGD().transform_update(dict(update.difference()), stream(0, "sent"))
    after = {name: value - dense(sent[name]) for name, value in update.before.items()}
    return RecordedUpdate(before=update.before, after=after, training=support.PLAIN, origin={})


def screener(model: nn.Module, seconds: float) -> Screener:
    return Screener(model=lambda: model, input_shape=support.SHAPE, seconds=seconds)


def test_grids_are_read_once_for_each_reading_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    read, made = [], quantization_grids._read_grids

    def noted(values: Tensor) -> object:
        read.append(values)  # kept, so that no other has its place
        return made(values)

    monkeypatch.setattr(quantization_grids, "_read_grids", noted)
    model = Recurrent()
    screener(model, 20)(signs_of(model))
    places = [(value.data_ptr(), value.shape) for value in read]
    assert len(places) == len(set(places))
    assert len(read) <= 8 * len(model.state_dict())


def test_an_update_that_is_read_too_slowly_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "LEAST_SECONDS", 0.05)

    def slow(values: Tensor) -> object:
        for _ in range(1000):
            time.sleep(0.01)
            check_time_limit()
        raise AssertionError("nobody ended this")

    monkeypatch.setattr(quantization_grids, "_read_grids", slow)
    model = Recurrent()
    found = screener(model, 0.05)(signs_of(model))
    assert (found.verdict, found.must_not_leave) == ("failed", True)
    assert found.reason == (
        "reading the update took more than 0.05 seconds, so that no attack was begun: give more (seconds)"
    )


def test_what_nobody_could_ask_in_time_behind_the_attacks_is_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> str:
        while True:
            time.sleep(0.01)
            check_time_limit()

    monkeypatch.setattr(screening, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(screening, "find_doubt", slow)
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 10, bias=False))
    update = support.recorded(model, 8)
    with torch.no_grad():
        found = screener(model, 0.5)(update)
    assert (found.verdict, found.exposures) == ("not decided", ())
    assert "nobody could ask whether it is of a form that hides examples" in found.reason
