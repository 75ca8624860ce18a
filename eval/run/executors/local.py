"""Workers on this machine, as child processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


class LocalExecutor:
    """Calls what is submitted in as many threads, each waiting for the process that it starts.

    Args:
        options: none.
        workers: how many at a time.
        gpu: whether each needs a GPU; they are given out by number.
        folder: not used.

    Raises:
        ValueError: an option.
    """

    gives_gpus = False

    def __init__(self, options: Mapping[str, Any], workers: int, gpu: bool, folder: Path) -> None:
        self.check(options)
        self._threads = ThreadPoolExecutor(workers)

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check that there are no options.

        Raises:
            ValueError: there are.
        """
        if options:
            raise ValueError(f"expected no options for --executor local, got {', '.join(options)}")

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call it in the next thread that is free."""
        return self._threads.submit(fn, *args)

    def together(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def close(self) -> None:
        """Wait until all has ended."""
        self._threads.shutdown(cancel_futures=True)
