"""Which executor a run is computed by, and by how many workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from eval.run.executors import check_executor, check_name
from eval.run.resources import default_workers


@dataclass(frozen=True, kw_only=True)
class ExecutorChoice:
    """Which executor a run is computed by.

    Attributes:
        name: `local`, `slurm`, `dask` or `ray`.
        options: of the engine, by its own names.
        workers: how many; None is as many as this machine has room for, where the work is done on it.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)

    def check(self) -> None:
        """Check that the executor's package is there and takes these options; starts and writes nothing.

        Raises:
            ValueError: an option that it does not have, or one of another type.
            MissingPackageError: the package is not installed; says how to install it.
        """
        check_executor(self.name, self.options)

    @property
    def is_elsewhere(self) -> bool:
        """Whether workers may run on other machines than this one."""
        return "address" in self.options or (self.name == "slurm" and self.options.get("cluster") != "local")

    @property
    def needs_number(self) -> bool:
        """Whether the number of workers has yet to be said, as nobody here can tell it."""
        return self.is_elsewhere and self.workers is None

    def count(self, device: str) -> int:
        """Return how many workers to ask for on a kind of device, `cpu` or `cuda`.

        Raises:
            ValueError: it has to be said, or there are fewer GPUs here.
        """
        if self.needs_number:
            raise ValueError(f"say how many workers --executor {self.name} is to start: --workers 8")
        if self.is_elsewhere and self.workers is not None:
            return self.workers
        if device == "cpu":
            return self.workers or default_workers(torch.device(device))
        gpus = visible_gpus()
        if (self.workers or 1) > len(gpus):
            raise ValueError(f"expected at most {len(gpus)} workers, one for each GPU here, got {self.workers or 1}")
        return self.workers or len(gpus)


def choose_executor(
    name: str | None, section: Mapping[str, Any], options: Mapping[str, Any], workers: int | None
) -> ExecutorChoice | None:
    """Return the executor that is asked for, or None where none is.

    Args:
        name: as asked for beside the config; it goes before the config's.
        section: what the config says: options, and perhaps a `name`.
        options: as asked for beside the config; they go before the config's.
        workers: how many; None is not said.

    Raises:
        ValueError: no such executor, or options of none.
    """
    rest = {key: value for key, value in section.items() if key != "name"}
    named = section.get("name")
    chosen = name or named
    if chosen is None:
        if options:
            raise ValueError(f"expected an executor for the option {next(iter(options))}: --executor slurm")
        return None
    return ExecutorChoice(
        name=chosen, options={**(rest if named in (None, chosen) else {}), **options}, workers=workers
    )


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]
