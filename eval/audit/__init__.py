"""Audits of one model, one update or one method."""

from eval.audit.update import leakage

__all__ = ["leakage"]
