"""A run that is killed goes on and leaves the bytes of one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.mark.slow
def test_kills_at_random_points_change_nothing(tmp_path):
    words = [sys.executable, TESTS / "support" / "killed.py", tmp_path, "10"]
    places = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    done = subprocess.run(words, env=places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == 11
    assert all(outcome["same"] for outcome in outcomes), outcomes
