"""What all tests of audits share: few candidates, and whatever is said in plain data is held against its schema."""

import json
from collections.abc import Iterator

import pytest
from support.brief import few_candidates, one_chart_of_a_kind
from support.json_schema import CLOSED, faults

from eval.audit.findings import AuditReport
from eval.audit.judgment import Judgment


@pytest.fixture(scope="module", autouse=True)
def _brief() -> Iterator[None]:
    with few_candidates(), one_chart_of_a_kind():
        yield


@pytest.fixture(scope="module", autouse=True)
def _findings_follow_their_schema() -> Iterator[None]:
    """Hold everything that `--json` prints and `audit.json` holds against the schema, whatever the test is of."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (AuditReport, Judgment):
            patch.setattr(kind, "plain", _checked(kind.plain))
        yield


def _checked(plain):
    def told(found):
        said = plain(found)
        wrong = faults(json.loads(json.dumps(said, allow_nan=False)), CLOSED, CLOSED)
        assert not wrong, wrong
        return said

    return told
