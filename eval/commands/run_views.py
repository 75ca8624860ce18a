"""What `hyperleak run` shows of a run without computing any of it: its cost before, and how far it is elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from eval.commands.terminal import (
    FAILURE,
    STOPPED,
    USAGE,
    console,
    duration,
    exit_on_errors,
    print_json,
    print_line,
    print_message,
    print_rows,
    show_progress,
)

if TYPE_CHECKING:
    from eval.run.plan import Plan
    from eval.run.run_directory import RunDir

HEAD = ("cell", "kind", "cost on one worker", "known from")


def print_plan(plan: Plan, folder: RunDir, workers: int, *, as_json: bool) -> None:
    """Print the cells of a plan with what they will cost; nothing is written."""
    from eval.run.estimate import estimate

    cost = estimate(plan, folder)
    if as_json:
        print_json(
            {
                "cells": [asdict(cell) for cell in cost.cells],
                "open": len(cost.open),
                "unknown": cost.unknown,
                "seconds": cost.seconds(),
                "workers": workers,
            }
        )
        return
    screen = console()
    rows = [
        [cell.name, cell.kind, "unknown" if cell.seconds is None else duration(cell.seconds), cell.basis]
        for cell in cost.cells
    ]
    print_rows(screen, [list(HEAD), *rows])
    words = f"{len(cost.open)} of {len(cost.cells)} cells are to be computed"
    if len(cost.open) > cost.unknown:
        words += f": {duration(cost.seconds(workers))} on {workers} worker{'s' * (workers > 1)}"
    if cost.unknown:
        words += f"; what {cost.unknown} of them cost is unknown"
    print_line(screen, words)


def watch_run(path: Path, config: str, *, as_json: bool) -> None:
    """Show how far the run in a folder is, until nobody is at work there."""
    from eval.run.run_directory import RunDir
    from eval.run.shared.watch import watch

    screen = console(as_json=as_json)
    try:
        with exit_on_errors(USAGE), show_progress(screen) as display:
            if config:
                raise ValueError(f"expected --watch DIR alone, got the config {config} beside it")
            about = watch(RunDir(path), display.stage, display.search, display.run)
    except KeyboardInterrupt as error:
        print_message("the run goes on; nobody watches it from here any more")
        raise typer.Exit(STOPPED) from error
    cells = [cell for cell in about.get("cells", []) if isinstance(cell, dict)]
    done, failed = (sum(cell.get("status") == kind for cell in cells) for kind in ("finished", "failed"))
    if as_json:
        print_json({"folder": str(path), "status": about.get("status"), "cells": len(cells), "finished": done})
    else:
        more = f", {failed} failed" if failed else ""
        print_line(screen, f"{done} of {len(cells)} cells are finished{more}; nobody is at work in {path}")
    if about.get("status") != "finished":
        raise typer.Exit(FAILURE)
