"""An audit within a time, or with a key pressed: searches end with their best, and the findings say so."""

import json
import os
import re
import signal

import pytest
import torch
from support.audit_command import written
from support.paced import CLOCK, paced
from support.runs import tiny
from support.tiny import CONFIG, Registered
from typer.testing import CliRunner

import hyperleak
from attacks.search_control import SearchControl, SearchProgress
from eval import cli
from eval.audit.request import AuditRequest
from eval.commands import terminal
from eval.commands.system_errors import first_interrupt_ends_search
from eval.commands.terminal import duration, iterations_words, seconds_of
from eval.run import plan

MODULE = """
import torch

def build():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    for p in model.parameters():
        p.data = torch.rand(p.shape, generator=generator) - 0.5
    return model, torch.rand(2, 1, 8, 8, generator=generator), torch.tensor([0, 1])
"""
FIRST, SECOND = "{name: paced, iterations: 40}", "{name: paced, iterations: 60}"


@pytest.fixture
def clock(monkeypatch):
    with Registered(), paced(monkeypatch) as clock:
        yield clock


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, also where whoever started the tests ignores it, as a shell does for what runs behind it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "timed", MODULE)
    return name


def audit(name, *words):
    return CliRunner().invoke(cli.app, ["audit", f"{name}:build", "--device", "cpu", "--workers", "1", *words])


def test_an_audit_ends_in_time_and_says_what_was_cut_short(clock, mine, tmp_path):
    words = ("--attack", FIRST, "--attack", SECOND, "--attack", "guess", "--out", "kept")
    found = audit(mine, *words, "--minutes", "1", "--json")
    assert clock.now == 60
    assert found.exit_code == terminal.UNDECIDED
    said = json.loads(found.stdout)  # progress is on stderr
    first, second, guess = said["findings"]
    assert first["cut_short"].startswith("the search was cut short by the time limit after")
    assert "cut-short" in first["flags"]
    assert second["cut_short"]
    assert (guess["cut_short"], guess["verdict"]) == (
        "the time limit came before it",
        "not tried: the time limit came before it",
    )
    assert {one["what"] for one in said["undecided"]} >= {"guess could not be tried"}
    assert any("did not search to the end" in one["what"] for one in said["undecided"])
    assert "timed" in found.stderr
    assert "80 iterations of 2 updates" in found.stderr
    assert json.loads((tmp_path / "kept" / "audit.json").read_text())["findings"] == said["findings"]
    begun = clock.now
    whole = audit(mine, *words, "--json")
    assert clock.now - begun == 200
    again = json.loads(whole.stdout)
    assert [finding["cut_short"] for finding in again["findings"]] == [None] * 3
    fresh = json.loads(audit(mine, *words[:-1], "fresh", "--json").stdout)
    assert again["findings"] == fresh["findings"]


@pytest.mark.usefixtures("interruptible")
def test_a_key_pressed_during_a_search_ends_it_with_its_best(clock, mine, tmp_path, monkeypatch):
    def tick():
        clock.now += 1
        if clock.now == 55:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(clock, "tick", tick, raising=False)
    words = ("--attack", FIRST, "--attack", SECOND, "--out", "kept")
    found = audit(mine, *words)
    assert found.exit_code == terminal.STOPPED
    assert "cut short by an interrupt after 15 of 40 iterations" in found.stdout
    assert "the time limit" not in found.output  # there was none
    assert "stopped at paced; what was found by then stands above; the same command goes on from here" in found.stderr
    assert "paced-2:" not in found.stdout
    begun = clock.now
    again = audit(mine, *words)
    assert again.exit_code != terminal.STOPPED
    assert clock.now - begun == 40 + 120  # of the first attack one update was whole


@pytest.mark.usefixtures("interruptible")
def test_a_key_pressed_twice_stops_at_once(clock, mine, monkeypatch):
    def tick():
        clock.now += 1
        if clock.now == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(clock, "tick", tick, raising=False)
    found = audit(mine, "--attack", FIRST)
    assert found.exit_code == terminal.STOPPED
    assert clock.now == 5
    assert "nothing was found before it" in found.stderr


def test_an_ignored_key_stays_ignored(clock, mine, monkeypatch):
    def tick():
        clock.now += 1
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(clock, "tick", tick, raising=False)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = audit(mine, "--attack", "{name: paced, iterations: 4}", "--json")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["findings"][0]["cut_short"] is None
    assert clock.now == 8


@pytest.mark.usefixtures("interruptible")
def test_without_a_search_a_key_stops_at_once():
    control = SearchControl()
    with first_interrupt_ends_search(control):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert not control.interrupted
        with control.searching():
            os.kill(os.getpid(), signal.SIGINT)
            assert control.interrupted
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(mine, minutes):
    found = audit(mine, "--minutes", minutes)
    assert found.exit_code == terminal.USAGE
    assert "expected --minutes as a number above 0" in found.stderr


