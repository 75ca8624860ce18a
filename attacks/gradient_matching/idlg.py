"""Improved DLG: the label is read off the classifier's gradient first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attacks.base import NotApplicable, attacks
from attacks.gradient_matching.dlg import DLG
from attacks.gradient_matching.engine.base import SIGN_WARNING
from attacks.labels.recovery import fixed_labels
from attacks.update.observed_update import ObservedUpdate
from fl.view import ServerView


@attacks.register("idlg")
@dataclass(frozen=True, kw_only=True)
class IDLG(DLG):
    """iDLG (Zhao et al., 2020, Eq. 3-4): DLG with the label of a single image known from the sign of its gradient.

    Threat model: as of `DLG`, with the update of the classifier among what is seen.

    Attributes:
        labels: always by the rule, unless known.
    """

    plain: ClassVar[str] = "reads the label off the update, then solves for the picture."

    labels: Literal["auto", "joint", "random"] = "auto"

    def refuse(self, view: ServerView) -> NotApplicable | None:
        """Refuse views without a shared classifier and a known number of images, or known labels."""
        reason = super().refuse(view)
        if reason is None and fixed_labels(view, "auto") is None:
            missing = "labels can't be read off: it takes a shared classifier and a known batch size"
            reason = NotApplicable(SIGN_WARNING if ObservedUpdate(view).sign_flipped else missing)
        return reason
