"""What went wrong in a part of the work, rather than a fault of the program or a key pressed."""

from __future__ import annotations

import zipfile
import zlib

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a method, an attack or the machine may raise in a cell; others (a key pressed, a signal) end the run."""
IMPORTING = (*FAULTS, NameError, SyntaxError)
"""What a module may raise while it is imported."""
DAMAGED = (ArithmeticError, OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged `.npz` may raise; RuntimeError where flags say it is encrypted or packed in another way."""
