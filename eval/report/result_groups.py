"""Figures of a run by group of rows: all that is said of one method under one defense, one attack and one round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from statistics import median as middle
from typing import Any

from attacks.verification.other_pictures import LEAST_SEEN
from eval.io.text import format_count
from eval.metrics import statistics, validity_flags
from eval.metrics.lineup import AMONG, BY_PICTURE, BY_UPDATE
from eval.metrics.score import NO_RECONSTRUCTION, Row
from eval.metrics.statistics import Interval
from eval.report.settings import RunSettings

IMAGE = "picture"
"""Column that tells images apart across an experiment."""
COPY_OF = validity_flags.COPY_OF
"""Column of an image that equals another one: that one's name. Copies count as one image."""
BASELINES = {"mean": "mean color", "grey": "mid gray", "noise": "noise", "nearest": "nearest image"}
"""What can be guessed without the update (see `eval.metrics.baselines`)."""
OWN_BASELINES = {**BASELINES, "public": "mean of the attack's public images"}
"""The same, with what an attack that has public images can guess by itself."""
RECOGNIZABLE_PSNR = 20.0
"""PSNR in dB from which on a person recognizes the content, about."""
CLEAR_MARGIN = 10.0
"""An image counts as leaked on its own if it is recognizable and this far, in dB, above every guess of that image."""
MIN_IMAGES = 6
"""Images from which on a mean can be shown to lie above a baseline: of five, all may do so by chance (1 in 32)."""
NOT_ATTACKED = "-"
"""Stands for the attack in rows of a training that none was asked for on."""
PSNR_COLUMNS = ("psnr", "psnr_seen", "psnr_scaled")
"""Of whole pictures; of the pixels alone that a network is given; once brightness and contrast are fitted, where these
are all that is open."""
MIN_SEEN_NUMBERS = 64
"""Numbers of a picture that a part of it must have, below `LEAST_SEEN` of them, for its PSNR to count: 8 by 8 gray
pixels show content, and few numbers come near to right ones by chance."""
RECOVERED_BELOW = 0.1
"""Relative error below which a private tensor counts as recovered."""


@dataclass(frozen=True)
class PrivateTensorRecovery:
    """How far an attack came with one private value.

    Attributes:
        errors: relative error for every update that the attack applied to, infinite where nothing of it came back.
    """

    errors: tuple[float, ...]

    @property
    def n_recovered(self) -> int:
        """Return for how many updates it was recovered."""
        return sum(error < RECOVERED_BELOW for error in self.errors)

    @property
    def share_in_words(self) -> str:
        """Return words such as `1 of 2 updates`."""
        return f"{self.n_recovered} of {format_count(len(self.errors), 'update')}"

    @property
    def best_error(self) -> float | None:
        """Return the smallest error; None where nothing came back."""
        return _finite(min(self.errors))

    @property
    def median_error(self) -> float | None:
        """Return the median error; None where nothing came back for half of the updates."""
        return _finite(middle(self.errors))


