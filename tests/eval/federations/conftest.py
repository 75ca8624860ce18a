"""What tests of screenings have in common."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the seconds in which this thread computes, not those in which the machine is busy with other things."""
    monkeypatch.setattr(time, "monotonic", time.thread_time)
