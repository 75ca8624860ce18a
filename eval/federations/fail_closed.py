"""Failures of a screening, whatever they are, as an answer: an update of which nobody could say must not just go on.

A screening calls code of its users (their model) and of the framework around it, on whatever a client sends. So any
error is possible, and each has to end in the policy that was asked for, with its reason in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from eval.federations.reply_checks import UnreadableError

T = TypeVar("T")
F = TypeVar("F")
LONGEST = 600
"""Characters of an error's message that a reason holds."""
log = logging.getLogger(__name__)


def attempt(work: Callable[[], T], failed: Callable[[str], F]) -> T | F:
    """Return what a piece of work comes to, or the answer to its failure.

    An interrupt is raised, as is whatever else is neither an error nor an attempt to end the process.

    Args:
        work: what is tried.
        failed: makes an answer of the error in words.
    """
    try:
        return work()
    except (Exception, SystemExit) as error:
        log.log(logging.DEBUG if isinstance(error, UnreadableError) else logging.ERROR, "not screened", exc_info=True)
        return failed(describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and its message in one line, also where that can't be had."""
    kind = "" if isinstance(error, UnreadableError) else type(error).__name__  # whose words are ours, and enough
    try:
        said = " ".join(str(error).split())
    except Exception as own:  # noqa: BLE001  of an error that can't be printed
        said = f"no message, since printing it raised {type(own).__name__}"
    short = said if len(said) <= LONGEST else f"{said[:LONGEST]}..."
    return ": ".join(filter(None, (kind, short)))
