"""The Python face: what `hyperleak.run` leaves is what `hyperleak.load` finds, and errors name their cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import tiny
from support.tiny import CONFIG, Registered

import hyperleak
from eval.io import yaml12
from eval.run import attack_cell, training_cell


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
    with pytest.raises(ValueError, match="expected rows of images, rounds, privacy, got 'pictures'"):
        loaded.rows("pictures")


def test_frames_have_a_row_for_every_image(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = hyperleak.run(tiny(), tmp_path / "a", device="cpu", workers=1)
    frame = found.frame()
    assert len(frame) == len(found.rows())
    assert {"method", "attack", "psnr"} <= set(frame.columns)
    known = [row["psnr"] for row in found.rows() if row.get("psnr") is not None]
    assert frame["psnr"].dropna().tolist() == known != []


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
