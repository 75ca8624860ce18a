"""An audit: attacks on updates, in words and figures that answer one question, what leaked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.gradient_matching.engine.fit_check import LABELS_UNCONFIRMED
from attacks.parallel import AttackPool
from attacks.verification import CONTRADICTED
from eval.audit import attack_selection
from eval.audit import output_folder as kept
from eval.audit.user_model import Subject
from eval.audit.verdict import agreed, few, floor, leaked, unscored, verdict
from eval.io import jsonl
from eval.metrics import self_verification, validity_flags
from eval.metrics.score import Row, score
from eval.report.result_groups import private_tensor_recoveries
from eval.report.sections import inconclusive as undecided
from eval.report.sections.inconclusive import Open, Outcome
from eval.run import auxiliary_overlap
from eval.run.runner import FAULTS, Progress, ProgressCounter, silent
from fl.seeds import derive
from fl.view import ThreatModel

PICTURED = {"settled", "ran", "searched", "gave up", "contradicted"}
"""What attacks come to that bring pictures."""


@dataclass(frozen=True)
class Finding:
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
        few: how many images there are where they are too few to tell content from chance; else 0.
        doubtful: whether the labels are guesses of a search that did not explain the update.
        failed: the error that it ended with, or nothing.
        traceback: the file that has the traceback of that, where one was kept.
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
    few: int = 0
    doubtful: bool = False
    failed: str = ""
    traceback: Path | None = None

    @classmethod
    def of_failure(cls, attack: str, reason: str, kept: Path | None) -> Finding:
        """What is left of an attack that ended with an error."""
        words = " ".join(reason.split())
        return cls(attack, [], "", f"failed: {words}", failed=words, traceback=kept)

    @classmethod
    def of_spared(cls, attack: str, reason: str) -> Finding:
        """What is left of an attack that was not needed."""
        return cls(attack, [], "", reason, spared=reason)

    def best(self, figure: str) -> float | None:
        """The highest value of a figure over the images, or None."""
        return max((row[figure] for row in self.rows if row.get(figure) is not None), default=None)


@dataclass(frozen=True)
class Audit:
    """All findings on one subject.

    Attributes:
        subject: what was audited.
        findings: by attack.
        notes: what to know of the subject itself.
        mismatch: in words, if an update is not what the model makes of its images, or can be of no images.
        stopped: the attack at which Ctrl-C ended the audit, or nothing.
    """

    subject: str
    findings: list[Finding]
    notes: tuple[str, ...] = ()
    mismatch: str = ""
    stopped: str = ""

    def undecided(self, limits: Mapping[str, float]) -> list[Open]:
        """What keeps the audit from an answer: nothing where what leaked answers it.

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
        said = [undecided.contradicted(self.mismatch)] if self.mismatch else []
        said += undecided.opened(outcomes)
        said += [undecided.without(figure, limits[figure]) for figure, value in figures.items() if value is None]
        if not (limits and undecided.answered(outcomes)):
            said += [undecided.too_few(found.attack, found.few) for found in self.findings if found.few]
        settled = {one.update for one in outcomes if one.kind == "settled"}
        blind = [
            found.attack
            for found in self.findings
            if not found.rows and any(one.kind in PICTURED and one.update not in settled for one in found.outcomes)
        ]
        return [*said, undecided.unjudged(blind)] if blind else said

    def best(self, figure: str) -> float | None:
        """The highest value of a figure over all attacks and images, or None."""
        return max((best for found in self.findings if (best := found.best(figure)) is not None), default=None)

    def above(self, figure: str, limit: float) -> str:
        """In words, of how many images a figure is above a limit, and of how many that of the best guess is, too."""
        rows = [row for found in self.findings for row in found.rows if row.get(figure) is not None]
        over = {_image(row): row for row in rows if row[figure] > limit}
        guessed = [floor(row, figure) for row in over.values() if floor(row, figure) > limit]
        words = f"{figure.upper()} {self.best(figure):.4g} > {limit:g}"
        if not guessed:
            return words
        return (
            f"{words}; of the {len(over)} image(s) above it, the best guess without the update exceeds it for "
            f"{len(guessed)}, too (by up to {max(guessed):.4g}): for these the limit says nothing of the update"
        )

    def plain(self) -> dict[str, Any]:
        """The audit in plain data."""
        return {
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
                    "traceback": None if found.traceback is None else str(found.traceback),
                    "verdict": found.verdict,
                    "leaked": found.leaked,
                    "outcomes": [
                        {"update": one.number, "kind": one.kind, "words": one.words} for one in found.outcomes
                    ],
                    "labels": found.labels,
                    "verified": found.verified,
                    "private": _counted(found.rows),
                    "flags": found.flags,
                    "notes": found.notes,
                    "images": found.rows,
                }
                for found in self.findings
            ],
            "max_psnr": self.best("psnr"),
            "max_ssim": self.best("ssim"),
        }


