"""The Python face: what `hyperleak.run` leaves is what `hyperleak.load` finds, and errors name their cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import tiny
from support.tiny import CONFIG, Registered
from torch import Tensor, nn

import hyperleak
from eval.io import yaml12
from eval.run import attack_cell, training_cell
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.runtime.user_code import find_callable
from fl.seeds import stream


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The entries that the tiny experiment names."""
    with Registered():
        yield


def test_a_run_from_plain_data_is_loaded_and_not_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = yaml12.parse(CONFIG)
    first = hyperleak.run(data, tmp_path / "a", device="cpu", workers=1)
    assert first.failures == ()
    assert first.report.is_file()
    assert "| " in first.table
    monkeypatch.setattr(training_cell, "train", None)
    monkeypatch.setattr(attack_cell, "run_attack_cell", None)
    again = hyperleak.run(tiny(), tmp_path / "a", device="cpu", workers=1)  # the same as an object
    loaded = hyperleak.load(tmp_path / "a")
    assert first.rows() == again.rows() == loaded.rows() != []
    assert {"round", "method"} <= set(loaded.rows("rounds")[0])
    frame = loaded.frame()
    assert len(frame) == len(loaded.rows())
    assert {"method", "attack", "psnr"} <= set(frame.columns)
    known = [row["psnr"] for row in loaded.rows() if row.get("psnr") is not None]
    assert frame["psnr"].dropna().tolist() == known != []
    charts = loaded.figures("svg")
    assert charts
    assert all(path.parent == tmp_path / "a" / "figures" and path.read_text().startswith("<") for path in charts)
    with pytest.raises(ValueError, match="'gif'"):
        loaded.figures("gif")
    with pytest.raises(ValueError, match="expected rows of images, rounds, privacy, got 'pictures'"):
        loaded.rows("pictures")


def test_a_run_in_which_nothing_can_be_finished_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the cause")

    monkeypatch.setattr(training_cell, "train", fail)
    with pytest.raises(RuntimeError, match=r"nothing could be finished: .*the cause"):
        hyperleak.run(tiny(), tmp_path / "a", device="cpu", workers=1)


