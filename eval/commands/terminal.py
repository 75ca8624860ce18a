"""What all parts of the command share: how errors, progress, tables and JSON reach whoever reads them."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands.system_errors import explain_os_error
from eval.io.sanitize import escape_controls, shorten
from eval.io.shareable_paths import relative_to_cwd
from fl.runtime.main_guard import UnguardedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from attacks.search_control import SearchProgress
    from eval.report.results_table import Table
    from eval.run.run_options import Progress, RunListener, RunProgress, SearchListener

FAILURE, USAGE, LEAKED, UNDECIDED, STOPPED = 1, 2, 3, 4, 130
"""Exit codes: something could not be done; it was asked for wrongly; more leaked than was allowed; nothing did, but the
audit is not decided; Ctrl-C."""

Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes for clients and attacks; default as many as cores and memory allow."),
]
Executor = Annotated[
    str | None,
    typer.Option(
        metavar="local|slurm|dask|ray",
        help="What starts the workers that compute the run, on this machine or others that see its folder; --workers "
        "says how many.",
    ),
]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option",
        metavar="KEY=VALUE",
        help="An option of the executor, by its own name: partition=gpu, address=HOST:8786. Repeatable.",
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE|MODULE",
        help="A file or module of your own that registers methods, attacks, ...: my_attack.py. Repeatable.",
    ),
]
IMPORT_HINT = "names of your own are known with --import FILE"
"""What helps where a name is unknown and nothing of the user's own was imported."""
Minutes = Annotated[
    float | None,
    typer.Option(
        help="How long trainings and attacks may take, about: searches then end with their best so far, and what comes "
        "later is left out. The same command without it computes the rest."
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Fetch no weights for LPIPS; HYPERLEAK_OFFLINE=1 does the same everywhere.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and everything else on stderr.")]
SEARCH_LINE_SECONDS = 30.0
"""Between two lines on a search, where there is no terminal."""
ALL_CELLS = "all cells"
"""What the progress calls the whole of a run."""
PATH_OPTIONS = ("--out", "--import", "--junit", "--sarif")
"""Options whose values are paths."""
_UNPRINTABLE = re.compile(
    r"[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What JSON may hold as it is, and a terminal had better not."""


@contextmanager
def exit_on_errors(code: int) -> Iterator[None]:
    """Say what is wrong in one line and leave; other errors are faults of the program and keep their traceback."""
    try:
        yield
    except BrokenPipeError:  # of what is printed (see `eval.commands.system_errors`)
        raise
    except (ValueError, OSError) as error:
        words = explain_os_error(error) if isinstance(error, OSError) else str(error)
        print_message(f"error: {' '.join(words.split())}")
        raise typer.Exit(USAGE if isinstance(error, UnguardedError) else code) from error


def print_json(value: Any) -> None:
    """Print plain data as JSON on stdout."""
    told = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    typer.echo(_UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], told))


@contextmanager
def prints_aside(as_json: bool = True) -> Iterator[None]:
    """Send what models and modules of the user's own print to stderr, where stdout is for JSON."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        yield


def print_message(words: str) -> None:
    """Print a line on stderr, without its middle where it is very long."""
    typer.echo(escape_controls(shorten(words)), err=True)


def print_output(words: str) -> None:
    """Print a line on stdout."""
    typer.echo(escape_controls(words))


def console(*, as_json: bool = False) -> Console:
    """Return where words for people go: stdout, or stderr where stdout is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json, emoji=False, markup=False, highlight=False)


def print_line(
    screen: Console, words: str, style: str | None = None, *, lines: bool = False, wrapped: bool = True
) -> None:
    """Print words for people: in as many lines as a terminal needs, in one elsewhere.

    Args:
        screen: where to.
        words: from wherever; nothing in them is markup, and control characters are shown.
        style: of the words.
        lines: whether their own line ends are kept.
        wrapped: whether a terminal's lines end between words.
    """
    screen.print(
        escape_controls(words, lines=lines),
        style=style,
        highlight=False,
        markup=False,
        soft_wrap=not screen.is_terminal or not wrapped,
    )


