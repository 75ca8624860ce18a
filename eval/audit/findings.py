"""What an audit found, in words and figures that answer one question: what leaked. It is read from rows alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eval.audit.verdict import (
    all_verified,
    are_flat,
    closest_figure,
    count_if_too_few,
    counted_figures,
    exact_match_rate,
    has_leaked,
    unscored_verdict,
    verdict,
)
from eval.metrics import self_verification, validity_flags
from eval.metrics.score import Row
from eval.report.result_groups import private_tensor_recoveries
from eval.report.sections import inconclusive as undecided
from eval.report.sections.inconclusive import OpenQuestion, Outcome
from fl.view import ThreatModel

LABEL_FIGURES = ("label_correct", "label_overlap", "label_error")
"""What rows say of labels that came back: nothing where the attacker was given them."""
PICTURED_KINDS = {"settled", "borne out", "ran", "searched", "gave up", "contradicted"}
"""What attacks come to that bring pictures."""
NOT_BEGUN = "the time limit came before it"
SCHEMA_VERSION = "1.0"
"""Of what `AuditReport.plain` and `eval.audit.judgment.Judgment.plain` return, as `findings.schema.json` describes it.
The first number counts changes by which a reader may fail; the second what is added."""


@dataclass(frozen=True)
class AttackFinding:
    """What one attack found.

    Attributes:
        attack: which.
        rows: one per image (see `eval.metrics.score`); none where the truth is not known.
        refused: why the attack does not apply to some updates, or nothing.
        verdict: what leaked, in a sentence.
        labels: recovered labels of every update, where the attack recovers any.
        verified: whether the attack could check its own success; None if it can't tell.
        flags: what to know before trusting the figures (see `eval.metrics.validity_flags`).
        notes: what the attack noted of how far it got.
        spared: why it was not tried on some updates or any, or nothing.
        outcomes: what it came to on every update (`eval.report.sections.inconclusive`).
        leaked: whether content or identity of images leaked, by the bar of reports.
        too_few_images: how many images there are where they are too few to tell content from chance; else 0.
        doubtful: whether the labels are guesses: of a search that did not explain the update, or counted.
        failed: the error that it ended with, or nothing.
        origin: the file and the line that raised it, where known.
        traceback: the file that has the traceback of that, where one was kept.
        cut_short: what ended it before its time, or kept it from beginning, in words, or nothing.
    """

    attack: str
    rows: list[Row]
    refused: str
    verdict: str
    labels: list[list[int]] = field(default_factory=list)
    verified: bool | None = None
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spared: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    leaked: bool = False
    too_few_images: int = 0
    doubtful: bool = False
    failed: str = ""
    origin: str = ""
    traceback: Path | None = None
    cut_short: str = ""

    @classmethod
    def of_not_begun(cls, attack: str) -> AttackFinding:
        """Return what is left of an attack that the time limit came before."""
        return cls(attack, [], "", "not tried: the time limit came before it", cut_short=NOT_BEGUN)

    @classmethod
    def from_failure(cls, attack: str, reason: str, origin: str, kept: Path | None) -> AttackFinding:
        """Return what is left of an attack that ended with an error.

        Args:
            attack: its label.
            reason: the error.
            origin: the file and the line that raised it, where known.
            kept: the file that has the traceback, if one was kept.
        """
        words = " ".join(reason.split())
        return cls(attack, [], "", f"failed: {words}", failed=words, origin=origin, traceback=kept)

    @classmethod
    def from_skip(cls, attack: str, reason: str) -> AttackFinding:
        """Return what is left of an attack that was not needed."""
        return cls(attack, [], "", reason, spared=reason)

    def was_cut_short(self, settled: Collection[Hashable]) -> bool:
        """Return whether a search ended before its last iteration on an update that no other attack settles."""
        begun = bool(self.cut_short) and self.cut_short != NOT_BEGUN
        return begun and any(one.update not in settled and one.kind != "cut short" for one in self.outcomes)

    def best(self, figure: str) -> float | None:
        """Return the highest value of a figure over the images, or None."""
        return max((one.value for row in self.rows for one in counted_figures(row, figure)), default=None)


@dataclass(frozen=True)
class AuditReport:
    """All findings on one subject.

    Attributes:
        subject: what was audited.
        findings: by attack.
        notes: what to know of the subject itself.
        mismatch: in words, if an update is not what the model makes of its images, or can be of no images.
        stopped: the attack at which Ctrl-C ended the audit, or nothing.
        captured: whether an update that was captured was audited, which holds the images that it holds.
    """

    subject: str
    findings: list[AttackFinding]
    notes: tuple[str, ...] = ()
    mismatch: str = ""
    stopped: str = ""
    captured: bool = False

    def open_questions(self, limits: Mapping[str, float]) -> list[OpenQuestion]:
        """Return what keeps the audit from an answer: nothing where what leaked answers it.

        Without limits it is whether images leaked; with limits, whether any came closer than they allow. Attacks that
        failed are left out: they have an exit code of their own.

        Args:
            limits: by figure.
        """
        figures = {figure: self.best(figure) for figure in limits}
        if any(value is not None and value > limits[figure] for figure, value in figures.items()):
            return []
        if not limits and any(found.leaked for found in self.findings):
            return []
        outcomes = [one for found in self.findings for one in found.outcomes]
        said = [undecided.contradicted_settings(self.mismatch)] if self.mismatch else []
        said += undecided.find_open_questions(outcomes)
        if late := [found.attack for found in self.findings if found.cut_short == NOT_BEGUN]:
            said.append(undecided.not_begun(late))
        settled = {one.update for one in outcomes if one.kind in {"settled", "borne out"}}
        if cut := [found.attack for found in self.findings if found.was_cut_short(settled)]:
            said.append(undecided.cut_short(cut))
        said += [
            undecided.limit_without_figure(figure, limits[figure]) for figure, value in figures.items() if value is None
        ]
        if not (limits and undecided.is_answered(outcomes)):
            said += [
                undecided.too_few_images(found.attack, found.too_few_images, captured=self.captured)
                for found in self.findings
                if found.too_few_images
            ]
        if not limits and are_flat([row for found in self.findings for row in found.rows]):
            said.append(undecided.flat_pictures())
        blind = [
            found.attack
            for found in self.findings
            if not found.rows
            and any(one.kind in PICTURED_KINDS and one.update not in settled for one in found.outcomes)
        ]
        return [*said, undecided.unjudged_pictures(blind)] if blind else said

    def best(self, figure: str) -> float | None:
        """Return the highest value of a figure over all attacks and images, or None."""
        return max((best for found in self.findings if (best := found.best(figure)) is not None), default=None)

    def describe_excess(self, figure: str, limit: float) -> str:
        """Say of how many images a figure is above a limit, and of how many that of the best guess is, too."""
        figures = [
            (row, closest)
            for found in self.findings
            for row in found.rows
            if (closest := closest_figure(row, figure, limit)) and closest.value > limit
        ]
        over = {_image_key(row): closest.guess for row, closest in figures}
        guessed = [guess for guess in over.values() if guess > limit]
        highest = max((closest for _, closest in figures), key=lambda one: one.value)
        part = f" ({highest.words})" if highest.words else ""
        words = f"{figure.upper()} {highest.value:.4g} > {limit:g}{part}"
        if not guessed:
            return words
        return (
            f"{words}; of the {len(over)} image(s) above it, the best guess without the update exceeds it for "
            f"{len(guessed)}, too (by up to {max(guessed):.4g}): for these the limit says nothing of the update"
        )

    def plain(self) -> dict[str, Any]:
        """Return the audit in plain data (`eval/audit/findings.schema.json`)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "subject": self.subject,
            "notes": list(self.notes),
            "mismatch": self.mismatch or None,
            "stopped": self.stopped or None,
            "findings": [
                {
                    "attack": found.attack,
                    "refused": found.refused or None,
                    "spared": found.spared or None,
                    "failed": found.failed or None,
                    "origin": found.origin or None,
                    "traceback": None if found.traceback is None else str(found.traceback),
                    "cut_short": found.cut_short or None,
                    "verdict": found.verdict,
                    "leaked": found.leaked,
                    "outcomes": [
                        {"update": one.number, "kind": one.kind, "words": one.words} for one in found.outcomes
                    ],
                    "labels": found.labels,
                    "verified": found.verified,
                    "exact_match_rate": exact_match_rate(found.rows),
                    "private": _private_counts(found.rows),
                    "flags": found.flags,
                    "notes": found.notes,
                    "images": found.rows,
                }
                for found in self.findings
            ],
            "max_psnr": self.best("psnr"),
            "max_ssim": self.best("ssim"),
        }


