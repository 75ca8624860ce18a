"""The hostile files of `benchmarks.reliability.hostile`, by kind, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability.hostile_files import kinds

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_nothing_comes_of_them(kind: str) -> None:
    words = [sys.executable, "-m", "benchmarks.reliability.hostile", kind]
    told = subprocess.run(words, capture_output=True, cwd=ROOT, check=True)
    assert [one for one in json.loads(told.stdout) if one["wrong"]] == []


def test_hostile_cases_are_at_least_300() -> None:
    assert sum(1 for make in kinds().values() for _ in make()) >= 300
