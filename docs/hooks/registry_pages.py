"""Writes the reference: a page for every registered entry, the config's keys, the command's options, the configs."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import click
import typer

from eval.cli import app
from eval.commands.list_ import registries
from eval.commands.show import describe
from eval.experiment import config_catalog
from eval.experiment.docstrings import meanings
from eval.experiment.serialization import LISTS, SECTIONS
from eval.experiment.spec import Experiment
from fl.ranges import Length, Range
from fl.settings import type_hints

TITLES = {
    "methods": "Methods",
    "attacks": "Attacks",
    "defenses": "Defenses",
    "datasets": "Data sets",
    "models": "Networks",
    "partitions": "Partitions",
    "augmentations": "Augmentations",
}
INTRODUCTIONS = {
    "methods": "How clients train, what they send and what the server makes of it.",
    "attacks": "What a server can make of what it sees. `A+B` chains a rewriting attack with the one that follows.",
    "defenses": "What a client does to its update before it is sent. A list is a chain.",
    "datasets": "Images to train on and to attack. Some come with scikit-image, others are read from `HYPERLEAK_DATA`.",
    "models": "Networks, by the name that `task.model` takes.",
    "partitions": "Which client holds which image, for `federation.partition`.",
    "augmentations": "How images are changed before they are fed, for `federation.augment`.",
}
PLACES = {
    "methods": "method",
    "attacks": "attack",
    "defenses": "defense",
    "datasets": "task.dataset",
    "models": "task.model",
    "partitions": "federation.partition",
    "augmentations": "federation.augment",
}


def pages() -> dict[str, str]:
    """Return all generated reference pages by their path in the site."""
    found: dict[str, str] = {}
    for kind, registry in registries().items():
        entries = {name: _only(describe(name), kind) for name in registry.names()}
        found[f"reference/{kind}/index.md"] = _overview(kind, entries)
        found |= {f"reference/{kind}/{name}.md": _entry(kind, about, registry) for name, about in entries.items()}
    found["reference/config.md"] = _config_page()
    found["reference/configs.md"] = _catalog_page()
    found["reference/cli.md"] = _command_page()
    return found


def _only(found: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(about for about in found if about["kind"] == kind.removesuffix("s"))


# ---- registries ------------------------------------------------------------------------------------------------------
def _overview(kind: str, entries: dict[str, dict[str, Any]]) -> str:
    rows = [
        (f"[`{name}`]({name}.md)", escape(_summary(about)), escape("; ".join(about["papers"])))
        for name, about in entries.items()
    ]
    return f"# {TITLES[kind]}\n\n{INTRODUCTIONS[kind]}\n\n" + table(("name", "in short", "source"), rows)


def _summary(about: dict[str, Any]) -> str:
    words = about["plain"] or re.split(r"(?<=[.:]) ", about["text"].partition("\n")[0])[0].rstrip(":.") + "."
    return str(words[:1].upper() + words[1:])


def _entry(kind: str, about: dict[str, Any], registry: Any) -> str:
    name, entry = about["name"], registry.get(about["name"])
    parts = [f"# `{name}`"]
    if about["plain"]:
        parts.append(f"*In plain words: {escape(about['plain'])}*")
    parts.append(prose(about["text"]))
    if about["papers"]:
        parts.append(f"**Source:** {escape('; '.join(about['papers']))}.")
    parts.append(f"## Use it\n\n```yaml\n{_example(kind, name, about)}\n```")
    if about["fields"]:
        rows = list(_settings(about["fields"], type_hints(entry)))
        parts.append("## Settings\n\n" + table(("setting", "type", "default", "meaning"), rows))
        parts += _former(entry)
    if presets := about.get("presets"):
        rows = [
            (f"`{preset}`", code(_values(own["settings"])), escape(own["source"])) for preset, own in presets.items()
        ]
        parts.append("## Presets\n\n" + table(("preset", "settings", "source"), rows))
    where = entry.__module__.replace(".", "/")
    parts.append(f"Defined in `{where}.py`. `hyperleak show {name}` prints this page in a terminal.")
    return "\n\n".join(parts) + "\n"


def _former(entry: Any) -> list[str]:
    """What settings were called before, where they still may be."""
    names = getattr(entry, "former_names", {}).items()
    words = ", ".join(f"`{old}` (now `{new}`)" for old, new in names)
    return [f"Former names are still read, with a note: {words}."] if words else []


def _example(kind: str, name: str, about: dict[str, Any]) -> str:
    required = {key: "..." for key, field in about["fields"].items() if field["required"]}
    entry = name if not required else "{" + ", ".join(["name: " + name, *(f"{key}: ..." for key in required)]) + "}"
    section, _, key = PLACES[kind].partition(".")
    return f"{section}:\n  {key}: {entry}" if key else f"{section}: [{entry}]"


def _settings(fields: dict[str, dict[str, Any]], types_of: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, field in fields.items():
        default = "required" if field["required"] else code(plain_json(field["default"]))
        yield f"`{key}`", escape(type_words(types_of.get(key, Any))), default, escape(field["meaning"])


# ---- config ----------------------------------------------------------------------------------------------------------
def _config_page() -> str:
    parts = [
        "# Config keys",
        "A config is a YAML file with the sections below. `task` and `method` are required. Every default is written "
        "out in the `config.yaml` of a run. `hyperleak show SECTION` prints a section in a terminal.",
    ]
    words = TOP | meanings(Experiment)
    types_of = type_hints(Experiment)
    rows = []
    for key in ("title", "imports", "seeds"):
        rows.append((f"`{key}`", escape(type_words(types_of[key])), escape(words.get(key, ""))))
    rows += [(f"`{key}`", f"a list of [{key}s](#lists)", escape(words.get(key, ""))) for key in LISTS]
    rows += [(f"`{key}`", f"[below](#{key})", escape(words.get(key, ""))) for key in SECTIONS]
    rows.append(("`published`", "a list", "A paper's figures, which the report sets beside ours."))
    rows.append(("`sweep`", "a mapping", "Lists of values for settings, by key: a grid of entries."))
    parts.append("## Top level\n\n" + table(("key", "what it holds", "meaning"), rows))
    parts.append(
        "## Lists\n\nAn entry of `method`, `attack` or `defense` is a name, or a mapping with `name` and settings. "
        "Three more keys may stand in it: a label of its own, which methods an attack runs on, and settings of other "
        "sections for this entry alone. "
        "[Change settings](../how-to/change-settings.md) shows them."
    )
    for section in SECTIONS:
        about = _only(describe(section), "config section")
        own = _settings(about["fields"], type_hints(SECTIONS[section]))
        parts.append(f"## `{section}` {{ #{section} }}\n\n{prose(about['text'])}\n\n" + table(_COLUMNS, own))
        parts += _former(SECTIONS[section])
    return "\n\n".join(parts) + "\n"


TOP = {
    "title": "What the run is about, for its report.",
    "imports": "Files and modules of your own that register what the config names.",
    "seeds": "Each repeats network, training and attacks; the split and the watched images stay.",
    "method": "How clients train.",
    "defense": "What they do to their update.",
    "attack": "What the server makes of it.",
    "task": "What is learned.",
    "federation": "Who learns it, and for how long.",
    "threat": "What the server knows beside the update.",
    "observe": "Which updates it is given.",
    "score": "Figures beyond those that are always taken.",
}
_COLUMNS = ("key", "type", "default", "meaning")


def _catalog_page() -> str:
    rows = [(f"`{name}`", escape(config_catalog.read_title(name))) for name in config_catalog.list_config_names()]
    text = "# Configs that come with hyperleak\n\n`hyperleak show NAME` says how many cells one comes to, "
    text += "`hyperleak run NAME` runs it. The first folders of a name may be left out.\n\n"
    return text + table(("name", "title"), rows)


# ---- command ---------------------------------------------------------------------------------------------------------
def _command_page() -> str:
    group = typing.cast(click.Group, typer.main.get_command(app))
    parts = ["# Command line", f"{group.help}\n\n`hyperleak COMMAND --help` prints the same in a terminal."]
    with click.Context(group, info_name="hyperleak") as context:
        own = list(_options(group.params, context))
        if own:
            parts.append("## hyperleak\n\n" + table(("option", "default", "meaning"), own))
        parts += list(_commands(group, context, "hyperleak"))
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, context: Any, path: str, level: int = 2) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        own = f"{path} {name}"
        usage = " ".join(_argument(param) for param in command.params if param.param_type_name == "argument")
        text = f"{'#' * level} `{own}`\n\n{prose(command.help or '')}\n\n```\n{own} {usage} [OPTIONS]\n```"
        rows = list(_options(command.params, context))
        yield text + ("\n\n" + table(("option", "default", "meaning"), rows) if rows else "")
        if hasattr(command, "list_commands"):
            yield from _commands(command, context, own, level + 1)


def _argument(param: Any) -> str:
    word = param.metavar or str(param.name).strip("_").upper()
    return word if param.required else f"[{word}]"


def _options(params: Iterable[Any], context: Any) -> Iterator[tuple[str, ...]]:
    for param in params:
        if getattr(param, "hidden", False):
            continue
        argument = param.param_type_name == "argument"
        names = _argument(param) if argument else ", ".join([*param.opts, *param.secondary_opts])
        default = param.default() if callable(param.default) else param.default
        shown = "" if default is None or default == () or default is False or "Sentinel" in repr(default) else default
        yield f"`{names}`", code(str(shown)), escape(getattr(param, "help", "") or "")


# ---- words -----------------------------------------------------------------------------------------------------------
def type_words(hint: Any) -> str:
    """Return what a setting's type takes, in words: "int >= 1", "list of float >= 0 and <= 1, 2 or more of them"."""
    rules: list[Any] = []
    while typing.get_origin(hint) is Annotated:
        hint, *inner = typing.get_args(hint)
        rules += inner
    ranges = [words for rule in rules if isinstance(rule, Range) and (words := _range(rule))]
    lengths = [f", {rule} of them" for rule in rules if isinstance(rule, Length)]
    return " ".join([_type(hint), *ranges]) + "".join(lengths)


