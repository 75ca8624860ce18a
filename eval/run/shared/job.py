"""What a worker is given, and the process that it runs in, whichever executor starts it.

An executor's own process (of Slurm, Dask or Ray) starts another and waits. So a worker has threads, GPU, current folder
and modules of its own in the same way everywhere, can't be in the way of what else runs there, and ends with the
process that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
)
"""Variables that a worker has as its caller has them, set or not.

Threads change how sums are rounded; where freed memory is kept, searches are faster.
"""
OUR_VARIABLES = "HYPERLEAK_"
"""What the names of our own begin with, which it has as well."""
MODULE = "eval.run.shared.worker"
AT_PARENTS_END: list[Callable[[], None]] = []
"""What a worker does before it leaves because that which started it has ended."""
TOLD_LINES = 3
"""Lines of a dead worker's last words that are repeated."""


DONE, STOPPED, REFUSAL, DEATH = "done", "stopped", "refused", "died"
"""How a worker has ended: nothing was left for it; it was told to; it can't compute these cells; in any other way."""
ENDS = {0: DONE, 4: STOPPED, 3: REFUSAL}
"""The same, by the code with which a worker leaves."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """Plain data that say what a worker is to do.

    Attributes:
        folder: of the run, as an absolute path.
        worker: what it is called.
        caller: the member that asked for it.
        experiment: as YAML.
        cells: names of all cells, as the caller plans them.
        code: hash of the source that the caller runs.
        device: `cpu` or `cuda`.
        workers: how many there are.
        gpu: the one GPU that it may use, as CUDA_VISIBLE_DEVICES says it; None where its executor has seen to that.
        checkpoint_seconds: between checkpoints of a training.
        keep_checkpoints: whether these stay.
        deadline: when all has to end, by the clock of the file system; None is never.
        current_folder: of the caller.
        module_folders: where the caller looks for modules.
        imports: files of modules that the experiment imports.
        variables: of its environment; None for one that is not set.
    """

    folder: str
    worker: str
    caller: str
    experiment: str
    cells: Sequence[str]
    code: str
    device: str
    workers: int
    gpu: str | None
    checkpoint_seconds: float
    keep_checkpoints: bool
    deadline: float | None
    current_folder: str
    module_folders: Sequence[str]
    imports: Sequence[str]
    variables: Mapping[str, str | None]

    def plain(self) -> dict[str, Any]:
        """Return the job as what every executor can send."""
        return asdict(self)


def caller_variables() -> dict[str, str | None]:
    """Return what of this process's environment a worker has to have alike."""
    own = [name for name in os.environ if name.startswith(OUR_VARIABLES)]
    return {name: os.environ.get(name) for name in (*THREAD_VARIABLES, *own)}


def run_worker(job: Mapping[str, Any]) -> tuple[str, str]:
    """Start a worker, and wait until it has ended: what an executor is given to run.

    Args:
        job: a `WorkerJob` as plain data.

    Returns:
        How it has ended, and why, in words.
    """
    said = Path(job["folder"]) / "shared" / f"{job['worker']}.txt"
    here = Path(job["current_folder"])
    with said.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=here if here.is_dir() else None,
            env=_environment(job),
            start_new_session=True,  # a key pressed at the caller is the caller's to understand
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:  # a worker leaves when its stdin ends, as it does with this process
        process.stdin.write(json.dumps(dict(job)).encode() + b"\n")
        process.stdin.flush()
        told = process.stdout.read().decode(errors="replace").strip()
        code = process.wait()
    if code in ENDS:
        return ENDS[code], told
    lines = (
        said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TOLD_LINES:] if said.exists() else []
    )
    return DEATH, " | ".join([f"signal {-code}" if code < 0 else f"exit code {code}", *lines])


def leave_with_parent() -> None:
    """End this process, a worker's, when whoever started it has ended: no fault of what it was computing."""
    sys.stdin.read()
    for give_up in AT_PARENTS_END:
        give_up()
    os._exit(1)


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    changed = dict(job["variables"])
    if job["gpu"] is not None:
        changed["CUDA_VISIBLE_DEVICES"] = job["gpu"]
    whole: dict[str, str | None] = {**os.environ, **changed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {name: value for name, value in whole.items() if value is not None}
