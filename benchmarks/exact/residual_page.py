"""The page of `benchmarks.exact.residual`: each row's goal beside what was found."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import table
from benchmarks.exact.residual_victims import Case, Goal
from eval.metrics.statistics import exact_interval

CLOSE = 40
"""dB."""
PEER = "breaching"
"""The attack that is another project's code."""
TESTED = "backsolve"
"""The attack that the goals are for."""
RESULTS = "residual.json"
"""The file of all figures, beside the page."""
Rows = Sequence[dict[str, Any]]


def document(cases: Sequence[Case], rows: Rows, tested: str = TESTED) -> list[str]:
    """Return the results in words: the attack under test row by row, others beside it, and what they said.

    Args:
        cases: the rows of the table.
        rows: of the results.
        tested: the attack whose goals they are.
    """
    found = [(case, _of(rows, case, case.attack(tested))) for case in cases]
    own = [row for _, measured in found for row in measured]
    wrong = sum(row.get("false", False) for row in rows)
    proven = sum(row.get("verified", False) for row in rows)
    false = f"False `verified` over all rows and attacks: {wrong}, of {proven} that said it."
    return [
        "# Exact inversion of residual and other deep networks",
        "",
        "A victim is one step of a client. The attack knows the network and how many pictures the step is of. It is "
        "given no label. Where nothing else is said, a network is untrained, in evaluation mode, and built for small "
        "images (a 3x3 stem without pooling; VGG ends in one linear layer). It normalizes pixels itself. Victim i has "
        "pictures of its own and the network of seed i; a trained network is the same for all. Pictures are CIFAR-10's "
        "test images from number 2000 on, or ImageNet's. The attack was developed on other pictures.",
        "",
        "Exact: every pixel to 8 bits. A picture that was not handed out counts as missed, and as 0 dB in the median. "
        "Matching of pictures is one to one. Intervals are Clopper and Pearson's at 95 %, of victims, the pictures of "
        "a batch a share of one. Seconds are CPU seconds of a victim on one core. PSNR ends at 100 dB. A `verified` is "
        "false where any picture that was handed out with it is not exact. Right labels show that what flows back at "
        "the top of the network was found; a result does not hand that out.",
        "",
        "What is trained was trained on 15,000 of CIFAR-10's training images, shifted and mirrored, by SGD with "
        "momentum and weight decay. `benchmarks/exact/residual_training.py` has the constants. It classifies 39 % of "
        "1,000 test images right after one epoch. After ten it is 79 %. The pre-trained ResNet-20 is a published one "
        "with 92 %.",
        "",
        "In rows of HyperFL and HyperFL-LPM the classifier is at rest in the attacked step, the step size is in the "
        "row, and pixels are normalized. What a round of the published algorithm gives away is "
        "[measured apart](published_hyperfl.md).",
        "",
        false,
        "",
        *_states(own),
        "## With a goal",
        "",
        *_table([(case, rows) for case, rows in found if case.goal], goals=True),
        "",
        "## To know",
        "",
        *_table([(case, rows) for case, rows in found if rows and not case.goal], goals=False),
        *_beside(cases, rows, tested),
        *_reasons(cases, rows, tested),
    ]


def _of(rows: Rows, case: Case, attack: str) -> Rows:
    """Return what an attack made of a row's victims."""
    return [row for row in rows if row["case"] == case.name and row["attack"] == attack]


def _table(found: Sequence[tuple[Case, Rows]], *, goals: bool) -> list[str]:
    head = [
        "row",
        "victim",
        "batch",
        "what is sent",
        "victims",
        *(["goal"] if goals else []),
        "exact",
        f"above {CLOSE} dB",
    ]
    head += ["median dB (least)", "labels right", "victims verified", "false", "without a picture"]
    head += ["median seconds (most)", *(["met"] if goals else [])]
    body = []
    for case, rows in found:
        goal = [words(case.goal)] if case.goal else []
        met = [_met(case, rows)] if case.goal else []
        about = [f"`{case.name}`", case.title, case.batch, case.setting]
        body.append([*about, _count(case, rows), *goal, *line(case, rows), *met])
    return table(head, body) if body else ["Nothing was measured so far."]


def line(case: Case, rows: Rows) -> list[str]:
    """Shares, medians and cost of one row of the table."""
    if not rows:
        return ["-"] * 8
    pictures, told = case.batch * len(rows), [row["labels"] for row in rows if row.get("labels") is not None]
    psnr = _psnr(case, rows)
    seconds = [row["seconds"] for row in rows]
    return [
        _share(case, rows, "exact"),
        _share(case, rows, "close"),
        f"{statistics.median(psnr):.0f} ({min(psnr):.0f})",
        f"{sum(told)} of {pictures}" if told else "-",
        f"{sum(row.get('verified', False) for row in rows)}",
        f"{sum(row.get('false', False) for row in rows)}",
        f"{sum('psnr' not in row for row in rows)}",
        f"{statistics.median(seconds):.1f} ({max(seconds):.0f})",
    ]


def words(goal: Goal) -> str:
    """Return a goal in words."""
    parts = [f"{goal.exact:.0%} exact"] if goal.exact else []
    parts += [f"{goal.close:.0%} above {CLOSE} dB"] if goal.close else []
    parts += [f"median above {CLOSE} dB"] if goal.median else []
    parts += ["all labels"] if goal.labels else []
    parts += [f"{goal.seconds:.0f} s"] if goal.seconds else []
    return ", ".join(parts)


