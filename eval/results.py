"""Rows, tables and files of a finished run: the public names of `eval.run.results`."""

from eval.run.results import (
    assemble,
    environment,
)
from eval.run.results import write_table_and_report as publish

__all__ = [
    "assemble",
    "environment",
    "publish",
]