def examine(
    name: str,
    subjects: Sequence[Subject],
    attacks: Mapping[str, Attack],
    *,
    seed: int = 0,
    out: Path | None = None,
    told: Progress = silent,
    thrifty: bool = False,
    workers: int = 1,
) -> Audit:
    """Run attacks on the updates of one subject; one that fails stops no other, and Ctrl-C loses none that is done.

    Args:
        name: of the subject.
        subjects: its updates.
        attacks: by label.
        seed: of their randomness.
        out: folder for pictures and tracebacks; none are kept without.
        told: of how many images every attack is done with.
        thrifty: whether an update that one attack settles (`eval.metrics.self_verification`) is left out of those
            behind it.
        workers: processes that updates are spread over; their number changes no result.
    """
    with closing(AttackPool(workers)) as spread:
        found, stopped = _examined(subjects, attacks, seed, out, told, spread, thrifty=thrifty)
    against = (
        f"{one.attack}: {one.words}" for own in found for one in own.outcomes if one.words.startswith(CONTRADICTED)
    )
    mismatch = next(filter(None, (*map(_mismatch, subjects), *against)), "")
    return Audit(name, found, mismatch=mismatch, stopped=stopped)


def _examined(
    subjects: Sequence[Subject],
    attacks: Mapping[str, Attack],
    seed: int,
    out: Path | None,
    told: Progress,
    spread: AttackPool,
    *,
    thrifty: bool,
) -> tuple[list[Finding], str]:
    """What attacks found, and the one at which Ctrl-C came, or nothing."""
    found: list[Finding] = []
    settled: dict[int, str] = {}
    stopped = ""
    for label, attack in attacks.items():
        open_to = {i: subject for i, subject in enumerate(subjects) if i not in settled}
        if not open_to:
            found.append(Finding.of_spared(label, attack_selection.spared([*settled.values()])))
            continue
        try:
            truths = (subject.truth.inputs for subject in open_to.values() if subject.truth is not None)
            auxiliary_overlap.check_no_overlap(attack, label, truths)
            results = _results(label, attack, open_to, seed, told, spread)
            finding = _finding(label, open_to, results, seed)
            if out is not None:
                kept.pictures(out / label, open_to, results)
        except KeyboardInterrupt:
            stopped = label
            break
        except FAULTS as error:
            written = None if out is None else out / f"{label}-traceback.txt"
            if written is not None:
                jsonl.write_text(written, traceback.format_exc())
            found.append(Finding.of_failure(label, f"{type(error).__name__}: {error}", written))
            continue
        if settled:
            spared = f"of the {len(open_to)} update(s) that no attack before it settled"
            finding = replace(finding, spared=spared, verdict=f"{spared}: {finding.verdict}")
        found.append(finding)
        if thrifty:
            sizes = {i: subject.view.batch_size for i, subject in open_to.items()}
            settled |= {i: label for i, result in results.items() if self_verification.is_settled(result, sizes[i])}
    return found, stopped


def _results(
    label: str, attack: Attack, subjects: Mapping[int, Subject], seed: int, told: Progress, spread: AttackPool
) -> dict[int, Result]:
    """What one attack makes of updates, by their numbers."""
    views = [subject.view for subject in subjects.values()]
    size = views[0].batch_size or 1
    count = ProgressCounter(told, f"{label}: images", size * len(views))
    count.set(0)
    seeds = [derive(seed, "attack", number) for number in subjects]
    results = spread.run(attack, views, seeds, lambda done: count.advance(size * done))
    return dict(zip(subjects, results, strict=True))


