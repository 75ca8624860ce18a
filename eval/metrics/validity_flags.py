"""Validity flags: what a reader has to know before trusting a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from eval.metrics.score import NO_IMAGES, NO_RECONSTRUCTION, Row
from fl.view import ThreatModel

FLAGS = {
    "non-finite": "The attack produced NaN or infinity, in an image or in its objective; such images are failures.",
    "unmatched": "There were fewer reconstructions than true images; the images left over count as failures.",
    "extra-candidates": "There were more reconstructions than true images; scoring kept those that match best.",
    "objective-never-improved": "A search never got below the objective it started from; its settings fail here.",
    "cut-short": "A time limit or an interrupt ended the search before its last iteration; a whole one may find more.",
    "below-floor": "Mean PSNR is below that of each image's mean color: by PSNR no image content is shown to leak.",
    "labels-given": "The threat model gives the attacker the labels; label accuracy says nothing.",
    "defense-known": "The attacker knows the defense; searches adapt as far as its surrogate and other hooks model it.",
    "changed-pictures": "A defense changes pictures before they are fed: all figures are of what was fed, not of the "
    "client's own pictures.",
    "forward-mismatch": "The attacker's model of training does not give the observed update on the true data.",
    "single-image": "All figures come from one image; there is no interval and no general statement.",
    "lpips-missing": "LPIPS was asked for and is not available; the rows say what to do.",
    "ssim-missing": "The images are smaller than the window of SSIM.",
}
"""Every flag and its explanation, in the order in which they are listed."""

CHANGED_BY = "changed_by"
"""Column that names the defenses that change pictures before these are fed: the figures are of what was fed."""
COPY_OF = "copy_of"
"""Column of an image that equals another one: that one's name."""

TOLERANCE = 1e-4
"""Forward error from which on an update is not what the attacker's own model of training makes of the true data."""


def find_flags(
    rows: Sequence[Row],
    *,
    histories: Iterable[Sequence[float]] = (),
    labels_given: bool = False,
    defense_known: bool = False,
    forward_error: float | None = None,
    tolerance: float = TOLERANCE,
    image: str = "image",
) -> list[str]:
    """Return the flags that apply to rows of one setting, in the order of `FLAGS`.

    Args:
        rows: from `eval.metrics.score.score`, over any number of images and seeds.
        histories: the objective step by step, one sequence per search; analytic attacks have none.
        labels_given: the threat model's `knows_labels`.
        defense_known: there is a defense and the threat model says `knows_defense`.
        forward_error: relative error of `predict(view, truth)` against `view.update`, where it was measured.
        tolerance: of `forward_error`.
        image: column that tells images apart across the whole experiment.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("expected at least one row, got none")
    searches = [history for history in histories if len(history) > 1]
    failures = {row["failure"] for row in rows}
    expected = (NO_RECONSTRUCTION, NO_IMAGES)
    missing = {name for row in rows for name, reason in row["missing"].items() if reason not in expected}
    finite = all(math.isfinite(value) for history in searches for value in history)
    applies = {
        "non-finite": "non-finite" in failures or not finite or bool(searches and "objective" in missing),
        "unmatched": "unmatched" in failures,
        "extra-candidates": any(row["candidates"] > row["images"] for row in rows),
        "objective-never-improved": any(_stuck(history) for history in searches),
        "cut-short": any(row.get("cut_short") for row in rows),
        "below-floor": _below_mean_color(rows),
        "labels-given": labels_given,
        "defense-known": defense_known,
        "changed-pictures": any(row.get(CHANGED_BY) for row in rows),
        "forward-mismatch": forward_error is not None and not forward_error <= tolerance,
        "single-image": len({row.get(COPY_OF, row[image]) for row in rows}) == 1,
        "lpips-missing": any(name.startswith("lpips_") for name in missing),
        "ssim-missing": "ssim" in missing,
    }
    return [name for name in FLAGS if applies[name]]


def forward_error_limit(rows: Sequence[Row]) -> float:
    """Return the forward error above which view, truth and update of these rows do not belong together."""
    return max((row.get("forward_tolerance", TOLERANCE) for row in rows), default=TOLERANCE)


def audit_flags(rows: Sequence[Row], threat: ThreatModel, *, defended: bool) -> list[str]:
    """Return the validity flags of one attack in an audit, by its rows and what the attacker knows."""
    if not rows:
        return []
    errors = [row["forward_error"] for row in rows if "forward_error" in row]
    found = find_flags(
        rows,
        histories=[[math.nan if value is None else value for value in row.get("history") or ()] for row in rows],
        labels_given=threat.knows_labels,
        defense_known=defended and threat.knows_defense,
        forward_error=max((math.inf if error is None else error for error in errors), default=None),
        tolerance=forward_error_limit(rows),
        image="picture",
    )
    return [name for name in found if name != "lpips-missing"]  # an audit does not ask for it


def _stuck(history: Sequence[float]) -> bool:
    """Return whether no later value lies below the first (NaN never does)."""
    return not any(value < history[0] for value in history[1:])


def _below_mean_color(rows: Sequence[Row]) -> bool:
    """Return whether the mean PSNR of the images there are lies below that of their mean colors."""
    gains = [row["psnr"] - row["floor_mean_psnr"] for row in rows if row["psnr"] is not None]
    return bool(gains) and fmean(gains) < 0
