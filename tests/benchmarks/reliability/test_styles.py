"""A sample of the audits of `benchmarks.reliability.styles`."""

import pytest

from benchmarks.reliability.styles import Case, audited, figures


@pytest.mark.parametrize(
    "number", [0, pytest.param(2, marks=pytest.mark.slow), 17, pytest.param(21, marks=pytest.mark.slow)]
)
def test_an_audit_of_an_odd_model_does_not_end_as_if_all_was_tried(number):
    answer = audited(Case.drawn(number))
    assert not answer.wrong, answer
    assert not answer.crashed, answer
    assert answer.code in {0, 3, 4}
    assert all(figure.met for figure in figures([answer]))


def test_a_case_follows_from_its_number():
    assert Case.drawn(5) == Case.drawn(5)
    assert len({Case.drawn(number).style for number in range(40)}) > 30
