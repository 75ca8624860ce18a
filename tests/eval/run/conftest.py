"""What tests of runs share."""

from collections.abc import Iterator

import pytest

from eval.metrics.identification import draw_distractors
from fl.federation import Federation


@pytest.fixture(scope="module", autouse=True)
def _few_candidates() -> Iterator[None]:
    """Replay the client on eight candidates an image, where a run takes fifty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(draw_distractors.__kwdefaults__, "count", 7)
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
