"""Every step of the file layer fails once, or stops the process, in turn: what is left then, and after going on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from support.runs import tiny
from support.tiny import Registered

from eval.run import runner
from eval.run.execute import run_and_publish
from eval.run.run_directory import LOCK, LOG, RunDir
from fl.runtime import atomic_files


class Stopped(BaseException):
    """The process ends here."""


@contextmanager
def failing(at: int, stopped: bool = False) -> Iterator[list[str]]:
    """Step number `at` of the file layer fails, or stops all; yields the kinds of the steps as they are taken."""
    taken = list[str]()

    def step(kind: str, path: Path) -> None:
        taken.append(kind)
        if len(taken) - 1 != at:
            return
        if stopped:
            raise Stopped
        if kind == "allocate":
            raise MemoryError
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with mock.patch.object(atomic_files, "before_disk_change", step):
        yield taken


def stopped_clock() -> float:
    """The time: always the same."""
    return 0.0


def go(path: Path) -> None:
    """A small run with its report, with a clock that stands still."""
    folder = RunDir(path)
    with mock.patch.object(time, "perf_counter", stopped_clock), Registered(), folder.locked(), folder.logged():
        plan = runner.prepare(
            tiny("attack=guess", "observe.method={steps: 1}", "method=[{name: fedavg, lr: 0.1}]"), device="cpu"
        )
        run_and_publish(plan, folder, runner.Options(checkpoint_seconds=0.0))


def left(folder: Path) -> dict[str, bytes]:
    """All files of a folder but the log and the lock."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in {LOG, LOCK}}


def steps(path: Path) -> list[str]:
    """The kinds of all steps of a run that nothing disturbs."""
    with failing(-1) as taken:
        go(path)
    return taken


def outcome(path: Path, calm: dict[str, bytes], at: int, *, stopped: bool) -> str:
    """What comes of a fault at step `at` and the same run again: "same", or what is wrong."""
    with failing(at, stopped):
        try:
            go(path)
        except (OSError, MemoryError, ValueError, Stopped):
            pass
        except BaseException as error:  # noqa: BLE001 - what may not happen is told
            return f"step {at}: {type(error).__name__}: {error}"
    go(path)
    found = left(path)
    differ = sorted(name for name in found.keys() | calm.keys() if found.get(name) != calm.get(name))
    return f"step {at}: {', '.join(differ)}" if differ else "same"
