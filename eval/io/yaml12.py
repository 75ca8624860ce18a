"""YAML as people expect it: `1e-4` is a number, `no` is a word, a key given twice is an error.

A file may come from anyone: what it expands to, its depth and its size are limited before anything is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from eval.io.sanitize import shorten

_RESOLVED = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""YAML 1.2's idea of these types; PyYAML has that of 1.1, with octals, minutes, and `on` and `no` as booleans."""


MOST_CHARACTERS, MOST_VALUES, MOST_DEPTH = 2**20, 50_000, 50
"""Limits of a document: its length, its values once every alias is written out, how deep they lie in each other."""


_HALF = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Safe, strict about keys, and made to stop at limits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[str, int | None] = {}
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return a node, counted with all that an alias repeats."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"line {event.start_mark.line + 1}: "
        if isinstance(event, yaml.AliasEvent):
            repeated = str(event.anchor)
            size = self._sizes.get(repeated, 1)
            if size is None:
                raise ValueError(f"{where}*{shorten(repeated, 40)} repeats what it is part of")
            self._count(size, where)
            return super().compose_node(parent, index)
        self._count(1, where)
        if isinstance(event, yaml.ScalarEvent) and _HALF.search(event.value):
            raise ValueError(f"{where}expected text, got half of a character (a surrogate)")
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ValueError(f"{where}expected values at most {MOST_DEPTH} deep in each other, got more")
        before, anchor = self._values, event.anchor
        if anchor is not None:
            self._sizes[anchor] = None  # until it is whole
        node = super().compose_node(parent, index)
        if anchor is not None:
            self._sizes[anchor] = 1 + self._values - before
        self._depth -= 1
        return node

    def _count(self, more: int, where: str) -> None:
        self._values += more
        if self._values > MOST_VALUES:
            raise ValueError(f"{where}expected at most {MOST_VALUES} values, with every alias written out, got more")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping whose keys are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            where = f"line {key.start_mark.line + 1}: "
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{where}{TEMPLATE}")
            if key.value in seen:
                raise ValueError(f"{where}{shorten(key.value, 100)!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal things twice: no anchors."""
        return True


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _RESOLVED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _tag, (_pattern, _first) in _RESOLVED.items():
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


TEMPLATE = (
    "expected a word as a key, got a list or settings; is `{{ ... }}` of a template not filled in? In quotes it is text"
)


def read(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        ValueError: it is longer than `parse` takes, or no text.
    """
    if path.stat().st_size > 4 * MOST_CHARACTERS:
        raise ValueError(f"expected a file of at most {MOST_CHARACTERS} characters, got {path.stat().st_size} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected text in UTF-8, got byte {error.object[error.start]:#x} at {error.start}") from error


def parse(text: str) -> Any:
    """Return what a YAML document says, in plain Python types.

    Raises:
        ValueError: not YAML, above the limits, or a key given twice; says in which line.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"expected at most {MOST_CHARACTERS} characters, got {len(text)}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # PyYAML's, of a tag such as !!int
        raise ValueError(f"a value is not of the type that its tag (!!int, say) says: {error}") from error


def parse_settings(text: str) -> dict[str, Any]:
    """Parse settings given by name or as YAML: `ig`, `{name: ig, tv_weight: 1e-2}`.

    Raises:
        ValueError: as `parse`.
    """
    value = parse(text)
    return value if isinstance(value, dict) else {"name": text}


def dump(data: Any) -> str:
    """Return `data` as YAML that `parse` reads back to an equal value; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
