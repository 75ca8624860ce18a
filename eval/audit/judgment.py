"""What an audit comes to under limits: what leaked, by which attack from which update, and what keeps it undecided."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from attacks.result import Remark
from eval.audit.findings import AttackFinding, AuditReport
from eval.audit.verdict import changed_words, closest_figure, in_words_of_rows, leaked_rows
from eval.io.text import join_words
from eval.metrics.score import Row
from eval.metrics.self_verification import borne_out_words
from eval.report.result_groups import RECOVERED_BELOW, private_tensor_recoveries
from eval.report.sections.inconclusive import OpenQuestion, update_key

Rule = Literal["limit-exceeded", "image-leak", "confirmed-reconstruction", "private-tensor"]
"""What can leak: an image came closer than a limit; the content or the identity of images, by the bar of reports; what
the attack confirms itself, or the whole update bears out, where the true images are not known; a tensor that the method
keeps private."""


@dataclass(frozen=True)
class Leak:
    """One thing that leaked.

    Attributes:
        rule: which kind.
        attack: that showed it.
        update: from which, as audits number them; None where all of them show it together and none does alone.
        words: what leaked, with the figures beside those of the best guess.
        allowed: whether the limits that were given let it pass.
    """

    rule: Rule
    attack: str
    update: Hashable
    words: str
    allowed: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the leak in plain data."""
        update = list(self.update) if isinstance(self.update, tuple) else self.update
        told = {"rule": self.rule, "attack": self.attack, "update": update}
        return {**told, "words": self.words, "allowed": self.allowed}


@dataclass(frozen=True)
class Judgment:
    """An audit's findings under limits.

    Attributes:
        report: the findings.
        limits: by figure, what no image may exceed; without any, every leak counts.
    """

    report: AuditReport
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def best(self) -> dict[str, float | None]:
        """The highest value of each limited figure; None where it could not be taken."""
        return {figure: self.report.best(figure) for figure in self.limits}

    @cached_property
    def above(self) -> list[str]:
        """The figures that are above their limits."""
        return [figure for figure, value in self.best.items() if value is not None and value > self.limits[figure]]

    @cached_property
    def undecided(self) -> list[OpenQuestion]:
        """What keeps the audit from an answer."""
        return self.report.open_questions(self.limits)

    @property
    def failed(self) -> list[AttackFinding]:
        """The attacks, and the trainings, that ended with an error."""
        return [found for found in self.report.findings if found.failed]

    @cached_property
    def leaks(self) -> list[Leak]:
        """What leaked, attack by attack; with limits, what does not exceed them is there and is allowed."""
        return [leak for found in self.report.findings for leak in self._leaks_of(found)]

    @property
    def violations(self) -> list[Leak]:
        """The leaks that no limit allows."""
        return [leak for leak in self.leaks if not leak.allowed]

    @cached_property
    def updates(self) -> list[Hashable]:
        """The updates that any attack came to anything on, in the order in which they first appear."""
        return list(dict.fromkeys(one.update for found in self.report.findings for one in found.outcomes))

    def plain(self) -> dict[str, Any]:
        """Return the judgment in plain data (`eval/audit/findings.schema.json`)."""
        return {
            **self.report.plain(),
            "limits": dict(self.limits),
            "above": self.above,
            "unknown": [figure for figure, value in self.best.items() if value is None],
            "undecided": [one.plain() for one in self.undecided],
            "leaks": [leak.plain() for leak in self.leaks],
        }

    def _leaks_of(self, found: AttackFinding) -> list[Leak]:
        """Return what one attack shows to leak."""
        rows: dict[Hashable, list[Row]] = {}
        for row in found.rows:
            rows.setdefault(update_key(row), []).append(row)
        limited = bool(self.limits)
        over = {update: words for update, own in rows.items() if (words := self._excess(own))}
        leaks = [Leak("limit-exceeded", found.attack, update, words) for update, words in over.items()]
        seen = {update: leaked_rows(own) for update, own in rows.items()} if found.leaked else {}
        leaks += [
            Leak(
                "image-leak",
                found.attack,
                update,
                f"{in_words_of_rows(own, 'image content leaked')}{changed_words(own)}: {images_in_words(own)}",
                limited,
            )
            for update, own in seen.items()
            if own and update not in over
        ]
        if found.leaked and not any(seen.values()) and not over:
            alone = next(iter(rows)) if len(rows) == 1 else None
            leaks.append(Leak("image-leak", found.attack, alone, found.verdict, limited))
        for one in found.outcomes:
            if one.kind == "settled" and one.update not in rows:
                words = "the attack confirms what it recovered, and nobody gave the true images to compare it with"
                leaks.append(Leak("confirmed-reconstruction", found.attack, one.update, words, limited))
            elif one.kind == "borne out" and one.update not in rows:
                words = f"{borne_out_words(mixed=Remark.MAY_BE_MIXTURE in one.remarks)}: {one.words}"
                leaks.append(Leak("confirmed-reconstruction", found.attack, one.update, words, limited))
        for update, own in rows.items():
            if words := _private_words(own):
                leaks.append(Leak("private-tensor", found.attack, update, words, limited))
        return leaks

    def _excess(self, rows: Sequence[Row]) -> str:
        """Return in words which images of an update are above which limits, or nothing."""
        said = []
        for figure, limit in self.limits.items():
            figures = [(row, found) for row in rows if (found := closest_figure(row, figure, limit))]
            if over := [row for row, found in figures if found.value > limit]:
                guessed = sum(found.value > limit and found.guess > limit for _, found in figures)
                too = f", and the best guess alone exceeds it for {guessed} of {len(over)}" if guessed else ""
                said.append(f"{figure.upper()} above {limit:g}: {images_in_words(over, figure, limit)}{too}")
        return "; ".join(said)


def update_words(update: Hashable) -> str:
    """Return what tells an update from others, in words; of None that all are meant."""
    if update is None:
        return "all updates together"
    if isinstance(update, tuple):
        seed, number, name = update
        return f"update {name} of round {number}, seed {seed}"
    return f"update {update}"


def images_in_words(rows: Sequence[Row], figure: str = "psnr", limit: float = -math.inf) -> str:
    """Return how close images of one update came, each beside the best guess without the update.

    Where the figure is of a part of the picture, or of one whose brightness and contrast were fitted, it says so.

    Args:
        rows: one per image.
        figure: `psnr` in dB, or `ssim`.
        limit: figures above it go before others.
    """
    unit = " dB" if figure == "psnr" else ""
    told = []
    for row in rows:
        found = closest_figure(row, figure, limit)
        if found is None:
            continue
        part = f" {found.words}" if found.words else ""
        told.append(f"image {row['image']} at {found.value:.4g}{unit}{part} (best guess {found.guess:.4g}{unit})")
    return in_words_of_rows(rows, join_words(told))


def _private_words(rows: Sequence[Row]) -> str:
    """Return which private tensors an update gave away, or nothing."""
    errors = {what: secret.best_error for what, secret in private_tensor_recoveries(rows).items() if secret.n_recovered}
    told = [f"{what} (relative error {error:.0e})" for what, error in errors.items()]
    return f"private {join_words(told)} recovered, below a relative error of {RECOVERED_BELOW:g}" if told else ""
