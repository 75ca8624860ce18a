"""What tests of runs share."""

import pytest

from fl.federation import Federation


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
