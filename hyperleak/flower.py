"""Audits of Flower apps, and methods of ours as such: what `eval.federations` offers, in one place.

`pip install '.[flower]'` in the folder of hyperleak brings what it needs.
"""

from __future__ import annotations

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError(
        "expected Flower (flwr) for hyperleak.flower, got none: pip install '.[flower]' in the folder of hyperleak"
    ) from error

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.flower import (
    AuditMod,
    AuditStrategy,
    RecordMod,
    audit_mod,
    audit_recorded,
    audit_strategy,
    record_mod,
    recorded_update,
    with_mod,
)
from eval.federations.flower_methods import client_app, server_app
from eval.federations.reply_checks import UnreadableError
from eval.federations.response import LeakageError, Responder
from eval.federations.round_report import RoundReports
from eval.federations.screening import Screener, Screening

__all__ = [
    "AuditMod",
    "AuditStrategy",
    "LeakageError",
    "RecordMod",
    "RecordedUpdate",
    "Responder",
    "RoundReports",
    "Screener",
    "Screening",
    "TrainingFacts",
    "UnreadableError",
    "audit_mod",
    "audit_recorded",
    "audit_strategy",
    "client_app",
    "record_mod",
    "recorded_update",
    "server_app",
    "with_mod",
]
