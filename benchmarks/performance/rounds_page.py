"""From what `benchmarks.performance.rounds` measured to a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import table

Row = dict[str, Any]
FEDAVG, FACTORED, AUTHORS = "FedAvg, loop", "HyperFL, factored", "HyperFL, the authors' code"
OVER_FEDAVG, PAPER, FASTER = 1.45, 1.6, 10
"""The goals of a HyperFL round, and what its paper says of the first."""


def page(found: Mapping[str, Any], shares: Mapping[str, float]) -> list[str]:
    """All figures.

    Args:
        found: as kept.
        shares: of the machine's peak that loops reach, by their names in scaling.md.
    """
    single, more, clock = found["hyperfl"], found["further"], found["clock"]
    networks = list(dict.fromkeys(row["network"] for row in single["rows"]))
    head = ["network", "what", "seconds per client", "over FedAvg", "over factored"]
    return [
        "# One local round per client",
        "",
        f"{found['images']} images, batches of {found['batch']}, {found['epochs']} epochs (HyperFL and FedRep: after "
        f"one of the classifier), median of {found['repeats']} turns. Loops train {found['few']} clients one after the "
        "other; `factored` trains more of them, which share products, `vmap` as many at once, and processes have as "
        "many between them. Ours include the aggregation, the authors' code does not. Ratios are medians over the "
        "turns.",
        "",
        f"CPU seconds of one thread (of processes: of all of them together), {single['clients']} clients{_on(single)}:",
        "",
        *table(head, shown(single["rows"], [FEDAVG, FACTORED])),
        "",
        *(line for network in networks for line in goals(network, single["rows"], shares)),
        "Further methods and engines, measured apart from that, with FedAvg and HyperFL once more for the ratios, "
        f"{more['clients']} clients{_on(more)}:",
        "",
        *table(head, shown(more["rows"], [FEDAVG, FACTORED])),
        "",
        *_clock(clock),
    ]


def shown(rows: Sequence[Row], bases: Sequence[str]) -> list[list[str]]:
    """A line each, with ratios to these of its network."""
    return [
        [
            row["network"],
            row["what"],
            f"{statistics.median(row['seconds_per_client']):.2f}",
            *(f"{over(rows, row['network'], row['what'], base):.2f}" for base in bases),
        ]
        for row in rows
    ]


def over(rows: Sequence[Row], network: str, what: str, base: str) -> float:
    """How many times as long as `base` it takes, the median over the turns."""
    one, other = (seconds(rows, network, name) for name in (what, base))
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def seconds(rows: Sequence[Row], network: str, what: str) -> list[float]:
    """Per client, turn by turn; none where it was not measured."""
    return next((row["seconds_per_client"] for row in rows if (row["network"], row["what"]) == (network, what)), [])


def goals(network: str, rows: Sequence[Row], shares: Mapping[str, float]) -> list[str]:
    """What these figures come to beside what was wished for."""
    mine = over(rows, network, FACTORED, FEDAVG)
    said = f"{network}: a HyperFL round takes {mine:.2f} FedAvg rounds (goal: at most {OVER_FEDAVG}; the paper {PAPER}"
    if not seconds(rows, network, AUTHORS):
        return [f"{said}).", ""]
    times = over(rows, network, AUTHORS, FACTORED)
    said += (
        f"; the authors' code here {over(rows, network, AUTHORS, FEDAVG):.1f}) and is {times:.1f} times as fast as the "
    )
    said += f"authors' (goal: at least {FASTER} times)."
    return [said + ("" if times >= FASTER else _why(network, rows, shares)), ""]


def _why(network: str, rows: Sequence[Row], shares: Mapping[str, float]) -> str:
    """What stands in the way of the second goal."""
    wanted = statistics.median(seconds(rows, network, AUTHORS)) / FASTER
    fedavg = statistics.median(seconds(rows, network, FEDAVG))
    share = shares.get(f"{FEDAVG.lower()}, {network}")
    near = (
        ""
        if share is None
        else f", and that loop runs at {share:.0%} of the machine's peak ([scaling.md](scaling.md), d)"
    )
    word = "less" if wanted < fedavg else "no less"
    return f" A tenth of theirs would be {wanted:.2f} s: {word} than FedAvg itself takes ({fedavg:.2f} s){near}."


def _on(part: Mapping[str, Any]) -> str:
    """The processor of a part, where there is one."""
    return f", {part['on']['processor']}" if part["on"] else ""


def _clock(clock: Mapping[str, Any]) -> list[str]:
    """Seconds of the clock, where there are any."""
    if not clock["rows"]:
        return []
    on, cores = clock["on"], clock["on"]["cores"]
    return [
        f"Seconds of the clock, all {cores} cores (ours in {cores} processes, the authors' in {cores} threads), which "
        f"take an idle machine; {clock['clients']} clients; measured on: processor {on['processor']}, torch "
        + on["torch"]
        + (", before what stands above:" if clock["kept"] else ":"),
        "",
        *table(["network", "what", "seconds per client", "over factored"], shown(clock["rows"], [FACTORED])),
    ]
