"""`hyperleak show NAME`: settings, defaults and meaning of one thing, or what a config runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from eval.commands.list_ import KINDS as REGISTRIES
from eval.commands.list_ import import_modules, registries
from eval.commands.terminal import (
    IMPORT_HINT,
    USAGE,
    Imports,
    Json,
    console,
    exit_on_errors,
    print_json,
    print_line,
    print_rows,
    table_cell,
)

KINDS = ("method", "defense", "attack")

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def show(
    name: Annotated[str, typer.Argument(help="Of a method, attack, data set, ..., a config or a config's section.")],
    import_: Imports = None,
    as_json: Json = False,
) -> None:
    """The settings of one thing: their defaults, what they mean, and the paper it comes from; what a config runs."""
    with exit_on_errors(USAGE):
        import_modules(import_ or ())
        found = describe(name, tuple(import_ or ()))
    if as_json:
        print_json(found)
        return
    screen = console()
    for about in found:
        _print(screen, about)


def describe(name: str, imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return all that is known by a name, in plain data: kind, name, text and fields with default and meaning.

    Args:
        name: of anything.
        imports: modules that were imported for it, which a config may ask for as well.

    Raises:
        UnknownNameError: nothing is; says what is close.
    """
    from eval.experiment import source_catalog

    if not imports and source_catalog.certain():
        with suppress(source_catalog.UnclearSourceError):
            return _describe(name, imports, source_catalog)
    return _describe(name, imports, _Registries())


class _Catalog(Protocol):
    """What there is by name: `eval.experiment.source_catalog`, or the registries."""

    def names(self, kind: str) -> list[str]:
        """Return names of a kind."""

    def entry(self, kind: str, name: str) -> Any:
        """Return what a name of a kind stands for."""

    def sections(self) -> list[str]:
        """Return names of a config's sections."""

    def section(self, name: str) -> Any:
        """Return what a section is read as."""


class _Registries:
    """What the registries say, once all that they hold is imported."""

    def __init__(self) -> None:
        from eval.experiment.serialization import SECTIONS

        self._registries, self._sections = registries(), SECTIONS

    def names(self, kind: str) -> list[str]:
        """Return names of a kind."""
        return self._registries[kind].names()

    def entry(self, kind: str, name: str) -> Any:
        """Return what a name of a kind stands for."""
        return self._registries[kind].get(name)

    def sections(self) -> list[str]:
        """Return names of a config's sections."""
        return list(self._sections)

    def section(self, name: str) -> Any:
        """Return what a section is read as."""
        return self._sections[name]


def _describe(name: str, imports: Sequence[str], known: _Catalog) -> list[dict[str, Any]]:
    from fl.registry import UnknownNameError

    found = [_describe_entry(kind, known.entry(kind, name)) for kind in REGISTRIES if name in known.names(kind)]
    if name in known.sections():
        found.append(_describe_entry("config section", known.section(name), name))
    if not found and "+" in name:
        for part in name.split("+"):
            if part not in known.names("attacks"):
                raise UnknownNameError("attack", part, known.names("attacks"))
        return [about for part in name.split("+") for about in _describe(part, imports, known)]
    every = {entry for kind in REGISTRIES for entry in known.names(kind)} | set(known.sections())
    return found or [_describe_config(name, sorted(every), imports)]


def _describe_entry(kind: str, entry: Any, name: str | None = None) -> dict[str, Any]:
    from eval.experiment.docstrings import citations, meanings, plain_words

    text = inspect.cleandoc(entry.__doc__ or "")
    about: dict[str, Any] = {
        "kind": kind.removesuffix("s"),
        "name": name or entry.name,
        "plain": plain_words(entry),
        "papers": citations(entry) if isinstance(entry, type) else [],
        "text": re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", re.split(r"\n+(?:Attributes|Args|Raises|Returns):\n", text)[0]),
    }
    if not isinstance(entry, type):
        return {**about, "fields": {}}
    words = meanings(entry)
    fields = {f.name: {**_default(f), "meaning": words.get(f.name, "")} for f in dataclasses.fields(entry) if f.init}
    presets = {name: dataclasses.asdict(preset) for name, preset in getattr(entry, "presets", {}).items()}
    return {**about, "fields": fields, **({"presets": presets} if presets else {})}


