"""What tests of runs share."""

from collections.abc import Iterator

import pytest
from support.brief import few_candidates, one_chart_of_a_kind

from fl.federation import Federation


@pytest.fixture(scope="module", autouse=True)
def _brief() -> Iterator[None]:
    with few_candidates(), one_chart_of_a_kind():
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
