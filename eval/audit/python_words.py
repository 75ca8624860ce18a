"""What an audit says, in the words of those who call it from Python: arguments in place of options of the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from eval.audit.findings import AttackFinding, AuditReport

OPTION = re.compile(r"(?<![^\s(])(?<!ray start )--([a-z]+(?:-[a-z]+)*)(?![\w.-]*[\w/-])")
"""An option by itself: not in the middle of a name of a file or a layer, nor the beginning of one, nor another
program's."""
PHRASES: tuple[tuple[str, str], ...] = (
    (r"\. On the command line: .*", ""),
    (r"this file as --after FILE, --before FILE beside it", "update=(before, after)"),
    (r"this alone as --after FILE where", "(None, weights) where"),
    (r"two files by --before and --after", "two files or states as update=(before, after)"),
    (r"say --clients N \(clients=N of hyperleak\.audit\)", "say clients=N"),
    (r"hyperleak audit --method, ", ""),
    (r" \((?:method, )?--[a-z][a-z-]*(?: \d+)?\)", ""),
    (r"(?:--images '[^']*', or )?an \.npz file of such images \(see --help\)", "such images"),
    (r" \(see --help\)", ""),
    (r"\(threat, --threat ", "(--threat "),
    (
        r"alone \(--labels 3,0\), or with their images \(--images, or your function returns them\)",
        "as labels=, with or without their images",
    ),
    (r"--targets ([a-z]+)", r"targets='\1'"),
)
"""What is said by other words, in this order; what is left of options then is said by the names of the arguments."""
SETTINGS = re.compile(r"(?<![^\s(])--([a-z]+(?:-[a-z]+)*) '\{([^{}']*)\}'")
"""An option with settings behind it, as a mapping of YAML."""
NUMBER = re.compile(r"(?<![^\s(])--([a-z]+(?:-[a-z]+)*) (\d+)\b")
"""An option with a number behind it."""
ARGUMENTS = {"attack": "attacks", "image": "images"}
"""Arguments that are called otherwise than their options."""


def in_python(words: str) -> str:
    """Return a sentence with options of the command line as arguments of `hyperleak.audit`."""
    for pattern, instead in PHRASES:
        words = re.sub(pattern, instead, words)
    words = SETTINGS.sub(
        lambda found: f"{_argument(found[1])}={{{', '.join(map(_pair, found[2].split(', ')))}}}", words
    )
    words = NUMBER.sub(lambda found: f"{_argument(found[1])}={found[2]}", words)
    return OPTION.sub(lambda found: _argument(found[1]), words)


def _argument(option: str) -> str:
    return ARGUMENTS.get(option, option.replace("-", "_"))


def _pair(words: str) -> str:
    """Return one pair of a mapping of YAML as Python writes it."""
    key, joint, value = words.partition(": ")
    known = {"true": "True", "false": "False"}
    plain = known.get(value, value if re.fullmatch(r"[\d.e-]+|\.\.\.", value) else repr(value))
    return f"{key!r}: {plain}" if joint else words


@contextmanager
def errors_in_python() -> Iterator[None]:
    """Have errors about what a caller gave name arguments."""
    try:
        yield
    except ValueError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_python(error.args[0]),)
        raise


def report_in_python(report: AuditReport) -> AuditReport:
    """Return a report whose sentences name arguments."""
    notes, mismatch = tuple(map(in_python, report.notes)), in_python(report.mismatch)
    return replace(report, notes=notes, mismatch=mismatch, findings=[_finding(one) for one in report.findings])


def _finding(found: AttackFinding) -> AttackFinding:
    return replace(
        found,
        refused=in_python(found.refused),
        verdict=in_python(found.verdict),
        spared=in_python(found.spared),
        failed=in_python(found.failed),
        notes=[in_python(note) for note in found.notes],
        outcomes=[replace(one, words=in_python(one.words)) for one in found.outcomes],
    )
