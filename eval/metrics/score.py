"""One row of figures per true image, ready for JSON: the place where reconstruction and truth meet.

A true image that no reconstruction stands for (too few of them, or pixels that are not finite) counts as a failure,
not as a gap: it gets what the worst possible picture gets, MSE 1, PSNR 0 dB and SSIM 0, no exact pixel and a wrong
label, and `failure` says why. LPIPS has no worst value and is missing there. Dropping such images instead would let an
attack that gives up on hard ones look better than one that tries. Where an attack is not after images at all
(`inputs` is None), their figures are missing and nothing has failed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.result import Remark
from eval.metrics import image as metrics
from eval.metrics.baselines import baseline_images
from eval.metrics.matching import assign, exchange_copies
from eval.metrics.perceptual import Perceptual
from eval.metrics.tables import NOT_FOUND, table_scores
from eval.metrics.tokens import token_scores
from fl.inputs.form import InputForm, image_form
from fl.losses import Loss
from fl.losses.cross_entropy import CrossEntropy
from fl.tensors import Value, dense
from fl.types import Task

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

NO_IMAGES = "the attack recovers no images"
"""Why a figure is missing where images were never the aim."""

NO_PICTURES = "of pictures alone, and these inputs are none"
"""Why similarities of pictures are missing of a table, a series or several inputs."""

NO_TRUTH = "the true images are not known"
"""Why a figure is missing of an update that was captured without its images."""

_EXTRACTOR = "extractor/"
_CLIENT = re.compile(f"({_EXTRACTOR})?part/([0-9]+)/")
_FAR = 1e9
MIN_FITTED = 16
"""Numbers that a picture must have for its brightness and contrast, two numbers, to be fitted to the true one."""
_WORST = {"mse": 1.0, "psnr": 0.0, "ssim": 0.0, "ssim_rog": 0.0, "ssim_uniform7": 0.0}


class Reconstructed(Protocol):
    """What an attack hands back (`attacks.base.Reconstruction`)."""

    @property
    def inputs(self) -> Tensor | None:
        """Images (N, C, H, W), or None where the attack recovers none."""

    @property
    def labels(self) -> Tensor | None:
        """Recovered labels (N,), or probabilities (N, K), or None."""

    @property
    def objective(self) -> float:
        """The attack's own objective at the end; NaN without one."""

    @property
    def seen(self) -> Tensor | None:
        """The pixels (N, C, H, W) that the network is given, where it is given some alone; else None."""

    @property
    def remarks(self) -> Collection[str]:
        """What the result says of itself (`attacks.result.Remark`)."""

    @property
    def private(self) -> Mapping[str, Value]:
        """Recovered private tensors by name, generated parameters under `extractor/name`."""


