"""Workers as tasks of Dask: on a scheduler that is there, or in a cluster of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from eval.run.executors import LostError, import_package, in_words
from eval.run.executors.options import Kinds, check_options, parameters
from eval.run.executors.reach import check_address

CLUSTER_OPTIONS: dict[str, Kinds] = {
    "n_workers": (int,),
    "threads_per_worker": (int,),
    "processes": (bool,),
    "memory_limit": (str, float),
}
"""Types of options of `LocalCluster`, which has no annotations."""
ENGINE_ERRORS = (TypeError, OSError, ValueError, RuntimeError)
"""What Dask raises where it can't be begun."""
CONFIG = {"distributed.scheduler.allowed-failures": 0, "distributed.nanny.pre-spawn-environ": {}}
"""Of a cluster of this machine. A task whose process has died is not begun again behind our back. And Dask's variables
(one has glibc give freed memory back, with which searches take twice as long) are not set: they would stay in this
process, too."""


class DaskExecutor:
    """Submits tasks to Dask.

    Args:
        options: `address` of a scheduler and what else `distributed.Client` takes; without an address what
            `distributed.LocalCluster` takes.
        workers: how many at a time; in a cluster of this machine as many processes.
        gpu: whether each needs a GPU: one of the resource `GPU` that Dask's workers were started with; in a cluster of
            this machine they are given out by number.
        folder: for what a cluster of this machine spills.

    Raises:
        ValueError: an option that Dask does not know, or no scheduler there.
        MissingPackageError: Dask is not installed.
    """

    def __init__(self, options: Mapping[str, Any], workers: int, gpu: bool, folder: Path) -> None:
        distributed, dask = import_package("distributed", "dask"), import_package("dask", "dask")
        self.gives_gpus = "address" in options
        self._resources = {"GPU": 1} if gpu and self.gives_gpus else {}
        self._cluster: Any = None
        own = dict(options)
        try:
            if not self.gives_gpus:
                usual = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
                with dask.config.set(CONFIG):
                    self._cluster = distributed.LocalCluster(**usual | {"local_directory": str(folder)} | own)
                own = {"address": self._cluster}
            self._client = distributed.Client(**own)
        except ENGINE_ERRORS as error:
            self.close()
            raise ValueError(f"--executor dask: {in_words(error)}") from error

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check that Dask is there and takes these options, and that a scheduler answers; starts nothing.

        Raises:
            ValueError: an option that Dask does not know, or one of another type, or no scheduler at the address.
            MissingPackageError: Dask is not installed.
        """
        distributed, _ = import_package("distributed", "dask"), import_package("dask", "dask")
        if "address" in options:
            known = parameters(distributed.Client.__init__) | {"address": (str,)}
        else:
            kinds = (distributed.LocalCluster, distributed.Nanny, distributed.Worker)
            known = parameters(*(kind.__init__ for kind in kinds)) | CLUSTER_OPTIONS
        check_options("dask", options, known)
        if "address" in options:
            address = str(options["address"])
            check_address("dask", address, "dask scheduler", speaks_first=address.startswith("tcp:"))
            try:
                distributed.Client(**options).close()
            except MemoryError as error:  # it takes what others send for sizes
                raise ValueError(f"--executor dask: what answers at {address} is no scheduler of Dask's") from error
            except ENGINE_ERRORS as error:
                raise ValueError(f"--executor dask: {in_words(error)}") from error

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> _DaskFuture:
        """Submit a task."""
        return _DaskFuture(self._client.submit(fn, *args, pure=False, retries=0, resources=self._resources or None))

    def together(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def close(self) -> None:
        """Leave the scheduler; end a cluster of this machine."""
        for one in (getattr(self, "_client", None), self._cluster):
            if one is not None:
                one.close()


class _DaskFuture:
    """A task of Dask's as a future."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def done(self) -> bool:
        """Return whether the task has ended."""
        return bool(self._task.done())

    def result(self) -> Any:
        """Return its result.

        Raises:
            LostError: its process has died, or the scheduler has dropped it.
        """
        if self._task.status != "finished":
            raise LostError(f"Dask calls its task {self._task.status}")
        return self._task.result()

    def cancel(self) -> None:
        """Have the scheduler drop the task; the process that it has started is told by its caller."""
        self._task.cancel()
