"""The folder of a run: the public names of `eval.run.run_directory`."""

from eval.run.run_directory import (
    BusyError,
    Checkpoints,
    Lock,
    LostLockError,
    RunDir,
    about_cell,
    check_cell,
)

__all__ = [
    "BusyError",
    "Checkpoints",
    "Lock",
    "LostLockError",
    "RunDir",
    "about_cell",
    "check_cell",
]