class TrueValues(Protocol):
    """What a client held (`fl.client.Truth`)."""

    @property
    def inputs(self) -> Tensor:
        """Images (M, C, H, W) in [0, 1]."""

    @property
    def labels(self) -> Tensor:
        """Labels (M,), or probabilities (M, K), where the largest counts."""

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
    public: Tensor | None = None,
    seed: int = 0,
    task: Task | None = None,
) -> list[Row]:
    """Match the reconstructions to the true images once and take every metric in that order.

    Columns:
        image, matched: indices into the truth and into the reconstructions (None if nothing matches).
        images, candidates: how many true images and reconstructions the batch had.
        failure: None, "unmatched" or "non-finite".
        the names in `MEASURES`, and LPIPS under the name of its backbone and size.
        psnr_seen, seen, seen_numbers: where the network is given some pixels alone, PSNR of these, which share they
            are, and how many numbers.
        psnr_scaled: of pictures known up to brightness and contrast, PSNR once these are fitted to the true one.
        exact8: every pixel right after rounding to 8 bits.
        label, label_correct: the true label, and whether its reconstruction has it (None if either was not recovered).
        label_error: under another loss than cross entropy, how far the target is off (`fl.losses.Loss.errors`).
        row_accuracy, exact_match, categories_right, numbers_right: of a table (`eval.metrics.tables`).
        tokens, tokens_read, tokens_recall, tokens_precision: of ids (`eval.metrics.tokens`).
        label_overlap: share of the batch's labels recovered, in whatever order.
        objective: of the attack, for the whole batch.
        private_errors: relative error of every recovered private tensor, a group's clients matched once as images are.
        extractor_error: of the generated parameters together (None if they were not all recovered).
        unscored: where no images were recovered, the names of what else was and has no true value; absent if nothing.
        floor_<guess>_<metric>: (psnr_seen and psnr_scaled as well) for every guess of `eval.metrics.baselines`.
        missing: why a figure could not be taken, by column.

    Args:
        reconstruction: of an attack.
        truth: what the client fed.
        perceptual: LPIPS, from `eval.metrics.perceptual.load_lpips`.
        reference: images (R, C, H, W) the attacker had before, for the baseline `nearest`.
        public: means (M, C, H, W) of public images that the attack has, for the baseline `public`.
        seed: of the baseline `noise`.
        task: what the inputs are and what the targets are of; None is pictures and cross entropy.

    Returns:
        One row per true image, in the order of the truth.

    Raises:
        ValueError: shapes do not fit, or true images are not in [0, 1].
    """
    if not len(truth.inputs):
        raise ValueError("expected at least one true image, got none")
    true = truth.inputs.detach()
    metrics.prepare(true, true)
    recovered = reconstruction.inputs
    guess = true[:0] if recovered is None else recovered.detach().to(true.device)
    loss = CrossEntropy() if task is None else task.loss
    form = image_form(true.shape[1:]) if task is None else task.inputs
    matched = _match(reconstruction, truth, guess, loss)
    measures, missing = _measures(true, perceptual, form)
    scored = _images(measures, guess, true, matched)
    failure, absent, why = _absent(measures, recovered)
    labels, batch = _labels(reconstruction, truth, matched, loss), _batch(reconstruction, truth)
    if task is not None and form.has_ids:
        batch |= token_scores(reconstruction.private, task, true)
    if form.kind == "table":
        scored = _with_columns(scored, guess, true, matched, form)
        absent |= NOT_FOUND if failure is not None else {}
    guesses = _Guesses(reference, public, seed, task).of(true)
    floors = _floors(measures, true, guesses, form)
    rows: list[Row] = []
    for image, match in enumerate(matched):
        head = {"image": image, "matched": match, "images": len(true), "candidates": len(guess)}
        row: Row = {**head, "failure": failure if match is None else None, **dict.fromkeys(missing, math.nan)}
        row |= {**scored.get(image, absent), **labels[image], **batch, **floors[image]}
        if match is not None:
            row |= _figures_of_kind(reconstruction, match, guesses, true, image)
        reasons = missing if match is not None else dict.fromkeys(absent, why) | missing
        rows.append(_json_ready(row, reasons))
    return rows


def _match(reconstruction: Reconstructed, truth: TrueValues, guess: Tensor, loss: Loss) -> list[int | None]:
    """Return which reconstruction stands for each true image; copies of one image change places for their labels."""
    true = truth.inputs.detach()
    matched = assign(guess, true)
    told = reconstruction.labels if loss.takes_classes else None
    if told is None or len(told) != len(guess) or len(truth.labels) != len(true):
        return matched
    return exchange_copies(matched, true, _hard(told), _hard(truth.labels))


def _figures_of_kind(
    reconstruction: Reconstructed, match: int, guesses: Mapping[str, Tensor], true: Tensor, image: int
) -> Row:
    """Return the figures of images whose network sees some pixels alone, or that are known up to a scale."""
    assert reconstruction.inputs is not None
    found, row = reconstruction.inputs.detach()[match].to(true.device), Row()
    if reconstruction.seen is not None and reconstruction.seen[match].any():
        row |= _of_seen_pixels(guesses, found, true[image], reconstruction.seen[match], image)
    by_channel = Remark.SCALES_TAKEN_OFF in reconstruction.remarks
    scaled = by_channel or Remark.SCALE_TAKEN_OFF in reconstruction.remarks
    fitted = true[0, 0] if by_channel else true[0]
    if scaled and fitted.numel() >= MIN_FITTED:
        row |= _up_to_scale(guesses, found, true[image], image, by_channel=by_channel)
    return row