def report_from_rows(
    name: str,
    rows: Sequence[Row],
    *,
    threat: ThreatModel,
    defended: bool,
    labels: Mapping[str, list[list[int]]] = MappingProxyType({}),
) -> AuditReport:
    """Return the audit that the rows of a run's `images.jsonl` amount to.

    Args:
        name: of the subject.
        rows: of one method under one defense.
        threat: what the attacker knows.
        defended: whether there is a defense.
        labels: that every attack recovered, update by update.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["attack"], []).append(row)
    tests = sum(any(row.get("identified") is not None for row in group) for group in groups.values())
    context = _Context(threat, defended, tests)
    found = [_finding(attack, group, context, labels.get(attack, [])) for attack, group in groups.items()]
    return AuditReport(name, found)


@dataclass(frozen=True)
class _Context:
    """What the attacks of one audit share: what the attacker knows, and how many are judged by names of images."""

    threat: ThreatModel
    defended: bool
    tests: int


def _finding(attack: str, rows: Sequence[Row], context: _Context, labels: list[list[int]]) -> AttackFinding:
    """Return what one attack's rows come to."""
    if context.threat.knows_labels:
        rows, labels = [row | dict.fromkeys(set(row).intersection(LABEL_FIGURES)) for row in rows], []
    unsettled = [row for row in rows if not row.get("spared")]
    if not unsettled:
        return AttackFinding.from_skip(attack, str(rows[0]["not_applicable"]))
    refused = [
        _refusal_words(row["not_applicable"], limit=bool(row.get("limit")))
        for row in unsettled
        if "not_applicable" in row
    ]
    scored = [row for row in unsettled if "not_applicable" not in row]
    judged, unjudged = ([row for row in scored if bool(row.get("unjudged")) == blind] for blind in (False, True))
    said = _full_verdict(
        judged, refused, unscored_verdict(unjudged) if unjudged and not judged else "", tests=context.tests
    )
    spared = ""
    if len(unsettled) < len(rows):
        spared = f"of the {len({row['update'] for row in unsettled})} update(s) that no attack before it settled"
        said = f"{spared}: {said}"
    return AttackFinding(
        attack,
        judged,
        refused[0] if refused else "",
        said,
        labels,
        all_verified(row.get("verified") for row in scored),
        validity_flags.audit_flags(judged, context.threat, defended=context.defended),
        self_verification.attack_notes(judged)
        or list(dict.fromkeys(row["note"] for row in unjudged if row.get("note"))),
        spared=spared,
        outcomes=undecided.outcomes_of_rows(attack, unsettled),
        leaked=has_leaked(judged, context.tests),
        too_few_images=count_if_too_few(judged, context.tests),
        doubtful=any(row.get("labels_doubtful") for row in scored),
        cut_short=next((str(row["cut_short"]) for row in unsettled if row.get("cut_short")), ""),
    )


def _image_key(row: Row) -> tuple[Any, ...]:
    """Return what tells an image from others of an audit, whatever the attack."""
    return row.get("seed"), row["picture"]


def _private_counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Return, for each private value, for how many updates it was recovered, in plain data."""
    found = private_tensor_recoveries(rows)
    return {what: {"recovered": secret.n_recovered, "updates": len(secret.errors)} for what, secret in found.items()}


def _full_verdict(rows: Sequence[Row], refused: Sequence[str], instead: str = "", tests: int = 1) -> str:
    """Return the verdict on what an attack applied to, and why not to the rest: `refused` are the reasons."""
    said = [verdict(rows, tests)] if rows else [instead] if instead else []
    if refused:
        said.append(f"not applicable{f' to {len(refused)} update(s)' if said else ''}: {refused[0]}")
    return "; ".join(said)


def _refusal_words(reason: str, *, limit: bool) -> str:
    """Return why an attack does not apply; where that says nothing of the update, it says so."""
    return f"{reason} (a limit of the attack, no finding)" if limit else reason
