"""Which images of an attacked update are told from others of their class: by picture, by features, by the update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from attacks.base import Reconstruction
from eval.metrics.identification import (
    Features,
    classifier_features,
    draw_distractors,
    is_closest_in_features,
    is_closest_in_pixels,
    is_closest_in_update,
    replay_obstacle,
)
from eval.metrics.score import Row
from fl.types import Batch, Truth
from fl.view import ServerView

AMONG, BY_PICTURE = "identified_among", "identified"
BY_FEATURES, BY_UPDATE = "identified_by_features", "identified_by_update"
"""Columns: of how many candidates, and for each way of telling whether it named the true image."""


@dataclass(frozen=True, eq=False)
class IdentificationLineup:
    """Every true image of one update among others of its class; what no attack changes is told once.

    Attributes:
        view: what the server sees of the update.
        truth: what was fed.
        others: the other candidates (N - 1, C, H, W) of every true image that has any, by its number.
    """

    view: ServerView
    truth: Truth
    others: dict[int, Tensor]

    @classmethod
    def of(cls, view: ServerView, truth: Truth, reference: Batch | None, seed: int) -> IdentificationLineup:
        """Draw a lineup from images (R,) and their labels that no watched client holds."""
        if reference is None or truth.labels.ndim > 1:
            return cls(view, truth, {})
        drawn = {
            i: draw_distractors(reference, int(truth.labels[i]), image.cpu(), seed=seed + i)
            for i, image in enumerate(truth.inputs)
        }
        return cls(view, truth, {i: others for i, others in drawn.items() if len(others)})

    def rows(self, rows: list[Row], result: Reconstruction) -> list[Row]:
        """Return an attack's rows with whether their images are named, or why that can't be told."""
        features = "" if result.inputs is None or not self.others else classifier_features(self.view, result.private)
        return [self._row(row, result, features) if row.get("image") in self.others else row for row in rows]

    @cached_property
    def by_update(self) -> dict[int, bool | str] | str:
        """Whether the update itself names each image, by its number; or why nobody can tell, of one or of all."""
        labels = self.truth.labels
        return replay_obstacle(self.view) or {
            i: is_closest_in_update(self.view, int(labels[i]), self.truth.inputs[i].cpu(), others)
            for i, others in self.others.items()
        }

    def _row(self, row: Row, result: Reconstruction, features: Features | str) -> Row:
        image, others = row["image"], self.others[row["image"]]
        update = self.by_update
        told: dict[str, bool | str] = {BY_UPDATE: update if isinstance(update, str) else update[image]}
        if result.inputs is not None:
            found = None if row["matched"] is None else result.inputs[row["matched"]].cpu()
            told |= _brought_back(found, self.truth.inputs[image].cpu(), others, features)
        missing = {column: why for column, why in told.items() if isinstance(why, str)}
        reasons = {"missing": {**row.get("missing", {}), **missing}} if missing else {}
        return {**row, AMONG: len(others) + 1, **told, **dict.fromkeys(missing), **reasons}


def _brought_back(
    found: Tensor | None, image: Tensor, others: Tensor, features: Features | str
) -> dict[str, bool | str]:
    """Return whether a reconstruction (None: there is none) is closest to the true image, as pixels and as features."""
    if found is None:
        return {BY_PICTURE: False, BY_FEATURES: features if isinstance(features, str) else False}
    near = features if isinstance(features, str) else is_closest_in_features(features, found, image, others)
    return {BY_PICTURE: is_closest_in_pixels(found, image, others), BY_FEATURES: near}
