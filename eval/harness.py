"""Runs an experiment: plans its cells and computes those that are missing: the public names of `eval.run.runner`."""

from eval.run.runner import (
    Counter,
    Failure,
    Needed,
    Options,
    Progress,
    always,
    run,
    silent,
)

__all__ = [
    "Counter",
    "Failure",
    "Needed",
    "Options",
    "Progress",
    "always",
    "run",
    "silent",
]
