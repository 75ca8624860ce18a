"""Where the code of what is audited stands, as files for CI name it: relative to the repository, never absolute."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fl.runtime.user_code import user_file

ROOT, MODULES = "%SRCROOT%", "%PYTHONPATH%"
"""What a place is relative to: the root of the repository, or a folder in which Python finds modules."""


@dataclass(frozen=True)
class SourcePlace:
    """A line of a file.

    Attributes:
        uri: of the file, relative.
        base: to what, `ROOT` or `MODULES`.
        line: counted from 1.
        width: characters in it.
        name: of what begins there, dotted.
    """

    uri: str
    base: str
    line: int
    width: int
    name: str


def place_of_target(target: str) -> SourcePlace:
    """Return where the function, class or model `module:name` stands, whose module has been imported."""
    module, _, name = target.partition(":")
    return place_of(getattr(sys.modules.get(module), name, None), module, name)


def place_of(found: object, module: str, name: str) -> SourcePlace:
    """Return where an object of a module stands; the module's first line where Python can't tell.

    Args:
        found: a function or a class; of other objects it is known only which module they are in.
        module: dotted.
        name: of the object in it.
    """
    line, width = 1, 0
    if inspect.isfunction(found) or inspect.isclass(found):
        whole: Any = inspect.unwrap(found)
        module = whole.__module__
        try:
            lines, line = inspect.getsourcelines(whole)
            width = len(lines[0].rstrip("\n"))
        except (OSError, TypeError):  # made in a notebook, or in C
            line, width = 1, 0
    path, root = user_file(module), repository_root()
    dotted = f"{module}.{name}"
    if path is not None and path.is_relative_to(root):
        return SourcePlace(quote(os.fsencode(path.relative_to(root))), ROOT, line, width, dotted)
    file = Path(getattr(sys.modules.get(module), "__file__", None) or f"{module.replace('.', '/')}.py")
    packages = module.count(".") + (file.name == "__init__.py")
    return SourcePlace(quote(os.fsencode("/".join(file.parts[-1 - packages :]))), MODULES, line, width, dotted)


def repository_root() -> Path:
    """Return the folder with a `.git` that the current one is in, or the current one."""
    here = Path.cwd().resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
