"""No all-clear where the strongest attacks did not run: what leaves an audit undecided, and what decides it."""

import json

import numpy as np
import pytest
import torch
from support.audit_command import audit, written
from support.tiny import Registered
from torch import nn

import hyperleak
from attacks.base import Remark
from attacks.gradient_matching.engine.fit_check import LABELS_UNCONFIRMED, still_falling
from attacks.verification.words import CONTRADICTED
from eval.audit.findings import AttackFinding, AuditReport
from eval.commands import terminal
from eval.report.sections import inconclusive
from eval.report.sections.inconclusive import FEATURES_ALONE, Outcome
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream

MODULE = """
import torch
from torch import nn

def images(count):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = nn.functional.gelu(self.first(x))
        return self.head((x + self.norm(self.second(x))).mean((2, 3)))

def residual():
    torch.manual_seed(0)
    return Residual(), *images(1)

def shallow():
    "Too few numbers in its update for the pixels: that is counted."
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, stride=3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(8, 3)), *images(1)

def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3)), *images(1)

def residual_alone():
    return residual()[0]

def dense_alone():
    return dense()[0]
"""
SEARCH = "{name: ig, iterations: 20}"


@pytest.fixture
def mine(monkeypatch, tmp_path):
    name = written(monkeypatch, tmp_path, "undecided", MODULE)
    with Registered():
        yield name


def test_too_few_images_are_mended_as_the_source_of_updates_allows():
    """Of a model more images can be attacked; one captured update has those that it has."""
    finding = AttackFinding("ig", [], "", "too few", too_few_images=2)
    (of_model,) = AuditReport("a model", [finding]).open_questions({})
    assert of_model.remedy == "attack 6 images or more (--count)"
    (of_update,) = AuditReport("an update", [finding], captured=True).open_questions({})
    assert of_update.remedy.startswith("one update holds no further images: let the model make updates of 6 images")


@pytest.mark.parametrize("limit", [(), ("--max-psnr", 60)])
def test_attacks_stopped_by_how_a_model_is_written_leave_the_audit_undecided(mine, limit):
    words = (f"{mine}:residual", "--attack", "rconv", "--attack", "cascade", "--attack", SEARCH, *limit)
    result = audit(*words)
    assert result.exit_code == terminal.UNDECIDED, result.output
    assert "not decided: rconv and cascade could not be tried: " in result.stderr
    assert "(a limit of these attacks, not of what the update tells)" in result.stderr
    assert "a limit of the attack, no finding" in result.stdout
    assert "note: only rconv, cascade, ig tried, as asked for by --attack" in result.stdout
    found = json.loads(audit(*words, "--json").stdout)
    assert any(one["what"] == "rconv and cascade could not be tried" for one in found["undecided"])


def test_an_exact_attack_that_ran_and_counted_too_few_equations_decides(mine):
    result = audit(f"{mine}:shallow", "--attack", "rconv", "--attack", "cascade", "--max-psnr", 60)
    assert result.exit_code == 0, result.output
    assert "not decided" not in result.output


def test_what_leaked_is_an_answer(mine):
    assert audit(f"{mine}:dense").exit_code == 0
    assert audit(f"{mine}:dense", "--max-psnr", 30).exit_code == terminal.LEAKED
    assert json.loads(audit(f"{mine}:dense", "--json").stdout)["undecided"] == []


def test_a_search_that_gave_up_leaves_the_audit_undecided(mine):
    result = audit(f"{mine}:dense", "--attack", "{name: ig, iterations: 1}", "--max-psnr", 60)
    assert result.exit_code == terminal.UNDECIDED, result.output
    assert "not decided: the search of ig failed: the search (of at most 1 iterations) ended without" in result.stderr


def test_pictures_without_the_truth_are_not_judged(mine):
    model, images, labels = __import__(mine).residual()
    view, _ = from_batch(model, images, labels)
    np.savez("update.npz", **{name: value.numpy() for name, value in view.update.items()})
    words = ("--update", "update.npz", "--model", f"{mine}:residual_alone", "--input-shape", "1,8,8")
    result = audit(*words, "--attack", "{name: ig, iterations: 200}")
    assert result.exit_code == terminal.UNDECIDED
    model, images, labels = __import__(mine).dense()
    view, _ = from_batch(model, images, labels)
    np.savez("update.npz", **{name: value.numpy() for name, value in view.update.items()})
    sure = audit(*("--update", "update.npz", "--model", f"{mine}:dense_alone", "--input-shape", "1,8,8"))
    assert sure.exit_code == 0, sure.output


def test_an_audit_of_a_method_has_the_same_verdict(tmp_path):
    with Registered():
        words = ("--method", "fedavg", "--dataset", "{name: faces, size: 8}", "--model", "tiny", "--count", 1)
        cut = audit(*words, "--attack", "{name: ig, iterations: 1}", "--json", "--max-psnr", 60)
        assert cut.exit_code == terminal.UNDECIDED, cut.output
        assert json.loads(cut.stdout)["undecided"][0]["what"] == "the search of ig failed"


def outcome(kind: str, attack: str = "cascade", update: int = 0, words: str = "why") -> Outcome:
    return Outcome(attack, update, kind, words)


