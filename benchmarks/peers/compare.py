"""The comparisons, and how one is run: every victim by each peer and by ours in turn, then all by ours in one stack."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import attacks
import fl.data
from attacks.base import Reconstruction
from benchmarks.peers.adapters import PEERS, Peer, Run, Setting
from benchmarks.peers.sources import PeerMissingError
from benchmarks.peers.victims import Victim, network, victims
from eval.metrics.baselines import baseline_images
from eval.metrics.image import psnr

ALONE, STACKED = "ours, one by one", "ours, in one stack"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        title: of it.
        peers: compared with.
        dataset: whose test images are attacked.
        network: by name.
        settings: of the network.
        ours: name of our attack.
        iterations: that peers are asked for.
        moves: that those come to.
        tv: weight of the total variation.
        options: further settings of our attack.
        others: what they are changed to in further stacks of ours, by what to call those.
        knows_labels: whether both sides are given the labels; else both recover them.
        notes: what a reader should know.
    """

    title: str
    peers: tuple[str, ...]
    dataset: str
    network: str
    ours: str
    iterations: int
    moves: int
    tv: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    knows_labels: bool = True
    notes: str = ""

    def attack(self, iterations: int) -> attacks.Attack:
        """Ours."""
        prior = {"tv_weight": self.tv} if self.tv else {}
        return attacks.build({"name": self.ours, "iterations": iterations, **prior, **self.options})


@dataclass(frozen=True)
class Figures:
    """What one side reached on all victims.

    Attributes:
        psnr: in dB, victim by victim; not finite pixels count as mid gray.
        iterations: of each victim.
        seconds: of CPU time, victim by victim; one number for a stack.
        broken: victims whose images were not finite.
    """

    psnr: list[float]
    iterations: list[int]
    seconds: list[float]
    broken: int

    @property
    def rate(self) -> float:
        """Image-iterations per CPU second."""
        return sum(self.iterations) / sum(self.seconds)


@dataclass(frozen=True)
class Outcome:
    """Of one comparison.

    Attributes:
        floor: the PSNR of each image's own mean color.
        figures: by peer, and of ours.
        missing: why a peer was not run, by peer.
        labels: how many labels ours had right, in the stack.
    """

    floor: list[float]
    figures: dict[str, Figures]
    missing: dict[str, str]
    labels: int


def compare(case: Case, count: int) -> Outcome:
    """Attack the first `count` test images."""
    data = fl.data.load(case.dataset)
    task = network(case.network, data.num_classes, {"input_shape": data.input_shape, **case.settings})
    test = data.test.take(torch.arange(count))
    attacked = victims(task, test, knows_labels=case.knows_labels)
    peers, missing = find_peers(case.peers, Setting(task, case.iterations, case.tv))
    for peer in peers.values():  # the first call pays for what is set up once
        peer(attacked[0])
    case.attack(2).run([attacked[0].view], [attacked[0].seed])
    runs: dict[str, list[Run]] = {name: [] for name in (*peers, ALONE)}
    for victim in attacked:
        for name, peer in peers.items():
            runs[name].append(peer(victim))
        moves = [runs[name][-1].iterations for name in peers]  # a peer may stop early
        runs[ALONE].append(run_ours(case, [victim], min(moves, default=case.moves))[0][0])
    figures = {name: summed(some, attacked) for name, some in runs.items()}
    together, labels = run_ours(case, attacked, case.moves)
    figures[STACKED] = summed(together, attacked)
    for name, change in case.others.items():
        other = replace(case, options={**case.options, **change})
        figures[f"{STACKED}, {name}"] = summed(run_ours(other, attacked, case.moves)[0], attacked)
    images = torch.cat([victim.image for victim in attacked])
    return Outcome(psnr(baseline_images(images)["mean"], images).tolist(), figures, missing, labels)


def find_peers(names: Iterable[str], setting: Setting) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those peers that are there, and why others are not."""
    there: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            there[name] = PEERS[name][1](setting)
        except (PeerMissingError, ImportError) as error:
            missing[name] = str(error)
    return there, missing


def run_ours(case: Case, attacked: list[Victim], iterations: int) -> tuple[list[Run], int]:
    """Our attack on all of `attacked` at once, the time shared out evenly, and how many labels are right."""
    attack = case.attack(iterations)
    begin = time.process_time()
    results = attack.run([victim.view for victim in attacked], [victim.seed for victim in attacked])
    spent = (time.process_time() - begin) / len(attacked)
    runs, right = [], 0
    for victim, result in zip(attacked, results, strict=True):
        assert isinstance(result, Reconstruction)
        assert isinstance(result.inputs, torch.Tensor)
        assert isinstance(result.labels, torch.Tensor)
        right += int((result.labels == victim.label).all())
        runs.append(Run(result.inputs, iterations, spent))
    return runs, right


def summed(runs: list[Run], attacked: list[Victim]) -> Figures:
    """Scores and times."""
    images = torch.cat([run.image for run in runs])
    broken = ~images.isfinite().flatten(1).all(1)
    images = torch.where(broken.view(-1, 1, 1, 1), 0.5, images)
    scores: Any = psnr(images, torch.cat([victim.image for victim in attacked]))
    return Figures(scores.tolist(), [run.iterations for run in runs], [run.seconds for run in runs], int(broken.sum()))
