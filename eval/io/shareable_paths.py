"""Paths as they may be shown and kept: nothing that tells of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def relative_to_cwd(path: str) -> str:
    """Return `path` relative to the current folder where it lies below it, else its last part."""
    here, whole = Path.cwd(), Path(os.path.abspath(path))
    for place in (whole, whole.resolve()):
        if place.is_relative_to(here):
            return str(place.relative_to(here))
    return whole.name
