"""Accuracy on domains left out over rounds, of a finished run: `python -m benchmarks.hyperfl.left_out RUN PICTURE.svg`.

A line for each method, the mean over the domains that were left out in turn; bands reach from one seed to the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from eval.io.jsonl import read_rows
from eval.report.charts.render import render_file
from eval.report.charts.specs import Curve, LineChart
from eval.report.charts.style import WIDE
from fl.runtime.atomic_files import atomic_write

WHERE, LABEL = "accuracy_unseen", "accuracy on the domain left out (%)"


def over_domains(run: Path) -> dict[str, dict[int, dict[int, float]]]:
    """Means over domains, by method, round and seed."""
    found: dict[str, dict[int, dict[int, list[float]]]] = {}
    for row in read_rows(run / "rounds.jsonl"):
        if row.get(WHERE) is not None:
            method = str(row["method"]).partition("@")[0]
            seeds = found.setdefault(method, {}).setdefault(row["round"], {})
            seeds.setdefault(row["seed"], []).append(100 * row[WHERE])
    return {m: {n: {s: fmean(v) for s, v in seeds.items()} for n, seeds in by.items()} for m, by in found.items()}


def main(run: Path, picture: Path) -> None:
    """Draw it."""
    curves, spoken = [], []
    for series, (method, rounds) in enumerate(over_domains(run).items()):
        ends = sorted(rounds.items())
        points = [(float(number), fmean(seeds.values())) for number, seeds in ends]
        band = [(float(number), min(seeds.values()), max(seeds.values())) for number, seeds in ends]
        curves.append(Curve(method, series, points, band))
        spoken.append(f"{method}: first {points[0][1]:.1f}, last {points[-1][1]:.1f}.")
    alt = f"Accuracy on the domain left out, mean over domains. {' '.join(spoken)}"
    with atomic_write(picture) as file:
        file.write(render_file(LineChart(LABEL, curves), "svg", WIDE, alt=alt))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    given = parser.parse_args()
    main(given.run, given.picture)