def _describe_config(name: str, others: Sequence[str], imports: Sequence[str]) -> dict[str, Any]:
    """Return what a config says of itself, its entries, and to how many cells they come.

    Raises:
        UnknownNameError: nothing is called so, neither a config nor one of `others`; says what is close.
        FileNotFoundError: likewise, where a config is closer.
    """
    from eval.experiment import config_catalog
    from eval.io.sanitize import shorten
    from fl.registry import UnknownNameError, closest_name

    try:
        path = config_catalog.find_config(name)
    except config_catalog.UnknownConfigError as error:
        near = {*error.near, *(other.rpartition("/")[2] for other in error.near)}
        if closest_name(name, (*others, *sorted(near))) in near:
            raise
        note = "; configs: `hyperleak list configs`" + ("" if imports else f"; {IMPORT_HINT}")
        raise UnknownNameError("name", name, others, note) from error
    from eval.experiment import yaml_config
    from eval.run import plan

    about = {"kind": "config", "name": config_catalog.config_name(path), "plain": "", "papers": [], "fields": {}}
    unread: list[str] = []
    about |= {"comment": shorten(config_catalog.read_description(path)), "unread": unread}

    def asked(modules: Sequence[str]) -> bool:
        unread.extend(modules)
        return False

    try:
        experiment = yaml_config.load(path, imports=imports, asked=asked)
        trainings, attacked = plan.count_tasks(experiment)
    except ValueError:
        if not unread:
            raise
        return {**about, **_outline(path), "cells": None}  # what it names may be in what was not run
    entries = {kind: [entry.label for entry in getattr(experiment, kind)] for kind in KINDS}
    return {**about, "text": experiment.title, **entries, "cells": {"trainings": trainings, "attacks": attacked}}


def _outline(path: Path) -> dict[str, Any]:
    """Return what a config says of itself as it stands, without looking anything up."""
    from eval.io import yaml12
    from eval.report.settings import RunSettings

    setting = RunSettings.from_plain(yaml12.parse(yaml12.read(path)))
    entries = {"method": setting.methods, "defense": setting.defenses, "attack": setting.attacks}
    return {"text": setting.title, **{kind: list(own) for kind, own in entries.items()}}


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return whether a field needs a value, and what it is without one, in plain data."""
    from fl.registry import Registry

    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return {"required": True, "default": None}
    registry = getattr(type(value), "registry", None)
    if isinstance(registry, Registry):
        value = registry.spec(value)
    return {"required": False, "default": list(value) if isinstance(value, tuple) else value}


def _print(screen: Console, about: dict[str, Any]) -> None:
    print_line(screen, f"{about['name']} ({about['kind']})", "bold")
    if about["plain"]:
        print_line(screen, f"In plain words: {about['plain']}")
    if about["papers"]:
        print_line(screen, f"Paper: {'; '.join(about['papers'])}")
    print_line(screen, about["text"], lines=about["kind"] != "config")
    if about["kind"] == "config":
        _print_config(screen, about)
    settings = [(name, _default_words(field), field["meaning"]) for name, field in about["fields"].items()]
    if settings:
        _print_settings(screen, settings)
    for name, preset in about.get("presets", {}).items():
        own = ", ".join(f"{key} {json.dumps(value)}".replace('"', "") for key, value in preset["settings"].items())
        print_line(screen, f"preset {name}: {own} ({preset['source']})")
    screen.print()


def _print_config(screen: Console, about: dict[str, Any]) -> None:
    if about["comment"]:
        print_line(screen, about["comment"])
    if about["unread"]:
        asks = " ".join(f"--import {shlex.quote(module)}" for module in about["unread"])
        print_line(screen, f"note: its own code is not run to show it; {asks} runs it, and shows what it adds")
    for kind, words in (("method", "methods"), ("defense", "defenses"), ("attack", "attacks")):
        print_line(screen, f"{words}: {', '.join(about[kind]) or 'none'}")
    if about["cells"] is None:
        return
    trainings, attacked = about["cells"]["trainings"], about["cells"]["attacks"]
    print_line(screen, f"cells: {trainings + attacked} ({trainings} trainings, {attacked} attacks)")


def _default_words(field: dict[str, Any]) -> str:
    """Return the default of a field in words."""
    return "(required)" if field["required"] else json.dumps(field["default"]).strip('"')


def _print_settings(screen: Console, settings: Sequence[Sequence[str]]) -> None:
    """Print the settings in columns."""
    columns = ("setting", "default", "meaning")
    if not screen.is_terminal:
        print_rows(screen, [columns, *settings])
        return
    from rich.table import Table as Grid

    grid = Grid(show_header=True, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for setting in settings:
        grid.add_row(*map(table_cell, setting))
    screen.print(grid, highlight=False)
