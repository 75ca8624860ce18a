"""`hyperleak show NAME`: settings, defaults and meaning of one thing, or what a config runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.commands.list_ import registries
from eval.commands.terminal import IMPORT_HINT, USAGE, Imports, Json, cell, console, emit, errors, line, rows

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
    from eval.experiment.plugins import import_plugins

    with errors(USAGE):
        import_plugins(import_ or ())
        found = describe(name, tuple(import_ or ()))
    if as_json:
        emit(found)
        return
    screen = console()
    for about in found:
        _print(screen, about)


def describe(name: str, imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All that is known by a name, in plain data: kind, name, text and fields with default and meaning.

    Args:
        name: of anything.
        imports: modules that were imported for it, which a config may ask for as well.

    Raises:
        UnknownNameError: nothing is; says what is close.
    """
    from eval.experiment.serialization import SECTIONS

    known = registries()
    found = [_about(kind, registry.get(name)) for kind, registry in known.items() if name in registry.names()]
    if name in SECTIONS:
        found.append(_about("config section", SECTIONS[name], name))
    if not found and "+" in name:
        import attacks

        attacks.build(name)  # says what is wrong with a part
        return [about for part in name.split("+") for about in describe(part)]
    every = {entry for registry in known.values() for entry in registry.names()} | set(SECTIONS)
    return found or [_config(name, sorted(every), imports)]


def meanings(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, section = text.partition("Attributes:\n")
        lines = re.split(r"\n(?=\S)", section)[0] if section else ""
        for entry in re.split(r"\n(?= {4}\S)", "\n" + lines):
            names, colon, words = entry.strip().partition(":")
            if colon:
                found |= {name.strip(): " ".join(words.split()) for name in names.split(",")}
    return found


def _about(kind: str, entry: Any, name: str | None = None) -> dict[str, Any]:
    from eval.report.glossary import citations

    text = inspect.cleandoc(entry.__doc__ or "")
    about: dict[str, Any] = {
        "kind": kind.removesuffix("s"),
        "name": name or entry.name,
        "plain": getattr(entry, "plain", ""),
        "papers": citations(entry) if isinstance(entry, type) else [],
        "text": re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", re.split(r"\n+(?:Attributes|Args|Raises|Returns):\n", text)[0]),
    }
    if not isinstance(entry, type):
        return {**about, "fields": {}}
    words = meanings(entry)
    fields = {f.name: {**_default(f), "meaning": words.get(f.name, "")} for f in dataclasses.fields(entry) if f.init}
    presets = {name: dataclasses.asdict(preset) for name, preset in getattr(entry, "presets", {}).items()}
    return {**about, "fields": fields, **({"presets": presets} if presets else {})}


def _config(name: str, others: Sequence[str], imports: Sequence[str]) -> dict[str, Any]:
    """What a config says of itself, its entries, and to how many cells they come.

    Raises:
        UnknownNameError: nothing is called so, neither a config nor one of `others`; says what is close.
        FileNotFoundError: likewise, where a config is closer.
    """
    from eval.experiment import config_catalog, yaml_config
    from eval.io.sanitize import shorten
    from eval.run import plan
    from fl.registry import UnknownNameError, closest_name

    try:
        path = config_catalog.resolve(name)
    except config_catalog.UnknownConfigError as error:
        if closest_name(name, (*others, *error.near)) in error.near:
            raise
        note = "; configs: `hyperleak list configs`" + ("" if imports else f"; {IMPORT_HINT}")
        raise UnknownNameError("name", name, others, note) from error
    about = {"kind": "config", "name": config_catalog.name_of(path), "plain": "", "papers": [], "fields": {}}
    unread: list[str] = []
    about |= {"comment": shorten(config_catalog.comment(path)), "unread": unread}

    def asked(modules: Sequence[str]) -> bool:
        unread.extend(modules)
        return False

    try:
        experiment = yaml_config.load(path, imports=imports, asked=asked)
        trainings, attacked = plan.count(experiment)
    except ValueError:
        if not unread:
            raise
        return {**about, **_outline(path), "cells": None}  # what it names may be in what was not run
    entries = {kind: [entry.label for entry in getattr(experiment, kind)] for kind in KINDS}
    return {**about, "text": experiment.title, **entries, "cells": {"trainings": trainings, "attacks": attacked}}


def _outline(path: Path) -> dict[str, Any]:
    """What a config says of itself as it stands, without looking anything up."""
    from eval.io import yaml12
    from eval.report.settings import RunSettings

    setting = RunSettings.from_plain(yaml12.parse(yaml12.read(path)))
    entries = {"method": setting.methods, "defense": setting.defenses, "attack": setting.attacks}
    return {"text": setting.title, **{kind: list(own) for kind, own in entries.items()}}


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Whether a field needs a value, and what it is without one, in plain data."""
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
    line(screen, f"{about['name']} ({about['kind']})", "bold")
    if about["plain"]:
        line(screen, f"In plain words: {about['plain']}")
    if about["papers"]:
        line(screen, f"Paper: {'; '.join(about['papers'])}")
    line(screen, about["text"], lines=about["kind"] != "config")
    if about["kind"] == "config":
        _print_config(screen, about)
    settings = [(name, _shown(field), field["meaning"]) for name, field in about["fields"].items()]
    if settings:
        _print_settings(screen, settings)
    for name, preset in about.get("presets", {}).items():
        own = ", ".join(f"{key} {json.dumps(value)}".replace('"', "") for key, value in preset["settings"].items())
        line(screen, f"preset {name}: {own} ({preset['source']})")
    screen.print()


def _print_config(screen: Console, about: dict[str, Any]) -> None:
    if about["comment"]:
        line(screen, about["comment"])
    if about["unread"]:
        asks = " ".join(f"--import {shlex.quote(module)}" for module in about["unread"])
        line(screen, f"note: its own code is not run to show it; {asks} runs it, and shows what it adds")
    for kind, words in (("method", "methods"), ("defense", "defenses"), ("attack", "attacks")):
        line(screen, f"{words}: {', '.join(about[kind]) or 'none'}")
    if about["cells"] is None:
        return
    trainings, attacked = about["cells"]["trainings"], about["cells"]["attacks"]
    line(screen, f"cells: {trainings + attacked} ({trainings} trainings, {attacked} attacks)")


def _shown(field: dict[str, Any]) -> str:
    """The default of a field in words."""
    return "(required)" if field["required"] else json.dumps(field["default"]).strip('"')


def _print_settings(screen: Console, settings: Sequence[Sequence[str]]) -> None:
    """The settings in columns."""
    columns = ("setting", "default", "meaning")
    if not screen.is_terminal:
        rows(screen, [columns, *settings])
        return
    from rich.table import Table as Grid

    grid = Grid(show_header=True, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for setting in settings:
        grid.add_row(*map(cell, setting))
    screen.print(grid, highlight=False)
