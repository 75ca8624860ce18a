"""What all tests of audits share.

Lineups are of a few candidates: how many are meant is tested with the lineups themselves, in `tests/eval/metrics`. And
whatever an audit says in plain data is held against the schema of findings.
"""

import json
from collections.abc import Iterator

import pytest
from support.json_schema import CLOSED, faults

from eval.audit.findings import AuditReport
from eval.audit.judgment import Judgment
from eval.metrics.identification import draw_distractors


@pytest.fixture(scope="module", autouse=True)
def _few_candidates() -> Iterator[None]:
    """Replay the client on eight candidates an image, where a run takes fifty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_distractors.__kwdefaults__, "count", 7)
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
