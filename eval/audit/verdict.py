"""Whether image content leaked, in one sentence: by the bar of reports, for audits and single updates."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

from attacks.gradient_matching.engine.fit_check import EXPLAINED_BELOW, LABELS_SEARCHED, LABELS_UNCONFIRMED
from attacks.labels.recovery import LABELS_COUNTED
from attacks.result import Remark
from eval.io.text import join_words
from eval.metrics.own_pictures import OWN_PSNR
from eval.metrics.score import Row
from eval.metrics.self_verification import borne_out_words, remarks_of, verification_words
from eval.metrics.validity_flags import CHANGED_BY
from eval.report.result_groups import (
    CLEAR_MARGIN,
    COPY_OF,
    IMAGE,
    MIN_IMAGES,
    RECOGNIZABLE_PSNR,
    RECOVERED_BELOW,
    ResultGroup,
    exceeds_baseline,
    has_failed,
    is_seen_enough,
    leaks_alone,
    private_tensor_recoveries,
)

COUNTED_MARGIN = 1.0
"""How far above every guess, in dB, an image has to come to be counted beside the verdict, which asks for more."""
FLAT_FROM = 40.0
"""PSNR in dB of an image's own mean color from which on it is flat: only an exact attack is told from that guess."""
SCALED = "once brightness and contrast are fitted, which the network takes off"
MEASURED = {"residual", "rank", "condition"}
"""Prefixes of what exact attacks hand out to say how their equations were solved: nothing of the client's."""


def verdict(rows: Sequence[Row], tests: int = 1) -> str:
    """Return what leaked, in a sentence: images beside the best guess without the update, and private tensors.

    Args:
        rows: of one attack.
        tests: so many attacks are judged by the images that they name.
    """
    images, tokens, columns = image_verdict(rows, tests), token_verdict(rows), column_verdict(rows)
    said = [words for words in (tokens, images, columns) if words]
    private = private_tensor_recoveries(rows)
    if not images and not private and not tokens:
        said.append(describe_no_images(rows))
    labels = [_label(row) for row in rows]
    if any(
        label is not None for label in labels
    ):  # an image for which none came back counts as one whose label did not
        why = [_label_doubt(row) for row in rows if row.get("labels_doubtful")]
        doubt = f" (doubtful: {why[0]})" if why else ""
        said.append(f"{round(sum(label or 0.0 for label in labels))} of {len(labels)} label(s) recovered{doubt}")
    for what, secret in private.items():
        word = "leaked: " if secret.n_recovered else ""
        closest = "" if secret.best_error is None else f", at best {secret.best_error:.0e}"
        said.append(
            f"private {what} {word}recovered for {secret.n_recovered} of {len(secret.errors)} update(s) "
            f"(relative error below {RECOVERED_BELOW:g}{closest})"
        )
    return "; ".join(said)


def _label_doubt(row: Row) -> str:
    """Return why labels are doubtful, in the words of the attack."""
    said = (words for words in (LABELS_COUNTED, LABELS_SEARCHED) if words in row.get("note", ""))
    return next(said, LABELS_UNCONFIRMED)


def token_verdict(rows: Sequence[Row]) -> str:
    """Return which ids were read off updates, in words; empty where none were."""
    updates = {row.get("update"): row for row in rows if row.get("tokens_read") is not None}
    if not updates:
        return ""
    own = list(updates.values())
    occur, read = (sum(row[column] for row in own) for column in ("tokens", "tokens_read"))
    hits = round(sum(row["tokens_precision"] * row["tokens_read"] for row in own if row["tokens_read"]))
    wrong = f", {read - hits} other(s) read" if read > hits else ""
    return f"ids leaked: {hits} of the {occur} that occur were read off the embeddings{wrong}; their order is not told"


def column_verdict(rows: Sequence[Row]) -> str:
    """Return how much of a table's rows came back, in words; empty where there is no table."""
    scored = [row for row in rows if row.get("row_accuracy") is not None]
    if not scored:
        return ""
    mean, guess = (fmean(map(found, scored)) for found in (itemgetter("row_accuracy"), _column_guess))
    words = f"{100 * mean:.0f} % of the columns right (TabLeak's accuracy), {100 * guess:.0f} % by the best guess"
    rate = exact_match_rate(scored)
    if rate is None:
        return words
    whole, guessed = round(rate * len(scored)), sum(_column_guess(row, "exact_match") for row in scored)
    return (
        f"{words}; {whole} of {len(scored)} row(s) right in all columns (exact match rate {100 * rate:.0f} %), "
        f"{guessed:.0f} by the best guess"
    )