def score_without_truth(reconstruction: Reconstructed, size: int | None, task: Task | None = None) -> list[Row]:
    """Return rows of an update whose true images nobody has: one per reconstruction, or one if there is none.

    The columns are those of `score`, as far as they can be told; `unjudged` says that there is nothing to compare with.

    Args:
        reconstruction: of an attack.
        size: how many images the update is computed from; None if the server does not know.
        task: what the targets are of; None is cross entropy.
    """
    found = reconstruction.inputs
    given, classes = reconstruction.labels, task is None or task.loss.takes_classes
    labels = None if given is None or not classes else _hard(given)
    row: Row = {
        **{"images": size, "candidates": 0 if found is None else len(found), "unjudged": True, "failure": None},
        **dict.fromkeys((*MEASURES, "exact8"), math.nan),
        **{"label": None, "label_correct": None, "label_overlap": None},
        **{"objective": float(reconstruction.objective), "private_errors": {}, "extractor_error": None},
    }
    if found is None and reconstruction.private:
        row["unscored"] = sorted(reconstruction.private)
    heads: list[Row] = [{"image": i, "matched": i} for i in range(row["candidates"])] or [{"matched": None}]
    told = [None] * len(heads) if labels is None or len(labels) != len(heads) else labels
    reasons = dict.fromkeys((*MEASURES, "exact8"), NO_TRUTH)
    return [
        _json_ready({**head, **row, "recovered_label": label}, reasons) for head, label in zip(heads, told, strict=True)
    ]


def private_errors(recovered: Mapping[str, Value], true: Mapping[str, Value]) -> dict[str, float]:
    """Return relative error `|a - b| / |b|` of every recovered tensor that has a true value.

    Recovered tensors without one (such as features) are left out. A wrong value of a true zero has infinite error.

    Raises:
        ValueError: a recovered tensor has another shape than the true one.
    """
    return {name: relative_error({name: recovered[name]}, {name: true[name]}) for name in recovered if name in true}


def relative_error(a: Mapping[str, Value], b: Mapping[str, Value]) -> float:
    """Return `|a - b| / |b|` of all tensors of `b` together, summed in float64.

    Raises:
        ValueError: a tensor has another shape in `a` than in `b`.
    """
    difference = norm = 0.0
    for name, value in b.items():
        mine, true = dense(a[name]), dense(value)
        if mine.shape != true.shape:
            raise ValueError(f"expected {name!r} of shape {tuple(true.shape)}, got {tuple(mine.shape)}")
        mine, true = (x.detach() if x.is_floating_point() else x.double() for x in (mine, true))
        difference += _squared(mine.to(true.device) - true)
        norm += _squared(true)
    if norm == 0:
        return math.nan if math.isnan(difference) else math.inf if difference else 0.0
    return math.sqrt(difference / norm)


def _squared(value: Tensor) -> float:
    """Return the squared norm, summed in float64 without a copy in it: of a hypernetwork that would be 120 MB."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _measures(
    true: Tensor, perceptual: Perceptual | None, form: InputForm
) -> tuple[dict[str, Measure], dict[str, str]]:
    """Return the metrics that can be taken of these images, and why the others can't."""
    channels, height, width = true.shape[1:]
    measures, missing = dict(MEASURES), {}
    if not form.is_image:
        odd = [name for name in measures if name not in ("mse", "psnr")]
        return {name: measures[name] for name in ("mse", "psnr")}, dict.fromkeys((*odd, "lpips"), NO_PICTURES)
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
    """Return every metric of every pair of images."""
    if not len(a):
        return []
    columns = {name: measure(a, b).tolist() for name, measure in measures.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(a))]


def _images(measures: Mapping[str, Measure], guess: Tensor, true: Tensor, matched: list[int | None]) -> dict[int, Row]:
    """Return the figures of every true image that a reconstruction stands for."""
    hits = [i for i, j in enumerate(matched) if j is not None]
    found = [j for j in matched if j is not None]
    a, b = guess[found], true[hits]
    columns = zip(hits, _take(measures, a, b), metrics.exact8(a, b).tolist(), strict=True)
    return {image: {**figures, "exact8": exact} for image, figures, exact in columns}


def _absent(measures: Mapping[str, Measure], recovered: Tensor | None) -> tuple[str | None, Row, str]:
    """Return what a true image without a reconstruction gets: its failure, its figures, why others are missing."""
    if recovered is None:
        return None, dict.fromkeys([*measures, "exact8"], math.nan), NO_IMAGES
    failure = "unmatched" if recovered.isfinite().all() else "non-finite"
    return failure, {**{name: _WORST.get(name, math.nan) for name in measures}, "exact8": False}, NO_RECONSTRUCTION


