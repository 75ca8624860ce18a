"""Audits of one model, one update or one method."""

from eval.audit.leakage_words import leakage

__all__ = ["leakage"]
