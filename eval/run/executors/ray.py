"""Workers as tasks of Ray: on a cluster that is there, or on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from eval.run.executors import LostError, import_package, in_words
from eval.run.executors.options import check_options, parameters
from eval.run.executors.reach import check_address

NO_ADDRESS = {"address": "local", "include_dashboard": False}
"""Of a cluster of its own on this machine: without an address Ray joins what runs here, or looks for what did."""


class RayExecutor:
    """Submits tasks to Ray.

    Args:
        options: what `ray.init` takes, `address` of a cluster among them; without it Ray is started on this machine.
        workers: how many at a time.
        gpu: whether each needs a GPU (`num_gpus=1`).
        folder: not used.

    Raises:
        ValueError: an option that Ray does not know, or no cluster there.
        MissingPackageError: Ray is not installed.
    """

    gives_gpus = True

    def __init__(self, options: Mapping[str, Any], workers: int, gpu: bool, folder: Path) -> None:
        self._ray = import_package("ray", "ray")
        self._gpus = int(gpu)
        self._began = not self._ray.is_initialized()
        if self._began:
            _begin(self._ray, options if "address" in options else {"num_cpus": workers, **NO_ADDRESS, **options})

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check that Ray is there and takes these options, and that a cluster answers; starts nothing.

        Raises:
            ValueError: an option that Ray does not know, or one of another type, or no cluster at the address.
            MissingPackageError: Ray is not installed.
        """
        ray = import_package("ray", "ray")
        own = {key: value for key, value in options.items() if not key.startswith("_")}
        check_options("ray", own, parameters(ray.init))
        address = options.get("address")
        if address is not None and address != "local" and not ray.is_initialized():
            check_address("ray", str(address), "ray start --head")
            _begin(ray, options)
            ray.shutdown()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> _RayFuture:
        """Submit a task, which is not begun again if its process dies."""
        task = self._ray.remote(fn).options(num_cpus=1, num_gpus=self._gpus, max_retries=0)
        return _RayFuture(self._ray, task.remote(*args))

    def together(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def close(self) -> None:
        """Leave the cluster; end Ray where it was started here."""
        if self._began:
            self._ray.shutdown()


def _begin(ray: Any, options: Mapping[str, Any]) -> None:
    """Begin Ray in this process.

    Raises:
        ValueError: an option that Ray does not know, or no cluster there.
    """
    try:
        ray.init(**{"log_to_driver": False, "logging_level": logging.ERROR, **options})
    except (RuntimeError, ConnectionError, ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"--executor ray: {in_words(error)}") from error


class _RayFuture:
    """A task of Ray's as a future."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def done(self) -> bool:
        """Return whether the task has ended."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Any:
        """Return its result.

        Raises:
            LostError: its process has died, or the task was cancelled.
        """
        try:
            return self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            raise LostError(str(error).strip().splitlines()[0]) from error

    def cancel(self) -> None:
        """End the task with its process."""
        self._ray.cancel(self._reference, force=True)