def exact_match_rate(rows: Sequence[Row]) -> float | None:
    """Return the share of a table's rows with all columns right; None where there is no table."""
    known = [row["exact_match"] for row in rows if row.get("exact_match") is not None]
    return fmean(known) if known else None


def _column_guess(row: Row, figure: str = "row_accuracy") -> float:
    keys = [key for key in row if key.startswith("floor_") and key.endswith(f"_{figure}")]
    return max((row[key] for key in keys if row[key] is not None), default=0.0)


def _label(row: Row) -> float | None:
    """Return whether an image's label was recovered, or the share of its batch's that were; None if none came back."""
    found = [row[column] for column in ("label_correct", "label_overlap") if row.get(column) is not None]
    return float(found[0]) if found else None


def describe_no_images(rows: Sequence[Row]) -> str:
    """Return what an attack came to that recovered neither images nor private tensors."""
    unscored = dict.fromkeys(name for row in rows for name in row.get("unscored", ()))
    names = [name for name in unscored if name.partition("/")[0] not in MEASURED]
    if not names:
        return "the attack recovered no images, nor any private tensor"
    beyond = all(Remark.BEYOND_RANGE in row.get("remarks", ()) for row in rows)
    first = "what the first layer takes, beyond the range of inputs"
    source = first if beyond else "the input of a layer behind the first"
    meant = f" ({source})" if names[0].partition("/")[0] == "features" else ""
    values = f"{join_words(names)}{meant}"
    return f"the attack recovered no images, only {values}, of which there is no true value to compare with"


def image_verdict(rows: Sequence[Row], tests: int = 1) -> str:
    """Return what became of one attack's images, beside the best guess without the update; empty where none is judged.

    Content leaked where a report says so (`eval.report.sections.findings`): an image came back recognizable and far
    above every guess of itself, the mean over enough images lies above the best guess, or more images are named than
    by chance.

    Args:
        rows: one per image (see `eval.metrics.score`).
        tests: so many attacks are judged by their names.
    """
    group = _group(rows)
    judged = group.image_rows
    if not judged:
        return ""
    figures = [closest_figure(row, "psnr") or ClosestFigure(row["psnr"], best_baseline(row)) for row in judged]
    gains = [figure.gain for figure in figures]
    furthest = max(figures, key=lambda figure: figure.gain)
    part = f" {furthest.words}" if furthest.words and furthest.gain >= COUNTED_MARGIN else ""
    told, seen = _evidence(group, tests), bool(group.leaked_rows) or exceeds_baseline(group.gain)
    counted = sum(gain >= COUNTED_MARGIN for gain in gains)
    return in_words_of_rows(
        rows,
        f"{_headline(group, gains, seen, bool(told))}{changed_words(rows)}: {''.join(f'{words}; ' for words in told)}"
        f"{counted} of {len(gains)} image(s) at least {COUNTED_MARGIN:g} dB above "
        f"the best guess without the update, the furthest at {furthest.value:.1f} dB against "
        f"{furthest.guess:.1f} dB{part}, on average {fmean(gains):+.1f} dB{_words_of_copies(group)}",
    )


def changed_words(rows: Sequence[Row]) -> str:
    """Say that figures are of what a defense made of pictures before they were fed, where one did.

    Where the client's own are known, how close one of these came back, relative to its best guess, is told as well.
    """
    by = dict.fromkeys(row[CHANGED_BY] for row in rows if row.get(CHANGED_BY))
    if not by:
        return ""
    words = f"of the pictures as {join_words([*by])} changed them, not of the client's own"
    figures = [ClosestFigure(row[OWN_PSNR], best_baseline(row, OWN_PSNR)) for row in rows if row.get(OWN_PSNR)]
    best = max(figures, key=lambda figure: figure.gain, default=None)
    of_own = f", which came back at {best.value:.1f} dB at best against {best.guess:.1f} dB" if best else ""
    return f" ({words}{of_own})"


def _words_of_copies(group: ResultGroup) -> str:
    copies = {row[IMAGE] for row in group.image_rows if COPY_OF in row}
    return f"; images that equal others ({len(copies)}) count once: {group.n_images} in all" if copies else ""


def in_words_of_rows(rows: Sequence[Row], words: str) -> str:
    """Return what is said of images as it is said of rows, where they are those of a table."""
    if not any(row.get("row_accuracy") is not None for row in rows):
        return words
    return re.sub(r"(?<![-\w])(an )?image(s?)(?![-\w])", lambda found: f"{'a ' * bool(found[1])}row{found[2]}", words)


def has_leaked(rows: Sequence[Row], tests: int = 1) -> bool:
    """Return whether content or identity of images leaked, as `image_verdict` says it, or ids that were fed."""
    group = _group(rows)
    if any(row.get("tokens_read") and row["tokens_precision"] == 1 for row in rows):
        return True
    return bool(group.image_rows) and bool(_evidence(group, tests))


