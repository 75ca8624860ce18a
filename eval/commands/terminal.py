"""What all parts of the command share: how errors, progress, tables and JSON reach whoever reads them."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands.system_errors import explained
from eval.io.sanitize import shorten, visible
from eval.io.shareable_paths import relative_to_cwd
from fl.runtime.main_guard import UnguardedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from eval.report.results_table import Table
    from eval.run.runner import Progress

FAILURE, USAGE, LEAKED, UNDECIDED, STOPPED = 1, 2, 3, 4, 130
"""Exit codes: something could not be done; it was asked for wrongly; more leaked than was allowed; nothing did, but the
audit is not decided; Ctrl-C."""

Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes for clients and attacks; default as many as cores and memory allow."),
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and everything else on stderr.")]
_ODD = re.compile(
    r"[\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What JSON may hold as it is, and a terminal had better not."""


@contextmanager
def errors(code: int) -> Iterator[None]:
    """Say what is wrong in one line and leave; other errors are faults of the program and keep their traceback."""
    try:
        yield
    except BrokenPipeError:  # of what is printed (see `eval.commands.system_errors`)
        raise
    except (ValueError, OSError) as error:
        words = explained(error) if isinstance(error, OSError) else str(error)
        say(f"error: {' '.join(words.split())}")
        raise typer.Exit(USAGE if isinstance(error, UnguardedError) else code) from error


def emit(value: Any) -> None:
    """Print plain data as JSON on stdout."""
    told = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    typer.echo(_ODD.sub(lambda found: json.dumps(found[0])[1:-1], told))


def say(words: str) -> None:
    """Print a line on stderr, without its middle where it is very long."""
    typer.echo(visible(shorten(words)), err=True)


def tell(words: str) -> None:
    """Print a line on stdout."""
    typer.echo(visible(words))


def console(*, as_json: bool = False) -> Console:
    """Where words for people go: stdout, or stderr where stdout is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json, emoji=False, markup=False, highlight=False)


def line(screen: Console, words: str, style: str | None = None, *, lines: bool = False, wrapped: bool = True) -> None:
    """Print words for people: in as many lines as a terminal needs, in one elsewhere.

    Args:
        screen: where to.
        words: from wherever; nothing in them is markup, and control characters are shown.
        style: of the words.
        lines: whether their own line ends are kept.
        wrapped: whether a terminal's lines end between words.
    """
    screen.print(
        visible(words, lines=lines),
        style=style,
        highlight=False,
        markup=False,
        soft_wrap=not screen.is_terminal or not wrapped,
    )


def rows(screen: Console, entries: Sequence[Sequence[str]]) -> None:
    """Print an entry a line, its cells set apart by tabs: for `grep`, `cut` and `awk`, where there is no terminal."""
    for entry in entries:
        # the console's own methods make blanks of tabs
        screen.file.write("\t".join(visible(cell) for cell in entry) + "\n")


@contextmanager
def warnings_on(screen: Console) -> Iterator[None]:
    """Show what the package warns of while a command runs."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line(screen, f"warning: {shorten(record.getMessage())}", wrapped=False)

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


@contextmanager
def progress(screen: Console) -> Iterator[Progress]:
    """Bars on a terminal, a line for every stage that begins or ends elsewhere."""
    if not screen.is_terminal:
        yield _Lines(screen)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(SpinnerColumn(), *columns, console=screen) as bars:
        known: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(visible(stage), total=total)
            bars.update(known[stage], completed=done, total=total)

        yield show


class _Lines:
    """A line when a stage begins and when it ends, with the seconds between."""

    def __init__(self, screen: Console) -> None:
        self.screen = screen
        self.begun: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """As `eval.run.runner.Progress`."""
        if stage in self.begun and done < total:
            return
        began = self.begun.setdefault(stage, time.monotonic())
        took = f", {time.monotonic() - began:.1f} s" if done and done == total else ""
        line(self.screen, f"{stage} ({done}/{total}){took}", wrapped=False)


def show_table(screen: Console, found: Table) -> None:
    """A table of results, its flags and its legend: drawn on a terminal, a line a row elsewhere."""
    if screen.is_terminal:
        _draw(screen, found)
    else:
        line(screen, found.title)
        rows(screen, [found.columns, *found.rows, *found.baselines])
    for sentence in found.legend:
        line(screen, f"• {sentence}")


def cell(words: str) -> Text:
    """Words in a drawn table, in which nothing is markup."""
    from rich.text import Text

    return Text(visible(words))


def _draw(screen: Console, found: Table) -> None:
    """The table in columns, with the flags below."""
    from rich import box
    from rich.table import Table as Grid

    from eval.report.results_table import VALUE_COLUMNS

    grid = Grid(title=cell(found.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    *columns, _ = found.columns  # flags go below: there is no room for them on 80 columns
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column in VALUE_COLUMNS)
    for row in found.rows:
        grid.add_row(*map(cell, row[:-1]))
    grid.add_section()
    for row in found.baselines:
        grid.add_row(*map(cell, row[:-1]), style="dim")
    screen.print(grid)
    told = [columns.index(name) for name in ("method", "defense", "attack") if name in columns]
    for row in found.rows:
        if row[-1] != "-":
            line(screen, f"{', '.join(row[i] for i in told)}: {row[-1]}")


def told(words: Sequence[str], config: str = "") -> str:
    """The command as its run keeps it: without what an absolute path, or one above the folder, tells of the machine.

    Args:
        words: of the command line, without the program's name.
        config: that among them which names a config, if any.
    """
    own = list(words)
    for number, word in enumerate(words):
        if number and words[number - 1] in {"--out", "--import"}:
            own[number] = relative_to_cwd(word)
        elif word.startswith(("--out=", "--import=")):
            option, _, path = word.partition("=")
            own[number] = f"{option}={relative_to_cwd(path)}"
        elif word == config and Path(word).is_absolute():
            own[number] = relative_to_cwd(word)
    return shlex.join(["hyperleak", *own])
