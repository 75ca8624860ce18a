"""Commands on machines that fail; all cases are those of `benchmarks.reliability.environment`."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.reliability.environment import carry_out
from benchmarks.reliability.surroundings import Case, cases

QUICK = {"stdout is closed", "stdout is a full device", "the current folder is gone", "an eval.py of one's own"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in cases()],
)
def test_a_line_and_the_right_code(case: Case) -> None:
    if case.stranger and shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    outcome = carry_out(case)
    assert not outcome.wrong, (outcome.wrong, outcome.stderr)
