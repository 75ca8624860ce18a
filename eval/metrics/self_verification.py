"""What an attack showed of its own result without the truth: in rows, in words, and whether it is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attacks.base import Reconstruction, Remark
from eval.io.text import join_words
from eval.metrics.score import Row

MIN_FIXED_SHARE = 0.9
"""Share of an image's pixels that the update must fix for it to count as settled: corners are often left open."""

SETTLED_WORDS = (
    "recovered every image and confirmed it, or nearly all of its pixels; labels and private tensors that are not "
    "named were not searched for"
)
"""What an attack that settles every update leaves."""

BORNE_OUT = "the update bears out what the attack recovered"


def add_self_check_columns(result: Reconstruction, rows: Sequence[Row]) -> list[Row]:
    """Return one update's rows with what the attack says of itself: its objective's course, check and note.

    Args:
        result: of the attack.
        rows: its scores, one per true image.
    """
    history = [value if math.isfinite(value) else None for value in map(float, result.history)]
    common: Row = {"verified": result.verified, "history": history}
    if result.note:
        common["note"] = result.note
    if result.approximate:
        common["approximate"] = True
    if result.remarks:
        common["remarks"] = sorted(result.remarks)
    if Remark.LABELS_DOUBTFUL in result.remarks:
        common["labels_doubtful"] = True
    if result.given_up:
        common["given_up"] = result.given_up
    if result.cut_short:
        common["cut_short"] = result.cut_short
    own = [{**row, **common, **_fixed(result, row)} for row in rows]
    return [{**row, "verified": None} if row["verified"] and _is_lacking(row) else row for row in own]


def _is_lacking(row: Row) -> bool:
    """Return whether no picture came back for an image, though for others: none of it can be confirmed."""
    return bool(row.get("candidates") and row.get("failure"))


def remarks_of(row: Row) -> frozenset[Remark]:
    """Return what an attack says of the result that a row is of, for code to act on."""
    return frozenset(map(Remark, row.get("remarks", ())))


def borne_out_words(*, mixed: bool) -> str:
    """Say in words that an update bears out what an attack recovered, and how far.

    Args:
        mixed: whether it may be a mixture of unlike examples that were stated as one.
    """
    if mixed:
        return f"{BORNE_OUT}, if it is of as many examples as stated: a mixture would not show"
    return f"{BORNE_OUT}, if not to a quarter of a level"


def _fixed(result: Reconstruction, row: Row) -> Row:
    """Return the share of pixels that the update fixes, where the attack can tell."""
    match = row.get("matched")
    return {} if result.fixed is None or match is None else {"fixed": float(result.fixed[match].double().mean())}


def are_settled(rows: Sequence[Row]) -> bool:
    """Return whether the rows of one update show that no other attack can find more of it.

    There is a picture for each of its images, and the attack either confirms it or says that its equations, all of
    which it satisfies, fix nearly all pixels: what is left is in no equation.
    """
    if not rows or any(not row.get("candidates") or row["candidates"] != row["images"] for row in rows):
        return False
    return all(row.get("verified") or row.get("fixed", 0.0) >= MIN_FIXED_SHARE for row in rows)


def settled_updates(rows: Sequence[Row]) -> list[str | int]:
    """Return the updates among an attack's rows where no other attack can find more (see `are_settled`)."""
    updates: dict[str | int, list[Row]] = {}
    for row in rows:
        updates.setdefault(row["update"], []).append(row)
    return [key for key, own in updates.items() if are_settled(own)]


def not_needed_words(names: Sequence[str]) -> str:
    """Say in words that these attacks leave nothing to find."""
    return f"not needed: {join_words(list(dict.fromkeys(names)))} {SETTLED_WORDS}"


def verification_words(verified: bool | None, fixed: float | None = None) -> str:
    """Say in words what the attack tells of its own result; empty where it can't tell."""
    if verified is None:
        return ""
    if verified:
        return "confirmed by the attack"
    return "not confirmed by the attack" if fixed is None else f"{_share(fixed)} of pixels confirmed by the attack"


def _share(value: float) -> str:
    """Return a share in percent that is 100 only if it is whole."""
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.3g} %"


def attack_notes(rows: Sequence[Row]) -> list[str]:
    """Return what the attack noted, each once, with the numbers of the images that it says it of."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("note"):
            found.setdefault(row["note"], []).append(number)
    return [
        f"of image{'s' * (len(numbers) > 1)} {join_words([str(number) for number in numbers])} the attack says: {note}"
        for note, numbers in found.items()
    ]
