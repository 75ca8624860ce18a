"""One row of figures per true image, ready for JSON: the place where reconstruction and truth meet.

A true image that no reconstruction stands for (too few of them, or pixels that are not finite) counts as a failure,
not as a gap: it gets what the worst possible picture gets, MSE 1, PSNR 0 dB and SSIM 0, no exact pixel and a wrong
label, and `failure` says why. LPIPS has no worst value and is missing there. Dropping such images instead would let an
attack that gives up on hard ones look better than one that tries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from eval import metrics
from eval.assignment import assign
from eval.floors import guesses
from eval.perceptual import Perceptual
from fl.tensors import Value, dense

Row = dict[str, Any]
"""Plain JSON values by column; a figure that could not be taken is None, and `row["missing"]` says why."""

Measure = Callable[[Tensor, Tensor], Tensor]

MEASURES: dict[str, Measure] = {
    "mse": metrics.mse,
    "psnr": metrics.psnr,
    "ssim": metrics.ssim,
    "ssim_rog": metrics.ssim_rog,
    "ssim_uniform7": metrics.ssim_uniform7,
}
NO_RECONSTRUCTION = "no reconstruction stands for this image"
"""Why a figure of a failed image is missing."""

_WORST = {"mse": 1.0, "psnr": 0.0, "ssim": 0.0, "ssim_rog": 0.0, "ssim_uniform7": 0.0}


class Reconstructed(Protocol):
    """What an attack hands back (`attacks.base.Reconstruction`)."""

    @property
    def inputs(self) -> Tensor:
        """Images (N, C, H, W)."""

    @property
    def labels(self) -> Tensor | None:
        """Recovered labels (N,), or probabilities (N, K), or None."""

    @property
    def objective(self) -> float:
        """The attack's own objective at the end."""

    @property
    def private(self) -> Mapping[str, Value]:
        """Recovered private tensors by name."""


class TrueValues(Protocol):
    """What a client held (`fl.client.Truth`)."""

    @property
    def inputs(self) -> Tensor:
        """Images (M, C, H, W) in [0, 1]."""

    @property
    def labels(self) -> Tensor:
        """Labels (M,) or probabilities (M, K)."""

    @property
    def private(self) -> Mapping[str, Value]:
        """Private tensors before training, by name."""

    @property
    def extractor(self) -> Mapping[str, Value]:
        """Generated parameters by name; empty without a generator."""


def score(
    reconstruction: Reconstructed,
    truth: TrueValues,
    *,
    perceptual: Perceptual | None = None,
    reference: Tensor | None = None,
    seed: int = 0,
) -> list[Row]:
    """Match the reconstructions to the true images once and take every metric in that order.

    Columns:
        image, matched: indices into the truth and into the reconstructions (None if nothing matches).
        images, candidates: how many true images and reconstructions the batch had.
        failure: None, "unmatched" or "non-finite".
        the names in `MEASURES`, and LPIPS under the name of its backbone and size.
        exact8: every pixel right after rounding to 8 bits.
        label, label_correct: the true label and whether its reconstruction has it (None if no labels were recovered).
        label_overlap: share of the batch's labels recovered, in whatever order.
        objective: of the attack, for the whole batch.
        private_errors: relative error of every recovered private tensor.
        extractor_error: of the generated parameters together (None if they were not all recovered).
        floor_<guess>_<metric>: for every guess of `eval.floors`.
        missing: why a figure is None, by column.

    Args:
        reconstruction: of an attack.
        truth: what the client fed.
        perceptual: LPIPS, from `eval.perceptual.load_lpips`.
        reference: images (R, C, H, W) the attacker had before, for the floor `nearest`.
        seed: of the noise floor.

    Returns:
        One row per true image, in the order of the truth.

    Raises:
        ValueError: shapes do not fit, or true images are not in [0, 1].
    """
    if not len(truth.inputs):
        raise ValueError("expected at least one true image, got none")
    true, guess = truth.inputs.detach().cpu(), reconstruction.inputs.detach().cpu()
    metrics.prepare(true, true)
    matched = assign(guess, true)
    measures, missing = _measures(true, perceptual)
    hits = [i for i, j in enumerate(matched) if j is not None]
    found = [j for j in matched if j is not None]
    scored = dict(zip(hits, _take(measures, guess[found], true[hits]), strict=True))
    exact = dict(zip(hits, metrics.exact8(guess[found], true[hits]).tolist(), strict=True))
    floors = _floors(measures, true, reference, seed)
    labels = _labels(reconstruction, truth, matched)
    batch = _batch(reconstruction, truth)
    unmatched = "unmatched" if guess.isfinite().all() else "non-finite"
    rows: list[Row] = []
    for image, match in enumerate(matched):
        failed = match is None
        head = {"image": image, "matched": match, "images": len(true), "candidates": len(guess)}
        figures = {name: _WORST.get(name, math.nan) for name in measures} if failed else scored[image]
        reasons = dict.fromkeys(measures, NO_RECONSTRUCTION) | missing if failed else missing
        row: Row = {**head, "failure": unmatched if failed else None, **figures, **dict.fromkeys(missing, math.nan)}
        row |= {"exact8": exact.get(image, False), **labels[image], **batch, **floors[image]}
        rows.append(_json_ready(row, reasons))
    return rows


