"""What takes long where it is not the point: searches for pictures, replays of a client, and charts of reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from attacks.analytic.graph import feature_inversion, picture_search, pooled_stem
from attacks.analytic.maxpool import solver
from attacks.learned import inversion_network
from eval.metrics.identification import draw_distractors
from eval.report import blocks
from eval.report.charts.specs import Chart

STEPS, CANDIDATES, IMITATED = 20, 8, 32


@contextmanager
def brief_picture_searches() -> Iterator[None]:
    """Let a search for a picture end after some steps, and be begun again but once, by as short an annealing.

    Where features are not enough for a direct search it takes thousands of steps and seconds of time, and on networks
    as small as tests have it finds little. Likewise, a picture below a max pooling is looked for in one way alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ANNEALING_STEPS", "MAX_DESCENT_STEPS"):
            patch.setattr(feature_inversion, name, STEPS)
        brief = partial(feature_inversion.InversionSettings, max_steps=STEPS, restarts=1)
        patch.setattr(picture_search, "InversionSettings", brief)
        ways = solver.schedules
        patch.setattr(solver, "schedules", lambda unknowns: ways(unknowns)[:1])
        for name in ("ROUGHER", "REHEATINGS"):
            patch.setattr(pooled_stem, name, ())
        yield


@contextmanager
def few_imitated_clients() -> Iterator[None]:
    """Let a network that learns to invert updates scale them by those of few clients, where it imitates hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inversion_network, "SCALING_UPDATES", IMITATED)
        yield


@contextmanager
def few_candidates() -> Iterator[None]:
    """Name an attacked image among eight of its class, where a run takes fifty.

    A client is replayed on each. How many are meant is tested with the lineups themselves, in `tests/eval/metrics`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_distractors.__kwdefaults__, "count", CANDIDATES - 1)
        yield


_SHOWN: dict[type[Chart], Chart] = {}


@contextmanager
def one_chart_of_a_kind() -> Iterator[None]:
    """Put one chart of a process in the place of all of its kind, so that it is drawn once.

    What is drawn has tests of its own, in `tests/eval/report`.
    """
    draw = blocks.render_svg

    def render(chart: Chart, width: int) -> str:
        return draw(_SHOWN.setdefault(type(chart), chart), width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "render_svg", render)
        yield
