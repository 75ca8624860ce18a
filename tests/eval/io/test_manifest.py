"""What readers get is of one run, or they are told; `hyperleak doctor DIR` names what is damaged."""

import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.runs import run, tiny, unstated
from support.tiny import Registered
from typer.testing import CliRunner

from eval.cli import app
from eval.io import manifest
from eval.report.load import load
from eval.report.writer import write_report
from eval.run import folder_integrity
from eval.run.run_directory import RunDir

runner = CliRunner()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run that has kept its checkpoints."""
    folder = tmp_path_factory.mktemp("manifest") / "out"
    with Registered():
        run(tiny(), folder, keep_checkpoints=True)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


READ = ["config.yaml", "env.json", "images.jsonl", "rounds.jsonl", "run.json", "manifest.json", "partitions/1.json"]


@pytest.mark.parametrize("name", READ)
def test_a_flipped_bit_in_a_file_that_is_read_is_an_error_that_names_it(folder, name):
    flip(folder / name)
    with pytest.raises(ValueError, match=name):
        write_report(folder)


@pytest.mark.parametrize("name", ["images.jsonl", "rounds.jsonl", "config.yaml", "env.json"])
def test_files_of_another_run_are_told(folder, tmp_path, name):
    with Registered():
        run(tiny("title=Another", "seeds=1"), tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, folder / name)
    if name == "env.json":  # the same on the same machine
        load(folder)
    else:
        with pytest.raises(ValueError, match=name):
            load(folder)


def test_files_change_together_or_readers_are_told(folder, monkeypatch):
    """Stopped between two files that are put in place."""
    swap, done = manifest.replace_path, []

    def stop(new, path):
        done.append(path.name)
        if path.name == "images.jsonl":
            raise KeyboardInterrupt
        swap(new, path)

    monkeypatch.setattr(manifest, "replace_path", stop)
    with Registered(), pytest.raises(KeyboardInterrupt):
        run(tiny("title=Another", "seeds=1"), folder)
    assert "config.yaml" in done
    with pytest.raises(ValueError, match="of two states"):
        write_report(folder)
    assert any(line.startswith("manifest.json") for line in folder_integrity.check_folder(folder).damaged)
    monkeypatch.undo()
    with Registered():
        run(tiny("title=Another", "seeds=1"), folder)
    assert load(folder).title == "Another"
    assert {row["seed"] for row in load(folder).rows} == {1}


def test_an_error_before_that_leaves_all_as_it_was(folder, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    files = [path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    before = {path: path.read_bytes() for path in files if path.name not in {"run.json", "log.txt"}}
    monkeypatch.setattr(manifest, "publish", full)
    with Registered(), pytest.raises(OSError, match="no space"):
        run(tiny("title=Another"), folder)
    monkeypatch.undo()
    assert load(folder).title == "A tiny experiment"
    assert {path: path.read_bytes() for path in before} == before
    assert not [name for name in os.listdir(folder) if name.endswith(".part")]


def test_a_report_waits_while_a_run_puts_its_files_in_place(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    writer = threading.Thread(target=write_report, args=(folder,))
    writer.start()
    time.sleep(0.05)
    assert not (folder / "report.html").exists()
    os.close(descriptor)
    writer.join()
    assert (folder / "report.html").is_file()


def test_a_report_beside_a_run_is_of_the_last_whole_state(folder):
    about = json.loads((folder / "run.json").read_text())
    with RunDir(folder).locked():
        (folder / "run.json").write_text(json.dumps({"id": "x", "title": "At work", "status": "running", "cells": []}))
        write_report(folder)
    assert load(folder).metadata["status"] == "finished"
    assert load(folder).metadata["id"] == about["id"]


def test_doctor_finds_a_whole_folder_whole(folder):
    done = runner.invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 0, done.output
    assert " 0 damaged" in done.output


def places(folder: Path) -> dict[str, Path]:
    return {
        "cell": next(folder.glob("cells/*/cell.json")),
        "rows": next(folder.glob("cells/*/images.jsonl")),
        "cell pictures": next(folder.glob("cells/*/pictures.npz")),
        "checkpoint": next(folder.glob("checkpoints/*/*.npz")),
        "pictures": next(folder.glob("images/*.npz")),
        "drawn": next(folder.glob("images/*.png")),
        **{name: folder / name for name in READ},
    }


@pytest.mark.parametrize(
    "kind", ["cell", "rows", "cell pictures", "checkpoint", "pictures", "drawn", *READ]
)  # fmt: skip
def test_doctor_names_what_is_damaged_in_a_line(folder, kind):
    flip(path := places(folder)[kind])
    done = runner.invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if line.startswith("damaged")]
    assert path.parent.name in line or path.name in line or "readers' files" in line


def test_doctor_says_what_it_cannot_check(folder):
    for path in folder.glob("cells/*"):
        unstated(path)
    (folder / "manifest.json").unlink()
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({key: about[key] for key in about.keys() - {"sha256"}}))
    done = runner.invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 0
    assert "not checked" in done.output
    assert "images.jsonl" in done.output


def test_doctor_refuses_other_folders(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        done = runner.invoke(app, ["doctor", str(path)])
        assert done.exit_code == 2


def test_pictures_that_have_changed_are_not_shown(folder):
    path = next(folder.glob("images/fedavg*.npz"))
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **{name: array[::-1] for name, array in arrays.items()})
    run_ = load(folder)
    group = next(group for group in run_.groups if group.method == "fedavg" and group.attack == "guess")
    with pytest.raises(ValueError, match="has changed since it was written"):
        run_.load_pictures(group, 0)


def test_a_folder_that_lost_what_its_files_are_checked_by_is_told_from_an_old_one(folder):
    (folder / "manifest.json").unlink()
    (folder / "images.jsonl").write_text((folder / "images.jsonl").read_text().replace('"psnr": ', '"psnr": 9'))
    with pytest.raises(ValueError, match=r"manifest\.json is missing; the command that began the run writes it anew"):
        write_report(folder)
    assert [line.split(";")[0] for line in folder_integrity.check_folder(folder).damaged] == [
        "manifest.json is missing"
    ]
    with Registered():
        run(tiny(), folder)
    assert folder_integrity.check_folder(folder).damaged == []
    (folder / "run.json").unlink()
    assert [line.split(";")[0] for line in folder_integrity.check_folder(folder).damaged] == ["run.json is missing"]


def test_doctor_says_that_reports_are_not_checked(folder):
    (folder / "report.html").write_text("made up")
    assert "report.html" in folder_integrity.check_folder(folder).unchecked