@dataclass(frozen=True)
class _Guesses:
    """What the baselines are made of: images that the attacker had before, their means, the seed of noise, the task."""

    reference: Tensor | None
    public: Tensor | None
    seed: int
    task: Task | None

    def of(self, true: Tensor) -> dict[str, Tensor]:
        """Return the baselines by name."""
        found = baseline_images(true, reference=self.reference, public=self.public, seed=self.seed)
        if self.task is not None and self.task.inputs.shape[1:] == (1, 1):  # the mean over pixels would be the truth
            usual = true.new_tensor(self.task.mean).clamp(0, 1).view(1, -1, 1, 1)
            found["mean"] = usual.expand_as(true)
        return found


def _of_seen_pixels(guesses: Mapping[str, Tensor], found: Tensor, true: Tensor, seen: Tensor, image: int) -> Row:
    """Return PSNR of an image and of all guesses of it, on the pixels alone that the network is given."""
    seen = seen.to(true.device)
    share = float(seen.double().mean())

    def figure(other: Tensor) -> float:
        off = float(metrics.mse(torch.where(seen, other.to(true), true)[None], true[None])) / share
        return min(metrics.PSNR_CAP, -10 * math.log10(off)) if off > 0 else metrics.PSNR_CAP

    floors = {f"floor_{name}_psnr_seen": figure(images[image]) for name, images in guesses.items()}
    return {"seen": share, "seen_numbers": int(seen.sum()), "psnr_seen": figure(found), **floors}


def _up_to_scale(guesses: Mapping[str, Tensor], found: Tensor, true: Tensor, image: int, *, by_channel: bool) -> Row:
    """Return PSNR of an image and of all guesses of it, each once its brightness and contrast are fitted to the truth.

    Of a guess that turns dark and bright around nothing but its mean is left. They are fitted channel by channel where
    each channel's are open.
    """
    groups = len(true) if by_channel else 1
    wanted = true.double().reshape(groups, -1)

    def figure(other: Tensor) -> float:
        own = other.to(wanted).reshape(groups, -1)
        own = own - own.mean(1, keepdim=True)
        size = own.square().sum(1)
        slope = torch.where(size > 0, (own * wanted).sum(1) / size, 0.0).clamp_min(0)
        made = wanted.mean(1, keepdim=True) + slope[:, None] * own
        return float(metrics.psnr(made.view_as(true)[None], true[None]))

    floors = {f"floor_{name}_psnr_scaled": figure(images[image]) for name, images in guesses.items()}
    return {"psnr_scaled": figure(found), **floors}


def _floors(measures: Mapping[str, Measure], true: Tensor, guesses: Mapping[str, Tensor], form: InputForm) -> list[Row]:
    rows: list[Row] = [{} for _ in true]
    for guess, images in guesses.items():
        for row, figures in zip(rows, _take(measures, images, true), strict=True):
            row |= {f"floor_{guess}_{name}": figure for name, figure in figures.items()}
        if form.kind == "table":
            for row, figures in zip(rows, table_scores(images, true, form), strict=True):
                row |= {f"floor_{guess}_{name}": figure for name, figure in figures.items()}
    return rows


def _with_columns(
    scored: dict[int, Row], guess: Tensor, true: Tensor, matched: list[int | None], form: InputForm
) -> dict[int, Row]:
    """Return the figures of every true row with the shares of its columns that are right."""
    hits = [i for i, j in enumerate(matched) if j is not None]
    found = guess[[j for j in matched if j is not None]]
    shares = dict(zip(hits, table_scores(found, true[hits], form), strict=True)) if hits else {}
    return {image: {**row, **shares[image]} for image, row in scored.items()}


def _targets(reconstruction: Reconstructed, truth: TrueValues, matched: list[int | None], loss: Loss) -> list[Row]:
    """Return what is told of targets that are no classes: each true one, and how far the one recovered is off."""
    true, recovered = truth.labels, reconstruction.labels
    rows: list[Row] = [
        {"label": None, "target": loss.plain(one), "label_correct": None, "label_overlap": None, "label_error": None}
        for one in true
    ]
    if recovered is None or reconstruction.inputs is None or len(recovered) != len(reconstruction.inputs):
        return rows
    hits = [(i, j) for i, j in enumerate(matched) if j is not None]
    if not hits:
        return rows
    mine, own = ([pair[side] for pair in hits] for side in (1, 0))
    off = loss.errors(recovered.detach().cpu()[mine], true.cpu()[own]).tolist()
    for i, error in zip(own, off, strict=True):
        rows[i] |= {"label_error": error, "label_correct": error == 0 if loss.has_exact_targets else None}
    return rows