def _met(case: Case, rows: Rows) -> str:
    """Return whether the figures reach the goal; of fewer victims than there are, as far as they go."""
    if not rows:
        return "-"
    goal = case.goal or Goal()
    reached = (
        goal.exact is None or _mean(_shares(case, rows, "exact")) >= goal.exact,
        goal.close is None or _mean(_shares(case, rows, "close")) >= goal.close,
        not goal.median or statistics.median(_psnr(case, rows)) > CLOSE,
        not goal.labels or all(row.get("labels") == case.batch for row in rows),
        goal.seconds is None or statistics.median(row["seconds"] for row in rows) <= goal.seconds,
    )
    return ("yes" if all(reached) else "no") + ("" if len(rows) >= case.count else ", so far")


def _count(case: Case, rows: Rows) -> str:
    return f"{len(rows)}" if len(rows) >= case.count else f"{len(rows)} of {case.count} so far"


def _psnr(case: Case, rows: Rows) -> list[float]:
    """PSNR of every picture, 0 of those that were not handed out."""
    return [value for row in rows for value in _padded(row.get("psnr", []), case.batch)]


def _padded(values: Sequence[float], count: int) -> list[float]:
    return [*values, *[0.0] * (count - len(values))]


def _shares(case: Case, rows: Rows, kind: str) -> list[float]:
    """Of every victim, the share of its pictures that are exact or close."""
    hits = [row.get("exact", []) if kind == "exact" else [v > CLOSE for v in row.get("psnr", [])] for row in rows]
    return [sum(own) / case.batch for own in hits]


def _share(case: Case, rows: Rows, kind: str) -> str:
    shares = _shares(case, rows, kind)
    low, high = exact_interval(min(sum(shares), len(shares)), len(shares))
    return f"{_mean(shares):.0%} [{low:.0%}, {high:.0%}]"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _beside(cases: Sequence[Case], rows: Rows, tested: str) -> list[str]:
    """Other attacks on the same victims."""
    body = []
    for case in cases:
        for attack in dict.fromkeys(row["attack"] for row in rows if row["case"] == case.name):
            if attack == case.attack(tested):
                continue
            others = _of(rows, case, attack)
            same = {row["victim"] for row in others}
            exact = [row for row in _of(rows, case, case.attack(tested)) if row["victim"] in same]
            psnr = [value for row in others for value in row.get("psnr", [])]
            shown = f"{statistics.median(psnr):.1f} ({min(psnr):.1f} to {max(psnr):.1f})" if psnr else "-"
            seconds = [f"{statistics.median(row['seconds'] for row in own):.1f}" for own in (others, exact) if own]
            level = f"{statistics.median(_psnr(case, exact)):.0f}" if exact else "-"
            about = [f"`{case.name}`", case.title, case.batch, case.setting]
            about += [attack, len(others), shown, seconds[0]]
            body.append([*about, level, seconds[1] if exact else "-"])
    if not body:
        return []
    head = [
        "row",
        "victim",
        "batch",
        "what is sent",
        "attack",
        "victims",
        "median dB (least to most)",
        "median seconds",
    ]
    head += [f"`{tested}` on the same: median dB", "median seconds"]
    text = "Attacks are ours, by the settings named."
    if any(str(about[4]).startswith(PEER) for about in body):
        text += (
            f" But `{PEER}` is the peer's own code: its attack `invertinggradients` with its own settings but for the "
            "iterations named, and told the label."
        )
    return ["", "## Searches on the same victims", "", text, "", *table(head, body)]


def _reasons(cases: Sequence[Case], rows: Rows, tested: str) -> list[str]:
    """Return what was said where there was no picture, and what was noted beside one; what is said most comes first."""
    said: dict[str, Counter[str]] = {}
    for case in cases:
        for row in rows:
            text = row.get("error") or row.get("reason") or row.get("note")
            if row["case"] == case.name and text:
                other = "" if row["attack"] == case.attack(tested) else f" by `{row['attack']}`"
                said.setdefault(gist(text), Counter())[f"`{case.name}`{other}"] += 1
    if not said:
        return []
    body = [
        [str(counts.total()), f"`{text}`", ", ".join(f"{row} {count}" for row, count in counts.items())]
        for text, counts in sorted(said.items(), key=lambda item: -item[1].total())
    ]
    left_out = f"Figures, layers and what stood in brackets are left out here. `{RESULTS}` has every text in full."
    head = ["victims", "text", "rows, with their victims"]
    return ["", "## What the attacks said", "", left_out, "", *table(head, body)]


def gist(text: str) -> str:
    """Return what a note says, without layers, figures and brackets, so that notes of several victims are equal."""
    text = re.sub(r"\s*\([^()]*\)", "", text).replace("`", "'")
    text = re.sub(r"\b[a-z0-9_]+(\.[a-z0-9_]+)*\.[a-z_]+\b", "...", text)
    text = re.sub(r"\d[\d,.]*(?:e-?\d+)?(?<![.,])", "...", text)
    return text.replace("... and ...:", "...:")


def state(row: Mapping[str, Any]) -> str:
    """Return the state of the attacks' code of a row, by the seven digits that git shows at least."""
    return row["attacks"][:7]


def _states(own: Rows) -> list[str]:
    """Return that the figures are of several states of the code, where they are."""
    if len({state(row) for row in own}) < 2:
        return []
    return [
        "The attack was developed further between measurements, so victims met several states of its code. Today's may "
        f"do better or worse. `{RESULTS}` names the state for every victim (`attacks`). "
        "`git rev-parse --short HEAD:attacks` names that of a checkout.",
        "",
    ]
