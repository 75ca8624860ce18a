"""Lineups of a few candidates: how many are meant is tested with the lineups themselves, in `tests/eval/metrics`."""

from collections.abc import Iterator

import pytest

from eval.metrics.identification import draw_distractors


@pytest.fixture(scope="module", autouse=True)
def _few_candidates() -> Iterator[None]:
    """Replay the client on eight candidates an image, where a run takes fifty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_distractors.__kwdefaults__, "count", 7)
        yield
