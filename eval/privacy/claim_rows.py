"""Claims of differential privacy as rows of a run's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from fl.privacy_statement import PrivacyStatement

BOUND, OF_UPDATE, EPSILON = "identified_bound", "identified_bound_update", "identified_epsilon"
"""Columns of an attacked image: how often anybody can name it at most, from all that is seen and from the update alone,
and the epsilon of all that is seen."""


def statement_of_row(row: Mapping[str, object]) -> PrivacyStatement:
    """Return the statement that a claim was made of."""
    return PrivacyStatement(**{field.name: row[field.name] for field in fields(PrivacyStatement)})  # type: ignore[arg-type]