@pytest.mark.parametrize(
    ("outcomes", "open_"),
    [
        ([outcome("limit")], True),
        ([outcome("limit"), outcome("searched", "ig")], True),
        ([outcome("limit", "rconv"), outcome("ran"), outcome("searched", "ig")], False),
        ([outcome("limit"), outcome("ran", "rconv"), outcome("searched", "ig")], True),
        ([outcome("limit"), outcome("limit", "rconv"), outcome("ran", "april")], True),
        ([outcome("limit", "rconv"), outcome("fact"), outcome("searched", "ig")], False),
        ([outcome("limit", "spear"), outcome("fact"), outcome("searched", "ig")], True),
        ([outcome("limit"), outcome("blind", "analytic"), outcome("searched", "ig")], True),
        ([outcome("limit"), outcome("settled", "analytic")], False),
        ([outcome("settled"), outcome("limit", update=1)], True),
        ([outcome("ran"), outcome("gave up", "ig")], True),
        ([outcome("fact"), outcome("searched", "ig")], False),
        ([outcome("fact"), outcome("fact", "ig")], True),
        ([outcome("blind", "analytic", words=FEATURES_ALONE)], True),
        ([outcome("blind", "analytic", words=FEATURES_ALONE), outcome("fact")], True),
        ([outcome("blind", "analytic", words=FEATURES_ALONE), outcome("searched", "ig")], False),
        ([outcome("blind", "analytic", words=FEATURES_ALONE), outcome("settled")], False),
        ([outcome("blind", "peel", words="")], False),
    ],
)
def test_what_is_left_open(outcomes, open_):
    assert bool(inconclusive.find_open_questions(outcomes)) == open_


def test_rows_say_what_attacks_came_to():
    rows = [{"update": 0, "not_applicable": "no", "limit": True}, {"update": 1, "given_up": "stopped"}]
    rows += [{"update": 2, "not_applicable": "no"}, {"update": 3, "verified": False, "candidates": 1, "images": 1}]
    rows += [{"update": 4, "verified": None, "candidates": 1, "images": 1}, {"update": 5, "verified": True}]
    rows += [{"update": 6, "verified": True, "candidates": 1, "images": 1}]
    rows += [{"update": 7, "not_applicable": "not needed", "spared": True}]  # says nothing
    rows += [{"update": 8, "verified": None, "candidates": 1, "images": 1, "approximate": True, "note": "nearly"}]
    for number, remark in enumerate((Remark.CONTRADICTED, Remark.RULE_UNKNOWN, Remark.SIZE_CONTRADICTED), 9):
        said = {"remarks": [remark], "note": "in whatever words", "approximate": True}
        rows += [{"update": number, "verified": False, "candidates": 1, "images": 1, **said}]
    rows += [{"update": 12, "verified": False, "candidates": 1, "images": 1, "note": CONTRADICTED}]
    outcomes = inconclusive.outcomes_of_rows("a", rows)
    kinds = [
        "limit",
        "gave up",
        "fact",
        "ran",
        "searched",
        "blind",
        "settled",
        "borne out",
        *["contradicted"] * 3,
        "ran",
    ]
    assert [one.kind for one in outcomes] == kinds
    assert [one.words for one in outcomes[8:]] == ["in whatever words"] * 3 + [""]


@pytest.mark.parametrize(
    ("history", "falls"),
    [([1.0] * 4, True), ([1 / (i + 1) for i in range(20)], True), ([1.0, *[0.5] * 19], False)],
)
def test_an_objective_that_still_fell(history, falls):
    assert still_falling(history, 1.0) == falls


def test_a_label_of_a_failed_search_says_so(mine):
    """The update is of no image at all: whatever label the search ends at, it is a guess."""
    model, images, labels = __import__(mine).residual()
    view, _ = from_batch(model, images, labels)
    noise = torch.Generator().manual_seed(0)
    np.savez("odd.npz", **{name: torch.randn(value.shape, generator=noise) for name, value in view.update.items()})
    words = ("--update", "odd.npz", "--attack", "{name: ig, iterations: 20, labels: random}")
    result = audit(*words, "--model", f"{mine}:residual_alone", "--input-shape", "1,8,8")
    assert "recovered labels (doubtful): " in result.stdout
    assert LABELS_UNCONFIRMED in result.stdout
    scored = audit(*words, "--model", f"{mine}:residual", "--json")
    (row,) = json.loads(scored.stdout)["findings"][0]["images"]
    assert row["labels_doubtful"] is True
    assert "label(s) recovered (doubtful: " in json.loads(scored.stdout)["findings"][0]["verdict"]


class Points(nn.Module):
    """Adds up what it makes of each point, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.mT)))).sum(1))


def test_points_told_in_another_order_than_the_true_ones_are_no_all_clear():
    net = Points()
    initialize(net, stream(1, "rearranged"))
    points = (torch.rand(1, 2, 3, generator=stream(0, "rearranged")) * 255).round() / 255
    report = hyperleak.audit(net, points, torch.tensor([1]), attacks=["cascade"], batch_size=1)
    (finding,) = report.findings
    assert not finding.leaked
    assert any("for which of several" in one.what and "another order" in one.why for one in report.open_questions({}))
