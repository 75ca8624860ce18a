"""`hyperleak reproduce`: the papers' tables and figures, what of them is measured, and how close a run comes."""

from __future__ import annotations

import inspect
import io
import json as json_format
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands import run_views
from eval.commands.run import run
from eval.commands.terminal import (
    FAILURE,
    USAGE,
    console,
    exit_on_errors,
    print_json,
    print_line,
    print_message,
    print_rows,
    table_cell,
)

if TYPE_CHECKING:
    from rich.console import Console

    from eval.report.results_table import Table
    from eval.reproduce.items import Item

PUBLISHED = "published.md"
"""File in a run's folder with its figures beside the paper's."""
OWN = ("config", "watch")
"""Parameters of `hyperleak run` that `hyperleak reproduce` has none of."""
RIGHT = ("paper", "here", "difference", "95 % interval")


class ScaleName(StrEnum):
    """How large an experiment is."""

    SMOKE = "smoke"
    SMALL = "small"
    PAPER = "paper"


def reproduce(
    item: Annotated[
        str,
        typer.Argument(
            help="A table or figure, such as hyperfl/table3-emnist; with --list a paper (hyperfl), or how names begin."
        ),
    ] = "",
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Show tables and figures: what each scale costs and how much of it is measured; end there.",
        ),
    ] = False,
    scale: Annotated[
        ScaleName | None,
        typer.Option(
            help="How much of the paper's experiment: smoke (to see that it runs), small (about a tenth), paper (all). "
            "Needed to run; with --list, the one that is shown."
        ),
    ] = None,
    **words: Any,
) -> None:
    """Redo a table or figure of one of the five papers, and set it beside the paper's.

    A run goes on where it was when it is started again: by default each item has one folder for each scale,
    results/reproduce/ITEM/SCALE. Further options are those of `hyperleak run`; --plan shows what it will cost.
    """
    as_json = bool(words.get("json"))
    if list_:
        given = {"item": item, "list_": list_, "scale": scale, **words}
        beside = run_views.options_unlike(reproduce, given, "item", "list_", "scale", "json")
        _list(item, scale, beside, as_json=as_json)
        return
    from eval.reproduce.items import find_item

    with exit_on_errors(USAGE):
        if not item:
            raise ValueError("expected a table or figure and --scale; `hyperleak reproduce --list` shows all")
        chosen = find_item(item)
        if scale is None:
            known = f"`hyperleak reproduce --list {chosen.name}` shows what each costs"
            raise ValueError(f"expected --scale {' or '.join(ScaleName)} for {chosen.name}; {known}")
    _reproduce(chosen, scale, words, as_json=as_json)


def _with_options_of_run() -> None:
    """Give `reproduce` the options of `run`, in the place of `words`."""
    own = [p for p in inspect.signature(reproduce, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    others = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.name not in OWN]
    parameters = [*own, *others]
    reproduce.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    reproduce.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_with_options_of_run()


def _reproduce(item: Item, scale: ScaleName, words: dict[str, Any], *, as_json: bool) -> None:
    """Run an item at a scale in the way of `hyperleak run`, and show what came out beside the paper's."""
    from eval.experiment import yaml_config

    with exit_on_errors(USAGE):
        experiment = item.at(scale.value)
    out = words["out"] or item.default_folder(scale.value)
    heard = io.StringIO()
    code = 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{item.path.stem}-{scale.value}.yaml"
        path.write_text(yaml_config.dump(experiment), encoding="utf-8")
        try:
            with redirect_stdout(heard) if as_json else nullcontext():
                run(config=str(path), **{**words, "out": out})
        except typer.Exit as stop:
            code = stop.exit_code
            if code != FAILURE:
                raise
    if words.get("plan_only"):
        if as_json:
            typer.echo(heard.getvalue(), nl=False)
        return
    _show(item, scale, Path(out), json_format.loads(heard.getvalue() or "{}") if as_json else None)
    if code:
        raise typer.Exit(code)


def _show(item: Item, scale: ScaleName, out: Path, summary: dict[str, Any] | None) -> None:
    """Print a run's figures beside the paper's and write them into its folder; nothing where nothing is finished."""
    from eval.io import jsonl, manifest
    from eval.report.load import ROWS, load
    from eval.report.results_table import to_markdown
    from eval.reproduce.paper_comparison import as_table, compare_with_paper

    found = []
    if (out / ROWS).is_file() and (out / ROWS).stat().st_size:
        with exit_on_errors(FAILURE):
            found = compare_with_paper(load(out))
    if summary is not None:
        print_json({**summary, "scale": scale.value, "item": item.name, "published": [one.to_plain() for one in found]})
    if not found:
        if summary is None:
            print_message(f"the config of {item.name} gives no figures of the paper: report.html has what came out")
        return
    table = as_table(found, item.title, scale.value)
    with exit_on_errors(FAILURE), jsonl.locked(out):
        jsonl.write_text(out / PUBLISHED, to_markdown(table))
        manifest.add_files(out, PUBLISHED)
    if summary is None:
        screen = console()
        screen.print()
        _print_table(screen, table)
        print_line(screen, f"Written to {out / PUBLISHED}", wrapped=False)


def _print_table(screen: Console, table: Table) -> None:
    """Print a table and its legend: drawn on a terminal, a line a row elsewhere."""
    _print_grid(screen, table.title, table.columns, table.rows)
    for sentence in table.legend:
        print_line(screen, f"• {sentence}")


def _print_grid(screen: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not screen.is_terminal:
        print_line(screen, title)
        print_rows(screen, [list(columns), *map(list, rows)])
        return
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(title=table_cell(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        grid.add_column(table_cell(column), overflow="fold", justify="right" if column in RIGHT else "left")
    for row in rows:
        grid.add_row(*map(table_cell, row))
    screen.print(grid)


def _list(beginning: str, scale: ScaleName | None, beside: Sequence[str], *, as_json: bool) -> None:
    """Show the tables and figures whose names begin so, at one scale or at all; refuses options `beside` these."""
    from eval.experiment.scale_names import SCALES
    from eval.reproduce.index import list_indexed
    from eval.reproduce.item_status import LEGEND, as_rows, columns
    from eval.reproduce.items import list_items

    shown = SCALES if scale is None else (scale.value,)
    with exit_on_errors(USAGE):
        if beside:
            raise ValueError(
                f"--list computes nothing, and takes --scale and --json alone; got {', '.join(beside)} beside it"
            )
        found = list_indexed(list_items(beginning), print_message)
    if as_json:
        print_json([one.to_plain(shown) for one in found])
        return
    screen = console()
    _print_grid(screen, "Tables and figures of the papers", columns(shown), as_rows(found, shown))
    for sentence in LEGEND:
        print_line(screen, f"• {sentence}")
