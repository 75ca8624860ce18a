"""What went wrong in a part of the work, rather than a fault of the program or a key pressed."""

from __future__ import annotations

import zipfile
import zlib

from fl.runtime.user_code import FAULTS, IMPORTING

__all__ = ["DAMAGED", "FAULTS", "IMPORTING"]
DAMAGED = (ArithmeticError, OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged `.npz` may raise; RuntimeError where flags say it is encrypted or packed in another way."""