@dataclass(frozen=True)
class ResultGroup:
    """The rows of one setting.

    Attributes:
        method, defense, attack: labels.
        round: rounds of training before the observed one.
        rows: one per attacked image and seed, in the order of the file.
    """

    method: str
    defense: str
    attack: str
    round: int
    rows: tuple[Row, ...]

    @property
    def subject(self) -> tuple[str, str]:
        """Return method and defense."""
        return self.method, self.defense

    @cached_property
    def attacked_rows(self) -> list[Row]:
        """Return rows of updates that the attack applied to."""
        return [row for row in self.rows if "not_applicable" not in row]

    @cached_property
    def image_rows(self) -> list[Row]:
        """Return rows with an image to judge; failures count, attacks that are not after images don't."""
        return [row for row in self.attacked_rows if row.get("psnr") is not None]

    @cached_property
    def unjudged_rows(self) -> list[Row]:
        """Rows of reconstructions that nothing can be compared with, as the true images are not known."""
        return [row for row in self.attacked_rows if row.get("unjudged")]

    @cached_property
    def refusals(self) -> dict[str, int]:
        """Return why the attack said nothing, and of how many updates."""
        return dict(Counter(str(row["not_applicable"]) for row in self.rows if "not_applicable" in row))

    @cached_property
    def accuracy_by_seed(self) -> dict[int, float]:
        """Return accuracy in the group's round by seed; empty where it was not measured."""
        return self.by_seed("accuracy")

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy in the group's round, mean over seeds."""
        return fmean(self.accuracy_by_seed.values()) if self.accuracy_by_seed else None

    def by_seed(self, column: str) -> dict[int, float]:
        """Return a figure of the training by seed: each seed trains one model, however many images are attacked."""
        return {row["seed"]: row[column] for row in self.rows if row.get(column) is not None}

    def mean_over_seeds(self, column: str) -> float | None:
        """Return mean over seeds of a figure of the training."""
        values = self.by_seed(column)
        return fmean(values.values()) if values else None

    @cached_property
    def psnr(self) -> Interval | None:
        """Return mean PSNR in dB."""
        return self.mean_interval("psnr")

    @cached_property
    def n_images(self) -> int:
        """Return how many different images were attacked."""
        return len({image_name(row) for row in self.image_rows})

    @cached_property
    def best_baseline(self) -> tuple[str, float] | None:
        """Return the guess that scores best on these images, and its mean PSNR in dB."""
        means = {
            g: fmean(row[_baseline_column(g)] for row in self.image_rows)
            for g in OWN_BASELINES
            if _all(self.image_rows, _baseline_column(g))
        }
        return max(means.items(), key=lambda item: item[1]) if means else None

    @cached_property
    def gain(self) -> Interval | None:
        """Return PSNR above the best baseline in dB, image by image."""
        if self.best_baseline is None:
            return None
        column = _baseline_column(self.best_baseline[0])
        return _mean([{**row, "gain": row["psnr"] - row[column]} for row in self.image_rows], "gain")

    @cached_property
    def leaked_rows(self) -> list[Row]:
        """Return images that leaked by themselves: recognizable, and `CLEAR_MARGIN` above each of their guesses."""
        return [row for row in self.image_rows if any(leaks_alone(row, metric) for metric in PSNR_COLUMNS)]

    @cached_property
    def label_recovery_rate(self) -> Interval | None:
        """Return share of images whose class was recovered."""
        return success_share([{**row, "hit": float(row["label_correct"])} for row in self.labeled_rows], "hit")

    @cached_property
    def labeled_rows(self) -> list[Row]:
        """Return all images once the attack names any label; one without a named label has none recovered."""
        if all(row.get("label_correct") is None for row in self.image_rows):
            return []
        return [{**row, "label_correct": bool(row.get("label_correct"))} for row in self.image_rows]

    @cached_property
    def identification(self) -> IdentificationRate | None:
        """Return how many reconstructions name their image among others of its class, by their pixels."""
        return self.identification_by(BY_PICTURE)

    def identification_by(self, column: str) -> IdentificationRate | None:
        """Return how many images are named so (see `eval.metrics.lineup`); None where none could be.

        Every image counts once, from the first seed that attacked it: seeds share their images.
        """
        once = self.first_rows(column)
        if not once:
            return None
        chances = [1 / row[AMONG] if column == BY_UPDATE else chance_rate(row) for row in once]
        return IdentificationRate(sum(bool(row[column]) for row in once), len(once), fmean(chances))

    def first_rows(self, column: str) -> list[Row]:
        """Return the rows in which it is told whether an image is named, one for each image."""
        rows = self.attacked_rows if column == BY_UPDATE else self.image_rows  # an update tells without a picture
        return list({image_name(row): row for row in reversed(rows) if row.get(column) is not None}.values())

    @cached_property
    def label_gain(self) -> Interval | None:
        """Return share of labels recovered above what the commonest class of these images gets by itself."""
        share, common = self.label_recovery_rate, self.commonest_label_share
        if share is None or common is None:
            return None
        low, high = (None if end is None else end - common for end in (share.low, share.high))
        return replace(share, value=share.value - common, low=low, high=high)

    @cached_property
    def commonest_label_share(self) -> float | None:
        """Return share of the commonest class among these images: what naming it every time gets."""
        known = [str(row["label"]) for row in self.labeled_rows]
        return Counter(known).most_common(1)[0][1] / len(known) if known else None

    @cached_property
    def private_tensors(self) -> dict[str, PrivateTensorRecovery]:
        """Return what came back of what else was private, by name; "extractor" is the generated part."""
        return private_tensor_recoveries(self.attacked_rows)

    def mean_interval(self, column: str) -> Interval | None:
        """Return mean of a column with its interval; None where no row has it."""
        return _mean([row for row in self.image_rows if column in row], column)

    def share_reaching(self, level: float, prefix: str = "") -> Interval | None:
        """Return share of images with a PSNR of at least `level` dB."""
        return share_reaching(self.image_rows, level, f"{prefix}psnr")

    def flags(self, setting: RunSettings) -> list[str]:
        """Return the validity flags that apply (see `eval.metrics.validity_flags`)."""
        judged = [row for row in self.attacked_rows if not row.get("unjudged")]
        if not judged:
            return []
        errors = [row.get("forward_error", 0.0) for row in judged]
        histories = [row.get("history") or [] for row in judged]
        knows = setting.threat.get("knows_defense", False)
        found = validity_flags.find_flags(
            judged,
            histories=[[math.nan if value is None else value for value in history] for history in histories],
            labels_given=bool(setting.threat.get("knows_labels", False)),
            defense_known=setting.defense_name(self.defense) != "none" and bool(knows),
            forward_error=max(math.inf if error is None else error for error in errors),
            tolerance=validity_flags.forward_error_limit(judged),
            image=IMAGE,
        )
        return [name for name in found if name != "lpips-missing" or setting.lpips_asked]


