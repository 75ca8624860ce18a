"""From figures to a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.common import table
from benchmarks.peers.adapters import PEERS
from benchmarks.peers.compare import ALONE, STACKED, Case, Outcome
from benchmarks.peers.sources import chapter
from eval.metrics.statistics import paired_difference

RESAMPLES = 2000
AHEAD = 0.005
"""dB from which a victim counts as won: less does not show in the tables."""


def median_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median over victims of ours minus theirs, and the ends of its 95 % percentile bootstrap interval."""
    gaps = np.subtract(ours, theirs)
    drawn = np.random.default_rng(0).integers(len(gaps), size=(RESAMPLES, len(gaps)))
    low, high = np.quantile(np.median(gaps[drawn], axis=1), [0.025, 0.975])
    return float(np.median(gaps)), float(low), float(high)


def section(case: Case, outcome: Outcome) -> list[str]:
    """Return one comparison."""
    rows: list[list[object]] = []
    for name, figures in outcome.figures.items():
        low, middle, high = np.quantile(figures.psnr, [0.25, 0.5, 0.75])
        done = f"{min(figures.iterations)} to {max(figures.iterations)}"
        done = str(figures.iterations[0]) if len({*figures.iterations}) == 1 else done
        ends = f"{middle:.2f} [{low:.1f}, {high:.1f}]"
        rows.append([name, done, ends, figures.broken, f"{sum(figures.seconds):.1f}", f"{figures.rate:.0f}"])
    rows += [[name, "", "not run", "", "", ""] for name in outcome.missing]
    rows.append(["baseline: mean color", "", f"{np.median(outcome.floor):.2f}", "", "", ""])
    head = ["", "iterations", "PSNR dB, median [quartiles]", "not finite", "CPU s", "image-iterations per CPU s"]
    lines = [f"## {case.title}", "", case.notes, "", *table(head, rows), ""]
    if pairs := _pairs(outcome):
        head = ["ours minus theirs, dB", "median [95 %]", "mean [95 %]", "ahead / behind", "ours over theirs, speed"]
        lines += [*table(head, pairs), ""]
    return lines + [line for name, why in outcome.missing.items() for line in (f"{name} was not run: {why}", "")]


def _pairs(outcome: Outcome) -> list[list[object]]:
    rows: list[list[object]] = []
    mine = {name: figures for name, figures in outcome.figures.items() if name.startswith((ALONE, STACKED))}
    for name, theirs in outcome.figures.items():
        for own, ours in mine.items():
            if name in mine:
                continue
            middle, low, high = median_difference(ours.psnr, theirs.psnr)
            mean = paired_difference(ours.psnr, theirs.psnr)
            gaps = np.subtract(ours.psnr, theirs.psnr)
            rows.append(
                [
                    f"{own}: {name}",
                    f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]",
                    f"{mean.value:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]",
                    f"{int((gaps > AHEAD).sum())} / {int((gaps < -AHEAD).sum())} of {len(gaps)}",
                    f"{ours.rate / theirs.rate:.2f}x",
                ]
            )
    return rows


def page(count: int, outcomes: Sequence[tuple[Case, Outcome]]) -> list[str]:
    """Return the whole page."""
    sources = {name: PEERS[name][0] for case, _ in outcomes for name in case.peers}
    return [
        "# Ours beside the peers' own code",
        "",
        f"The first {count} test images of each data set, each alone in a batch. All sides are handed the same "
        "weights, the same gradient and the same random start, bit for bit, and make as many iterations. The peers' "
        "searches run as their authors wrote them, called from Python; of the scripts of iDLG and ROG, which can't be "
        "imported, the settings, the data, the plots and what comes after the search are replaced. Each victim is "
        "attacked by every peer and by ours in turn, then ours attacks all of them in one stack, as it is used. One "
        "thread; seconds are of CPU time and hold the whole call: what else the machine does slows both sides down, so "
        "read the ratios. "
        f"Intervals are 95 % over images, of medians by the bootstrap. A victim within {AHEAD} dB counts for nobody.",
        "",
        *[line for case, outcome in outcomes for line in section(case, outcome)],
        *chapter(
            [f"{name}: {source.get}" for name, source in sources.items()],
            "`python -m benchmarks.peers`, with `HYPERLEAK_DATA` set",
        ),
    ]


def record(outcomes: Sequence[tuple[Case, Outcome]]) -> Mapping[str, Any]:
    """Return all figures, for the JSON file."""
    return {"comparisons": [{"case": asdict(case), **asdict(outcome)} for case, outcome in outcomes]}
