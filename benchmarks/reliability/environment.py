"""Machines that fail: full disks, closed pipes, lost folders, missing rights, little memory, signals.

Each case starts the command in a process of its own, in surroundings made bad on purpose, and asks for three things:
the right exit code, one line that says what is wrong and what to do, and no traceback. Cases that need another user are
run in a user namespace (`unshare`), in which a process of no known user has no rights beyond its own.

`python -m benchmarks.reliability.environment` takes about four minutes and writes the page.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.reliability.page import Figure, record
from benchmarks.reliability.surroundings import CONFIG, ROOT, STRANGER, Case, cases

LONGEST = 120
"""Seconds after which a case counts as hanging."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to: exit code, lines on stderr, seconds, and what is wrong with it, or nothing."""

    code: int
    stderr: list[str]
    seconds: float
    wrong: str


def carry_out(case: Case) -> Outcome:
    """Run a case and judge it."""
    with TemporaryDirectory(prefix="environment-") as scratch:
        folder = Path(scratch)
        (folder / "small.yaml").write_text(CONFIG)
        case.prepare(folder)
        began = time.monotonic()
        code, error = _run(case, folder)
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
    lines = [line for line in error.splitlines() if line.strip()]
    return Outcome(code, lines, time.monotonic() - began, _wrong(case, code, lines))


def _run(case: Case, folder: Path) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **case.env}
    given = {key: value for key, value in env.items() if value is not None}
    words = [*(STRANGER if case.stranger else ()), sys.executable, "-m", "hyperleak", *case.words]

    def settle() -> None:
        for name, most in case.limits.items():
            resource.setrlimit(getattr(resource, name), (most, most))
        if case.sent is not None:  # heard, also where the shell that started this ignores it
            signal.signal(case.sent[0], signal.SIG_DFL)
        if case.ignored:
            signal.signal(case.ignored, signal.SIG_IGN)
        if case.stdout == "closed":
            os.close(1)
        if case.inside == "gone":
            shutil.rmtree(folder / "gone")

    if case.inside == "gone":
        (folder / "gone").mkdir()
    out = open("/dev/full", "w") if case.stdout == "full" else None  # noqa: SIM115 (closed below)
    process = subprocess.Popen(
        words,
        cwd=folder / case.inside,
        env=given,
        preexec_fn=settle,
        stdout=out or subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    if case.stdout == "cut":
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    try:
        if case.sent is not None:
            _send(process, folder / case.sent[1], case.sent[0])
        return _ended(process)
    finally:
        if out is not None:
            out.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    try:
        _, error = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return -1, f"still running after {LONGEST} s"
    return process.returncode, error.decode("utf-8", "backslashreplace")


def _send(process: subprocess.Popen[bytes], path: Path, number: int) -> None:
    deadline = time.monotonic() + LONGEST
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)


def _wrong(case: Case, code: int, lines: Sequence[str]) -> str:
    if code != case.code:
        return f"exit {code} in place of {case.code}"
    if any("Traceback" in line or "Exception ignored" in line for line in lines):
        return "a traceback"
    if not case.said:
        return f"{len(lines)} lines where all is well" if len(lines) > case.lines else ""
    if len(lines) > 1 + case.lines:
        return f"{len(lines)} lines"
    return "" if any(re.search(case.said, line) for line in lines) else "its line does not say what is wrong"


def main() -> None:
    """Run all cases and write the page."""
    found = {case.name: carry_out(case) for case in cases() if not sys.argv[1:] or case.name in sys.argv[1:]}
    wrong = {name: outcome for name, outcome in found.items() if outcome.wrong}
    for name, outcome in wrong.items():
        sys.stderr.write(f"{name}: {outcome.wrong}\n  " + "\n  ".join(outcome.stderr[-12:]) + "\n")
    right = f"{len(found) - len(wrong)} right"
    figure = Figure(
        "commands on machines that fail: one line, the right exit code, no traceback",
        len(found),
        "all",
        right,
        not wrong,
    )
    details = {name: {"exit": one.code, "wrong": one.wrong} for name, one in found.items()}
    if sys.argv[1:]:
        return
    record("environment", "python -m benchmarks.reliability.environment", [figure], {"cases": details})


if __name__ == "__main__":
    main()