def print_rows(screen: Console, entries: Sequence[Sequence[str]]) -> None:
    """Print an entry a line, its cells set apart by tabs: for `grep`, `cut` and `awk`, where there is no terminal."""
    for entry in entries:
        # the console's own methods make blanks of tabs
        screen.file.write("\t".join(escape_controls(cell) for cell in entry) + "\n")


@contextmanager
def show_warnings(screen: Console) -> Iterator[None]:
    """Show what the package warns of while a command runs."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_line(screen, f"warning: {shorten(record.getMessage())}", wrapped=False)

    handler = Lines(logging.WARNING)
    handler.addFilter(lambda record: record.levelno == logging.WARNING)  # errors are reported by the command itself
    loggers = [logging.getLogger(name) for name in ("fl", "defenses", "attacks", "eval")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@dataclass(frozen=True)
class ProgressDisplay:
    """Who is told how far a command is.

    Attributes:
        stage: of parts of a stage.
        search: of iterations of the search of a stage.
        run: of cells of a run that several workers compute.
    """

    stage: Progress
    search: SearchListener
    run: RunListener


@contextmanager
def show_progress(screen: Console) -> Iterator[ProgressDisplay]:
    """Show bars on a terminal; elsewhere a line for every stage that begins or ends, and now and then for a search."""
    if not screen.is_terminal:
        lines = _ProgressLines(screen)
        yield ProgressDisplay(lines, lines.search, lines.run)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    searched = TextColumn("{task.fields[search]}", markup=False)
    with Bars(SpinnerColumn(), *columns, searched, console=screen) as bars:
        known: dict[str, Any] = {}
        totals: dict[str, int] = {}
        estimates = _Estimates(screen)

        def show(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(escape_controls(stage), total=total, search="")
            totals[stage] = total
            bars.update(known[stage], completed=done, total=total)
            if done == total:
                bars.update(known[stage], search="")

        def show_search(stage: str, progress: SearchProgress) -> None:
            estimates.note(stage, totals.get(stage, 0), progress)
            if stage in known:
                share = progress.iteration / max(progress.iterations, 1)
                bars.update(known[stage], completed=share * totals[stage], search=iterations_words(progress))

        def show_run(progress: RunProgress) -> None:
            show(ALL_CELLS, progress.done, progress.total)
            bars.update(known[ALL_CELLS], search=run_words(progress))

        yield ProgressDisplay(show, show_search, show_run)


class _Estimates:
    """Says of every search, once its speed is known, how long it will take."""

    def __init__(self, screen: Console) -> None:
        self.screen = screen
        self.noted: set[str] = set()

    def note(self, stage: str, updates: int, found: SearchProgress) -> None:
        """Take the progress of a search of so many updates."""
        if stage in self.noted or found.seconds_left is None:
            return
        self.noted.add(stage)
        if found.is_limited:
            words = f"the time limit ends it in {duration(found.seconds_left)}, before all of"
        else:
            words = f"{duration(found.seconds_left)} for"
        of = f" of {updates} update{'s' * (updates > 1)}" if updates else ""
        print_line(self.screen, f"{stage}: {words} {found.iterations:,} iterations{of}", wrapped=False)


def iterations_words(found: SearchProgress) -> str:
    """Return how far a search is: `1,200 of 28,800 iterations, about 12 min left`."""
    words = f"{found.iteration:,} of {found.iterations:,} iterations"
    if found.seconds_left is None:
        return words
    limit = " to the time limit" if found.is_limited else " left"
    return f"{words}, {duration(found.seconds_left)}{limit}"


def run_words(found: RunProgress) -> str:
    """Return who is at work on a run, and how long yet: `4 workers, about 12 min left`."""
    words = f"{found.workers} worker{'s' * (found.workers != 1)}"
    return words if found.seconds_left is None else f"{words}, {duration(found.seconds_left)} left"


def duration(seconds: float) -> str:
    """Return a span of time in words: `about 40 s`, `about 12 min`, `about 3.5 h`."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s"
    return f"about {round(seconds / 60)} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


