"""A session on a GPU ends inside its time, takes the cheapest table first, and packs no pictures."""

import json
import os
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.performance import gpu_session


def listed(name: str, seconds: float, measured: int) -> dict[str, Any]:
    return {"item": name, "rows": 2, "scales": {"paper": {"seconds": seconds, "measured": measured}}}


def test_tables_that_lack_rows_come_by_their_cost() -> None:
    items = [listed("a/long", 900.0, 0), listed("a/done", 1.0, 2), listed("b/short", 3.0, 1), {**listed("c", 1, 0)}]
    items.append({"item": "d/no-paper-size", "rows": 1, "scales": {"small": {"seconds": 1.0, "measured": 0}}})
    unknown = {"item": "a/unknown", "rows": 1, "scales": {"paper": {"seconds": None, "measured": 0}}}

    assert gpu_session.cheapest_first([unknown, *items]) == ["c", "b/short", "a/long", "a/unknown"]


def test_a_step_that_takes_too_long_is_stopped_and_keeps_its_output(tmp_path: Path) -> None:
    words = ["-c", "import sys, time; sys.stderr.write('begun\\n'); sys.stderr.flush(); time.sleep(60)"]

    step = gpu_session.run_step("slow", words, tmp_path, 2.0)

    assert step.exit_code is None
    assert step.seconds < 30
    assert (tmp_path / "slow.log").read_text() == "begun\n"


def test_what_a_stopped_step_started_ends_with_it(tmp_path: Path) -> None:
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    words = ["-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]

    assert gpu_session.run_step("parent", words, tmp_path, 1.0).exit_code is None

    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_what_a_key_interrupts_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_session, "_end", ended.append)
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_session.run_step("one", ["-c", "pass"], tmp_path, 30.0)

    (process,) = ended
    wait(process, 30)


def test_only_what_this_session_measured_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, folder = tmp_path / "pages", tmp_path / "out"
    pages.mkdir()
    folder.mkdir()
    monkeypatch.setattr(gpu_session, "RESULTS", pages)
    for name in ("gpu.json", "gpu.md"):
        (pages / name).write_text("of another GPU")
        os.utime(pages / name, (1.0, 1.0))

    def measure(session: gpu_session.Session, name: str, words: object, seconds: float) -> None:
        (pages / "gpu.json").write_text("of this one")

    monkeypatch.setattr(gpu_session.Session, "take", measure)
    gpu_session.Session(folder, 10.0).measure()  # no time
    assert not list(folder.iterdir())
    gpu_session.Session(folder, 600.0).measure()
    assert [path.name for path in folder.iterdir()] == ["gpu.json"]


def test_what_came_of_steps_is_on_file_after_each(tmp_path: Path) -> None:
    session = gpu_session.Session(tmp_path, 600.0)

    session.take("one", ["-c", "raise SystemExit(3)"], 30.0)
    session.take("two", ["-c", "pass"], 30.0)

    found = json.loads((tmp_path / "session.json").read_text())
    assert [(step["name"], step["exit_code"]) for step in found["steps"]] == [("one", 3), ("two", 0)]


def test_no_table_is_begun_without_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(gpu_session.Session, "take", lambda session, name, words, seconds: begun.append(name))

    gpu_session.Session(tmp_path, gpu_session.SPARE + gpu_session.LEAST - 5).fill_tables(["a/b"], "cpu")
    assert not begun
    gpu_session.Session(tmp_path, gpu_session.SPARE + gpu_session.LEAST + 60).fill_tables(["a/b", "c"], "cpu")

    assert begun == ["a-b", "c"]


def test_the_archive_has_finished_cells_and_no_pictures_or_weights(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a-b"
    kept = ["run.json", "cells/1/cell.json", "cells/1/images.jsonl"]
    left_out = ["cells/1/images.npz", "cells/2.part/cell.json", "checkpoints/3/state.pt", "checkpoints/3/at.json"]
    for name in kept + left_out:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")

    count = gpu_session.pack(tmp_path / "runs", tmp_path / "cells.tar.xz")

    with tarfile.open(tmp_path / "cells.tar.xz") as file:
        assert file.getnames() == sorted(f"a-b/{name}" for name in kept)
    assert count == len(kept)
