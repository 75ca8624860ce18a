"""What tests of runs share."""

from collections.abc import Iterator

import pytest
from support.brief import few_candidates

from fl.federation import Federation


@pytest.fixture(scope="module", autouse=True)
def _few_candidates() -> Iterator[None]:
    with few_candidates():
        yield


@pytest.fixture
def rounds(monkeypatch):
    """The rounds that were trained, in order."""
    trained: list[int] = []
    step = Federation.step

    def counted(self, **settings):
        trained.append(self.server.round)
        return step(self, **settings)

    monkeypatch.setattr(Federation, "step", counted)
    return trained
