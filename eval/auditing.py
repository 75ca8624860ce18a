"""An audit: attacks on updates, in words and figures that answer one question, what leaked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attacks
from attacks.base import Attack, NotApplicable, Reconstruction
from eval.audit import MARGIN
from eval.results import draw
from eval.score import Row, score
from eval.subjects import Subject
from fl.seeds import derive


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
    """

    attack: str
    rows: list[Row]
    refused: str
    verdict: str
    labels: list[list[int]] = field(default_factory=list)
    verified: bool | None = None

    def best(self, figure: str) -> float | None:
        """The highest value of a figure over the images, or None."""
        return max((row[figure] for row in self.rows if row.get(figure) is not None), default=None)


@dataclass(frozen=True)
class Audit:
    """All findings on one subject.

    Attributes:
        subject: what was audited.
        findings: by attack.
    """

    subject: str
    findings: list[Finding]

    def best(self, figure: str) -> float | None:
        """The highest value of a figure over all attacks and images, or None."""
        return max((best for found in self.findings if (best := found.best(figure)) is not None), default=None)

    def plain(self) -> dict[str, Any]:
        """The audit in plain data."""
        return {
            "subject": self.subject,
            "findings": [
                {
                    "attack": found.attack,
                    "refused": found.refused or None,
                    "verdict": found.verdict,
                    "labels": found.labels,
                    "verified": found.verified,
                    "images": found.rows,
                }
                for found in self.findings
            ],
            "max_psnr": self.best("psnr"),
            "max_ssim": self.best("ssim"),
        }


def examine(
    name: str, subjects: Sequence[Subject], tried: Sequence[Attack], *, seed: int = 0, out: Path | None = None
) -> Audit:
    """Run attacks on the updates of one subject.

    Args:
        name: of the subject.
        subjects: its updates.
        tried: the attacks.
        seed: of their randomness.
        out: folder for the pictures; none are kept without.

    Raises:
        ValueError: an attack that can't be run.
    """
    found = []
    for attack in tried:
        label = attacks.label(attack)
        seeds = [derive(seed, "attack", number) for number in range(len(subjects))]
        results = attack.run([subject.view for subject in subjects], seeds)
        pairs = [
            (number, subject, result)
            for number, (subject, result) in enumerate(zip(subjects, results, strict=True))
            if isinstance(result, Reconstruction)
        ]
        rows: list[Row] = []
        for number, subject, result in pairs:
            if subject.truth is not None:
                scored = score(result, subject.truth, seed=derive(seed, "floor", number))
                rows += [{**row, "update": number} for row in scored]
        refused = [result.reason for result in results if isinstance(result, NotApplicable)]
        labels = [result.labels.tolist() for _, _, result in pairs if result.labels is not None]
        verified = _all(result.verified for _, _, result in pairs)
        said = _said(rows, refused, "" if rows or not pairs else _unscored(verified))
        found.append(Finding(label, rows, refused[0] if refused else "", said, labels, verified))
        if out is not None and pairs:
            _keep(out / label, pairs)
    return Audit(name, found)


def of_rows(name: str, rows: Sequence[Row]) -> Audit:
    """The audit that the rows of a run's `images.jsonl` amount to."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["attack"], []).append(row)
    found = []
    for attack, group in groups.items():
        refused = [row["not_applicable"] for row in group if "not_applicable" in row]
        scored = [row for row in group if "not_applicable" not in row]
        verified = _all(row["verified"] for row in scored)
        reason = refused[0] if refused else ""
        found.append(Finding(attack, scored, reason, _said(scored, refused), verified=verified))
    return Audit(name, found)


def verdict(rows: Sequence[Row]) -> str:
    """What leaked, in a sentence: images beside the best guess without the update, and private tensors."""
    judged = [(row["psnr"] - floor(row), row) for row in rows if row.get("psnr") is not None]
    said = []
    if judged:
        best, shown = max(judged, key=lambda pair: pair[0])
        above = sum(gain >= MARGIN for gain, _ in judged)
        word = "image content leaked" if best >= MARGIN else "no image content shown to leak"
        said.append(
            f"{word}: {above} of {len(judged)} image(s) at least {MARGIN:g} dB above the best guess without the "
            f"update; at best {shown['psnr']:.1f} dB against {floor(shown):.1f} dB, on average "
            f"{fmean(gain for gain, _ in judged):+.1f} dB"
        )
    labels = [row["label_correct"] for row in rows if row.get("label_correct") is not None]
    if labels:
        said.append(f"{sum(labels)} of {len(labels)} label(s) recovered")
    for what, error in _secrets(rows).items():
        word = "recovered" if error < 0.1 else "not recovered"
        said.append(f"private {what} {word} (relative error {error:.0e})")
    return "; ".join(said) or "the attack recovers nothing that can be scored"


def floor(row: Row) -> float:
    """PSNR of the best guess of an image that knows nothing of the update."""
    found = [row[key] for key in row if key.startswith("floor_") and key.endswith("_psnr") and row[key] is not None]
    return max(found, default=-math.inf)


def _secrets(rows: Sequence[Row]) -> dict[str, float]:
    """Median relative error of recovered embeddings and extractors."""
    columns = {
        "embedding": [row.get("private_errors", {}).get("embedding") for row in rows],
        "extractor": [row.get("extractor_error") for row in rows],
    }
    known = {what: sorted(e for e in errors if e is not None) for what, errors in columns.items()}
    return {what: errors[len(errors) // 2] for what, errors in known.items() if errors}


def _said(rows: Sequence[Row], refused: Sequence[str], instead: str = "") -> str:
    """The verdict on what an attack applied to, and why it did not apply to the rest."""
    said = [verdict(rows)] if rows else [instead] if instead else []
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
