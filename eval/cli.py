"""The command `hyperleak`; what it needs is imported when it runs, so that help is quick."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from eval.harness import Progress
    from eval.tables import Table
    from fl.registry import Registry

CONFIGS = Path(__file__).parents[1] / "configs"
USER_ERROR, FAILURE = 2, 1
KINDS = ("methods", "attacks", "defenses", "datasets", "models")

app = typer.Typer(
    help="What a federated update gives away, and what each way of hiding it costs in accuracy.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of one in configs/.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: attack.iterations=500. May be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default results/NAME.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Train the methods of an experiment, attack what the server sees, and say what leaked."""
    from rich.console import Console

    from eval import config as configs
    from eval import harness, results, tables

    signal.signal(signal.SIGTERM, _stop)  # so that half-written results are removed
    console = Console()
    with _errors(USER_ERROR):
        path = find_config(config)
        folder = out if out is not None else Path("results") / path.stem
        experiment = configs.load(path, set_ or ())
        prepared = harness.prepare(experiment, device=device)
        results.check(folder, experiment)  # last: what is wrong in itself is said rather than that it is another
    with _errors(FAILURE):
        with _progress(console) as progress:
            outcome = harness.run(prepared, progress=progress)
        found = tables.table(outcome.rows, experiment)
        results.write(folder, experiment, outcome, device=str(prepared.device), table=tables.markdown(found))
    _show(console, found)
    console.print(f"\nWritten to {folder}", highlight=False, soft_wrap=True)


@app.command("list")
def list_(kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}.")] = None) -> None:
    """What there is to choose from: methods, attacks, defenses, datasets and models."""
    from rich.console import Console
    from rich.table import Table as Grid

    from eval.tables import summary
    from fl.registry import UnknownNameError

    with _errors(USER_ERROR):
        if kind is not None and kind not in KINDS:
            raise UnknownNameError("kind", kind, KINDS)
        registries = {name: _registry(name) for name in ([kind] if kind else KINDS)}
    console = Console()
    for name, registry in registries.items():
        grid = Grid(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for entry in registry.names():
            grid.add_row(entry, summary(registry.get(entry)))
        for module, reason in registry.skips().items():
            grid.add_row(module, reason)
        console.print(grid, highlight=False)


def find_config(name: str) -> Path:
    """The config file at a path, or of that name in the checkout's `configs`.

    Raises:
        FileNotFoundError: neither; says what is close.
    """
    places = [Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"]
    for path in places:
        if path.is_file():
            return path
    from difflib import get_close_matches

    known = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml"))
    close = get_close_matches(Path(name).stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise FileNotFoundError(f"no config {name!r}; {hint}known names: {', '.join(known) or 'none'}")


def _registry(kind: str) -> Registry[Any]:
    import attacks
    import defenses
    from fl.data import datasets
    from fl.method import methods
    from fl.models import models

    found = (methods, attacks.attacks, defenses.defenses, datasets, models)
    registries: dict[str, Registry[Any]] = dict(zip(KINDS, found, strict=True))
    return registries[kind]


@contextmanager
def _errors(code: int) -> Iterator[None]:
    """Say what is wrong in one line and leave; other errors are faults of the program and keep their traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(code) from error


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Bars on a terminal, a line for every stage begun elsewhere."""
    if not console.is_terminal:
        yield _lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(SpinnerColumn(), *columns, console=console) as bars:
        known: dict[str, object] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(stage, total=total)
            bars.update(known[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield show


def _lines(stage: str, done: int, total: int) -> None:
    if done == 0 or done == total:
        typer.echo(f"{stage} ({done}/{total})")


def _show(console: Console, found: Table) -> None:
    from rich import box
    from rich.table import Table as Grid

    from eval.tables import FIGURES

    grid = Grid(title=found.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    *columns, _ = found.columns  # flags go below: there is no room for them on 80 columns
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column in FIGURES)
    for row in found.rows:
        grid.add_row(*row[:-1])
    grid.add_section()
    for row in found.floors:
        grid.add_row(*row[:-1], style="dim")
    console.print(grid)
    for row in found.rows:
        if row[-1] != "-":
            console.print(f"{row[0]}, {row[columns.index('attack')]}: {row[-1]}", highlight=False, markup=False)
    for sentence in found.legend:
        console.print(f"• {sentence}", highlight=False, markup=False)
