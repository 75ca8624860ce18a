"""The former place of the folder of a run: what examples import of `eval.run.run_directory`."""

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
