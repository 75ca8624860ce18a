"""What SARIF 2.1.0 asks of a log (OASIS, errata 01), and GitHub of one that it takes, as far as our logs go.

An object is checked by the properties that the standard has it have and that it may have; a property that is not
listed here is a fault, so that what is written anew is looked up.
"""

from __future__ import annotations

import re
from typing import Any

OBJECTS: dict[str, tuple[set[str], dict[str, str]]] = {
    # name: (required, property: what it is, by "name", "name[]" for a list, "{name}" for a mapping)
    "sarifLog": ({"version", "runs"}, {"$schema": "uri", "version": "text", "runs": "run[]"}),
    "run": (
        {"tool"},
        {
            "tool": "tool",
            "automationDetails": "runAutomationDetails",
            "columnKind": "text",
            "originalUriBaseIds": "{artifactLocation}",
            "invocations": "invocation[]",
            "results": "result[]",
            "properties": "bag",
        },
    ),
    "tool": ({"driver"}, {"driver": "toolComponent"}),
    "toolComponent": (
        {"name"},
        {"name": "text", "version": "text", "rules": "reportingDescriptor[]", "notifications": "reportingDescriptor[]"},
    ),
    "reportingDescriptor": (
        {"id"},
        {
            "id": "text",
            "name": "text",
            "shortDescription": "multiformatMessageString",
            "fullDescription": "multiformatMessageString",
            "help": "multiformatMessageString",
            "defaultConfiguration": "reportingConfiguration",
            "properties": "bag",
        },
    ),
    "multiformatMessageString": ({"text"}, {"text": "message text"}),
    "reportingConfiguration": (set(), {"level": "level"}),
    "runAutomationDetails": (set(), {"id": "text"}),
    "invocation": (
        {"executionSuccessful"},
        {"executionSuccessful": "flag", "exitCode": "count", "toolExecutionNotifications": "notification[]"},
    ),
    "notification": (
        {"message"},
        {"message": "message", "level": "level", "descriptor": "reportingDescriptorReference"},
    ),
    "reportingDescriptorReference": ({"id"}, {"id": "text"}),
    "message": ({"text"}, {"text": "message text"}),
    "result": (
        {"message"},
        {
            "ruleId": "text",
            "ruleIndex": "count",
            "level": "level",
            "message": "message",
            "locations": "location[]",
            "partialFingerprints": "{text}",
            "properties": "bag",
        },
    ),
    "location": (set(), {"physicalLocation": "physicalLocation", "logicalLocations": "logicalLocation[]"}),
    "physicalLocation": ({"artifactLocation"}, {"artifactLocation": "artifactLocation", "region": "region"}),
    "artifactLocation": (set(), {"uri": "relative uri", "uriBaseId": "text", "description": "message"}),
    "region": (set(), {key: "line" for key in ("startLine", "startColumn", "endLine", "endColumn")}),
    "logicalLocation": (set(), {"fullyQualifiedName": "text"}),
}
LEAVES = {
    "text": lambda value: isinstance(value, str) and value,
    "message text": lambda value: isinstance(value, str) and value and not lone_braces(value) and value.isprintable(),
    "level": lambda value: value in {"none", "note", "warning", "error"},
    "flag": lambda value: isinstance(value, bool),
    "count": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "line": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
    "uri": lambda value: bool(re.fullmatch(r"https?://[!-~]+", value)),
    "relative uri": lambda value: bool(re.fullmatch(r"(?!/)(?![A-Za-z][A-Za-z0-9+.-]*:)(?!.*\.\./)[!-~]+", value)),
    "bag": lambda value: isinstance(value, dict),
}


def lone_braces(words: str) -> bool:
    """Whether words have a brace that begins or ends a placeholder (section 3.11.5)."""
    return bool(re.search(r"[{}]", words.replace("{{", "").replace("}}", "")))


def faults(value: Any, kind: str = "sarifLog", place: str = "$") -> list[str]:
    """Return where a log breaks the standard, a line each."""
    if kind.endswith("[]"):
        if not isinstance(value, list):
            return [f"{place}: expected a list"]
        return [words for i, one in enumerate(value) for words in faults(one, kind[:-2], f"{place}[{i}]")]
    if kind.startswith("{"):
        if not isinstance(value, dict):
            return [f"{place}: expected a mapping"]
        return [words for key, one in value.items() for words in faults(one, kind[1:-1], f"{place}.{key}")]
    if kind in LEAVES:
        return [] if LEAVES[kind](value) else [f"{place}: {value!r} is no {kind}"]
    required, known = OBJECTS[kind]
    if not isinstance(value, dict):
        return [f"{place}: expected a {kind}"]
    found = [f"{place}: no {key}" for key in sorted(required - value.keys())]
    for key, one in value.items():
        found += faults(one, known[key], f"{place}.{key}") if key in known else [f"{place}: unknown {key}"]
    return found


def references(log: dict[str, Any]) -> list[str]:
    """Return where parts of a log do not fit each other, or GitHub would not take it or not tell results apart."""
    found = [] if log["version"] == "2.1.0" and "$schema" in log else ["no version"]
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        rules, notices = ([one["id"] for one in driver[key]] for key in ("rules", "notifications"))
        found += ["a rule twice"] * (len({*rules}) < len(rules))
        for rule in driver["rules"]:
            for key in ("shortDescription", "fullDescription", "help"):
                found += [] if 0 < len(rule.get(key, {}).get("text", "")) <= 1024 else [f"{rule['id']}: {key}"]
        for result in run["results"]:
            index = result["ruleIndex"]
            found += [] if rules[index : index + 1] == [result["ruleId"]] else [f"{result['ruleId']}: wrong index"]
            found += [] if result["locations"] else ["no location"]
            for place in result["locations"]:
                physical = place["physicalLocation"]
                known = physical["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
                found += [] if known and len(physical["region"]) == 4 else ["unknown place"]
        marks = [result["partialFingerprints"]["primaryLocationLineHash"] for result in run["results"]]
        found += ["results that are not told apart"] * (len({*marks}) < len(marks))
        for invocation in run["invocations"]:
            told = [one["descriptor"]["id"] for one in invocation["toolExecutionNotifications"]]
            found += [] if {*told} <= {*notices} else ["unknown notification"]
            found += [] if invocation["executionSuccessful"] is not bool(told) else ["success with a failure"]
    return found
