"""Import a user's file before any attack of ours, and tell what is wrong with it: see `support.scripts.script`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eval.experiment import plugins


def main(folder: Path, name: str) -> str:
    os.chdir(folder)
    assert "attacks.gradient_matching.ig" not in sys.modules
    try:
        plugins.import_plugins([name])
    except ValueError as error:
        return str(error)
    return ""