def _range(rule: Range) -> str:
    low = "" if rule.low < -1e5 else f"{'>' if rule.above else '>='} {rule.low:g}"
    high = "" if rule.high == float("inf") or rule.high >= 1e5 else f"{'<' if rule.below else '<='} {rule.high:g}"
    return " and ".join(filter(None, [low, high]))


def _type(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "anything"
    if hint is None or hint is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in args) if len(args) > 1 else json.dumps(args[0])
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(dict.fromkeys(type_words(kind) for kind in args))
    if origin in {tuple, list} or (isinstance(origin, type) and issubclass(origin, Sequence)):
        inner = [type_words(kind) for kind in args if kind is not Ellipsis]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"list ({', '.join(inner)})"
    if isinstance(origin, type) and args:
        return f"mapping of {type_words(args[0])} to {type_words(args[1])}" if len(args) == 2 else origin.__name__
    registry = getattr(hint, "registry", None)
    if registry is not None and hasattr(registry, "kind"):
        return f"{registry.kind}, by name or settings"
    return {"bool": "true or false", "str": "text"}.get(
        getattr(hint, "__name__", ""), getattr(hint, "__name__", str(hint))
    )


def plain_json(value: Any) -> str:
    """Return a default as a config has it."""
    try:
        text = json.dumps(value, default=lambda x: getattr(x, "name", None) or str(x), ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text.strip('"') if isinstance(value, str) and value else text


def _values(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {plain_json(value)}" for key, value in settings.items())


def prose(text: str) -> str:
    """Return a docstring's text as Markdown: marks escaped, lists kept apart from the line before."""
    text = escape(text, cell=False)
    return re.sub(r"(?<=[^\n])\n(?=- )(?<!\n- )", "\n", re.sub(r"(?m)^(?!- )(.+)\n(?=- )", r"\1\n\n", text))


def escape(text: str, *, cell: bool = True) -> str:
    """Return text that Markdown shows as it is, code spans and links to results apart."""
    parts = re.split(r"(`[^`\n]+`)", text.replace("\n", " ") if cell else text)
    found = "".join(part if part.startswith("`") and part.endswith("`") else _plain(part) for part in parts)
    return found.replace("|", "\\|") if cell else found


def _plain(text: str) -> str:
    text = re.sub(r"([*_\[\]<>#])", lambda m: {"<": "&lt;", ">": "&gt;"}.get(m[1], "\\" + m[1]), text)
    return re.sub(
        r"benchmarks/results/([\w\\]+)\.md",
        lambda m: f"[{m[1]}](../../results/benchmarks/{m[1].replace(chr(92), '')}.md)",
        text,
    )


def code(text: str) -> str:
    """Return text as a code span for a table's cell, or nothing."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
