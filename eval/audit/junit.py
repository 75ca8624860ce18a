"""An audit as JUnit XML: a test case for each attack on each update, as Jenkins, GitLab and others read it.

There is no standard; elements and attributes are those of the schema of Jenkins' xUnit plugin (junit-10.xsd), which the
parsers of GitLab and of GitHub's actions take, too. Names of test cases are unique: GitLab keeps the first of a name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from xml.etree import ElementTree

from eval.audit.findings import AttackFinding
from eval.audit.judgment import Judgment, Leak, update_words
from eval.audit.verdict import image_line
from eval.io.sanitize import escape_controls, shorten
from eval.metrics.score import Row
from eval.report.sections.inconclusive import Outcome, update_key

Status = Literal["passed", "failure", "error", "skipped"]
SUITE = "hyperleak"
"""What the class of every test case begins with."""
MOST_IMAGES = 50
"""Images of a test case that are listed."""
STATED: dict[str, str] = {
    "fact": "not applicable",
    "limit": "not applicable (a limit of the attack, no finding)",
    "gave up": "not decided: the search gave up",
    "contradicted": "not decided: the rest of the update does not bear it out",
    "cut short": "not decided: cut short",
}
"""Outcomes that say nothing of the update, in words; of others the attack has an answer."""
UNJUDGED = "not decided: the true images are not known, and the attack does not confirm its pictures"
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow, not even escaped (section 2.2)."""


@dataclass(frozen=True)
class Case:
    """One test case.

    Attributes:
        group: what its class ends with; empty for the audit as a whole.
        name: of its own.
        status: what it came to.
        kind: of a failure or an error, in a word.
        message: why it did not pass; empty where it did.
        details: what else is known, in lines.
    """

    group: str
    name: str
    status: Status = "passed"
    kind: str = ""
    message: str = ""
    details: str = ""


def junit_xml(judgment: Judgment, *, version: str, at: datetime) -> str:
    """Return an audit as JUnit XML.

    Args:
        judgment: what the audit came to.
        version: of hyperleak.
        at: when the audit began, with a time zone.
    """
    cases = [*_audit_cases(judgment), *(case for found in judgment.report.findings for case in _cases(judgment, found))]
    counts = {name: sum(case.status == name for case in cases) for name in ("failure", "error", "skipped")}
    numbers = {"tests": str(len(cases)), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    root = ElementTree.Element("testsuites", {"name": "hyperleak audit", **numbers})
    about = {"name": _clean(judgment.report.subject), **numbers, "skipped": str(counts["skipped"])}
    suite = ElementTree.SubElement(root, "testsuite", {**about, "timestamp": at.isoformat(timespec="seconds")})
    properties = ElementTree.SubElement(suite, "properties")
    stated = {"hyperleak": version, **{f"max-{figure}": f"{limit:g}" for figure, limit in judgment.limits.items()}}
    for name, value in stated.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    for case in cases:
        suite.append(_element(case))
    ElementTree.SubElement(suite, "system-out").text = _clean(_summary(judgment))
    ElementTree.indent(root)
    # other characters are referred to by their numbers, so that no reader has to heed the encoding
    told = ElementTree.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{told}\n'


def _audit_cases(judgment: Judgment) -> Iterator[Case]:
    """Return what is said of the audit as a whole."""
    stopped = judgment.report.stopped
    if stopped:
        yield Case("", "the audit is whole", "error", "stopped", f"stopped at {stopped}: later attacks were not tried")
    said = [str(one) for one in judgment.undecided]
    if said:
        yield Case("", "the audit is decided", "failure", "not-decided", said[0], "\n".join(said[1:]))
    else:
        yield Case("", "the audit is decided")


def _cases(judgment: Judgment, found: AttackFinding) -> Iterator[Case]:
    """Return an attack's test cases: one for each update, one for all of them where only together they show a leak."""
    rows: dict[Hashable, list[Row]] = {}
    for row in found.rows:
        rows.setdefault(update_key(row), []).append(row)
    leaks: dict[Hashable, list[Leak]] = {}
    for leak in judgment.violations:
        if leak.attack == found.attack:
            leaks.setdefault(leak.update, []).append(leak)
    outcomes = {one.update: one for one in found.outcomes}
    for update in [*judgment.updates, *([None] if None in leaks or not judgment.updates else [])]:
        name = f"{found.attack} on {update_words(update)}" if judgment.updates else found.attack
        if update in leaks:
            words = "; ".join(leak.words for leak in leaks[update])
            lines = _image_lines(rows.get(update, found.rows))
            yield Case(found.attack, name, "failure", leaks[update][0].rule, words, lines)
        else:
            yield _without_leak(found, name, outcomes.get(update), rows.get(update, ()))


def _without_leak(found: AttackFinding, name: str, outcome: Outcome | None, rows: Sequence[Row]) -> Case:
    """Return the test case of an attack that shows no leak of one update."""
    if found.failed:
        return Case(found.attack, name, "error", "attack-failed", found.failed, found.origin)
    if outcome is not None:
        lines = _image_lines(rows)
        if said := STATED.get(outcome.kind):
            return Case(found.attack, name, "skipped", "", f"{said}: {outcome.words}", lines)
        if outcome.kind in {"ran", "searched"} and (found.cut_short or not rows):
            said = f"{STATED['cut short']}: {found.cut_short}" if found.cut_short else f"{UNJUDGED}: {found.verdict}"
            return Case(found.attack, name, "skipped", "", said, lines)
        return Case(found.attack, name, details=lines or found.verdict)
    if found.spared and not found.outcomes:
        return Case(found.attack, name, "skipped", "", found.spared)
    if found.spared:
        return Case(found.attack, name, "skipped", "", "not needed: an attack before it settles this update")
    return Case(found.attack, name, "skipped", "", f"not tried: {found.cut_short or 'the audit ended before it'}")


def _image_lines(rows: Sequence[Row]) -> str:
    """Return what became of images, a line each."""
    pictured = [row for row in rows if row.get("psnr") is not None]
    lines = [image_line(row, row["image"]) for row in pictured[:MOST_IMAGES]]
    left = len(pictured) - len(lines)
    return "\n".join([*lines, *([f"and {left} more"] if left else [])])


def _summary(judgment: Judgment) -> str:
    """Return what the audit says of its subject and of every attack, a line each."""
    report = judgment.report
    lines = [f"contradiction: {report.mismatch}"] if report.mismatch else []
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join([*lines, *(f"{found.attack}: {found.verdict}" for found in report.findings)])


def _element(case: Case) -> ElementTree.Element:
    """Return a test case as XML."""
    group = f"{SUITE}.{case.group}" if case.group else SUITE
    element = ElementTree.Element("testcase", classname=_clean(group), name=_clean(case.name))
    if case.status == "passed":
        if case.details:
            ElementTree.SubElement(element, "system-out").text = _clean(case.details)
        return element
    message = _clean(shorten(case.message))
    told = {"message": message, **({"type": case.kind} if case.kind else {})}
    # GitLab shows the text, Jenkins message and text
    text = "\n".join(filter(None, (message, _clean(case.details))))
    ElementTree.SubElement(element, case.status, told).text = text
    return element


def _clean(words: str) -> str:
    """Return the words without what XML does not allow, and without control characters that hide something."""
    return _NO_XML.sub("\ufffd", escape_controls(words, lines=True))
