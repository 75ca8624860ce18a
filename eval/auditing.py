"""An audit: attacks on updates, in words and figures that answer one question, what leaked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.base import Attack, NotApplicable, Reconstruction
from attacks.spread import Spread
from eval import checks, store
from eval.harness import FAULTS, Counter, Progress, silent
from eval.report.summary import RECOVERED, secrets
from eval.report.words import join
from eval.results import draw
from eval.score import Row, score
from eval.subjects import Subject
from eval.verdict import content, floor
from fl.seeds import derive
from fl.types import ThreatModel


@dataclass(frozen=True)
class Finding:
    """What one attack found.

    Attributes:
        attack: which.
        rows: one per image (see `eval.score`); none where the truth is not known.
        refused: why the attack does not apply to some updates, or nothing.
        verdict: what leaked, in a sentence.
        labels: recovered labels of every update, where the attack recovers any.
        verified: whether the attack could check its own success; None if it can't tell.
        flags: what to know before trusting the figures (see `eval.checks`).
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
    failed: str = ""
    traceback: Path | None = None

    @classmethod
    def of_failure(cls, attack: str, reason: str, kept: Path | None) -> Finding:
        """What is left of an attack that ended with an error."""
        words = " ".join(reason.split())
        return cls(attack, [], "", f"failed: {words}", failed=words, traceback=kept)

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
    """

    subject: str
    findings: list[Finding]
    notes: tuple[str, ...] = ()
    mismatch: str = ""

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
            "findings": [
                {
                    "attack": found.attack,
                    "refused": found.refused or None,
                    "failed": found.failed or None,
                    "traceback": None if found.traceback is None else str(found.traceback),
                    "verdict": found.verdict,
                    "labels": found.labels,
                    "verified": found.verified,
                    "private": _counted(found.rows),
                    "flags": found.flags,
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
    tried: Mapping[str, Attack],
    *,
    seed: int = 0,
    out: Path | None = None,
    told: Progress = silent,
) -> Audit:
    """Run attacks on the updates of one subject; one that fails stops no other.

    Args:
        name: of the subject.
        subjects: its updates.
        tried: the attacks, by label.
        seed: of their randomness.
        out: folder for pictures and tracebacks; none are kept without.
        told: of how many images every attack is done with.
    """
    found = []
    for label, attack in tried.items():
        try:
            found.append(_try(label, attack, subjects, seed, out, told))
        except FAULTS as error:
            kept = None if out is None else out / f"{label}-traceback.txt"
            if kept is not None:
                store.write_text(kept, traceback.format_exc())
            found.append(Finding.of_failure(label, f"{type(error).__name__}: {error}", kept))
    return Audit(name, found, mismatch=next(filter(None, map(_mismatch, subjects)), ""))


def _try(
    label: str, attack: Attack, subjects: Sequence[Subject], seed: int, out: Path | None, told: Progress
) -> Finding:
    """What one attack finds."""
    size = subjects[0].view.batch_size or 1
    count = Counter(told, f"{label}: images", size * len(subjects))
    count.to(0)
    seeds = [derive(seed, "attack", number) for number in range(len(subjects))]
    views = [subject.view for subject in subjects]
    results = Spread().run(attack, views, seeds, lambda done: count.more(size * done))
    pairs = [
        (number, subject, result)
        for number, (subject, result) in enumerate(zip(subjects, results, strict=True))
        if isinstance(result, Reconstruction)
    ]
    rows: list[Row] = []
    for number, subject, result in pairs:
        if subject.truth is not None:
            scored = score(result, subject.truth, seed=derive(seed, "floor", number))
            own = _about(subject, result)
            rows += [{**own, "update": number, "picture": f"{number}:{row['image']}", **row} for row in scored]
    refused = [result.reason for result in results if isinstance(result, NotApplicable)]
    labels = [result.labels.tolist() for _, _, result in pairs if result.labels is not None]
    verified = _all(result.verified for _, _, result in pairs)
    said = _said(rows, refused, "" if rows or not pairs else _unscored(verified))
    view = views[0]
    flags = _flags(rows, view.threat, defended=view.defense.name != "none", tolerance=subjects[0].tolerance)
    if out is not None and pairs:
        _keep(out / label, pairs)
    return Finding(label, rows, refused[0] if refused else "", said, labels, verified, flags)


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
        refused = [row["not_applicable"] for row in group if "not_applicable" in row]
        scored = [row for row in group if "not_applicable" not in row]
        verified = _all(row["verified"] for row in scored)
        reason = refused[0] if refused else ""
        flags = _flags(scored, threat, defended=defended)
        said = _said(scored, refused, tests=tests)
        found.append(Finding(attack, scored, reason, said, verified=verified, flags=flags))
    return Audit(name, found)


def verdict(rows: Sequence[Row], tests: int = 1) -> str:
    """What leaked, in a sentence: images beside the best guess without the update, and private tensors.

    Args:
        rows: of one attack.
        tests: so many attacks are judged by the images that they name.
    """
    images = content(rows, tests)
    said = [images] if images else []
    private = secrets(rows)
    if not images and not private:
        said.append(_bare(rows))
    labels = [_label(row) for row in rows]
    if any(
        label is not None for label in labels
    ):  # an image for which none came back counts as one whose label did not
        said.append(f"{round(sum(label or 0.0 for label in labels))} of {len(labels)} label(s) recovered")
    for what, secret in private.items():
        word = "leaked: " if secret.hits else ""
        closest = "" if secret.best is None else f", at best {secret.best:.0e}"
        said.append(
            f"private {what} {word}recovered for {secret.hits} of {len(secret.errors)} update(s) "
            f"(relative error below {RECOVERED:g}{closest})"
        )
    return "; ".join(said)


def _label(row: Row) -> float | None:
    """Whether an image's label was recovered, or the share of its batch's that were; None if none came back."""
    found = [row[column] for column in ("label_correct", "label_overlap") if row.get(column) is not None]
    return float(found[0]) if found else None


def _bare(rows: Sequence[Row]) -> str:
    """What an attack came to that recovered neither images nor private tensors."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("unscored", ())))
    if not names:
        return "the attack recovered no images, nor any private tensor"
    meant = " (the input of a layer behind the first)" if names == ["features"] else ""
    return f"the attack recovered no images, only {join(names)}{meant}, of which there is no true value to compare with"


