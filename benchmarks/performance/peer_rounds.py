"""Rounds of FedAvg and DP-FedAvg beside the peers' own code.

Run it by `python -m benchmarks.performance.peer_rounds [--turns 5]`.

In CPU seconds of one thread, everything in turns in one process, so that the ratios hold on a busy machine too. Before
anything is timed, every side trains for one epoch from the same weights on the same images in the same order, and must
end at the same weights. HYPERLEAK_PEERS names a folder with the peers' code, which is theirs and not part of this
repository; `--how` says how to fill it. Peers that are not there are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.common import publish, table
from benchmarks.peers import rounds
from benchmarks.peers.rounds import PeerTrainer, Setting, Trainer
from benchmarks.peers.sources import PeerMissingError, chapter
from benchmarks.peers.trainers import DPAuthors, HyperFLAuthors, PFLlib, PflResearch
from benchmarks.performance.noise_data import BATCH

NETWORKS = ("hyperfl-colour", "hyperfl-grey")
FEDAVG, DP = "FedAvg, ours", "DP-FedAvg, ours"
OURS: Mapping[str, Callable[[Setting], Trainer]] = {FEDAVG: rounds.fedavg, DP: rounds.dp_fedavg}
THEIRS: Mapping[str, tuple[type[PeerTrainer], str]] = {
    "FedAvg, PFLlib": (PFLlib, FEDAVG),
    "FedAvg, pfl-research": (PflResearch, FEDAVG),
    "FedAvg, the HyperFL authors": (HyperFLAuthors, FEDAVG),
    "DP-FedAvg, the HyperFL authors": (DPAuthors, DP),
}
"""The peers, and which of ours does the same work."""
CLIENTS = 2
APART = 1e-3
"""How far apart two sides may end, as a share of how far the weights moved."""


@dataclass
class Figures:
    """What was found on one network.

    Attributes:
        seconds: CPU seconds per client, turn by turn.
        apart: how far a peer's weights after an epoch are from ours, as a share of how far they moved.
        missing: why a peer was not run.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def over(self, name: str, base: str) -> list[float]:
        """Turn by turn, how many times as long `name` takes as `base`."""
        return [one / other for one, other in zip(self.seconds[name], self.seconds[base], strict=True)]


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Return the largest difference of any weight."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def same_work(name: str, theirs: Trainer, ours: Trainer) -> float:
    """Return how far apart both end after a round, as a share of how far the weights moved.

    Raises:
        ValueError: too far for rounding: they do not do the same work.
    """
    before = [p.detach().clone() for p in ours.setting.task.model.parameters()]
    theirs.round()
    ours.round()
    share = distance(theirs.weights(), ours.weights()) / distance(before, ours.weights())
    if not share <= APART:
        raise ValueError(f"{name} ends {share:.1e} of the way from ours: expected the same work on both sides")
    return share


def check(network: str, figures: Figures) -> None:
    """Compare one epoch of every peer with ours, in the order of the data and without noise."""
    quiet = Setting(network, epochs=1, shuffle=False, silent=True)
    for name, (peer, base) in THEIRS.items():
        try:
            theirs = peer(quiet)
        except PeerMissingError as error:
            figures.missing[name] = str(error)
            continue
        ours = OURS[base](quiet)
        figures.apart[name] = same_work(name, theirs, ours)
        theirs.close()
        ours.close()


def measure(network: str, turns: int, clients: int = CLIENTS) -> Figures:
    """Run every side in turns, after one that does not count."""
    figures = Figures()
    check(network, figures)
    setting = Setting(network, clients)
    made = {name: make(setting) for name, make in OURS.items()}
    made |= {name: peer(setting) for name, (peer, _) in THEIRS.items() if name in figures.apart}
    figures.seconds = {name: [] for name in made}
    for turn in range(turns + 1):
        for name, trainer in made.items():
            began = time.process_time()
            trainer.round()
            if turn:
                figures.seconds[name].append((time.process_time() - began) / clients)
    for trainer in made.values():
        trainer.close()
    return figures


def ends(values: list[float]) -> str:
    """Return the median, with the least and the largest."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def lines_of(network: str, figures: Figures) -> list[list[str]]:
    """Return the lines of a network."""
    found = []
    for name in OURS:
        over = "" if name == FEDAVG else f"{ends(figures.over(name, FEDAVG))} of {FEDAVG}"
        found.append([network, name, ends(figures.seconds[name]), over, ""])
    for name, (_, base) in THEIRS.items():
        if name in figures.missing:
            found.append([network, name, "not run", "", ""])
        else:
            over = f"{ends(figures.over(name, base))} of {base}"
            found.append([network, name, ends(figures.seconds[name]), over, f"{figures.apart[name]:.0e}"])
    return found


def page(measured: Mapping[str, Figures], turns: int) -> list[str]:
    """Return all figures."""
    missing = {name: why for figures in measured.values() for name, why in figures.missing.items()}
    return [
        "# Rounds of training beside the peers' own code",
        "",
        f"A round of {CLIENTS} clients with {rounds.IMAGES} images of noise each. They train for {Setting.epochs} "
        f"epochs in batches of {BATCH}. SGD has step size {rounds.LR}. Momentum is {rounds.MOMENTUM} and decay "
        f"{rounds.DECAY}, which the HyperFL authors have in their code. DP-FedAvg: each image's gradient clipped at "
        f"{rounds.CLIP}, noise of {rounds.NOISE} times that, batches of one size from shuffled images (theirs, "
        "and `mode: as-published` of ours). CPU seconds per client of one thread, everything in turns in one process, "
        f"median [least, largest] of {turns} turns; how many times as long a side takes is counted turn by turn. What "
        "else the machine does slows all sides down: read the ratios. Our network normalizes the images at every "
        "step; the peers' are normalized beforehand, as they do when they load them. PFLlib and pfl-research train "
        "the module of ours; all but ours keep images in torch's usual order, channels outermost.",
        "",
        "The last column: both sides trained for one epoch (12 steps) from the same weights, on the same images in "
        "the same order and without noise; the largest difference of any weight, as a share of the largest step away "
        "from the start. In longer rounds rounding decides near ties in max pooling, from where they part.",
        "",
        *table(
            ["network", "round", "CPU seconds per client", "times as long as", "apart"],
            [row for network, figures in measured.items() for row in lines_of(network, figures)],
        ),
        "",
        *[line for name, why in missing.items() for line in (f"{name} was not run: {why}", "")],
        *chapter(how(state=False), "`python -m benchmarks.performance.peer_rounds`"),
    ]


def how(*, state: bool = True) -> list[str]:
    """Return a line for each peer: how to get it, its licence and what is not as published; or whether it is there."""
    lines = []
    for peer in (PFLlib, PflResearch, HyperFLAuthors):
        got = peer.source.get
        if state:
            try:
                got = f"there, {peer.source.version()}"
            except PeerMissingError as error:
                got = str(error)
        lines.append(f"{peer.source.name}: {got}. Licence: {peer.licence}. Changed: {peer.changes}")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", action="store_true", help="say which peers are there, and how to get the others")
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.how:
        sys.stdout.write("\n".join(how()) + "\n")
        return
    torch.set_num_threads(1)
    measured = {network: measure(network, chosen.turns) for network in NETWORKS}
    result: dict[str, Any] = {
        "clients": CLIENTS,
        "versions": how(),
        "networks": {network: asdict(figures) for network, figures in measured.items()},
    }
    publish("peer_rounds", result, page(measured, chosen.turns))


if __name__ == "__main__":
    main()
