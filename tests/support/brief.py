"""What takes long where it is not the point: searches for pictures, and replays of a client on many candidates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attacks.analytic.graph import feature_inversion
from eval.metrics.identification import draw_distractors

STEPS, CANDIDATES = 20, 8


@contextmanager
def brief_picture_searches() -> Iterator[None]:
    """Let annealing and descent end after some steps, where a picture's features were not enough for a direct search.

    They take thousands of steps and seconds of time, and on networks as small as tests have they find little.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ANNEALING_STEPS", "MAX_DESCENT_STEPS"):
            patch.setattr(feature_inversion, name, STEPS)
        yield


@contextmanager
def few_candidates() -> Iterator[None]:
    """Name an attacked image among eight of its class, where a run takes fifty.

    A client is replayed on each. How many are meant is tested with the lineups themselves, in `tests/eval/metrics`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_distractors.__kwdefaults__, "count", CANDIDATES - 1)
        yield