def _image(row: Row) -> tuple[Any, ...]:
    """What tells an image from others of an audit, whatever the attack."""
    return row.get("seed"), row["picture"]


def _counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """For each private value, for how many updates it was recovered, in plain data."""
    found = secrets(rows)
    return {what: {"recovered": secret.hits, "updates": len(secret.errors)} for what, secret in found.items()}


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


def _about(subject: Subject, result: Reconstruction) -> Row:
    """What the rows of an update repeat, as in `images.jsonl`."""
    history = [value if math.isfinite(value) else None for value in map(float, result.history)]
    about: Row = {"history": history, "verified": result.verified}
    if subject.error is not None:
        about["forward_error"] = subject.error if math.isfinite(subject.error) else None
    return about


def _flags(rows: Sequence[Row], threat: ThreatModel, *, defended: bool, tolerance: float = 1e-4) -> list[str]:
    """The validity flags of one attack (see `eval.checks`)."""
    if not rows:
        return []
    errors = [row["forward_error"] for row in rows if "forward_error" in row]
    found = checks.flags(
        rows,
        histories=[[math.nan if value is None else value for value in row.get("history") or ()] for row in rows],
        labels_given=threat.knows_labels,
        defence_known=defended and threat.knows_defense,
        forward_error=max((math.inf if error is None else error for error in errors), default=None),
        tolerance=tolerance,
        image="picture",
    )
    return [name for name in found if name != "lpips-missing"]  # an audit does not ask for it


def _said(rows: Sequence[Row], refused: Sequence[str], instead: str = "", tests: int = 1) -> str:
    """The verdict on what an attack applied to, and why it did not apply to the rest."""
    said = [verdict(rows, tests)] if rows else [instead] if instead else []
    if refused:
        said.append(f"not applicable{f' to {len(refused)} update(s)' if said else ''}: {refused[0]}")
    return "; ".join(said)


def _all(checked: Iterable[bool | None]) -> bool | None:
    """Whether all are true; None where one is not known, or there is none."""
    found = list(checked)
    return None if not found or None in found else all(found)


def _unscored(verified: bool | None) -> str:
    words = {
        True: "the attack confirms that what it recovered is right",
        False: "the attack found nothing that explains the update",
        None: "the attack can't tell how close it came",
    }
    return f"{words[verified]}; give the true images (--images) to have the pictures scored"


def _keep(path: Path, pairs: Sequence[tuple[int, Subject, Reconstruction]]) -> None:
    """Pictures of all updates: reconstructions, below the originals where they are known."""
    found = [result.inputs.detach().cpu() for _, _, result in pairs if result.inputs is not None]
    originals = [subject.truth.inputs.cpu() for _, subject, _ in pairs if subject.truth is not None]
    if not found:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Tensor] = {"reconstruction": torch.cat(found)}
    if originals:
        arrays["original"] = torch.cat(originals)
    np.savez_compressed(path.with_suffix(".npz"), **{name: value.numpy() for name, value in arrays.items()})  # type: ignore[arg-type]
    shown = [arrays[name] for name in ("original", "reconstruction") if name in arrays]
    draw(torch.cat(shown), path.with_suffix(".png"), columns=len(arrays["reconstruction"]))
