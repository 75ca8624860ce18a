"""Losses of one's own in audits: what a refusal says to do works as written, from Python and on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.audit_command import audit
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from attacks.base import NotApplicable, build
from fl.capture import from_batch
from fl.seeds import stream

IG = {"name": "ig", "iterations": 3}
ROW, NUMBER, CLASS = torch.rand(1, 12, generator=stream(0, "row")), torch.tensor([1.0]), torch.tensor([1])


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.smooth_l1_loss(outputs.flatten(1), targets.reshape(len(targets), -1))


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def model(outputs: int = 1) -> nn.Module:
    layers = nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten()
    return initialized(nn.Sequential(*layers, nn.Linear(48, outputs))).float()


def audited(loss: Callable[..., Tensor] = huber, target: Tensor = NUMBER, **settings: Any) -> Any:
    own = model(3 if loss is smoothed else 1)
    (found,) = hyperleak.audit(own, ROW, target, loss=loss, attacks=IG, **settings).findings
    return found


def settings_in(words: str) -> list[dict[str, Any]]:
    """Return the settings that a sentence names as arguments of a call."""
    found = re.findall(r"(targets|threat)=('[a-z]+'|\{[^}]*\})", words)
    return [{name: ast.literal_eval(value)} for name, value in found]


def test_what_a_search_for_unknown_targets_asks_for_lets_it_run() -> None:
    refused = audited().refused
    assert "targets are unknown" in refused
    asked = settings_in(refused)
    assert asked == [{"targets": kind} for kind in ("free", "binary", "probabilities")] + [
        {"threat": {"knows_labels": True}}
    ]
    for settings in asked:
        found = audited(**settings)
        assert found.rows, settings
        assert not found.refused
    assert "labels-given" in found.flags
    assert "label(s) recovered" not in found.verdict


def test_what_a_search_for_unknown_classes_asks_for_lets_it_run() -> None:
    refused = audited(smoothed, CLASS).refused
    assert "classes are unknown" in refused
    (settings,) = settings_in(refused)
    assert settings == {"threat": {"knows_labels": True}}
    found = audited(smoothed, CLASS, **settings)
    assert found.rows
    assert "label(s) recovered" not in found.verdict
    assert found.rows[0]["label_correct"] is None


def test_a_callable_in_settings_says_what_its_targets_are() -> None:
    named = {"name": "function", "function": huber, "targets": "free"}
    (found,) = hyperleak.audit(model(), ROW, NUMBER, loss=named, attacks=IG).findings
    assert found.rows
    with pytest.raises(ValueError, match="expected settings function and targets of the loss, got 'target'"):
        hyperleak.audit(model(), ROW, NUMBER, loss={"name": "function", "function": huber, "target": "free"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": "any"}, "targets: expected 'known', 'free', 'binary', 'probabilities' or 'classes', got 'any'"),
        ({"loss": "bce", "targets": "free"}, "bce says itself what they are"),
        (
            {"loss": {"name": "function", "function": huber, "targets": "free"}, "targets": "binary"},
            "said once, got 'free' of the loss and 'binary'",
        ),
        ({"threat": {"knows_label": True}}, "threat: expected knows_labels, .*, got 'knows_label'"),
        ({"threat": {"knows_labels": 3}}, "threat.knows_labels: expected true or false, got 3"),
    ],
)
def test_settings_that_can_not_be_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hyperleak.audit(model(), ROW, NUMBER, **{"loss": huber, "attacks": IG, **settings})


def test_the_target_of_a_captured_update_may_be_known_without_its_input() -> None:
    view, _ = from_batch(model(), ROW, NUMBER, loss=huber)
    settings: dict[str, Any] = {"update": view.update, "input_shape": (12,), "loss": huber, "attacks": IG}
    (found,) = hyperleak.audit(model(), labels=NUMBER, **settings).findings
    assert not found.refused
    assert not found.labels  # those that were given are none that came back
    with pytest.raises(ValueError, match="got none: give them as labels=, with or without their images"):
        hyperleak.audit(model(), threat={"knows_labels": True}, **settings)
    with pytest.raises(ValueError, match=r"as many labels as examples, 1 \(batch_size, times clients\), got 2"):
        hyperleak.audit(model(), labels=[1.0, 2.0], **settings)
    (found,) = hyperleak.audit(model(), ROW, NUMBER, threat={"knows_labels": True}, **settings).findings
    assert found.rows
    with pytest.raises(ValueError, match="say threat and targets where it is made"):
        hyperleak.audit(view, targets="free")


def test_the_labels_of_several_clients_are_known_in_their_order() -> None:
    rows, numbers = torch.rand(2, 12, generator=stream(0, "rows")), torch.tensor([1.0, 3.0])
    made = [from_batch(model(), rows[i : i + 1], numbers[i : i + 1], loss=huber)[0].update for i in range(2)]
    mean = {name: (made[0][name] + made[1][name]) / 2 for name in made[0]}
    settings: dict[str, Any] = {"update": mean, "clients": 2, "loss": huber, "attacks": IG, "input_shape": (12,)}
    (known,) = hyperleak.audit(model(), rows, numbers, threat={"knows_labels": True}, **settings).findings
    assert len(known.rows) == 2
    (alone,) = hyperleak.audit(model(), labels=numbers, **settings).findings
    assert not alone.refused


def test_views_take_the_same_words() -> None:
    ig = build(IG)
    refused = ig(from_batch(model(), ROW, NUMBER, loss=huber)[0])
    assert isinstance(refused, NotApplicable)
    for settings in ({"targets": "free"}, {"threat": {"knows_labels": True}}):
        assert not isinstance(ig(from_batch(model(), ROW, NUMBER, loss=huber, **settings)[0]), NotApplicable)


MODULE = """
import torch
from torch import nn

def huber(outputs, targets):
    return nn.functional.smooth_l1_loss(outputs.flatten(1), targets.reshape(len(targets), -1))

def build():
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(48, 1)
    return nn.Sequential(*layers), torch.rand(1, 12), torch.ones(1)
"""


def test_the_command_takes_what_its_refusal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["model", "own_losses_of_a_user:build", "--loss", "own_losses_of_a_user:huber"]
    words += ["--attack", "{name: ig, iterations: 3}"]

    def said(*more: str) -> str:
        return audit(*words, *more).output

    refused = said()
    asked = set(re.findall(r"--(targets) ([a-z]+)", refused) + re.findall(r"--(threat) '([^']*)'", refused))
    assert len(asked) == 4
    for option, value in sorted(asked):
        assert "row 0: PSNR" in said(f"--{option}", value), (option, value)
    assert "expected --targets as known, free" in said("--targets", "any")
    assert "--threat: expected knows_labels, " in said("--threat", "{knows_label: true}")
    assert "expected --threat as settings such as '{knows_labels: true}'" in said("--threat", "knows_labels")
