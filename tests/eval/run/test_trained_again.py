"""Attacks added to a finished training whose states are gone: it is repeated, and may not give the same network."""

from pathlib import Path

import pytest
from support.runs import run, tiny, unstated
from support.tiny import Registered

from eval.io import jsonl
from eval.run import runner
from eval.run.training_cell import ROUNDS


@pytest.mark.parametrize("same", [True, False])
def test_a_training_that_gives_another_network_is_told(same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with Registered():
        run(tiny("attack=[]"), tmp_path / "a")
        again = tiny("attack=guess")
        for one in runner.prepare(again, device="cpu").trainings:
            if not same:
                _spoil(tmp_path / "a" / "cells" / one.cell.id / ROUNDS)
        run(again, tmp_path / "a")
    told = [words for words in caplog.messages if "trained again, the network after 2 rounds is not the one" in words]
    assert len(told) == (0 if same else 2)
    assert same or "3 of 3 clients is another" in told[0]


def _spoil(path: Path) -> None:
    """As if another processor had trained the network."""
    unstated(path.parent)
    rows = jsonl.read_rows(path)
    rows[-1]["accuracies"] = [1.5 for _ in rows[-1]["accuracies"]]
    jsonl.replace_rows(path, rows)
