"""Modules of the user's own, imported before names are looked up, so that what they register goes by its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attacks
from defenses import defenses
from eval.experiment.spec import Experiment
from eval.io import jsonl
from eval.io.errors import IMPORT_ERRORS
from eval.io.run_layout import MODULE_FOLDER, RUN
from eval.io.shareable_paths import relative_to_cwd
from fl.data import datasets
from fl.data.augment import augmentations
from fl.data.partitions.partition import partitions
from fl.method import methods
from fl.models import models
from fl.registry import Registry
from fl.runtime.user_code import error_line

REGISTRIES: tuple[Registry[Any], ...] = (
    methods,
    attacks.attacks,
    defenses,
    datasets,
    models,
    partitions,
    augmentations,
)
_sources: dict[str, bytes] = {}


def import_plugins(words: Sequence[str], folder: Path = Path(), given: Sequence[str] = ()) -> tuple[str, ...]:
    """Import modules; returns what a config is to say, without anything that a path tells of the machine.

    A file is imported by its stem, with its folder on `sys.path`, so that worker processes find it as well.

    Args:
        words: of a config: files (`mine.py`), looked for in `folder`, then in the current one, or modules (`my.own`).
        folder: of the config.
        given: on the command line, likewise; a file takes the place of those of the same name in `words`.

    Raises:
        FileNotFoundError: no such file or module.
        ValueError: it can't be imported; says in which line. Among the reasons is a name that is registered already.
    """
    left = not_on_command_line(words, given)
    for registry in REGISTRIES if left or given else ():
        registry.names()  # ours come first: a name of theirs that is taken is their fault
    kept = [
        *(_import_word(word, (folder, Path())) for word in left),
        *(_import_word(word, (Path(),)) for word in given),
    ]
    return tuple(dict.fromkeys(kept))


def not_on_command_line(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return what of the modules in a config is not given on the command line, too."""
    names = {Path(word).name for word in given}
    return [word for word in words if Path(word).name not in names]


def plugin_sources() -> Mapping[str, bytes]:
    """Return the files of the imported modules as they were then, by the module's name."""
    return _sources


def _import_word(word: str, folders: Sequence[Path]) -> str:
    if not word.endswith(".py") and os.sep not in word:
        search_modules_in(Path())
        _import(word, word)
        return word
    path = next((path for folder in folders if (path := folder / word).is_file()), None)
    if path is None:
        places = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
        raise FileNotFoundError(f"no file {word} to import in {places}; give it by --import")
    search_modules_in(path.parent)
    if "." in path.stem:
        raise ValueError(f"{word}: a module's name holds no dot; rename the file")
    found = importlib.util.find_spec(path.stem)
    origin = found.origin if found is not None else None
    if origin is None or not Path(origin).is_file() or not path.samefile(origin):
        raise ValueError(f"{word}: there is another module {path.stem!r} ({origin}); rename the file")
    _import(path.stem, word)
    return relative_to_cwd(str(path))


def shareable_folder(folder: Path) -> str:
    """Return a folder relative to the current one; nothing where it is not below that, as it tells of the machine."""
    whole, here = folder.resolve(), Path.cwd().resolve()
    return whole.relative_to(here).as_posix() if whole != here and whole.is_relative_to(here) else ""


def module_folder(experiment: Experiment, config: Path) -> str:
    """Return where the module of `task.model` lies, for the config that a run writes (`shareable_folder`).

    Args:
        experiment: that is run.
        config: the file it was read from: its author's, or that of a run which goes on.
    """
    if not experiment.task.model.user_code:
        return ""
    if (config.parent / RUN).is_file():
        return recorded_module_folder(config.parent)
    return shareable_folder(config.parent)


def recorded_module_folder(folder: Path) -> str:
    """Return where the module of `task.model` lies, as the run in `folder` says; nothing where it says nothing.

    Only a folder below the current one counts: whoever wrote the run can't lead elsewhere.
    """
    try:
        about = jsonl.read_json(folder / RUN)
    except (OSError, ValueError):
        return ""
    found = about.get(MODULE_FOLDER) if isinstance(about, dict) else None
    return shareable_folder(Path(found)) if isinstance(found, str) and found else ""


def search_modules_in(folder: Path) -> None:
    """Look for modules in a folder, after all other places: its files hide nobody else's."""
    if (place := os.path.abspath(folder)) not in sys.path:
        sys.path.append(place)
    importlib.invalidate_caches()


def _import(name: str, word: str) -> None:
    with _explain_import_error(name, word):
        module = importlib.import_module(name)
    if module.__file__ is not None:
        _sources.setdefault(name, Path(module.__file__).read_bytes())


@contextmanager
def _explain_import_error(name: str, word: str) -> Iterator[None]:
    """Say in a line what a module raised, and where in it."""
    try:
        yield
    except IMPORT_ERRORS as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise FileNotFoundError(f"no module {name!r} in {Path.cwd()} or among those installed") from error
        number = error_line(error, name)
        where = f", line {number}" if number else ""  # a SyntaxError has its own words for that
        raise ValueError(f"{word}{where}: {type(error).__name__}: {error}") from error
