"""A sample of the mutated configs: what is wrong for certain is refused with its key."""

from __future__ import annotations

from benchmarks.reliability.mutants import PERHAPS, WRONG, mutants, outcome


def test_mutants_that_are_wrong_are_refused_with_the_key() -> None:
    made = list(mutants(42, seed=1))
    assert {mutant.kind for mutant in made} == {*WRONG, *PERHAPS}
    said = [(mutant.config, mutant.kind, mutant.key, outcome(mutant)) for mutant in made]
    assert [case for case in said if case[1] in WRONG and case[3] != "refused"] == []
    assert {case[3] for case in said} <= {"refused", "built"}