def leaks_alone(row: Row, metric: str = "psnr") -> bool:
    """Return whether an image is recognizable and `CLEAR_MARGIN` above each of its guesses.

    Args:
        row: of the image.
        metric: one of `PSNR_COLUMNS`.
    """
    floors = (row.get(_baseline_column(g, metric)) for g in OWN_BASELINES)
    known = [floor for floor in floors if floor is not None]
    value = row.get(metric) if metric != "psnr_seen" or is_seen_enough(row) else None
    return value is not None and value >= RECOGNIZABLE_PSNR and bool(known) and value - max(known) >= CLEAR_MARGIN


def is_seen_enough(row: Row) -> bool:
    """Return whether the pixels that a network is given are so many that a figure of them alone counts."""
    share = row.get("seen")
    return share is not None and (share >= LEAST_SEEN or row.get("seen_numbers", 0) >= MIN_SEEN_NUMBERS)


def private_tensor_recoveries(rows: Sequence[Row]) -> dict[str, PrivateTensorRecovery]:
    """Return what is private and came back for any update, by name, with one error for every update."""
    updates = {(row.get("seed"), row.get("update")): row for row in rows}  # the rows of an update repeat them
    found: list[dict[str, float]] = []
    for row in updates.values():
        errors = {name: e for name, e in row.get("private_errors", {}).items() if not name.startswith("extractor/")}
        if row.get("extractor_error") is not None or "extractor_error" in row.get("missing", {}):
            errors["extractor"] = row["extractor_error"]  # all of them together
        found.append({name: math.inf if error is None else error for name, error in errors.items()})
    names = dict.fromkeys(name for errors in found for name in errors)
    return {name: PrivateTensorRecovery(tuple(errors.get(name, math.inf) for errors in found)) for name in names}


def group_rows(rows: Sequence[Row]) -> list[ResultGroup]:
    """Return the rows by setting, in the order in which settings first appear."""
    found: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["defense"], row["attack"], row["round"]), []).append(row)
    return [ResultGroup(*key, tuple(group)) for key, group in found.items()]


def image_name(row: Row) -> Any:
    """Return the name of the row's image; of a copy that of the first one."""
    return row.get(COPY_OF, row[IMAGE])


def image_key(row: Row) -> tuple[Any, ...]:
    """Return what tells an attacked image from others: its name, and two figures of its pixels."""
    return (row[IMAGE], row.get("floor_mean_mse"), row.get("floor_grey_mse"))


def distinct_images(rows: Sequence[Row]) -> list[Row]:
    """Return one row per attacked image and seed, for the baselines, which depend on no attack."""
    shown = [row for row in rows if row.get(IMAGE) is not None and "images" in row]
    named = [{**row, IMAGE: (image_name(row), *image_key(row)[1:])} for row in shown]
    for row in named:
        row.pop(COPY_OF, None)
    return list({(row[IMAGE], row["seed"]): row for row in named}.values())


