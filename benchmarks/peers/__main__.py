"""Ours beside the peers' own code, attack by attack: `python -m benchmarks.peers [--speed]`.

HYPERLEAK_DATA names the folder of the data sets, HYPERLEAK_PEERS one with the peers' code, which is theirs and not part
of this repository; `python -m benchmarks.peers --how` says how to fill it. Peers that are not there are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from benchmarks.common import publish, rewrite
from benchmarks.peers import speed
from benchmarks.peers.adapters import PEERS
from benchmarks.peers.compare import Case, Figures, Outcome, compare
from benchmarks.peers.report import page, record
from benchmarks.peers.sources import PeerMissingError

IMAGES = 16
IG_NOTE = (
    "Signed Adam at 0.1 with three decays, cosine, a start of standard normal numbers, box. {} iterations with TV "
    "{:g}; "
    "the label is known to all. "
    "invertinggradients returns its last iterate; breaching the best by the objective, ours the best of "
    "the last eighth. breaching's total variation also counts the border, as if the image went on in the data set's "
    "mean color."
)


def ig(title: str, dataset: str, network: str, iterations: int, tv: float, **others: Any) -> Case:
    """Return a comparison of IG, all sides with the same settings."""
    made = Case(
        title=title,
        peers=("invertinggradients", "breaching"),
        dataset=dataset,
        network=network,
        ours="ig",
        iterations=iterations,
        moves=iterations,
        tv=tv,
        notes=IG_NOTE.format(iterations, tv),
    )
    return replace(made, **others)


COLOR_ONLY = IG_NOTE.format(200, 1e-4) + " breaching's takes images of three channels only."
CASES = (
    ig(
        "IG, sigmoid LeNet of Zhu et al. (redrawn, normalized), CIFAR-10",
        "cifar10",
        "lenet-zhu",
        300,
        1e-2,
        settings={"normalize": True, "init": "redrawn"},
    ),
    ig("IG, HyperFL's color network, CIFAR-10", "cifar10", "hyperfl-colour", 200, 1e-4),
    ig(
        "IG, HyperFL's gray network, Fashion-MNIST",
        "fashion_mnist",
        "hyperfl-grey",
        200,
        1e-4,
        peers=("invertinggradients",),
        notes=COLOR_ONLY,
    ),
    Case(
        title="iDLG, sigmoid LeNet of Zhu et al., Fashion-MNIST",
        peers=("iDLG",),
        dataset="fashion_mnist",
        network="lenet-zhu",
        ours="idlg",
        iterations=100,
        moves=400,
        options={"objective": "l2", "tolerance": 0.0, "patience": 0},
        others={"50 pairs": {"history_size": 50}},
        knows_labels=False,
        notes="L-BFGS on the squared distance, N(0, 1) start, no prior; both recover the label. Theirs makes up to 100 "
        "steps of torch's L-BFGS, of up to 20 moves each, and stops where it calls itself converged. One by one, ours "
        "makes as many moves as theirs made on the same victim. In the stacks it makes 400. Both keep 100 pairs of "
        "steps and "
        "gradient changes, as torch does; the second stack keeps 50.",
    ),
    Case(
        title="ROG's search, its LeNet, CIFAR-10",
        peers=("ROG",),
        dataset="cifar10",
        network="lenet-rog",
        ours="rog",
        iterations=100,
        moves=100,
        options={"preset": "published"},
        notes="Codes of 8 x 8 enlarged fourfold. Adam at 0.05 with a cosine, 100 iterations; the label is known to "
        "both. "
        "Theirs returns its last iterate. Only the search is compared: the authors' networks that sharpen its result "
        "are for photographs of 128 x 128 pixels.",
    ),
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", action="store_true", help="say which peers are there, and how to get the others")
    parser.add_argument("--speed", action="store_true", help="only measure how fast long searches of IG are")
    parser.add_argument("--rewrite", action="store_true", help="write both pages anew from what was measured")
    chosen = parser.parse_args()
    if chosen.rewrite:
        rewrite("peers", lambda known: page(IMAGES, measured_before(known["comparisons"])))
        rewrite("peers_speed", lambda known: speed.page(speeds_before(known["networks"])))
        return
    if chosen.how:
        sys.stdout.write("\n".join(how()) + "\n")
        return
    torch.set_num_threads(1)
    if chosen.speed:
        measured = [(case, speed.measure(case)) for case in CASES if case.ours == "ig"]
        figures = [{"network": case.network, **asdict(speeds)} for case, speeds in measured]
        publish("peers_speed", {"versions": versions(), "networks": figures}, speed.page(measured))
        return
    outcomes: list[tuple[Case, Outcome]] = []
    for case in CASES:
        outcomes.append((case, compare(case, IMAGES)))
        whole = {"versions": versions(), **record(outcomes)}
        publish("peers", whole, page(IMAGES, outcomes))


def measured_before(comparisons: Sequence[Mapping[str, Any]]) -> list[tuple[Case, Outcome]]:
    """Comparisons as they were kept, with today's words about them."""
    by_title = {case.title: case for case in CASES}
    found = []
    for one in comparisons:
        figures = {name: Figures(**value) for name, value in one["figures"].items()}
        rest = {field.name: one[field.name] for field in fields(Outcome) if field.name != "figures"}
        found.append((by_title[one["case"]["title"]], Outcome(figures=figures, **rest)))
    return found


def speeds_before(networks: Sequence[Mapping[str, Any]]) -> list[tuple[Case, speed.Speeds]]:
    """Speeds as they were kept."""
    by_network = {case.network: case for case in CASES if case.ours == "ig"}
    return [
        (by_network[one["network"]], speed.Speeds(**{name: value for name, value in one.items() if name != "network"}))
        for one in networks
    ]


def how() -> list[str]:
    """Return one line for each peer."""
    return [f"{name}: {state}" for name, state in versions().items()]


def versions() -> dict[str, str]:
    """Of each peer, the version there is or how to get it."""
    found = {}
    for name, (source, _) in PEERS.items():
        try:
            found[name] = f"there, {source.version()}"
        except PeerMissingError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    main()
