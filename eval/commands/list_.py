"""`hyperleak list`: what there is to choose from."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands.terminal import (
    IMPORT_HINT,
    USAGE,
    Imports,
    Json,
    console,
    exit_on_errors,
    print_json,
    print_message,
    print_rows,
    prints_aside,
    table_cell,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from fl.registry import UnknownNameError

    with exit_on_errors(USAGE):
        if kind is not None and kind not in {*KINDS, CONFIGS}:
            raise UnknownNameError("kind", kind, (*KINDS, CONFIGS))
        import_modules(import_ or ())
    found = {kind: _configs()} if kind == CONFIGS else summaries([kind] if kind else KINDS)
    found = {name: {k: v for k, v in own.items() if in_folder_or_named(k, prefix)} for name, own in found.items()}
    if prefix and not any(found.values()):
        print_message(
            f"no {kind} whose name begins with {prefix!r}" + ("" if import_ or kind == CONFIGS else f"; {IMPORT_HINT}")
        )
    if json:
        print_json(found)
        return
    screen = console()
    if not screen.is_terminal:
        several = kind is None
        print_rows(screen, [[*([name] * several), *entry] for name, own in found.items() for entry in own.items()])
        return
    from rich.table import Table as Grid

    for name, entries in found.items():
        grid = Grid(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for entry, summary in entries.items():
            grid.add_row(table_cell(entry), table_cell(summary))
        screen.print(grid, highlight=False)


def registries() -> dict[str, Registry[Any]]:
    """Return every registry by its plural."""
    from eval.experiment.plugins import REGISTRIES

    return dict(zip(KINDS, REGISTRIES, strict=True))


def import_modules(words: Sequence[str]) -> None:
    """Import modules of the user's own; without any, nothing is imported for it."""
    if words:
        from eval.experiment.plugins import import_plugins

        with prints_aside():
            import_plugins(words)


def summaries(kinds: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the summary of every entry by kind and name, and why others are not there.

    Args:
        kinds: registries by their plurals, of `KINDS`.
    """
    from eval.experiment import source_catalog
    from eval.experiment.docstrings import summarize

    if source_catalog.certain():
        with suppress(source_catalog.UnclearSourceError):
            return {
                kind: {name: summarize(source_catalog.entry(kind, name)) for name in source_catalog.names(kind)}
                for kind in kinds
            }
    known = {kind: registry for kind, registry in registries().items() if kind in kinds}
    return {
        kind: {name: summarize(registry.get(name)) for name in registry.names()} | registry.skipped_modules()
        for kind, registry in known.items()
    }


def _configs() -> dict[str, str]:
    """Return name and title of every config."""
    from eval.experiment import config_catalog

    return {name: config_catalog.read_title(name) for name in config_catalog.list_config_names()}
