"""A JSON Schema validator of the keywords that our schema uses, so that its tests need no further package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import eval.audit

FILE = Path(eval.audit.__file__).parent / "findings.schema.json"
FINDINGS = json.loads(FILE.read_text(encoding="utf-8"))
ABOUT = {"$schema", "$id", "$defs", "title", "description"}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def faults(value: Any, schema: dict = FINDINGS, whole: dict = FINDINGS, place: str = "$") -> list[str]:
    """Return what is wrong with a value, a line each.

    Raises:
        AssertionError: the schema has a keyword that is not known here.
    """
    found = []
    for keyword, wanted in schema.items():
        if keyword in ABOUT:
            continue
        if keyword == "$ref":
            found += faults(value, whole["$defs"][wanted.removeprefix("#/$defs/")], whole, place)
        elif keyword == "anyOf":
            if all(faults(value, one, whole, place) for one in wanted):
                found.append(f"{place}: {value!r} is none of {wanted}")
        elif keyword == "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            if not any(is_of(value, kind) for kind in kinds):
                found.append(f"{place}: expected {kinds}, got {value!r}")
        elif keyword == "enum":
            found += [] if value in wanted else [f"{place}: {value!r} is none of {wanted}"]
        elif keyword in KEYWORDS:
            kind, check = KEYWORDS[keyword]
            if isinstance(value, kind):
                found += check(value, schema, whole, place)
        else:
            raise AssertionError(f"unknown keyword {keyword!r} at {place}")
    return found


def is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a JSON type; true and false are no numbers."""
    if kind in {"number", "integer"}:
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, TYPES[kind])


def _required(value: dict, schema: dict, whole: dict, place: str) -> list[str]:
    return [f"{place}: no {key!r}" for key in schema["required"] if key not in value]


def _dependent(value: dict, schema: dict, whole: dict, place: str) -> list[str]:
    needed = schema["dependentRequired"]
    return [
        f"{place}: {key!r} without {other!r}"
        for key in needed
        if key in value
        for other in needed[key]
        if other not in value
    ]


def _properties(value: dict, schema: dict, whole: dict, place: str) -> list[str]:
    known = schema["properties"]
    return [words for key in value if key in known for words in faults(value[key], known[key], whole, f"{place}.{key}")]


def _patterns(value: dict, schema: dict, whole: dict, place: str) -> list[str]:
    return [
        words
        for pattern, own in schema["patternProperties"].items()
        for key in value
        if re.search(pattern, key)
        for words in faults(value[key], own, whole, f"{place}.{key}")
    ]


def _others(value: dict, schema: dict, whole: dict, place: str) -> list[str]:
    rule = schema["additionalProperties"]
    others = [key for key in value if key not in schema.get("properties", {})]
    if rule is False:
        return [f"{place}: unknown {key!r}" for key in others]
    return [words for key in others for words in faults(value[key], rule, whole, f"{place}.{key}")]


def _items(value: list, schema: dict, whole: dict, place: str) -> list[str]:
    return [words for i, one in enumerate(value) for words in faults(one, schema["items"], whole, f"{place}[{i}]")]


KEYWORDS = {
    "required": (dict, _required),
    "dependentRequired": (dict, _dependent),
    "properties": (dict, _properties),
    "patternProperties": (dict, _patterns),
    "additionalProperties": (dict, _others),
    "items": (list, _items),
    "minItems": (list, lambda v, s, w, p: [f"{p}: too short"] * (len(v) < s["minItems"])),
    "maxItems": (list, lambda v, s, w, p: [f"{p}: too long"] * (len(v) > s["maxItems"])),
    "minimum": (int | float, lambda v, s, w, p: [f"{p}: {v} is too small"] * (v < s["minimum"])),
    "maximum": (int | float, lambda v, s, w, p: [f"{p}: {v} is too large"] * (v > s["maximum"])),
    "pattern": (str, lambda v, s, w, p: [f"{p}: {v!r} is not {s['pattern']}"] * (not re.search(s["pattern"], v))),
}


def closed(schema: Any = FINDINGS, name: str = "") -> Any:
    """Return the schema as it is of this version alone: no property is unknown, but for columns of images."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: closed(one, key) for key, one in schema.items()}
    if "properties" in schema and isinstance(schema.get("type"), str) and name != "image":
        own.setdefault("additionalProperties", False)
    return own


CLOSED = closed()
