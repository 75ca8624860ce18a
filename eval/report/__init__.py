"""The report of a run: what leaked in plain words, with the figures, pictures and settings it rests on."""

from eval.report.content import build
from eval.report.files import write

__all__ = ["build", "write"]
