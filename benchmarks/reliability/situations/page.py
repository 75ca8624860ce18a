"""The page of all situations, from their rows alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import table

MOST_REFUSED = 10
"""So many rows may end as refusals."""
LONGEST = 420
"""Characters of what the tool says that a cell holds."""


def document(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the page."""
    attacked, refused = ([row for row in rows if row["outcome"] == word] for word in ("attacked", "refused"))
    wrong = [row for row in rows if not row["right"]]
    lines = [
        "# Situations in which people are",
        "",
        "Models as people have them and updates as frameworks write them, each given in the public way that a row "
        "shows. A row ends in an attack or in a refusal. A refusal is quoted, with the way on that it names.",
        "",
        "Networks are untrained and updates are of one photograph of 32x32 pixels, where nothing else is said. Each "
        "comes from a fixed seed. Searches are cut short to keep the page cheap, so a search's figure is no limit of "
        "what an attacker finds. `model`, `images` and `labels` are the user's own; `true.npz` holds the pictures that "
        "an update is of, to score what comes back.",
        "",
        "Features are the input of a later layer, of which an audit has no true value. "
        "The last column says whether the outcome is the right one, and how that is known. No row may call verified "
        "what is wrong.",
        "",
        f"Rows: {len(rows)}.",
        "",
        f"- Attacked: {len(attacked)}.",
        f"- Refused: {len(refused)}. At most {MOST_REFUSED} may be.",
        f"- With an outcome that is not the right one: {len(wrong)}.",
    ]
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in attacked if row["part"] == part]
        if not own:
            continue
        head = ["situation", "how it is given", "attack", "what came back", "best guess", "verified", "CPU s", "right"]
        lines += ["", f"## {part}", "", *table(head, [_attacked(row) for row in own])]
    said = [row for row in attacked if row["said"]]
    if said:
        lines += [
            "",
            "## What is said beside these attacks",
            "",
            "The first line of the output, its notes and those of the attack, where there are any.",
            "",
            *table(["situation", "said"], [[row["situation"], _cell(row["said"])] for row in said]),
        ]
    if refused:
        head = ["situation", "how it is given", "reason and way on", "right"]
        lines += ["", "## Refused", "", *table(head, [_refused(row) for row in refused])]
    return lines


def _attacked(row: Mapping[str, Any]) -> list[str]:
    guess = "" if row["guess"] is None else f"{row['guess']:.1f} dB"
    verified = {True: "yes", False: "no", None: "can't tell"}[row["verified"]]
    found = ", ".join(filter(None, [_figures(row["figures"]), "features" if row["features"] else ""]))
    return [row["situation"], _code(row["given"]), f"`{row['attack']}`", found, guess, verified, *_end(row)]


def _refused(row: Mapping[str, Any]) -> list[str]:
    return [row["situation"], _code(row["given"]), _cell(row["reason"]), _end(row)[1]]


def _end(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['seconds']:.1f}", f"{'yes' if row['right'] else '**no**'}: {row['why']}"]


def _figures(figures: Mapping[str, Any]) -> str:
    found = []
    if "psnr" in figures:
        found.append(f"{figures['psnr']:.1f} dB")
    for name, words in (("row_accuracy", "of columns"), ("tokens_recall", "of ids"), ("label_overlap", "of labels")):
        if name in figures:
            found.append(f"{100 * figures[name]:.0f} % {words}")
    if "label_error" in figures:
        found.append(f"target off by {figures['label_error']:.1e}")
    return ", ".join(found)


def _code(line: str) -> str:
    return f"`{line.replace('|', '&#124;')}`"


def _cell(words: str) -> str:
    """Return words that a cell of a table can hold."""
    flat = re.sub(r"\s+", " ", words).replace("|", "&#124;").replace("<", "&lt;")
    return flat if len(flat) <= LONGEST else f"{flat[:LONGEST].rsplit(' ', 1)[0]} ..."