def test_the_python_api_keeps_to_the_time(clock, tmp_path):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    attack = {"name": "paced", "iterations": 100}
    report = hyperleak.audit(model, images, labels, attacks=[attack], minutes=0.5)
    assert clock.now == 30
    assert "cut short by the time limit after 15 of 100" in report.findings[0].cut_short
    with pytest.raises(ValueError, match="expected minutes > 0"):
        hyperleak.audit(model, images, labels, minutes=0)


class Slow(torch.nn.Module):
    """A network of which every pass takes a second."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)

    def forward(self, images):
        CLOCK.tick()
        return self.layer(images.flatten(1))


def test_preparing_an_update_is_not_counted_and_a_note_says_how_long_it_took(clock):
    images, labels, attack = torch.rand(1, 1, 8, 8), torch.tensor([0]), {"name": "paced", "iterations": 100}
    report = hyperleak.audit(Slow(), images, labels, attacks=[attack], minutes=0.5)
    assert "cut short by the time limit after 30 of 100" in report.findings[0].cut_short
    said = [note for note in report.notes if "does not count" in note]
    assert len(said) == 1
    taken = int(re.search(r"took (\d+) seconds", said[0])[1])
    assert 3 < taken < 30
    assert clock.now <= 30 + taken + 3  # seconds in which the picture is held to its update
    clock.now = 0
    report = hyperleak.audit(Slow(), images, labels, attacks=[attack], minutes=20)
    assert not [note for note in report.notes if "does not count" in note]


def test_the_command_does_not_count_preparing_either(clock, mine, monkeypatch):
    made = AuditRequest.plan

    def slowly(request):
        clock.now += 50
        return made(request)

    monkeypatch.setattr(AuditRequest, "plan", slowly)
    found = audit(mine, "--attack", FIRST, "--minutes", "1", "--json")
    assert "preparing what is attacked took 50 seconds, which the time limit does not count" in found.stdout
    assert clock.now == 110


def test_a_run_from_python_says_what_it_left(clock, tmp_path):
    one = ("observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1, batch_size: 6}]", "attack=[paced, guess]")
    cut = hyperleak.run(tiny(*one), tmp_path / "a", device="cpu", workers=1, minutes=0.1)
    assert cut.cut_short == ("fedavg: paced after round 2", "fedavg: guess after round 2")
    assert hyperleak.run(tiny(*one), tmp_path / "a", device="cpu", workers=1).cut_short == ()


def test_a_run_from_the_command_says_what_it_left(clock, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    words = [
        "run",
        str(config),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--workers",
        "1",
        "--only",
        "fedavg",
    ]
    words += ["--set", "observe.method={steps: 1}", "--set", "attack=[paced]"]
    cut = CliRunner().invoke(cli.app, [*words, "--minutes", "0.1", "--json"])
    assert cut.exit_code == 0, cut.output
    said = json.loads(cut.stdout)
    assert (said["status"], said["cut_short"], said["not_begun"]) == ("cut short", ["fedavg: paced after round 2"], [])
    assert "cut short for --minutes: fedavg: paced after round 2" in cut.stderr
    whole = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert (whole["status"], whole["cut_short"]) == ("finished", [])


def test_progress_is_said_in_words():
    assert [duration(x) for x in (0.2, 40, 89, 720, 3 * 3600)] == [
        "about 1 s", "about 40 s", "about 89 s", "about 12 min", "about 3.0 h",
    ]  # fmt: skip
    assert iterations_words(SearchProgress(0, 28800)) == "0 of 28,800 iterations"
    assert iterations_words(SearchProgress(1200, 28800, 700)) == "1,200 of 28,800 iterations, about 12 min left"
    limited = SearchProgress(1200, 28800, 30, is_limited=True)
    assert iterations_words(limited) == "1,200 of 28,800 iterations, about 30 s to the time limit"
    assert seconds_of(None) == float("inf")
    assert seconds_of(1.5) == 90


def test_elsewhere_than_on_a_terminal_a_search_has_a_line_now_and_then(clock, capsys):
    screen = terminal.console(as_json=True)
    with terminal.show_progress(screen) as seen:
        seen.stage("fedavg: ig", 0, 6)
        for iteration in range(0, 2880, 10):
            clock.now += 1
            seen.search("fedavg: ig", SearchProgress(iteration, 2880, 288 - iteration / 10 if iteration else None))
        seen.stage("fedavg: ig", 6, 6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "fedavg: ig (0/6)",
        "fedavg: ig: about 5 min for 2,880 iterations of 6 updates",
        "fedavg: ig: 300 of 2,880 iterations, about 4 min left",
    ]
    assert len(lines) == 2 + 9 + 1


def test_no_time_goes_into_similarity_of_pictures_where_there_are_none(monkeypatch):
    """Loading LPIPS takes seconds."""
    asked = []
    monkeypatch.setattr(plan, "load_lpips", lambda *words, **settings: asked.append(words))
    table, model = torch.rand(1, 5), torch.nn.Linear(5, 3)
    hyperleak.audit(model, table, [1], attacks="analytic")
    update = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    hyperleak.audit(model, update=update, input_shape=(5,), attacks="analytic")
    assert not asked
    hyperleak.audit(torch.nn.Sequential(torch.nn.Flatten(), model), table.view(1, 1, 1, 5), [1], attacks="analytic")
    assert asked
