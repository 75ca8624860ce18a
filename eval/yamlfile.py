"""YAML as people expect it: `1e-4` is a number, `no` is a word, a key given twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

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


class _Loader(yaml.SafeLoader):
    """Safe, and strict about keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose keys are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice")
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


def parse(text: str) -> Any:
    """What a YAML document says, in plain Python types.

    Raises:
        ValueError: not YAML, or a key given twice; says in which line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def named(text: str) -> dict[str, Any]:
    """Settings given by name or as YAML: `ig`, `{name: ig, tv: 1e-2}`.

    Raises:
        ValueError: as `parse`.
    """
    value = parse(text)
    return value if isinstance(value, dict) else {"name": text}


def dump(data: Any) -> str:
    """`data` as YAML that `parse` reads back to an equal value; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
