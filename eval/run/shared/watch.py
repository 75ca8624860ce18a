"""Watch a run that somebody else has started, here or on another machine that sees its folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from eval.run.members import WORKER, Members
from eval.run.run_directory import RUN, RunDir, is_locked
from eval.run.run_options import Progress, RunListener, SearchListener
from eval.run.shared.progress import ProgressReader, RunPace

LOOK_SECONDS = 0.5


class NotRunningError(ValueError):
    """There is no run to watch."""


def watch(folder: RunDir, progress: Progress, on_search: SearchListener, on_run: RunListener) -> Mapping[str, Any]:
    """Show how far a run is until nobody is at work there any more; returns what `run.json` says then.

    Of a run that one process computes by itself only the finished cells are shown.

    Args:
        folder: of the run; nothing is written there.
        progress: told how far stages are.
        on_search: told how far searches are.
        on_run: told how far the whole is.

    Raises:
        NotRunningError: there is no run.
    """
    if not folder.about_run():
        raise NotRunningError(f"expected the folder of a run, found no {RUN} in {folder.path}")
    members, reader, pace = Members(folder.path), ProgressReader(progress, on_search), RunPace(on_run)
    while True:
        states = members.states()
        is_at_work = any(state.is_alive for state in states) or is_locked(folder.path)
        reader.read(states)
        workers = sum(state.is_alive and state.kind == WORKER for state in states)
        pace.tell(folder.about_run, workers or int(is_at_work))
        if not is_at_work:
            return folder.about_run()
        time.sleep(LOOK_SECONDS)
