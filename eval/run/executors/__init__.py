"""What starts workers: processes of this machine, Slurm, Dask or Ray, behind one method, `submit(fn, *args)`.

One file each, whose package is imported when it is asked for. An executor is made of the engine's settings, under the
engine's own names; it is opened for as many workers, and closed at the end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fl.registry import closest_name

EXECUTORS = {"local": "LocalExecutor", "slurm": "SlurmExecutor", "dask": "DaskExecutor", "ray": "RayExecutor"}
"""Executors by name, each in the module of that name."""


class LostError(RuntimeError):
    """An engine has lost what was submitted, or cancelled it; the text says how."""


class Future(Protocol):
    """What is to come of something that was submitted: a part of `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether it has ended, however."""

    def result(self) -> Any:
        """Return what it has returned.

        Raises:
            LostError: the engine has lost it.
        """

    def cancel(self) -> bool | None:
        """End it, as far as can be."""


class Executor(Protocol):
    """Starts workers."""

    @property
    def gives_gpus(self) -> bool:
        """Whether the engine itself gives every worker a GPU of its own, where there are any."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Have `fn(*args)` run elsewhere, as soon as there is room; what it returns is plain data."""

    def together(self) -> AbstractContextManager[object]:
        """While the block runs what is submitted is put together, where the engine has a way to do so."""

    def close(self) -> None:
        """Give back what was taken for it."""


class MissingPackageError(ValueError):
    """An executor's package is not installed."""


def open_executor(name: str, options: Mapping[str, Any], *, workers: int, device: str, folder: Path) -> Executor:
    """Return an executor that is ready for workers.

    Args:
        name: `local`, `slurm`, `dask` or `ray`.
        options: of the engine.
        workers: how many there will be at a time.
        device: `cpu` or `cuda`; there each gets one GPU.
        folder: for what the engine has to keep.

    Raises:
        ValueError: no such executor or option.
        MissingPackageError: its package is not installed; says how to install it.
    """
    made: Executor = _kind_of(name)(dict(options), workers, device == "cuda", folder)
    return made


def check_executor(name: str, options: Mapping[str, Any]) -> None:
    """Check that an executor can be opened with these options, as far as that can be told without starting anything.

    Raises:
        ValueError: no such executor, an option that it does not have, or one of another type.
        MissingPackageError: its package is not installed; says how to install it.
    """
    _kind_of(name).check(dict(options))


def _kind_of(name: str) -> Any:
    """Return the class of an executor."""
    check_name(name)
    return getattr(importlib.import_module(f"{__name__}.{name}"), EXECUTORS[name])


def check_name(name: str) -> None:
    """Check that there is such an executor.

    Raises:
        ValueError: there is none.
    """
    if name not in EXECUTORS:
        near = closest_name(name, EXECUTORS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"expected an executor of {', '.join(EXECUTORS)}, got {name!r}{hint}")


def in_words(error: BaseException) -> str:
    """Return in one line what an engine said, with what it was at first where it raised something else of that."""
    first = error
    while first.__cause__ is not None and first.__cause__ is not first:  # as after `raise error from error`
        first = first.__cause__
    words = " ".join(str(error).split())
    return words if first is error else f"{words} ({' '.join(str(first).split())})"


def import_package(name: str, extra: str) -> Any:
    """Return an executor's package.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"--executor {extra} needs the package {name.partition('.')[0]}: pip install '.[{extra}]' in the folder of "
            f"hyperleak ({error})"
        ) from error