def private_errors(recovered: Mapping[str, Value], true: Mapping[str, Value]) -> dict[str, float]:
    """Relative error `|a - b| / |b|` of every recovered tensor that has a true value.

    Recovered tensors without one (such as features) are left out. A wrong value of a true zero has infinite error.

    Raises:
        ValueError: a recovered tensor has another shape than the true one.
    """
    return {name: relative_error({name: recovered[name]}, {name: true[name]}) for name in recovered if name in true}


def relative_error(a: Mapping[str, Value], b: Mapping[str, Value]) -> float:
    """`|a - b| / |b|` of all tensors of `b` together, in float64.

    Raises:
        ValueError: a tensor has another shape in `a` than in `b`.
    """
    difference = norm = 0.0
    for name, value in b.items():
        mine, true = dense(a[name]), dense(value)
        if mine.shape != true.shape:
            raise ValueError(f"expected {name!r} of shape {tuple(true.shape)}, got {tuple(mine.shape)}")
        mine, true = (x.detach().to("cpu", torch.float64) for x in (mine, true))
        difference += (mine - true).square().sum().item()
        norm += true.square().sum().item()
    if norm == 0:
        return math.nan if math.isnan(difference) else math.inf if difference else 0.0
    return math.sqrt(difference / norm)


def _measures(true: Tensor, perceptual: Perceptual | None) -> tuple[dict[str, Measure], dict[str, str]]:
    """The metrics that can be taken of these images, and why the others can't."""
    channels, height, width = true.shape[1:]
    measures, missing = dict(MEASURES), {}
    for name, window in metrics.WINDOWS.items():
        if min(height, width) < window:
            missing[name] = f"needs images of at least {window}x{window} pixels, got {height}x{width}"
    if channels not in (1, 3):
        missing["ssim_rog"] = f"needs 1 or 3 channels, got {channels}"
    if perceptual is None:
        missing["lpips"] = "no perceptual measure was asked for"
    else:
        name = perceptual.name(height, width)
        measures[name] = perceptual
        if perceptual.missing is not None:
            missing[name] = perceptual.missing
        elif channels not in (1, 3):
            missing[name] = f"needs 1 or 3 channels, got {channels}"
    return {name: measure for name, measure in measures.items() if name not in missing}, missing


def _take(measures: Mapping[str, Measure], a: Tensor, b: Tensor) -> list[Row]:
    """Every metric of every pair of images."""
    if not len(a):
        return []
    columns = {name: measure(a, b).tolist() for name, measure in measures.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(a))]


def _floors(measures: Mapping[str, Measure], true: Tensor, reference: Tensor | None, seed: int) -> list[Row]:
    rows: list[Row] = [{} for _ in true]
    for guess, images in guesses(true, reference=reference, seed=seed).items():
        for row, figures in zip(rows, _take(measures, images, true), strict=True):
            row |= {f"floor_{guess}_{name}": figure for name, figure in figures.items()}
    return rows


def _labels(reconstruction: Reconstructed, truth: TrueValues, matched: list[int | None]) -> list[Row]:
    true = _hard(truth.labels)
    if len(true) != len(matched):
        raise ValueError(f"expected {len(matched)} true labels, one per image, got {len(true)}")
    if reconstruction.labels is None:
        return [{"label": label, "label_correct": None, "label_overlap": None} for label in true]
    recovered = _hard(reconstruction.labels)
    if len(recovered) != len(reconstruction.inputs):
        raise ValueError(f"expected {len(reconstruction.inputs)} recovered labels, one per image, got {len(recovered)}")
    overlap = (Counter(recovered) & Counter(true)).total() / len(true)
    correct = [j is not None and recovered[j] == label for label, j in zip(true, matched, strict=True)]
    columns = zip(true, correct, strict=True)
    return [{"label": label, "label_correct": right, "label_overlap": overlap} for label, right in columns]


def _hard(labels: Tensor) -> list[int]:
    indices = labels.argmax(1) if labels.ndim == 2 else labels
    return [int(label) for label in indices.tolist()]


def _batch(reconstruction: Reconstructed, truth: TrueValues) -> Row:
    """What is known of the whole batch and repeated in each of its rows."""
    known = {**truth.private, **truth.extractor}
    recovered = reconstruction.private
    row: Row = {"objective": float(reconstruction.objective), "private_errors": private_errors(recovered, known)}
    complete = bool(truth.extractor) and all(name in recovered for name in truth.extractor)
    row["extractor_error"] = relative_error(recovered, truth.extractor) if complete else None
    return row


def _json_ready(row: Row, reasons: Mapping[str, str]) -> Row:
    """The row with None for every number that is not finite, and the reasons under `missing`."""
    missing: dict[str, str] = {}

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(f"{name}/{key}", item) for key, item in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            missing[name] = reasons.get(name, f"not finite ({value})")
            return None
        return value

    ready = {name: clean(name, value) for name, value in row.items()}
    return {**ready, "missing": missing}
