"""Any failure is an answer, and says what it was."""

from __future__ import annotations

import pytest

from eval.federations.fail_closed import LONGEST, attempt
from eval.federations.reply_checks import UnreadableError


class OwnError(Exception):
    pass


class SilentError(Exception):
    def __str__(self) -> str:
        raise OwnError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OwnError("two\nlines"), "OwnError: two lines"),
        (OwnError(), "OwnError"),
        (SystemExit(3), "SystemExit: 3"),
        (NameError("x"), "NameError: x"),
        (StopIteration(), "StopIteration"),
        (UnreadableError("expected weights"), "expected weights"),
        (SilentError(), "SilentError: no message, since printing it raised OwnError"),
        (OwnError("a" * 10_000), f"OwnError: {'a' * LONGEST}..."),
    ],
)
def test_an_error_is_an_answer_in_words(error: BaseException, words: str) -> None:
    def work() -> str:
        raise error

    assert attempt(work, lambda said: f"failed: {said}") == f"failed: {words}"


def test_what_works_is_returned_and_an_interrupt_is_none_of_ours() -> None:
    assert attempt(lambda: 3, str) == 3

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted, str)