def baseline_means(rows: Sequence[Row], metric: str = "psnr") -> dict[str, float]:
    """Return mean PSNR in dB, or another metric, of every guess on the attacked images."""
    named: dict[tuple[Any, ...], list[Row]] = {}
    for row in distinct_images(rows):
        named.setdefault(row[IMAGE], []).append(row)
    return {
        guess: fmean(fmean(row[_baseline_column(guess, metric)] for row in own) for own in named.values())
        for guess in BASELINES
        if _all([row for own in named.values() for row in own], _baseline_column(guess, metric))
    }


def baseline_scores(rows: Sequence[Row], metric: str = "psnr") -> dict[str, Interval]:
    """Return what every guess scores on the attacked images, each counted once per seed."""
    chosen = distinct_images(rows)
    found = {guess: _mean(chosen, f"floor_{guess}_{metric}") for guess in BASELINES if _has(chosen, guess, metric)}
    return {guess: value for guess, value in found.items() if value is not None}


def share_reaching(rows: Sequence[Row], level: float, column: str = "psnr") -> Interval | None:
    """Return share of rows of at least `level` dB in a column.

    Args:
        rows: one per image.
        level: a PSNR in dB.
        column: of the PSNR.
    """
    known = [row for row in rows if row.get(column) is not None]
    names = (IMAGE, COPY_OF, "seed")  # a copy of thousands of whole rows takes longer than all else here
    hits = [{name: row[name] for name in names if name in row} | {"hit": float(row[column] >= level)} for row in known]
    return success_share(hits, "hit")


def success_share(rows: Sequence[Row], column: str) -> Interval | None:
    """Return share of ones in a column of zeros and ones; images are the trials (`statistics.success_rate`)."""
    return statistics.success_rate(_copies_as_runs(rows), 0.5, column, image=IMAGE) if rows else None


def lpips_column(rows: Sequence[Row]) -> str | None:
    """Return the column that holds LPIPS, where any row has a figure in it."""
    return next((name for row in rows for name in row if name.startswith("lpips_") and row[name] is not None), None)


@dataclass(frozen=True)
class IdentificationRate:
    """How many reconstructions are closer to their own image than to others of its class.

    Attributes:
        hits: images so named.
        images: of so many.
        chance: the share that is named without the update, at most.
    """

    hits: int
    images: int
    chance: float

    @property
    def interval(self) -> tuple[float, float]:
        """Return the share's 95 % interval by Clopper and Pearson."""
        return statistics.exact_interval(self.hits, self.images)

    def excess_over_chance(self, tests: int) -> float:
        """Return by how much the share exceeds chance at least, as the best of so many tests (Bonferroni)."""
        return statistics.rate_lower_bound(self.hits, self.images, 0.025 / tests) - self.chance


def chance_rate(row: Row) -> float:
    """Return how often a reconstruction that knows nothing names its image: `candidates` / `among`.

    Of an update's several reconstructions the closest stands for each image, which is as many guesses.
    """
    return min(1.0, float(row.get("candidates", 1)) / float(row[AMONG]))


def exceeds_baseline(gain: Interval | None) -> bool:
    """Return whether a gain's interval lies above zero, over enough images for that to count."""
    return gain is not None and gain.low is not None and gain.low > 0 and gain.images >= MIN_IMAGES


def has_failed(row: Row) -> bool:
    """Return whether no reconstruction stands for the image, so that its figures are the worst there are."""
    return bool(row.get("failure")) or NO_RECONSTRUCTION in row.get("missing", {}).values()


def _mean(rows: Sequence[Row], column: str) -> Interval | None:
    known = [row for row in rows if row.get(column) is not None]
    return statistics.mean_interval(_copies_as_runs(known), column, image=IMAGE) if known else None


def _copies_as_runs(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with copies of an image as further attempts on it, so that they count as one image."""
    if not any(COPY_OF in row for row in rows):
        return rows
    return [
        {**row, IMAGE: row[COPY_OF], "seed": (row.get("seed"), row[IMAGE])} if COPY_OF in row else row for row in rows
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _baseline_column(guess: str, metric: str = "psnr") -> str:
    return f"floor_{guess}_{metric}"


def _all(rows: Sequence[Mapping[str, object]], column: str) -> bool:
    return bool(rows) and all(row.get(column) is not None for row in rows)


def _has(rows: Sequence[Row], guess: str, metric: str) -> bool:
    return any(row.get(f"floor_{guess}_{metric}") is not None for row in rows)
