"""How all tests run.

One thread per process: on a shared two-core machine two OpenMP threads are many times slower than one.

What hypothesis makes up is the same in every run and takes what it takes; `--hypothesis-profile nightly` (`make
nightly`) makes up new examples, and many more.
"""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import typer.testing
from hypothesis import HealthCheck, settings
from support.forkserver import use_forkserver

from eval.report.charts.render import render_svg
from eval.report.charts.specs import Chart

# What is compiled is kept, even where the environment says otherwise: a run starts dozens of processes, and each would
# compile the packages anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HYPERLEAK_OFFLINE"] = "1"  # no test fetches weights for LPIPS, nor does a command that it starts

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 100)  # ten thousand collected tests are looked through at every full collection
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile(
    "nightly",
    derandomize=False,
    deadline=None,
    max_examples=10_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _charts_drawn_once() -> Iterator[None]:
    """Draw a chart of a report once a process: the same gives the same bytes (`tests/eval/report/test_charts.py`)."""
    drawn: dict[tuple[str, int], str] = {}

    def render(chart: Chart, width: int) -> str:
        key = (repr(chart), width)
        if key not in drawn:
            drawn[key] = render_svg(chart, width)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.report.blocks.render_svg", render)
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """Make the command of an app once a process, where typer's runner makes it for each call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_lpips_of_this_machine() -> Iterator[None]:
    """Leave the backbone in the data folder alone, which some machines have: tests of LPIPS ask for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.metrics.perceptual.DATA_FILES", {})
        yield


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forked() -> Iterator[None]:
    """Start worker processes from one that has imported the packages."""
    with pytest.MonkeyPatch.context() as patch:
        use_forkserver(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Leave it to the system when files reach the disk: no test cuts the power, and thousands of files are written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed what networks that a test module makes draw their weights from, whatever was imported before it."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_collection_finish() -> None:
    """Leave what was collected out of all later collections of garbage: it lives as long as the process."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Seed the same before every test, so that none depends on those before it."""
    _seed()


def _seed() -> None:
    """Seed the global generator: networks draw from it that tests make by their class alone, as users do.

    Not by `torch.manual_seed`, which notes for GPUs where it was called from: half a millisecond for each test.
    """
    torch.default_generator.manual_seed(0)
