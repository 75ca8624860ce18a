"""From what `benchmarks.performance.scaling` measured to a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import table

INTRODUCTION = [
    "# Cost as work grows",
    "",
    "How to read it: all times are CPU seconds of one thread, so that a busy machine changes them little. What should "
    "grow with the work (time and memory of a table's largest case over its smallest) is told per victim or per "
    "client; a column that stays flat is one whose cost is proportional to the work. Memory is the peak of resident "
    "memory of a process that runs one case and nothing else, above what it held after torch was loaded and a tiny "
    "case had run (MiB). Images are noise, since only cost is measured. Searches of (a) to (c) are too short to be "
    "recorded (attacks/gradient_matching/engine/traced_objective.py): those of thousands of iterations "
    "are up to 1.4 times as fast, see speed.md.",
    "",
]


def page(found: Mapping[str, Any]) -> list[str]:
    """All parts there are."""
    sections: dict[str, Callable[[Any], list[str]]] = {
        "a": _victims,
        "b": _clients,
        "c": _sizes,
        "d": _loops,
        "e": _searches,
    }
    lines = list(INTRODUCTION)
    for part, section in sections.items():
        if part in found:
            lines += [*section(found[part]), "", f"Measured on: {found['processors'][part]}.", ""]
    return lines[:-1]


def _victims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        [
            row["network"],
            row["victims"],
            f"{row['image_iterations_per_second']:.0f}",
            f"{row['mib_above']:.0f}",
            f"{row['mib_above'] / row['victims']:.1f}",
        ]
        for row in rows
    ]
    head = ["network", "victims", "image-iterations per CPU s", "MiB above", "MiB per victim"]
    return [
        "## (a) Victims in one call of `ig`",
        "",
        "Views of single images under FedSGD, made in the same process and counted with it. The search puts at most 32 "
        "victims into a stack, fewer where a CPU's caches hold fewer gradients, so its own memory stops growing there; "
        "what goes on growing are the views and what is compared with them. From 64 victims on four iterations are "
        "timed: these rates differed by up to three times between two runs, memory hardly; (e) times more of them.",
        "",
        *table(head, cells),
    ]


def _clients(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        [
            row["network"],
            row["method"],
            row["clients"],
            f"{row['each']} x {row['epochs']}",
            f"{row['seconds_per_client']:.3f}",
            f"{row['mib_above']:.0f}",
            f"{row['mib_images']:.0f}",
            f"{row['mib_whole']:.0f}",
        ]
        for row in rows
    ]
    head = ["network", "method", "clients", "images x epochs", "CPU s per client", "MiB above", "of these images"]
    return [
        "## (b) Clients in one process",
        "",
        "One round without scoring: `fedavg` by the loop, `hyperfl` by factors; batches of 50. Images are what the "
        'clients hold; "whole process" includes torch itself. The rows of 600 images are the published amount of work.',
        "",
        *table([*head, "whole process, MiB"], cells),
    ]


def _sizes(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    networks = [
        [
            row["network"],
            f"{row['parameters']:,}",
            f"{row['client_round']:.3f}",
            f"{row['iterations']:.0f}",
            f"{max(row['mib_above'], 0.0):.0f}",
        ]
        for row in found["networks"]
    ]
    widths = [
        [row["hidden"], f"{row['parameters']:,}", f"{row['client_round']:.3f}", f"{max(row['mib_above'], 0.0):.0f}"]
        for row in found["hidden"]
    ]
    return [
        "## (c) Size of the network",
        "",
        "FedAvg, one epoch over 100 images; iterations of `ig` on one image. Memory is that of both in turn.",
        "",
        *table(["network", "parameters", "CPU s per client round", "`ig` iterations per CPU s", "MiB above"], networks),
        "",
        "HyperFL's hypernetwork for hyperfl-grey, by the units of its hidden layer (128 in the paper); one epoch of "
        "each phase over 100 images, four clients trained by factors, aggregation included.",
        "",
        *table(["hidden units", "parameters shared", "CPU s per client round", "MiB above"], widths),
    ]


def _loops(found: Mapping[str, Any]) -> list[str]:
    names = list(found["loops"][0]["parts"])
    looped = any(row["name"].startswith("hyperfl, loop") for row in found["loops"])
    one_by_one = "; by the loop each client has a hypernetwork of its own" if looped else ""
    cells = [
        [
            row["name"],
            f"{row['gflop'] * 1e3:,.1f}",
            f"{row['seconds'] * 1e3:,.2f}",
            f"{row['share']:.0%}",
            *(f"{row['parts'][name]:.0%}" for name in names),
        ]
        for row in found["loops"]
    ]
    return [
        "## (d) Where the time goes",
        "",
        "`ig`: one iteration of one trial, alone or in a stack of so many, before and after its evaluation is "
        "recorded, as in searches of hundreds of iterations (by autograd the shares on the right are of a whole call "
        "of few iterations). Local rounds: one client, one epoch over 200 images (HyperFL: of each phase, 10 clients "
        f"together by factors{one_by_one}), aggregation included. "
        "Operations are multiplications and additions in convolutions and matrix products "
        "(forward, backward and, in `ig`, the derivative of the backward pass); the peak is that of a product of two "
        f"2,048 x 2,048 matrices in float32 on one thread, {found['peak_gflop_per_second']:.0f} GFLOP/s here (another "
        "library makes the convolutions, which may come above it). The last "
        "columns are shares of a profiled run's time: operators by group, each without those it calls, and what lies "
        "between them (Python, autograd's own work, the profiler's).",
        "",
        *table(["loop", "MFLOP", "CPU ms", "of the peak", *names], cells),
    ]


def _searches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [[row["attack"], row["network"], *(f"{rate:.0f}" for rate in row["rates"])] for row in rows]
    return [
        "## (e) Every search",
        "",
        "Image-iterations per CPU second by the number of victims in one call, each a single image in one step (for "
        "`joint`, `bilevel` and `peel+ig` one of HyperFL, with its label to be found). Taken between one iteration and "
        "the next, after those in which a search is set up and recorded, as all are whose default length is worth it "
        "(not `rog`). The four searches for each image of `gradinversion` count as four images. `bilevel` searches for "
        "the embedding first, then for the image, where an iteration moves image and classifier in turn.",
        "",
        *table(["attack", "network", *(f"{count} victims" for count in rows[0]["victims"])], cells),
    ]
