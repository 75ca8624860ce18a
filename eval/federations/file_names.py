"""Names of files and folders for what clients, rounds and runs are called: they come from outside."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

LONGEST = 64
"""Characters of a name that is taken as it is."""
KEPT = 40
"""Characters of any other that stay readable."""
DIGEST = 16
"""Hexadecimal digits that tell names apart that look alike otherwise."""
PLAIN = re.compile(rf"[a-z0-9](?:[a-z0-9_-]{{0,{LONGEST - 1}}})")
ENDS_LIKE_OURS = re.compile(rf"(?:^|-)[0-9a-f]{{{DIGEST}}}$")


def as_file_name(text: str) -> str:
    """Return text as a part of a file's name, another for every other text.

    Small letters, digits, hyphens and underscores stay as they are. Whatever else there is (separators, dots, capitals,
    which some file systems do not tell from small letters) becomes a hyphen, and a digest of the whole is put behind.
    """
    if PLAIN.fullmatch(text) and not ENDS_LIKE_OURS.search(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9_]+', '-', text)[:KEPT].strip('-')}-{digest}".lstrip("-")


def free_file(path: Path) -> Path:
    """Return a path where no file is: this one, or one with a number before its ending."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return found