def _finding(label: str, subjects: Mapping[int, Subject], results: Mapping[int, Result], seed: int) -> Finding:
    """What one attack's results come to."""
    answers = {number: result for number, result in results.items() if isinstance(result, Reconstruction)}
    rows: list[Row] = []
    for number, result in answers.items():
        subject = subjects[number]
        if subject.truth is not None:
            scored = self_verification.columns(result, score(result, subject.truth, seed=derive(seed, "floor", number)))
            own = _error(subject)
            rows += [{**own, "update": number, "picture": f"{number}:{row['image']}", **row} for row in scored]
    refused = [_refused(r.reason, limit=r.limit) for r in results.values() if isinstance(r, NotApplicable)]
    labels = [result.labels.tolist() for result in answers.values() if result.labels is not None]
    verified = agreed(result.verified for result in answers.values())
    said = _said(rows, refused, "" if rows or not answers else unscored([*answers.values()]))
    first = next(iter(subjects.values()))
    view = first.view
    flags = validity_flags.audit_flags(
        rows, view.threat, defended=view.defense.name != "none", tolerance=first.tolerance
    )
    notes = self_verification.notes(rows) or list(
        dict.fromkeys(result.note for result in answers.values() if result.note)
    )
    return Finding(
        label,
        rows,
        refused[0] if refused else "",
        said,
        labels,
        verified,
        flags,
        notes,
        outcomes=[
            undecided.outcome(label, number, result, subjects[number].view.batch_size)
            for number, result in results.items()
        ],
        leaked=leaked(rows),
        few=few(rows),
        doubtful=any(LABELS_UNCONFIRMED in result.note for result in answers.values()),
    )


def of_rows(name: str, rows: Sequence[Row], *, threat: ThreatModel, defended: bool) -> Audit:
    """The audit that the rows of a run's `images.jsonl` amount to.

    Args:
        name: of the subject.
        rows: of one method under one defence.
        threat: what the attacker knows.
        defended: whether there is a defence.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["attack"], []).append(row)
    tests = sum(any(row.get("identified") is not None for row in group) for group in groups.values())
    found = []
    for attack, group in groups.items():
        refused = [
            _refused(row["not_applicable"], limit=bool(row.get("limit"))) for row in group if "not_applicable" in row
        ]
        scored = [row for row in group if "not_applicable" not in row]
        verified = agreed(row["verified"] for row in scored)
        reason = refused[0] if refused else ""
        flags = validity_flags.audit_flags(scored, threat, defended=defended)
        said = _said(scored, refused, tests=tests)
        notes = self_verification.notes(scored)
        found.append(
            Finding(
                attack,
                scored,
                reason,
                said,
                verified=verified,
                flags=flags,
                notes=notes,
                outcomes=undecided.of_rows(attack, group),
                leaked=leaked(scored, tests),
                few=few(scored, tests),
                doubtful=any(row.get("labels_doubtful") for row in scored),
            )
        )
    return Audit(name, found)


def _image(row: Row) -> tuple[Any, ...]:
    """What tells an image from others of an audit, whatever the attack."""
    return row.get("seed"), row["picture"]


def _counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """For each private value, for how many updates it was recovered, in plain data."""
    found = private_tensor_recoveries(rows)
    return {what: {"recovered": secret.n_recovered, "updates": len(secret.errors)} for what, secret in found.items()}


def _mismatch(subject: Subject) -> str:
    if not subject.mismatched or subject.truth is None:
        return subject.doubt
    doubt = f"{subject.doubt}. Otherwise " if subject.doubt else ""
    used = len(subject.truth.inputs)
    which = f", and the images: the first {used} of {subject.given} given, in their order" if subject.given else ""
    return (
        f"the update is not what this model makes of these images (relative error {subject.error:.2g}): {doubt}check "
        f"the sign, mean and std, --method, --batch-size{which}"
    )


def _error(subject: Subject) -> Row:
    """What the rows of an update repeat of the subject, as in `images.jsonl`."""
    if subject.error is None:
        return {}
    return {"forward_error": subject.error if math.isfinite(subject.error) else None}


def _said(rows: Sequence[Row], refused: Sequence[str], instead: str = "", tests: int = 1) -> str:
    """The verdict on what an attack applied to, and why it did not apply to the rest: `refused` are the reasons."""
    said = [verdict(rows, tests)] if rows else [instead] if instead else []
    if refused:
        said.append(f"not applicable{f' to {len(refused)} update(s)' if said else ''}: {refused[0]}")
    return "; ".join(said)


def _refused(reason: str, *, limit: bool) -> str:
    """Why an attack does not apply; where that says nothing of the update, it says so."""
    return f"{reason} (a limit of the attack, no finding)" if limit else reason