def test_what_is_asked_for_wrongly_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no run\.json in it"):
        hyperleak.load(tmp_path)
    with pytest.raises(ValueError, match="overrides go with the name of a config"):
        hyperleak.run(tiny(), tmp_path, overrides=["seeds=[1]"])
    with pytest.raises(FileNotFoundError, match="did you mean 'quickstart'"):
        hyperleak.run("quickstrat", tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'leakage'"):
        _ = hyperleak.leakage


@pytest.fixture
def subject() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network with two images and their labels."""
    draw = stream(0, "api")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=draw) * 0.3)
    return model, torch.rand(2, 1, 8, 8, generator=draw), torch.tensor([0, 2])


def test_a_model_its_update_and_its_view_are_audited_alike(
    subject: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, images, labels = subject
    told = hyperleak.audit(model, images[:1], labels[:1], attacks=["guess"], method="fedavg", out=tmp_path / "a")
    assert (tmp_path / "a" / "report.html").is_file()
    assert hyperleak.load(tmp_path / "a").rows()[0]["psnr"] == told.best("psnr")
    view, truth = from_batch(model, images[:1], labels[:1], method=FedAvg())
    of_view = hyperleak.audit(view, truth=truth, attacks=["guess"])
    update = {name: value.detach() for name, value in view.update.items()}
    captured = hyperleak.audit(model, images[:1], labels[:1], update=update, method="fedavg", attacks=["guess"])
    assert told.best("psnr") == of_view.best("psnr") == captured.best("psnr")
    (blind,) = hyperleak.audit(model, update=update, input_shape=(1, 8, 8), attacks=["guess"]).findings
    assert blind.rows == []
    assert captured.captured
    assert not told.captured
    torch.save(update, tmp_path / "update.pt")
    from_file = hyperleak.audit(
        model, images[:1], labels[:1], update=tmp_path / "update.pt", method="fedavg", attacks=["guess"]
    )
    assert from_file.best("psnr") == told.best("psnr")


def test_another_view_of_the_same_model_does_not_go_on_in_the_same_folder(
    subject: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, images, labels = subject
    views = [from_batch(model, images[i : i + 1], labels[i : i + 1], method=FedAvg())[0] for i in range(2)]
    hyperleak.audit(views[0], attacks=["guess"], out=tmp_path)
    hyperleak.audit(views[0], attacks=["guess"], out=tmp_path)
    with pytest.raises(ValueError, match="holds an audit of the same with other settings, weights or images"):
        hyperleak.audit(views[1], attacks=["guess"], out=tmp_path)


def test_an_audit_without_named_attacks_takes_those_that_fit(
    subject: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, labels = subject
    monkeypatch.setattr("eval.audit.attack_selection.default_attacks", lambda *_: ("analytic", "guess"))
    first, second = hyperleak.audit(model, images, labels, method="fedavg").findings
    assert first.verified
    assert (first.attack, second.attack) == ("analytic", "guess")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "expected images and labels, an update, or both; got neither"),
        ({"images": torch.zeros(1, 1, 8, 8)}, "expected labels beside images"),
        ({"images": torch.zeros(1, 8, 8, 3), "labels": [0]}, r"channels last, .*permute\(0, 3, 1, 2\)"),
        ({"images": torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "labels": [0]}, r"images.float\(\) / 255"),
        ({"labels": torch.zeros(1, dtype=torch.int64)}, "labels go with a tensor of images, got none"),
        ({"update": {"0.weight": torch.zeros(1)}}, r"expected input_shape=\(channels, height, width\)"),
        ({"update": {}}, "tensors by parameter name, or arrays .*, got none"),
        ({"images": torch.zeros(1, 8, 8), "labels": torch.zeros(1, dtype=torch.int64)}, r"\(1, 8, 8\): "),
        ({"options": hyperleak.AuditOptions(), "seed": 1}, "expected options or single settings, got both: seed"),
    ],
)
def test_an_audit_of_what_does_not_fit_together_is_refused(
    subject: tuple[nn.Module, Tensor, Tensor], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        hyperleak.audit(subject[0], **given)


def test_an_audit_takes_one_name_and_a_list_of_labels_and_says_what_to_do_with_arrays(
    subject: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, images, labels = subject
    (finding,) = hyperleak.audit(model, images[:1], [0], attacks="guess", method="fedavg").findings
    assert finding.attack == "guess"
    arrays: Any = images.numpy()
    with pytest.raises(TypeError, match=r"torch\.from_numpy\(images\)"):
        hyperleak.audit(model, arrays, labels)


def test_a_file_in_place_of_a_module_is_answered_by_the_module() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'nets\.my_cnn:build'\?"):
        find_callable("nets/my_cnn.py:build")


NO_OPTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 0}, ValueError, "batch_size: expected a whole number >= 1, got 0"),
    ({"batch_size": "2"}, ValueError, "batch_size: expected a whole number >= 1, got '2'"),
    ({"seed": "a"}, ValueError, "seed: expected a whole number"),
    ({"workers": -1}, ValueError, "workers: expected a whole number >= 1, got -1"),
    ({"minutes": "3"}, ValueError, "expected minutes > 0, or None for no limit, got '3'"),
    ({"attacks": 5}, TypeError, "attacks: expected a name or a list of names, got int"),
    ({"out": 5}, TypeError, "out: expected a path, got int"),
    ({"options": {"seed": 1}}, TypeError, "expected options as an object of AuditOptions, got dict; give its entries"),
    ({"update": [1]}, ValueError, "update: expected a file, tensors by parameter name, or arrays in the order of"),
]


@pytest.mark.parametrize(("given", "kind", "words"), NO_OPTION)
def test_an_option_that_is_none_is_answered_by_one_line(
    given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(kind, match=re.escape(words)) as caught:
        hyperleak.audit(model, torch.rand(2, 1, 8, 8), torch.tensor([1, 2]), **given)
    assert "\n" not in str(caught.value)


def test_what_is_no_subject_or_experiment_is_named() -> None:
    with pytest.raises(TypeError, match=r"expected a model .* or a server's view, got dict; a captured update goes as"):
        hyperleak.audit({}, torch.rand(2, 1, 8, 8), torch.tensor([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an experiment as a config's name"):
        hyperleak.run(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folder: expected a path, got int"):
        hyperleak.load(5)  # type: ignore[arg-type]


def test_settings_of_one_attack_stand_for_a_list_of_it() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    report = hyperleak.audit(model, torch.rand(1, 1, 8, 8), torch.tensor([1]), attacks={"name": "analytic"})
    assert [finding.attack for finding in report.findings] == ["analytic"]


def test_the_config_of_a_run_goes_on_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = hyperleak.run(yaml12.parse(CONFIG), "out", device="cpu", workers=1)
    monkeypatch.setattr(training_cell, "train", None)
    monkeypatch.setattr(attack_cell, "run_attack_cell", None)
    again = hyperleak.run("out/config.yaml", device="cpu", workers=1)
    assert again.folder == first.folder
    assert not (tmp_path / "results").exists()


def test_what_is_no_label_or_no_update_is_refused_with_what_to_give() -> None:
    model = torch.nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"labels: expected a number for each image, counted from 0, got \['cat'\]"):
        hyperleak.audit(model, torch.rand(1, 4), ["cat"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"got generator; dict\(...\) makes tensors by name"):
        hyperleak.audit(model, update=model.named_parameters(), input_shape=(4,))  # type: ignore[arg-type]
    update = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match="expected finite numbers from images, got NaN"):
        hyperleak.audit(model, torch.full((1, 4), torch.nan), [0], update=update)