def seconds_of(minutes: float | None) -> float:
    """Return the seconds of `--minutes`; infinity without.

    Raises:
        ValueError: not above 0.
    """
    if minutes is None:
        return math.inf
    if not 0 < minutes < math.inf:
        raise ValueError(f"expected --minutes as a number above 0, got {minutes:g}; leave it out for no limit")
    return 60 * minutes


class _ProgressLines:
    """A line when a stage begins and when it ends, with the seconds between, and every half minute for a search."""

    def __init__(self, screen: Console) -> None:
        self.screen = screen
        self.begun: dict[str, float] = {}
        self.totals: dict[str, int] = {}
        self.said: dict[str, float] = {}
        self.estimates = _Estimates(screen)

    def search(self, stage: str, progress: SearchProgress) -> None:
        """Show how far a search is, as an `eval.run.runner.SearchListener`."""
        now = time.monotonic()
        self.estimates.note(stage, self.totals.get(stage, 0), progress)
        if now - self.said.setdefault(stage, now) >= SEARCH_LINE_SECONDS:
            self.said[stage] = now
            print_line(self.screen, f"{stage}: {iterations_words(progress)}", wrapped=False)

    def run(self, progress: RunProgress) -> None:
        """Show how far a whole run is, as an `eval.run.run_options.RunListener`: now and then."""
        now = time.monotonic()
        if now - self.said.get(ALL_CELLS, -math.inf) >= SEARCH_LINE_SECONDS:
            self.said[ALL_CELLS] = now
            words = f"{progress.done} of {progress.total} cells are finished, {run_words(progress)}"
            print_line(self.screen, words, wrapped=False)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is, as an `eval.run.runner.Progress`."""
        self.totals[stage] = total
        if stage in self.begun and done < total:
            return
        began = self.begun.setdefault(stage, time.monotonic())
        took = f", {time.monotonic() - began:.1f} s" if done and done == total else ""
        print_line(self.screen, f"{stage} ({done}/{total}){took}", wrapped=False)


def show_table(screen: Console, found: Table) -> None:
    """Print a table of results, its flags and its legend: drawn on a terminal, a line a row elsewhere."""
    if screen.is_terminal:
        _draw_table(screen, found)
    else:
        print_line(screen, found.title)
        print_rows(screen, [found.columns, *found.rows, *found.baselines])
    for sentence in found.legend:
        print_line(screen, f"• {sentence}")


def table_cell(words: str) -> Text:
    """Return words for a drawn table, in which nothing is markup."""
    from rich.text import Text

    return Text(escape_controls(words))


def _draw_table(screen: Console, found: Table) -> None:
    """Print the table in columns, with the flags below."""
    from rich import box
    from rich.table import Table as Grid

    from eval.report.results_table import VALUE_COLUMNS

    grid = Grid(title=table_cell(found.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    *columns, _ = found.columns  # flags go below: there is no room for them on 80 columns
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column in VALUE_COLUMNS)
    for row in found.rows:
        grid.add_row(*map(table_cell, row[:-1]))
    grid.add_section()
    for row in found.baselines:
        grid.add_row(*map(table_cell, row[:-1]), style="dim")
    screen.print(grid)
    told = [columns.index(name) for name in ("method", "defense", "attack") if name in columns]
    for row in found.rows:
        if row[-1] != "-":
            print_line(screen, f"{', '.join(row[i] for i in told)}: {row[-1]}")


def shareable_command(words: Sequence[str], config: str = "") -> str:
    """Return the command as its run keeps it: without what an absolute path, or one above the folder, gives away.

    Args:
        words: of the command line, without the program's name.
        config: that among them which names a config, if any.
    """
    own = list(words)
    for number, word in enumerate(words):
        if number and words[number - 1] in PATH_OPTIONS:
            own[number] = relative_to_cwd(word)
        elif word.startswith(tuple(f"{option}=" for option in PATH_OPTIONS)):
            option, _, path = word.partition("=")
            own[number] = f"{option}={relative_to_cwd(path)}"
        elif word == config and Path(word).is_absolute():
            own[number] = relative_to_cwd(word)
    return shlex.join(["hyperleak", *own])
