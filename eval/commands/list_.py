"""`hyperleak list`: what there is to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands.terminal import IMPORT_HINT, USAGE, Imports, Json, cell, console, emit, errors, rows, say

if TYPE_CHECKING:
    from fl.registry import Registry

KINDS = ("methods", "attacks", "defenses", "datasets", "models", "partitions", "augmentations")
CONFIGS = "configs"


def list_(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}, {CONFIGS}.")] = None,
    prefix: Annotated[str, typer.Argument(help="How the names begin, or their last parts: hyperfl/table3.")] = "",
    import_: Imports = None,
    json: Json = False,
) -> None:
    """What there is to choose from: methods, attacks, defenses, datasets, models, partitions, augmentations, configs.

    Where there is no terminal each is a line of its own, its columns set apart by tabs (without KIND, that first, and
    all but the configs).
    """
    from eval.experiment.config_catalog import in_folder_or_named
    from eval.experiment.plugins import import_plugins
    from fl.registry import UnknownNameError

    with errors(USAGE):
        if kind is not None and kind not in {*KINDS, CONFIGS}:
            raise UnknownNameError("kind", kind, (*KINDS, CONFIGS))
        import_plugins(import_ or ())
    if kind == CONFIGS:
        found = {kind: _configs()}
    else:
        found = {name: _entries(registry) for name, registry in registries().items() if kind in {None, name}}
    found = {name: {k: v for k, v in own.items() if in_folder_or_named(k, prefix)} for name, own in found.items()}
    if prefix and not any(found.values()):
        say(f"no {kind} whose name begins with {prefix!r}" + ("" if import_ or kind == CONFIGS else f"; {IMPORT_HINT}"))
    if json:
        emit(found)
        return
    screen = console()
    if not screen.is_terminal:
        several = kind is None
        rows(screen, [[*([name] * several), *entry] for name, own in found.items() for entry in own.items()])
        return
    from rich.table import Table as Grid

    for name, entries in found.items():
        grid = Grid(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for entry, summary in entries.items():
            grid.add_row(cell(entry), cell(summary))
        screen.print(grid, highlight=False)


def registries() -> dict[str, Registry[Any]]:
    """Every registry by its plural."""
    from eval.experiment.plugins import REGISTRIES

    return dict(zip(KINDS, REGISTRIES, strict=True))


def _entries(registry: Registry[Any]) -> dict[str, str]:
    """Name and summary of every entry, and why others are not there."""
    from eval.report.glossary import summarize

    return {name: summarize(registry.get(name)) for name in registry.names()} | registry.skipped_modules()


def _configs() -> dict[str, str]:
    """Name and title of every config."""
    from eval.experiment import config_catalog

    return {name: config_catalog.title(name) for name in config_catalog.names()}
