"""Files and names made to harm whoever reads them, put through the commands: 300 of them.

A child process for each kind makes its files in a folder beside a secret one, and gives them to the commands. A case is
wrong if code of the file ran, if the secret file was shown, copied or changed, if anything outside of the folder was
written, if a traceback, a control character or markup came out, if it took over 5 s, or memory grew by over a gigabyte.

`python -m benchmarks.reliability.hostile` takes about two minutes and writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.reliability.hostile_files import Case, kinds
from benchmarks.reliability.page import Figure, record

ROOT = Path(__file__).parents[2]
SECRET = "CANARY-7f3a91"
SECONDS, BYTES = 5, 2**30


def judge(kind: str) -> list[dict[str, Any]]:
    """Return all cases of a kind in this process, each with what is wrong with it, or nothing."""
    from typer.testing import CliRunner

    from eval import cli

    signal.signal(signal.SIGALRM, _late)
    CliRunner().invoke(cli.app, ["list", "--json"])  # what is imported once counts for no case
    found = []
    with TemporaryDirectory(prefix="hostile-") as scratch:
        for number, case in enumerate(kinds()[kind]()):
            top = Path(scratch) / str(number)
            folder = top / "own"
            folder.mkdir(parents=True)
            secret = top / "secret"
            secret.mkdir()
            (secret / "secret.txt").write_text(SECRET)
            (secret / "secret.png").write_bytes(SECRET.encode())
            os.environ["HYPERLEAK_DATA"] = str(folder / "data")
            os.chdir(folder)
            try:
                case.make(folder)
            except (OSError, ValueError) as error:  # what the system takes for no name can't come out of a folder
                found.append({"name": case.name, "wrong": "", "unmade": str(error)[:80]})
                continue
            before, peak = _outside(top), _peak()
            began = time.monotonic()
            wrong = _tried(CliRunner(), cli.app, case, folder)
            wrong = wrong or ("over 5 s" if time.monotonic() - began > SECONDS else "")
            wrong = wrong or ("over 1 GB" if _peak() - peak > BYTES else "")
            wrong = wrong or ("something outside changed" if _outside(top) != before else "")
            found.append({"name": case.name, "wrong": wrong})
            os.chdir(scratch)
            shutil.rmtree(top)
    return found


def _tried(runner: Any, app: Any, case: Case, folder: Path) -> str:
    signal.alarm(SECONDS + 5)
    try:
        result = runner.invoke(app, case.words)
    finally:
        signal.alarm(0)
    if isinstance(result.exception, _Late):
        return "hangs"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"traceback: {type(result.exception).__name__}: {str(result.exception)[:200]}"
    if (folder / "ran").exists():
        return "code ran"
    said = result.output
    if SECRET in said or any(SECRET.encode() in text for text in _written(folder)):
        return "the secret came out"
    if set(said) & set("\x1b\r\x07\x9b\u202e\u2066\u2028\ufeff"):
        return "a control character came out"
    for path in (folder / "out" / "report.html", folder / "out" / "report.md"):
        if path.is_file() and path.suffix == ".html" and "<script" in path.read_text(encoding="utf-8"):
            return "markup came out"
    return "" if result.exit_code in {0, 1, 2, 3, 4} else f"exit {result.exit_code}"


def _written(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file() and path.stat().st_size < 10**8:
            yield path.read_bytes()


def _outside(top: Path) -> list[tuple[str, int, int]]:
    places = [*top.iterdir(), *(top / "secret").iterdir()]
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in places if path.name != "own")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Late(BaseException):
    """A case took too long."""


def _late(_number: int, _frame: object) -> None:
    raise _Late


def main() -> None:
    """Run all kinds, each in a process of its own, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", help="judge this kind alone, and write what came of it as JSON")
    chosen = parser.parse_args()
    if chosen.kind is not None:
        sys.stdout.write(json.dumps(judge(chosen.kind)))
        return
    found: list[dict[str, Any]] = []
    for kind in kinds():
        words = [sys.executable, "-m", "benchmarks.reliability.hostile", kind]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        told = subprocess.run(words, capture_output=True, env=env, cwd=ROOT, timeout=900)
        if told.returncode:
            found.append({"name": kind, "wrong": f"died with {told.returncode}: {told.stderr.decode()[-300:]}"})
        else:
            found += json.loads(told.stdout)
    found = [one for one in found if "unmade" not in one]
    wrong = [one for one in found if one["wrong"]]
    for one in wrong:
        sys.stderr.write(f"{one['name']}: {one['wrong']}\n")
    what = "hostile files and names: code run, secrets shown, paths left, hangs, memory, tracebacks, escapes"
    figures = [Figure(what, len(found), "none", f"{len(wrong)}", not wrong)]
    record("hostile", "python -m benchmarks.reliability.hostile", figures, {"wrong": wrong})


if __name__ == "__main__":
    main()
