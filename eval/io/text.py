"""Lists, counts and sentences in words."""

from __future__ import annotations

from collections.abc import Sequence


def format_count(amount: int, one: str, several: str = "") -> str:
    """Return a number with its noun: `1 image`, `8 images`."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Join words as in a sentence: `a, b and c`; `none` of nothing."""
    if not words:
        return "none"
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def to_sentence(words: str) -> str:
    """Return the words with a capital letter in front and one full stop behind."""
    words = words.strip()
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""
