"""Exact attacks whose searches for pictures end early, for tests of what holds whether a picture is found or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attacks.analytic.graph import feature_inversion

STEPS = 20


@contextmanager
def brief_picture_searches() -> Iterator[None]:
    """Let annealing and descent end after some steps, where a picture's features were not enough for a direct search.

    They take thousands of steps and seconds of time, and on networks as small as tests have they find little.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ANNEALING_STEPS", "MAX_DESCENT_STEPS"):
            patch.setattr(feature_inversion, name, STEPS)
        yield
