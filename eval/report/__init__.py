"""The report of a run: what leaked in plain words, with the figures, pictures and settings it rests on."""

from eval.report.assemble import build
from eval.report.writer import write

__all__ = ["build", "write"]
