"""What of the machine can go wrong under any command, in one line each: closed pipes, full disks, lost folders."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from attacks.search_control import SearchControl

FAILURE, USAGE, STOPPED = 1, 2, 130
_SPACE = "free some space or raise the limit, then start the same command again: what is finished is kept"
_RIGHTS = "choose another place, or change who may read and write there"
_FILE = "a file is where a folder belongs: remove it, or choose another place"
_PROCESSES = "allow more processes or memory, or use --workers 1"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _SPACE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (`ulimit -n 4096`), or use --workers 1"),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM), _PROCESSES),
    errno.EISDIR: "a folder is where a file belongs: remove it, or choose another place",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), _FILE),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "it is a link to itself; choose another place",
    errno.EIO: "the device does not answer; try again, or choose another place",
}
"""What to do, by the number of an error of the system."""


def explain_os_error(error: OSError) -> str:
    """Return an error of the system in words: of what, which, and what to do."""
    if error.errno is None or not error.strerror:
        return str(error)
    name = error.filename2 or error.filename  # of a file that could not be put in place, its place
    of = f"{os.fsdecode(name)}: " if isinstance(name, str | bytes) else ""
    remedy = REMEDIES.get(error.errno)
    return f"{of}{error.strerror}" + (f"; {remedy}" if remedy else "")


class GuardedGroup(TyperGroup):
    """All commands, with a line in place of a traceback where the machine is at fault."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        logging.raiseExceptions = False  # a log that can't be written is no reason for a traceback
        with _a_line(), _note_former_names():
            _check_environment()
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here: at the interpreter's end nobody could say what went wrong


def stop_on_signals() -> None:
    """Let a command that computes end in order when it is told to, or when its terminal goes; not under `nohup`."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


@contextmanager
def first_interrupt_ends_search(control: SearchControl) -> Iterator[None]:
    """Have the first Ctrl-C end a search that runs with the best it has; any other stops the command at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if control.interrupted or not control.is_searching:
            raise KeyboardInterrupt
        control.interrupt()
        # not by a stream, which may be in the middle of a line
        os.write(2, b"\nending the search with the best so far; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _check_environment() -> None:
    """Check that there is a folder to work in and a stream to print to; escape what can't be printed.

    Raises:
        typer.Exit: there is none.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        _leave("stdout is closed, so that nothing could be printed; send it to /dev/null if that is meant", USAGE)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:
        _leave("the current folder is gone; go to another (`cd`) and start the command again", USAGE)


@contextmanager
def _note_former_names() -> Iterator[None]:
    """Print a line for each setting that is given by a former name, in place of Python's warning."""
    from fl.settings import FormerNameWarning

    noted = set[str]()
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if not isinstance(message, FormerNameWarning):
                others(message, category, *rest, **named)
            elif (words := str(message)) not in noted:
                noted.add(words)
                typer.echo(f"note: {words}", err=True)

        warnings.simplefilter("always", FormerNameWarning)
        warnings.showwarning = show
        yield


@contextmanager
def _a_line() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _silence()
        _leave("the program that read the output has ended, so the rest of it is lost")
    except KeyboardInterrupt:
        _leave("stopped", STOPPED, error=False)
    except SystemExit as error:
        if error.code in {128 + signal.SIGTERM, 128 + signal.SIGHUP}:
            _leave(f"stopped by {signal.Signals(int(error.code) - 128).name}", int(error.code), error=False)
        raise
    except MemoryError:
        _leave(f"there is not enough memory; {_PROCESSES}, or smaller images and batches")
    except ImportError as error:
        if "cannot allocate" not in str(error).lower() and "failed to map" not in str(error).lower():
            raise
        _leave(f"there is not enough memory to start ({error}); allow more (`ulimit -v`)")
    except RuntimeError as error:
        if "not enough memory" not in str(error) and "out of memory" not in str(error).lower():
            raise
        _leave(f"there is not enough memory ({str(error).splitlines()[0]}); {_PROCESSES}")
    except OSError as error:
        _silence()
        _leave(explain_os_error(error))


def _silence() -> None:
    """Send what is left to print nowhere, if it can't be printed."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # what has no number is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(words: str, code: int = FAILURE, *, error: bool = True) -> NoReturn:
    from eval.io.sanitize import escape_controls, shorten

    with suppress(OSError):
        typer.echo(escape_controls(shorten(f"error: {words}" if error else words)), err=True)
    raise typer.Exit(code)
