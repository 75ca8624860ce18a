"""What `hyperleak run` shows of a run without computing any of it: its cost before, and how far it is elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def print_plan(plan: Plan, folder: RunDir, workers: int | None, *, as_json: bool) -> None:
    """Print the cells of a plan with what they will cost; nothing is written.

    Args:
        plan: of the run.
        folder: of the run.
        workers: how many there will be; None where their number has yet to be said: the cost is that of one.
        as_json: whether it is printed as JSON.
    """
    from eval.run.estimate import estimate

    cost, several = estimate(plan, folder), workers or 1
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
        words += f": {duration(cost.seconds(several))} on {several} worker{'s' * (several > 1)}"
        words += "" if workers else " (say --workers N for more)"
    if cost.unknown:
        words += f"; what {cost.unknown} of them cost is unknown"
    print_line(screen, words)


def options_unlike(command: Callable[..., None], values: Mapping[str, Any], *taken: str) -> list[str]:
    """Return the options of a command that have other values than by default, as they are written: `--set`.

    Args:
        command: a function with the parameters of a command.
        values: of these parameters.
        taken: names of parameters that are left out.
    """
    found = []
    for one in inspect.signature(command, eval_str=True).parameters.values():
        if one.name not in taken and values[one.name] != one.default:
            written = [word for meta in getattr(one.annotation, "__metadata__", ()) for word in _written(meta)]
            found.append(next(iter(written), f"--{one.name.replace('_', '-')}"))
    return found


def _written(option: Any) -> list[str]:
    """Return how an option of typer's is written; nothing where that is its parameter's name."""
    return [word for word in (option.default, *(option.param_decls or ())) if str(word).startswith("--")]


def watch_run(path: Path, beside: Sequence[str], *, as_json: bool) -> None:
    """Show how far the run in a folder is, until nobody is at work there.

    Args:
        path: the folder.
        beside: what else was asked for, which is refused: nothing is computed here.
        as_json: whether the end is printed as JSON.
    """
    from eval.run.run_directory import RunDir
    from eval.run.shared.watch import watch

    screen = console(as_json=as_json)
    try:
        with exit_on_errors(USAGE), show_progress(screen) as display:
            if beside:
                raise ValueError(
                    f"--watch shows a run that was started elsewhere and takes --json alone; got {', '.join(beside)} "
                    "beside it"
                )
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