def _labels(reconstruction: Reconstructed, truth: TrueValues, matched: list[int | None], loss: Loss) -> list[Row]:
    if not loss.takes_classes:
        return _targets(reconstruction, truth, matched, loss)
    true = _hard(truth.labels)
    if len(true) != len(matched):
        raise ValueError(f"expected {len(matched)} true labels, one per image, got {len(true)}")
    if reconstruction.labels is None:
        return [{"label": label, "label_correct": None, "label_overlap": None} for label in true]
    recovered, images = _hard(reconstruction.labels), reconstruction.inputs
    overlap = (Counter(recovered) & Counter(true)).total() / len(true)
    if images is None:
        return [{"label": label, "label_correct": None, "label_overlap": overlap} for label in true]
    if len(recovered) != len(images):
        raise ValueError(f"expected {len(images)} recovered labels, one per image, got {len(recovered)}")
    correct = [j is not None and recovered[j] == label for label, j in zip(true, matched, strict=True)]
    columns = zip(true, correct, strict=True)
    return [{"label": label, "label_correct": right, "label_overlap": overlap} for label, right in columns]


def _hard(labels: Tensor) -> list[int]:
    indices = labels.argmax(1) if labels.ndim == 2 else labels
    return [int(label) for label in indices.tolist()]


def _batch(reconstruction: Reconstructed, truth: TrueValues) -> Row:
    """Return what is known of the whole batch and repeated in each of its rows."""
    known = {**truth.private, **{_EXTRACTOR + name: value for name, value in truth.extractor.items()}}
    found = _by_client(reconstruction.private, known)
    errors = private_errors(found, known)
    extractor = {name: found.get(_EXTRACTOR + name) for name in truth.extractor}
    whole = {name: value for name, value in extractor.items() if value is not None}
    complete = bool(whole) and len(whole) == len(extractor)
    row: Row = {"objective": float(reconstruction.objective), "private_errors": errors}
    row["extractor_error"] = relative_error(whole, truth.extractor) if complete else None
    unscored = sorted(set(reconstruction.private) - set(known))
    return {**row, "unscored": unscored} if unscored and reconstruction.inputs is None else row


def _by_client(recovered: Mapping[str, Value], true: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return recovered tensors of a group under the numbers of the clients they come closest to, all together.

    A mean does not say which client is which, no more than it says which image is: clients that train alike could
    change places. Clients of other tensors are never confused.
    """
    mine, theirs = (_tensors_by_client(tensors) for tensors in (recovered, true))
    if len(mine) < 2 or mine.keys() != theirs.keys():
        return recovered
    numbers = sorted(mine)
    cost = np.array([[_capped_relative_error(mine[j], theirs[i]) for j in numbers] for i in numbers])
    _, columns = linear_sum_assignment(cost)
    moved = {numbers[j]: i for i, j in zip(numbers, columns.tolist(), strict=True)}

    def renamed(name: str) -> str:
        told = _CLIENT.match(name)
        return name if told is None else f"{told[1] or ''}part/{moved[int(told[2])]}/{name[told.end() :]}"

    return {renamed(name): value for name, value in recovered.items()}


def _tensors_by_client(tensors: Mapping[str, Value]) -> dict[int, dict[str, Value]]:
    """Return the tensors that belong to each client of a group, by its number."""
    found: dict[int, dict[str, Value]] = {}
    for name, value in tensors.items():
        if told := _CLIENT.match(name):
            found.setdefault(int(told[2]), {})[(told[1] or "") + name[told.end() :]] = value
    return found


def _capped_relative_error(mine: Mapping[str, Value], true: Mapping[str, Value]) -> float:
    """Return the sum of relative errors, at most `_FAR`; `_FAR` for tensors of other shapes."""
    shared = [name for name in mine if name in true]
    if any(mine[name].shape != true[name].shape for name in shared):
        return _FAR
    total = sum(relative_error({name: mine[name]}, {name: true[name]}) for name in shared)
    return total if total < _FAR else _FAR  # NaN: far


def _json_ready(row: Row, reasons: Mapping[str, str]) -> Row:
    """Return the row with None for every number that is not finite, and the reasons under `missing`."""
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
