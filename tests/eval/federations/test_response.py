"""An update that leaks is stopped, withheld, noised or warned of, and one that can't be screened does not leave."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import recorded as support
from torch import nn

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.response import LeakageError, OnLeak, Responder
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screener, Screening


def responder(on_leak: OnLeak, **settings: object) -> Responder:
    model = support.dense_network()
    screen = Screener(model=lambda: model, input_shape=support.SHAPE)
    return Responder(screen=screen, on_leak=on_leak, **settings)  # type: ignore[arg-type]


def failing(recorded: RecordedUpdate) -> Screening:
    return Screening(verdict="failed", reason="the screening failed: no reason")


def test_withheld_weights_are_those_before() -> None:
    update = support.recorded(support.dense_network())
    response = responder("withhold")(update)
    assert response.action == "withhold"
    assert response.words.startswith("withheld: an image is recovered")
    assert all(torch.equal(value, update.before[name]) for name, value in response.after.items())


def test_what_does_not_leak_is_sent_as_it_is() -> None:
    update = support.recorded(support.dense_network(), noise=1e-2)
    for on_leak in ("stop", "withhold", "noise", "warn"):
        response = responder(on_leak)(update)
        assert response.action == "send"
        assert all(torch.equal(value, update.after[name]) for name, value in response.after.items())


def test_a_warning_lets_it_pass(caplog: pytest.LogCaptureFixture) -> None:
    update = support.recorded(support.dense_network())
    with caplog.at_level(logging.WARNING):
        response = responder("warn")(update)
    assert response.action == "send"
    assert "sent with a warning: an image is recovered" in caplog.text


@pytest.mark.parametrize("half", ["before", "after"])
def test_numbers_that_are_none_end_in_the_policy_with_one_line(half: str, caplog: pytest.LogCaptureFixture) -> None:
    update = support.recorded(support.dense_network())
    states = {"before": dict(update.before), "after": dict(update.after)}
    states[half]["1.bias"] = states[half]["1.bias"] * float("nan")
    broken = replace(update, **states)
    for on_leak, action in (("withhold", "withhold"), ("noise", "withhold"), ("warn", "send")):
        caplog.clear()
        response = responder(on_leak)(broken)  # type: ignore[arg-type]
        assert response.action == action
        (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert "got NaN or infinity in '1.bias' (24 of 24)" in line.getMessage()
        assert not line.exc_info
    with pytest.raises(LeakageError, match="NaN"):
        responder("stop")(broken)


def test_stop_raises_and_is_in_the_report(tmp_path: Path) -> None:
    update = support.recorded(support.dense_network())
    with pytest.raises(LeakageError, match="stopped: an image is recovered"):
        responder("stop", reports=RoundReports(folder=tmp_path))(update)
    page = (tmp_path / "round-3" / "report.html").read_text()
    assert "<td>stopped</td>" in page
    assert "an image is recovered" in page


def test_noise_hides_what_is_then_sent() -> None:
    update = support.recorded(support.dense_network())
    response = responder("noise")(update)
    assert response.action == "send"
    assert not response.screening.exposures
    moved = sum(float((value - update.after[name]).square().sum()) for name, value in response.after.items())
    size = sum(float((value - update.before[name]).square().sum()) for name, value in update.after.items())
    assert 1e-3 < (moved / size) ** 0.5 < 3


def test_variances_under_noise_stay_variances() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.BatchNorm1d(24), nn.Linear(24, 10)).eval()
    update = support.recorded(model)
    after = {**update.after, "2.running_var": torch.full((24,), 1e-6)}
    spared = Screening(verdict="not shown to leak", reason="nothing is shown")
    answers = iter([Screening(verdict="leaked", reason="it leaks"), spared])
    response = Responder(screen=lambda _: next(answers), on_leak="noise")(replace(update, after=after))
    variances = response.after["2.running_var"]
    assert not torch.equal(variances, after["2.running_var"])
    assert float(variances.min()) >= 0


def test_noise_that_does_not_help_withholds() -> None:
    always = Screening(verdict="leaked", reason="it leaks whatever is done")
    response = Responder(screen=lambda _: always, on_leak="noise")(support.recorded(support.dense_network()))
    assert response.action == "withhold"


@pytest.mark.parametrize("on_leak", ["withhold", "noise"])
def test_what_could_not_be_screened_does_not_leave(on_leak: OnLeak) -> None:
    response = Responder(screen=failing, on_leak=on_leak)(support.recorded(support.dense_network()))
    assert (response.action, response.words) == ("withhold", "withheld: the screening failed: no reason")


def test_what_could_not_be_screened_stops_too() -> None:
    with pytest.raises(LeakageError, match="the screening failed"):
        Responder(screen=failing, on_leak="stop")(support.recorded(support.dense_network()))


@pytest.mark.parametrize("settings", [{"on_leak": "pray"}, {"noise": 0.0}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Responder(screen=failing, **settings)  # type: ignore[arg-type]


class OwnError(Exception):
    pass


@pytest.mark.parametrize("error", [OwnError("no luck"), NameError("no luck"), SystemExit("no luck")])
def test_any_error_is_a_screening_that_failed(error: BaseException, tmp_path: Path) -> None:
    def broken(recorded: RecordedUpdate) -> Screening:
        raise error

    update, reports = support.recorded(support.dense_network()), RoundReports(folder=tmp_path)
    for on_leak, action in (("withhold", "withhold"), ("noise", "withhold"), ("warn", "send")):
        response = Responder(screen=broken, on_leak=on_leak, reports=reports)(update)  # type: ignore[arg-type]
        assert (response.action, response.screening.verdict) == (action, "failed")
    with pytest.raises(LeakageError, match="no luck"):
        Responder(screen=broken, on_leak="stop", reports=reports)(update)
    page = (tmp_path / "round-3" / "report.html").read_text()
    assert page.count(f"the screening failed: {type(error).__name__}: no luck") >= 4


def test_an_error_while_noise_is_added_withholds() -> None:
    shown = Screening(verdict="leaked", reason="it leaks")
    update = support.recorded(support.dense_network())
    odd = RecordedUpdate(before={}, after=update.after, origin=update.origin)  # of which there is no difference
    response = Responder(screen=lambda _: shown, on_leak="noise")(odd)
    assert (response.action, response.screening.verdict) == ("withhold", "failed")


def test_a_report_that_cannot_be_written_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    reports = RoundReports(folder=tmp_path / "taken", record=True)
    assert responder("withhold", reports=reports)(support.recorded(support.dense_network())).action == "withhold"
    assert "the report could not be written: " in caplog.text
    with pytest.raises(LeakageError):
        responder("stop", reports=reports)(support.recorded(support.dense_network()))