def are_flat(rows: Sequence[Row]) -> bool:
    """Return whether there are images and one color shows each of them: what is not exact is no better than a guess."""
    colors = [row.get("floor_mean_psnr") for row in _group(rows).image_rows]
    return bool(colors) and all(color is not None and color >= FLAT_FROM for color in colors)


def leaked_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the images that leaked by themselves: recognizable, and far above every guess of themselves."""
    return _group(rows).leaked_rows


def count_if_too_few(rows: Sequence[Row], tests: int = 1) -> int:
    """Return how many images there are where they are too few to tell content from chance; else 0."""
    group = _group(rows)
    if not group.image_rows or _evidence(group, tests):
        return 0
    return group.n_images if _too_few(group, _gains(group.image_rows)) else 0


def image_line(row: Row, number: int) -> str:
    """Describe one image in a line: how close it came, or why nothing tells, and what the attack says of it itself."""
    label = {True: ", label recovered", False: ", label missed", None: ""}[row.get("label_correct")]
    exact = ", exact to 8 bits" if row.get("exact8") else ""
    own = verification_words(row.get("verified"), row.get("fixed"))
    if row.get("row_accuracy") is not None:
        exact = f", {100 * row['row_accuracy']:.0f} % of its columns right"
    shown = f"PSNR {row['psnr']:.1f} dB (best guess {best_baseline(row):.1f} dB)" if row.get("psnr") is not None else ""
    shown = f"none came back, which counts as {shown}" if shown and has_failed(row) else shown
    words = f"{in_words_of_rows([row], 'image')} {number}: {shown or _why_unscored(row)}{label}{exact}"
    if row.get("psnr_seen") is not None:
        shown = f"{row['psnr_seen']:.1f} dB (best guess {best_baseline(row, 'psnr_seen'):.1f} dB)"
        few = "" if is_seen_enough(row) else ", too few to count"
        words += f", {shown} {_seen_words(row)}{few}"
    if row.get("psnr_scaled") is not None:
        shown = f"{row['psnr_scaled']:.1f} dB (best guess {best_baseline(row, 'psnr_scaled'):.1f} dB)"
        words += f", {shown} {SCALED}"
    if row.get(OWN_PSNR) is not None:
        shown = f"{row[OWN_PSNR]:.1f} dB (best guess {best_baseline(row, OWN_PSNR):.1f} dB)"
        words += f", {shown} beside the closest of the client's own pictures"
    return f"{words}, {own}" if own else words


def _why_unscored(row: Row) -> str:
    """Return why an image has no figure."""
    return f"not scored, {row.get('missing', {}).get('psnr', 'for want of a true picture or of one that came back')}"


@dataclass(frozen=True)
class ClosestFigure:
    """A figure of an image.

    Attributes:
        value: that it has.
        guess: that its best guess without the update has.
        words: what the figure is of, where that is not the picture as it is; else empty.
    """

    value: float
    guess: float
    words: str = ""

    @property
    def gain(self) -> float:
        """How far the figure lies above that of the guess."""
        return self.value - self.guess


def counted_figures(row: Row, figure: str) -> list[ClosestFigure]:
    """Return a figure of an image as it is, and as those of it that count beside.

    Of a picture that a network is given in part that is the figure of the part, if it is large enough; of one that
    comes back up to brightness and contrast, the figure once these are fitted.

    Args:
        row: of the image.
        figure: `psnr` in dB, or `ssim`.
    """
    known = {figure: ""}
    if is_seen_enough(row):
        known[f"{figure}_seen"] = _seen_words(row)
    known[f"{figure}_scaled"] = SCALED
    return [
        ClosestFigure(row[name], best_baseline(row, name), words)
        for name, words in known.items()
        if row.get(name) is not None
    ]


def closest_figure(row: Row, figure: str, limit: float = -math.inf) -> ClosestFigure | None:
    """Return of the figures that count the one that lies furthest above its best guess's, or None.

    Args:
        row: of the image.
        figure: `psnr` in dB, or `ssim`.
        limit: figures above it go before others.
    """
    return max(counted_figures(row, figure), key=lambda one: (one.value > limit, one.gain), default=None)


def _seen_words(row: Row) -> str:
    return f"on the {100 * row['seen']:.3g} % of its pixels that the network is given"


def best_baseline(row: Row, figure: str = "psnr") -> float:
    """Return what the best guess of an image scores that knows nothing of the update."""
    keys = [key for key in row if key.startswith("floor_") and key.endswith(f"_{figure}")]
    return max((row[key] for key in keys if row[key] is not None), default=-math.inf)


def _gains(rows: Sequence[Row]) -> list[float]:
    """Return how far each image lies above its best guess, by the figure that counts."""
    return [(closest_figure(row, "psnr") or ClosestFigure(row["psnr"], best_baseline(row))).gain for row in rows]


def _group(rows: Sequence[Row]) -> ResultGroup:
    return ResultGroup("", "", "", 0, tuple({IMAGE: row.get("image"), **row} for row in rows))


def _too_few(group: ResultGroup, gains: Sequence[float]) -> bool:
    return group.n_images < MIN_IMAGES and max(gains) >= COUNTED_MARGIN


def _evidence(group: ResultGroup, tests: int) -> list[str]:
    """Return what shows that content leaked."""
    told = []
    if group.leaked_rows:
        told.append(
            f"{len(group.leaked_rows)} of {len(group.image_rows)} image(s) came back at {RECOGNIZABLE_PSNR:g} dB or "
            "more and at "
            f"least {CLEAR_MARGIN:g} dB above every guess{_words_of_part(group.leaked_rows)}"
        )
    gain, named = group.gain, group.identification
    if gain is not None and exceeds_baseline(gain):
        told.append(f"{gain.value:+.1f} [{gain.low:.1f}, {gain.high:.1f}] dB on average")
    if named is not None and named.excess_over_chance(tests) > 0:
        chance = f"by chance {100 * named.chance:.0f} %"
        told.append(f"{named.hits} of {named.images} image(s) named among others of their class ({chance})")
    return told


def _words_of_part(rows: Sequence[Row]) -> str:
    """Say that images did so on the pixels alone that the network is given, or up to their scale, where some did."""
    seen = [row["seen"] for row in rows if not leaks_alone(row) and leaks_alone(row, "psnr_seen")]
    words = f", on the pixels that the network is given ({100 * min(seen):.3g} %)" if seen else ""
    scaled = any(not leaks_alone(row) and leaks_alone(row, "psnr_scaled") for row in rows)
    return f"{words}, {SCALED}" if scaled else words


def _headline(group: ResultGroup, gains: Sequence[float], seen: bool, leaked: bool) -> str:
    if leaked:
        return "image content leaked" if seen else "identity of images leaked, not their content"
    if _too_few(group, gains):
        return "too few images to tell content from chance"
    return "not told apart from a guess" if abs(fmean(gains)) < COUNTED_MARGIN else "no image content shown to leak"


def all_verified(checked: Iterable[bool | None]) -> bool | None:
    """Return whether all are true; None where one is not known, or there is none."""
    found = list(checked)
    return None if not found or None in found else all(found)


def unscored_verdict(rows: Sequence[Row]) -> str:
    """Return what an attack says of its own results where the truth is not known.

    Args:
        rows: from `eval.metrics.score.score_without_truth`, with what the attack says of itself.
    """
    verified = all_verified(row.get("verified") for row in rows)
    words = {
        True: "the attack confirms that what it recovered is right",
        False: _explained_words(rows),
        None: "the attack can't tell how close it came",
    }[verified]
    if any(row.get("approximate") for row in rows):
        words = borne_out_words(mixed=any(Remark.MAY_BE_MIXTURE in remarks_of(row) for row in rows))
    updates: dict[Hashable, list[float]] = {}
    for row in rows:
        if row.get("fixed") is not None:
            updates.setdefault(row["update"], []).append(row["fixed"])
    known = [fmean(own) for own in updates.values()]
    if known and not verified:
        words = verification_words(False, min(known))
    if not any(row.get("candidates") for row in rows):
        return f"{describe_no_images(rows)}; {words}"
    misfits = [row["misfit"] for row in rows if row.get("misfit") is not None]
    if misfits:
        words += f"; the update of its picture differs from the observed one by 1 - cos = {max(misfits):.2g}"
        words += f" (below {EXPLAINED_BELOW:g} it explains the update)"
    return f"{words}; give the true images (--images) to have the pictures scored"


def _explained_words(rows: Sequence[Row]) -> str:
    """Say of how much of an update an attack found what explains it, where that is not the whole; none of it clears."""
    remarks = frozenset().union(*map(remarks_of, rows))
    if Remark.CONTRADICTED in remarks:
        how_much = "what it was read from, but training as stated does not make the rest of the update of it"
    elif Remark.NEARLY_TOLD in remarks:
        how_much = "nearly all of what it was read from, and more may have gone into the update than it"
    else:
        return "the attack found nothing that explains the update, which does not show that nothing leaks"
    what = "a picture" if any(row.get("candidates") for row in rows) else "an input of a layer"
    return f"not decided, as the attack found {what} that explains {how_much}: it may be the true one, or wrong"
