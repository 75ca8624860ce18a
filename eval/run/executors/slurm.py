"""Workers as jobs of Slurm, through submitit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eval.run.executors import LostError, import_package
from eval.run.executors.options import Kinds, check_options, parameters

TIMEOUT_MINUTES = 60
"""Minutes of a job where none are asked for; submitit's own default of five is short for a worker."""
CLUSTERS = ("slurm", "local")


class SlurmExecutor:
    """Submits jobs with submitit's `AutoExecutor`.

    Args:
        options: submitit's, by its names: `timeout_min`, `cpus_per_task`, `gpus_per_node`, `mem_gb`, and those of Slurm
            alone without a prefix: `partition`, `account`, `array_parallelism`, `additional_parameters`. `cluster:
            local` has submitit start processes here, for trials.
        workers: how many jobs.
        gpu: whether each needs a GPU.
        folder: for submitit's scripts and logs; every machine has to see it.

    Raises:
        ValueError: an option that submitit does not know, or no Slurm here.
        MissingPackageError: submitit is not installed.
    """

    gives_gpus = True

    def __init__(self, options: Mapping[str, Any], workers: int, gpu: bool, folder: Path) -> None:
        submitit, utils = import_package("submitit", "slurm"), import_package("submitit.core.utils", "slurm")
        self._errors = (utils.UncompletedJobError, utils.FailedJobError)
        self._refusals = (utils.FailedJobError, utils.FailedSubmissionError)
        own = dict(options)
        cluster = own.pop("cluster", "slurm")
        shared = {"name": "hyperleak", "timeout_min": TIMEOUT_MINUTES, "cpus_per_task": 1, "gpus_per_node": int(gpu)}
        try:
            self._executor = submitit.AutoExecutor(folder=folder / "submitit", cluster=cluster)
            generic = submitit.AutoExecutor._typed_parameters()
            named = {key if key in generic else f"slurm_{key}": value for key, value in (shared | own).items()}
            self._executor.update_parameters(**named)
        except (RuntimeError, NameError, AssertionError) as error:  # what submitit raises for each of these
            raise ValueError(f"--executor slurm: {' '.join(str(error).split())}") from error

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Check that submitit is there and takes these options, and that there is a Slurm here; submits nothing.

        Raises:
            ValueError: an option that submitit does not know, one of another type, or no Slurm here.
            MissingPackageError: submitit is not installed.
        """
        submitit, slurm = import_package("submitit", "slurm"), import_package("submitit.slurm.slurm", "slurm")
        own = dict(options)
        if (cluster := own.pop("cluster", "slurm")) not in CLUSTERS:
            raise ValueError(f"executor option cluster: expected {' or '.join(CLUSTERS)}, got {cluster!r}")
        known: dict[str, Kinds] = dict.fromkeys(slurm.SlurmExecutor._valid_parameters(), ())
        known |= {key: kinds for key, kinds in parameters(slurm._make_sbatch_string).items() if key in known}
        known |= {key: (kind,) for key, kind in submitit.AutoExecutor._typed_parameters().items()}
        check_options("slurm", own, known)
        with TemporaryDirectory() as folder:  # what is left, such as that there is no Slurm, submitit says itself
            cls(options, 1, False, Path(folder))

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> _SlurmFuture:
        """Submit a job.

        Raises:
            ValueError: Slurm refuses it.
        """
        with self._refusals_as_errors():
            return _SlurmFuture(self._executor.submit(fn, *args), self._errors)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Submit as one array of jobs, at the end of the block.

        Raises:
            ValueError: Slurm refuses it.
        """
        with self._refusals_as_errors(), self._executor.batch():
            yield

    def close(self) -> None:
        """Leave jobs alone: they were cancelled, or have ended."""

    @contextmanager
    def _refusals_as_errors(self) -> Iterator[None]:
        """Say in one line why Slurm takes no job: no such partition or account, say."""
        try:
            yield
        except self._refusals as error:
            words = " ".join(str(error).split())
            raise ValueError(f"--executor slurm: no job could be submitted: {words}") from error


class _SlurmFuture:
    """A job of submitit's as a future."""

    def __init__(self, job: Any, errors: tuple[type[Exception], ...]) -> None:
        self._job, self._errors = job, errors

    def done(self) -> bool:
        """Return whether the job has ended, or was never submitted."""
        try:
            return bool(self._job.done())
        except AttributeError:  # submitit's way to say that the block it was to be submitted with has failed
            return True

    def result(self) -> Any:
        """Return its result.

        Raises:
            LostError: the job has failed.
        """
        try:
            return self._job.result()
        except self._errors as error:
            raise LostError(f"job {self._job.job_id}: {str(error).strip().splitlines()[-1]}") from error

    def cancel(self) -> None:
        """Cancel the job, if it was submitted."""
        with suppress(AttributeError):
            self._job.cancel(check=False)
