"""Worker processes that end with their parent or when they are told to, never by a key pressed at it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fl.runtime.main_guard import EXIT_CODE, UnguardedError

START_SECONDS = 5.0
"""Seconds that processes take to start, about: shorter work is better done without them."""
REAP_SECONDS = 2.0
"""Seconds at most until another thread of this process knows with what code a dead process has left."""
WORKER_DIED = (
    "a worker process died, for want of memory, or because it can't import what a notebook has defined: use fewer "
    "workers, or one"
)


def worker_thread_count() -> int:
    """Return the number of threads of a process that is one of several: one, or what OMP_NUM_THREADS says."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdecimal() and int(told) else 1


@contextmanager
def use_worker_threads() -> Iterator[None]:
    """Give this process as many threads as a worker in the block, so that it rounds as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(worker_thread_count())
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """A pool of processes of few threads each (see `worker_thread_count`); they start when there is work.

    Several threads may use it. What they print goes to stderr, where this process's stdout is stderr when they are
    made (`contextlib.redirect_stdout`): there stdout is for what a command has found.

    Args:
        number: of processes.
        begin: called in each of them first, with `given`.
        given: what it gets. It goes through a pipe that a process which ends while it starts never reads: what is not
            in tensors has to be small (`fl.runtime.interprocess_packing.flatten`).
    """

    def __init__(self, number: int, begin: Callable[..., None] | None = None, *given: object) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        tf32 = not torch.cuda.is_available() or torch.backends.cudnn.allow_tf32
        self._told, self._end = spawn.Pipe(duplex=False)
        settings = (self._told, tf32, sys.stdout is sys.stderr, begin, given)
        self._pool = ProcessPoolExecutor(number, spawn, initializer=_initialize_worker, initargs=settings)
        self._tasks, self._children, self._lock = set[Future[Any]](), set[BaseProcess](), threading.Lock()

    def submit(self, work: Callable[..., Any], *given: object) -> Future[Any]:
        """Run `work(*given)` in whichever process is free.

        Raises:
            RuntimeError: a process has died.
            UnguardedError: for want of a guard in the script that was started.
        """
        with self._lock:
            before = set(multiprocessing.active_children())
            try:
                with _block_interrupts():
                    task = self._pool.submit(work, *given)
            except BrokenProcessPool as error:
                raise self._death_message() from error
            finally:
                self._children |= set(multiprocessing.active_children()) - before
            self._tasks = {*(left for left in self._tasks if not left.done()), task}
        return task

    def result(self, task: Future[Any]) -> Any:
        """Return what the work has returned.

        Raises:
            RuntimeError: its process has died.
            UnguardedError: for want of a guard in the script that was started.
        """
        try:
            return task.result()
        except BrokenProcessPool as error:
            raise self._death_message() from error

    def close(self) -> None:
        """End the processes: by themselves if they have done all, else whatever they do; none before it has started."""
        if not all(task.done() for task in self._tasks):
            self._end.close()
        self._pool.shutdown(cancel_futures=True)
        self._end.close()

    def _death_message(self) -> Exception:
        """Return what is to be said of a process that has died."""
        waited = time.monotonic() + REAP_SECONDS
        while all(child.exitcode is None for child in self._children) and time.monotonic() < waited:
            time.sleep(REAP_SECONDS / 100)
        return (
            UnguardedError()
            if any(child.exitcode == EXIT_CODE for child in self._children)
            else RuntimeError(WORKER_DIED)
        )


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Processes that start meanwhile hear of no key pressed until they say that they don't mind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a worker -----------------------------------------------------------------------------------------------------
def _initialize_worker(
    told: Connection, tf32: bool, aside: bool, begin: Callable[..., None] | None, given: tuple[Any, ...]
) -> None:
    if aside:
        print_on_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says what a key pressed at it means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, args=(told,), daemon=True).start()
    torch.set_num_threads(worker_thread_count())
    if not tf32:  # as in the process that asked
        torch.backends.cudnn.allow_tf32 = False
    if begin is not None:
        begin(*given)


def print_on_stderr() -> None:
    """Send what this process prints to stderr, also what libraries print beside Python."""
    with suppress(OSError):  # where one of the two is closed
        os.dup2(2, 1)
    sys.stdout = sys.stderr


def _exit_with_parent(told: Connection) -> None:
    """Leave when the other end of `told` is closed, by the parent or by its death."""
    wait([told])
    os._exit(1)
