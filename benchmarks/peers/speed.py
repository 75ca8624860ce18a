"""How fast IG is in searches as long as published ones, beside the peers' own code: whole calls, one thread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import fl.data
from benchmarks.common import table
from benchmarks.peers.adapters import Setting
from benchmarks.peers.compare import Case, find_peers, run_ours
from benchmarks.peers.victims import network, victims

ITERATIONS, REPEATS, STACK = 2000, 3, 64
"""From so many iterations on searches are recorded; a single victim is attacked so often, so many in one call once."""
COMPILED = {"compile": True}


@dataclass(frozen=True)
class Speeds:
    """Image-iterations per CPU second.

    Attributes:
        theirs: of one victim, by peer.
        alone: ours, of one victim.
        compiled: the same, compiled.
        stacked: ours, of several victims in one call, compiled.
        missing: why a peer was not run, by peer.
    """

    theirs: dict[str, float]
    alone: float
    compiled: float
    stacked: float
    missing: dict[str, str]


def measure(case: Case, *, iterations: int = ITERATIONS, repeats: int = REPEATS, count: int = STACK) -> Speeds:
    """Run every side in turn on the same victim; return medians over repeats, recording included."""
    data = fl.data.load(case.dataset)
    task = network(case.network, data.num_classes, {"input_shape": data.input_shape, **case.settings})
    attacked = victims(task, data.test.take(torch.arange(count)), knows_labels=case.knows_labels)
    quick = replace(case, options={**case.options, **COMPILED})
    peers, missing = find_peers(case.peers, Setting(task, iterations, case.tv))
    for peer in find_peers(case.peers, Setting(task, 2, case.tv))[
        0
    ].values():  # the first call pays for what is set up once
        peer(attacked[0])
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        runs = {name: peer(attacked[0]) for name, peer in peers.items()}
        runs |= {
            way: run_ours(one, attacked[:1], iterations)[0][0] for way, one in (("alone", case), ("compiled", quick))
        }
        for name, run in runs.items():
            rates.setdefault(name, []).append(run.iterations / run.seconds)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    (together, *_), _ = run_ours(quick, attacked, iterations)  # each with its share of the call's seconds
    alone, compiled = middle.pop("alone"), middle.pop("compiled")
    return Speeds(middle, alone, compiled, iterations / together.seconds, missing)


def page(measured: Sequence[tuple[Case, Speeds]]) -> list[str]:
    """Return all figures."""
    rows: list[list[object]] = []
    for case, speeds in measured:
        own = (speeds.alone, speeds.compiled, speeds.stacked)
        for name, rate in speeds.theirs.items():
            rows.append([case.network, name, f"{rate:.0f}", *(f"{mine:.0f} ({mine / rate:.1f}x)" for mine in own)])
        for name, why in speeds.missing.items():
            rows.append([case.network, name, f"not run: {why}", *(f"{mine:.0f}" for mine in own)])
    return [
        "# IG beside the peers' own code: speed of long searches",
        "",
        f"Image-iterations per CPU second, one thread; in brackets ours over theirs. Whole calls of {ITERATIONS:,} "
        f"iterations, on the same victim (medians of {REPEATS} in turn). The last column has {STACK} victims at "
        "once. So long a "
        "search of ours is recorded first (attacks/gradient_matching/engine/traced_objective.py), "
        "which counts; that a C++ compiler runs, where it says "
        "compiled, does not (25 to 50 seconds of the clock). Settings and the peers' code are those of peers.md.",
        "",
        *table(["network", "peer", "theirs", "ours", "ours, compiled", f"ours, {STACK} victims, compiled"], rows),
    ]
