"""An audit as SARIF 2.1.0 (OASIS, errata 01), as GitHub's code scanning and others read it.

Only what is a problem becomes a result: code scanning shows results of every kind as alerts, whatever passed among
them. It rejects a file in which a result has no place, and tells results apart by `primaryLocationLineHash` alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from eval.audit.judgment import Judgment, update_words
from eval.audit.source_place import MODULES, ROOT, SourcePlace
from eval.io.sanitize import escape_controls, shorten

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
VERSION = "2.1.0"
LONGEST = 1000
"""Characters of a message; GitHub shows the first sentence of it."""
NOT_DECIDED, FAILED, STOPPED = "not-decided", "attack-failed", "stopped"


@dataclass(frozen=True)
class Rule:
    """What one rule is about.

    Attributes:
        id: stable; alerts are told apart by it.
        level: of its results, where nothing else is said: `error`, `warning` or `note`.
        short: what it says, in a few words.
        full: the same, whole.
        help: what to do about it.
    """

    id: str
    level: str
    short: str
    full: str
    help: str


LOWER = (
    "Send less: larger batches, several local steps, secure aggregation, or differential privacy. The report "
    "(--out FOLDER) shows each image beside what came back."
)
RULES = (
    Rule(
        "limit-exceeded",
        "error",
        "An image came closer than the limit",
        "An attack rebuilt an image from an update more closely than --max-psnr or --max-ssim allows. The best guess "
        "without the update stands beside it: where that exceeds the limit, too, the limit says nothing of the update.",
        LOWER,
    ),
    Rule(
        "image-leak",
        "error",
        "An update gives images away",
        "An attack rebuilt images from an update far better than any guess without it, or told which image it was.",
        LOWER,
    ),
    Rule(
        "confirmed-reconstruction",
        "error",
        "An attack confirms that it recovered images",
        "The true images were not given. The attack checked what it recovered against the update and confirms it.",
        f"{LOWER} With the true images (--images) the result is scored.",
    ),
    Rule(
        "private-tensor",
        "error",
        "An update gives a private tensor away",
        "An attack recovered weights or embeddings that the method keeps from the server.",
        LOWER,
    ),
    Rule(
        NOT_DECIDED,
        "warning",
        "The audit is not decided",
        "Something keeps the audit from an answer: an attack that could not be tried, a search that ended early, too "
        "few images, or settings and update that contradict each other.",
        "Do what the message names behind 'To decide it'.",
    ),
)
NOTIFICATIONS = {
    FAILED: "An attack, or the training before it, ended with an error",
    STOPPED: "The audit was stopped before its end",
}


def sarif_log(judgment: Judgment, place: SourcePlace, *, version: str, exit_code: int) -> dict[str, Any]:
    """Return an audit as a SARIF log in plain data.

    Args:
        judgment: what the audit came to.
        place: where the model's or the method's code stands.
        version: of hyperleak.
        exit_code: that the command ends with.
    """
    driver = {
        "name": "hyperleak",
        "version": version,
        "rules": [_rule(rule) for rule in RULES],
        "notifications": [{"id": name, "shortDescription": _message(words)} for name, words in NOTIFICATIONS.items()],
    }
    notifications = _notifications(judgment)
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"hyperleak/{_slug(judgment.report.subject)}/"},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {
            ROOT: {"description": _message("The root of the repository, or the folder in which the audit ran")},
            MODULES: {"description": _message("A folder in which Python finds modules")},
        },
        "invocations": [
            {
                "exitCode": exit_code,
                "executionSuccessful": not notifications,
                "toolExecutionNotifications": notifications,
            }
        ],
        "results": [*_leaks(judgment, place), *_open_questions(judgment, place)],
        "properties": {"subject": escape_controls(judgment.report.subject), "limits": dict(judgment.limits)},
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _leaks(judgment: Judgment, place: SourcePlace) -> list[dict[str, Any]]:
    """Return what leaked; what limits allow is a note."""
    found = []
    for leak in judgment.leaks:
        allowed = " (no limit is exceeded)" if leak.allowed else ""
        words = f"{leak.attack} on {update_words(leak.update)}{allowed}: {leak.words}"
        told = leak.plain()
        about = _Result(leak.rule, "note" if leak.allowed else "error", words, (leak.attack, told["update"]))
        found.append(
            {**_result(judgment, place, about), "properties": {key: told[key] for key in ("attack", "update")}}
        )
    return found


def _open_questions(judgment: Judgment, place: SourcePlace) -> list[dict[str, Any]]:
    """Return what keeps the audit from an answer."""
    return [
        _result(judgment, place, _Result(NOT_DECIDED, "warning", f"Not decided: {one}", (one.what,)))
        for one in judgment.undecided
    ]


@dataclass(frozen=True)
class _Result:
    """What a result says: its rule, level and words, and what tells it from others of the rule."""

    rule: str
    level: str
    words: str
    identity: tuple[Hashable, ...]


def _result(judgment: Judgment, place: SourcePlace, said: _Result) -> dict[str, Any]:
    """Return a result (section 3.27)."""
    number = next(i for i, rule in enumerate(RULES) if rule.id == said.rule)
    identity = json.dumps([said.rule, judgment.report.subject, *said.identity], default=str)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return {
        "ruleId": said.rule,
        "ruleIndex": number,
        "level": said.level,
        "message": _message(said.words),
        "locations": [_location(place)],
        "partialFingerprints": {"primaryLocationLineHash": f"{digest}:1"},
    }


def _location(place: SourcePlace) -> dict[str, Any]:
    """Return a place in the source (section 3.28)."""
    region = {"startLine": place.line, "startColumn": 1, "endLine": place.line, "endColumn": place.width + 1}
    artifact = {"uri": place.uri, "uriBaseId": place.base}
    return {
        "physicalLocation": {"artifactLocation": artifact, "region": region},
        "logicalLocations": [{"fullyQualifiedName": place.name}],
    }


def _notifications(judgment: Judgment) -> list[dict[str, Any]]:
    """Return what went wrong with the audit itself (section 3.58)."""
    words = [(FAILED, f"{found.attack} failed: {found.failed}") for found in judgment.failed]
    if judgment.report.stopped:
        words.append((STOPPED, f"stopped at {judgment.report.stopped}"))
    return [{"level": "error", "descriptor": {"id": name}, "message": _message(said)} for name, said in words]


def _rule(rule: Rule) -> dict[str, Any]:
    """Return a rule (section 3.49)."""
    return {
        "id": rule.id,
        "name": "".join(word.title() for word in rule.id.split("-")),
        "shortDescription": {"text": rule.short},
        "fullDescription": {"text": rule.full},
        "help": {"text": rule.help},
        "defaultConfiguration": {"level": rule.level},
        "properties": {"tags": ["privacy"]},
    }


def _message(words: str) -> dict[str, str]:
    """Return words as a message; braces are doubled, as single ones would be placeholders (section 3.11.5)."""
    said = shorten(escape_controls(words), LONGEST)
    return {"text": said.replace("{", "{{").replace("}", "}}")}


def _slug(words: str) -> str:
    """Return words as they may stand between the slashes of an id."""
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", words).strip("-")
