"""Scripts beside this file that fork: a process of their own, so that what it forks has no threads and few imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def script(name: str, folder: Path, *words: str) -> Any:
    """Run `name FOLDER WORDS...` and return what it printed, read as JSON."""
    places = os.pathsep.join(map(str, (TESTS, TESTS.parent, folder)))
    command = [sys.executable, str(TESTS / "support" / name), str(folder), *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
