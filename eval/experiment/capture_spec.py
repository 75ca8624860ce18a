"""What an audit without a federation is of: a model of the user's own, or an update that was captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attacks.base import Attack
from defenses import Defense
from eval.experiment.spec import Entry, ScoreSpec
from fl.method import Method
from fl.view import ThreatModel


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """The settings of such an audit; attributes that an `Experiment` has, too, mean the same.

    Attributes:
        source: what is audited, in plain data: names of the model, of the images and of the update's file.
        method: what the client is taken to have trained by.
        attack: what is tried.
        title: of the audit.
        defense: of the client.
        threat: what the server knows beside the update.
        images: how many true images there are; None where none are known.
        batch_size: images in one update.
        seeds: the one from which everything random is drawn.
        score: figures beyond those that are always taken.
        imports: modules that register what is named here.
    """

    source: Mapping[str, str]
    method: tuple[Entry[Method], ...]
    attack: tuple[Entry[Attack], ...]
    title: str = ""
    defense: tuple[Entry[Defense], ...] = (Entry(label="none", item=Defense()),)
    threat: ThreatModel = field(default_factory=ThreatModel)
    images: int | None = None
    batch_size: int | None = 1
    seeds: tuple[int, ...] = (0,)
    score: ScoreSpec = field(default_factory=ScoreSpec)
    imports: tuple[str, ...] = ()

    @property
    def task(self) -> dict[str, str]:
        """Network and data, by the names that reports give them."""
        images = self.source.get("images") or self.source.get("update") or ""
        return {"model": self.source.get("model", ""), "dataset": images}
