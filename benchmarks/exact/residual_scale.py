"""Time and memory of exact inversion by batch and picture size: `python -m benchmarks.exact.residual_scale`.

Needs HYPERLEAK_DATA. Each size is attacked in a process of its own, so that its memory can be told. What has been
measured is left as it is (`--again` measures anew, `--only`, `--list`, `--rewrite`).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from attacks.base import attacks
from benchmarks.common import RESULTS, publish, results_parser, rewrite, start, table
from benchmarks.exact.residual import attempt
from benchmarks.exact.residual_networks import registered
from benchmarks.exact.residual_victims import CASES, Case, Goal, observe
from eval.io.jsonl import locked

PAGE, TESTED = "residual_scale", "backsolve"
MAX_SECONDS = 900.0
"""CPU seconds of a victim, after which nothing was found."""
many_classes = partial(registered, "resnet18", classes=1000)
BY_NAME = {case.name: case for case in CASES}
SIZES = (
    *(BY_NAME[f"resnet18-{batch}"] for batch in (1, 2, 4, 8, 16)),
    replace(BY_NAME["resnet18-16"], name="resnet18-32", batch=32, goal=Goal()),
    *(
        replace(BY_NAME["resnet18-imagenet-64"], name=name, title="ResNet-18", network=many_classes, batch=batch)
        for name, batch in (("resnet18-64px-1", 1), ("resnet18-64px-2", 2))
    ),
    BY_NAME["resnet18-imagenet-64"],
    BY_NAME["resnet18-imagenet-224"],
)
Row = dict[str, Any]
log = logging.getLogger(__name__)


def measure(case: Case) -> Row:
    """Return what the attack makes of a size's first victim, and what it takes, in this process."""
    victim = observe(case, 0)
    before = _peak()
    attack = attacks.build(TESTED)
    row = attempt(lambda: attack(victim.view, seed=0), victim.images, MAX_SECONDS)
    return {"case": case.name, **row, "before": before, "peak": _peak()}


def _peak() -> float:
    """MiB that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_apart(case: Case) -> Row:
    """Likewise in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.exact.residual_scale", "--one", case.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"case": case.name, "error": said[-1], "seconds": math.nan}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def document(rows: Sequence[Row]) -> list[str]:
    """Return the results in words."""
    by_name = {row["case"]: row for row in rows}
    lines = [_line(case, by_name[case.name]) for case in SIZES if case.name in by_name]
    ends = [(row["case"], row.get("reason") or row.get("error") or row.get("note")) for row in rows]
    states = ", ".join(sorted({f"`{row['attacks'][:7]}`" for row in rows if "attacks" in row}))
    return [
        "# Time and memory of exact inversion",
        "",
        f"One step of an untrained ResNet-18 in evaluation mode, attacked by `{TESTED}` in a process of its own. There "
        "is one victim of each size: the first of its row in [the benchmark of deep networks](residual.md), where it "
        "has one. Memory is what the attack adds to the most that the process held before it. Seconds are of one core. "
        f"The attacks' code was of state {states or '-'} (as `git rev-parse --short HEAD:attacks` names it).",
        "",
        *table(
            ["stem", "pixels", "batch", "exact", "median dB", "verified", "seconds", "more memory, MiB"],
            lines,
        ),
        "",
        "## What the attack said",
        "",
        *(f"- `{name}`: `{said}`" for name, said in ends if said),
    ]


def _line(case: Case, row: Mapping[str, Any]) -> list[object]:
    psnr = row.get("psnr") or [0.0]
    return [
        "ImageNet's" if "imagenet" in case.name else "CIFAR's",
        f"{case.side} x {case.side}",
        case.batch,
        f"{sum(row.get('exact', []))} of {case.batch}",
        f"{statistics.median(psnr):.0f}",
        "yes" if row.get("verified") else "no",
        f"{row['seconds']:.0f}",
        f"{row['peak'] - row['before']:.0f}" if "peak" in row else "-",
    ]


def known() -> list[Row]:
    """Return what has been measured."""
    path = RESULTS / f"{PAGE}.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def add(row: Row) -> None:
    """Put a row in the place of the last one of its size, and write the page anew."""
    RESULTS.mkdir(exist_ok=True)
    order = [case.name for case in SIZES]
    with locked(RESULTS):
        rows = {old["case"]: old for old in known() if old["case"] in order} | {row["case"]: row}
        kept = [rows[name] for name in order if name in rows]
        publish(PAGE, {"rows": kept}, document(kept))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = results_parser(__doc__)
    names = [case.name for case in SIZES]
    parser.add_argument("--only", nargs="+", metavar="SIZE", choices=names, help="sizes")
    parser.add_argument("--list", action="store_true", help="name the sizes")
    parser.add_argument("--one", metavar="SIZE", choices=names, help=argparse.SUPPRESS)
    chosen = start(parser, arguments)
    sizes = {case.name: case for case in SIZES}
    if chosen.one:
        sys.stdout.write(json.dumps(measure(sizes[chosen.one])) + "\n")
        return
    if chosen.list:
        sys.stdout.write("\n".join(sizes) + "\n")
        return
    if chosen.rewrite:
        rewrite(PAGE, lambda results: document(results["rows"]))
        return
    before = set() if chosen.again else {row["case"] for row in known()}
    for name, case in sizes.items():
        if name in before or (chosen.only and name not in chosen.only):
            continue
        row = measure_apart(case)
        add(row)
        log.info("%s", json.dumps(row))


if __name__ == "__main__":
    main()
