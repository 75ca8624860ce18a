"""Words that came from files, names and errors, as they may be shown: on a terminal, in Markdown, in a message.

Whoever made a file chose the words in it. Shown as they are they could move the cursor, forge lines, turn the order of
reading round, or be markup. HTML is escaped where it is made (`eval.report.render_html`), from words that went through
`visible`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

LONGEST_MESSAGE = 1500
"""Characters of a message that are shown."""
_ODD = re.compile(r"[^\x20-\x7e\n\xa0-\xac\xae-\u02ff]")
"""Characters worth a look: neither printable ASCII or Latin nor a line's end."""
_JOINERS = "\u00ad\u200c\u200d"
"""Invisible, but part of how some scripts are written; they change no other character."""
_SPECIAL = re.compile(
    r"([\\`*|<]"  # code, emphasis, cells, HTML
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis by underscores, which within a word are none
    r"|(?<=\])[(\[:]|!(?=\[)"  # links, definitions, images
    r"|:(?=//)|(?<=www)\."  # addresses, which some make links of by themselves
    r"|&(?=#?\w+;))",  # entities
    flags=re.IGNORECASE,
)
_LEADING = re.compile(r"^(\s*(?:\d+(?=[.)](?:\s|$)))?)([#>]|[-+](?=\s)|~(?=~~)|[.)](?=\s|$))")


def escape_controls(words: str, *, lines: bool = False) -> str:
    r"""Return the words with control and reordering characters as escapes: `\x1b`, `\u202e`.

    Args:
        words: of any origin, lone surrogates included; what is returned has none.
        lines: whether line ends stay; otherwise they become blanks.
    """
    words = words.replace("\r\n", "\n")
    return _ODD.sub(lambda found: _escaped(found[0]), words if lines else words.replace("\n", " "))


def shorten(words: str, most: int = LONGEST_MESSAGE) -> str:
    """Return the words, without their middle where they are too many: what is wrong stands first, what to do last."""
    if len(words) <= most:
        return words
    first, last = most * 2 // 3, most // 3
    return f"{words[:first]} ... [{len(words) - first - last} characters left out] ... {words[-last:]}"


def escape_markdown(words: str) -> str:
    """Return the words on one line of Markdown, in a cell of a table too, in which nothing is markup."""
    return _LEADING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", escape_controls(words)))


@cache
def _escaped(character: str) -> str:
    kind = unicodedata.category(character)
    hidden = kind in {"Cc", "Cs", "Zl", "Zp"} or (kind == "Cf" and character not in _JOINERS)
    if not hidden:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
