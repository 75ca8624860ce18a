"""What went wrong in a part of the work, rather than a fault of the program or a key pressed."""

from __future__ import annotations

import zipfile
import zlib

from eval.io.shareable_paths import relative_to_cwd
from fl.runtime.user_code import IMPORT_ERRORS, OUR_FOLDER, RUN_ERRORS, error_origin

__all__ = ["DAMAGED", "IMPORT_ERRORS", "RUN_ERRORS", "describe_origin"]
DAMAGED = (ArithmeticError, OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged `.npz` may raise; RuntimeError where flags say it is encrypted or packed in another way."""


def describe_origin(error: BaseException) -> str:
    """Return where an error arose, as `file, line number`, in code of the user's or ours; empty where nothing tells."""
    found = error_origin(error)
    if found is None:
        return ""
    path, line = found
    shown = path.relative_to(OUR_FOLDER) if path.is_relative_to(OUR_FOLDER) else relative_to_cwd(str(path))
    return f"{shown}, line {line}"
