"""What each defense is worth against an attacker who knows it.

Run it by `python -m benchmarks.leakage.defenses` (needs HYPERLEAK_DATA).

IG on Fashion-MNIST and the untrained LeNet of Zhu et al., one image in one step where the defense needs no more, every
defense at a published setting; beside it the same search by an attacker who does not know that there is a defense.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from attacks.base import NotApplicable
from benchmarks.common import RESULTS, publish, rewrite, table
from defenses import defenses
from eval.metrics.score import Row, score
from eval.metrics.statistics import Interval, mean_interval, paired_difference
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.types import Batch, Truth
from fl.view import ThreatModel

HEAD = ["defense", "images", "setting of", "knowing", "not knowing", "difference", "originals", "adapted settings"]
KEPT = (
    "defense",
    "images",
    "known",
    "update",
    "place",
    "psnr",
    "ssim",
    "psnr_original",
    "floor_mean_psnr",
    "objective",
)
"""Of an image's scores, what is published."""
FIRST = 1000
"""The first of the test images used."""


@dataclass(frozen=True)
class Case:
    """One defense.

    Attributes:
        name: with its setting, in words.
        source: of the setting.
        defense: as a config has it.
        adapted: what the attacker who knows it sets differently.
        images: in one update; of a group one for each client.
        redrawn: whether each update is of a federation with a seed of its own, where what is fed is a matter of chance.
    """

    name: str
    source: str
    defense: dict[str, Any]
    adapted: dict[str, Any] = field(default_factory=dict)
    images: int = 1
    redrawn: bool = False


CHAINS: dict[str, dict[str, Any]] = {
    "noise": {
        "name": "chain",
        "parts": [{"name": "clip", "max_norm": 1.0}, {"name": "noise", "std": 1e-2, "unit": "absolute"}],
    },
    "quantize": {"name": "chain", "parts": [{"name": "prune", "ratio": 0.9}, {"name": "quantize"}]},
    "prune": {"name": "chain", "parts": [{"name": "quantize"}, {"name": "prune", "ratio": 0.9}]},
}
CASES = (
    Case("none", "", {"name": "none"}),
    Case("clip, norm 1", "McMahan et al. 2018", {"name": "clip", "max_norm": 1.0}),
    Case("noise, std 1e-2 of gradient", "Zhu et al. 2019", {"name": "noise", "std": 1e-2, "unit": "absolute"}),
    Case("dp-sgd, clip 4, noise 2", "Abadi et al. 2016", {"name": "dp-sgd"}),
    Case("dp-sgd, clip 4, std 1e-2", "as noise", {"name": "dp-sgd", "std": 1e-2}),
    Case("prune, largest 10 % sent", "Zhu et al. 2019", {"name": "prune", "ratio": 0.9}),
    Case("prune, random 10 % sent", "Konecny et al. 2016", {"name": "prune", "ratio": 0.9, "keep": "random"}),
    Case("quantize, 8 bits", "Konecny et al. 2016", {"name": "quantize"}),
    Case("quantize, 2 bits", "ours", {"name": "quantize", "bits": 2}),
    Case("qsgd, 4 bits", "Alistarh et al. 2017", {"name": "qsgd"}),
    Case("signsgd", "Bernstein et al. 2018", {"name": "signsgd"}),
    Case("soteria, 60 % of units", "Sun et al. 2021", {"name": "soteria"}),
    Case("precode, K = 256, beta 1e-3", "Scheliga et al. 2022", {"name": "precode"}, {"private_lr": 0.1}),
    Case("clip, norm 1, then noise, std 1e-2", "clip and noise", CHAINS["noise"]),
    Case("prune, largest 10 %, then quantize, 8 bits", "prune and quantize", CHAINS["quantize"]),
    Case("quantize, 8 bits, then prune, largest 10 %", "prune and quantize", CHAINS["prune"]),
    Case("none", "", {"name": "none"}, images=2),
    Case("mixup, alpha 1", "Zhang et al. 2018", {"name": "mixup"}, {"labels": "joint"}, images=2, redrawn=True),
    Case("mixup, labels from random ones", "Zhang et al. 2018", {"name": "mixup"}, images=2, redrawn=True),
    Case(
        "instahide, k = 2",
        "Huang et al. 2020 (k = 4)",
        {"name": "instahide", "k": 2},
        {"tv_weight": 0.0},
        2,
        redrawn=True,
    ),
    Case("none", "", {"name": "none"}, images=4),
    Case("secagg, 4 clients", "Bonawitz et al. 2017", {"name": "secagg"}, images=4),
)


def attack_under_defense(case: Case, known: bool, images: Batch, search: dict[str, Any]) -> list[Row]:
    """Scores of every image under one defense, for an attacker who knows it or not."""
    task = fl.models.models.build({"name": "lenet-zhu", "input_shape": (1, 28, 28)}).build_task(num_classes=10, seed=0)
    defense = defenses.build(case.defense)
    client = Client(task, FedAvg(lr=1.0, steps=1, batch_size=None), defense)
    parts = [images.take(torch.arange(i, i + case.images)) for i in range(0, len(images), case.images)]
    threat = ThreatModel(knows_defense=known)
    each = case.images // defense.group_size
    given = [[part.take(torch.arange(i, i + each)) for i in range(0, case.images, each)] for part in parts]
    data = [ClientData(images, images)] * defense.group_size
    seeds = range(len(given)) if case.redrawn else [0] * len(given)
    runs = [Federation(client, data, seed=seed) for seed in seeds]
    seen = [
        run.observe(0, data=own if len(own) > 1 else own[0], threat=threat)
        for run, own in zip(runs, given, strict=True)
    ]
    attack = attacks.build({"name": "ig", **search, **(case.adapted if known else {})})
    found: list[Row] = []
    results = attack.run([view for view, _ in seen], list(range(len(seen))))
    for update, (result, (_, truth), part) in enumerate(zip(results, seen, parts, strict=True)):
        if isinstance(result, NotApplicable):
            raise ValueError(f"expected a reconstruction, got: {result.reason}")
        ones = score(result, truth)
        mine = ones if defense.group_size > 1 else score(result, original(truth, part))
        for fed, owned in zip(ones, mine, strict=True):
            own = {"update": update, "psnr_original": owned["psnr"], "place": fed["image"]}
            found.append({**fed, **own, "defense": case.name, "images": case.images, "known": known})
    return found


def original(truth: Truth, part: Batch) -> Truth:
    """Return the client's own images in the place of those it fed."""
    index = truth.trace.indices
    return replace(truth, trace=replace(truth.trace, inputs=part.inputs[index], labels=part.labels[index]))


def report(scored: Sequence[Row], seconds: float, search: dict[str, Any]) -> None:
    """Write what has been measured."""
    rows = [{key: row[key] for key in KEPT if key in row} for row in scored]
    publish("defenses", {"search": search, "rows": rows, "cpu_seconds": seconds}, document(scored, search))


def document(scored: Sequence[Row], search: Mapping[str, Any]) -> list[str]:
    """Return the page of what has been measured."""
    body = []
    for case in CASES:
        mine = [r for r in scored if (r["defense"], r["images"]) == (case.name, case.images)]
        knowing, not_knowing = ([r for r in mine if r["known"] == known] for known in (True, False))
        if not not_knowing:
            continue
        gap = paired_difference(knowing, not_knowing, image="update", run="place")
        settings = ", ".join(f"{key} {value}" for key, value in case.adapted.items())
        cells = [_told(mean_interval(data, image="update", run="place")) for data in (knowing, not_knowing)]
        owned = mean_interval(knowing, "psnr_original", image="update", run="place")
        ends = [_told(gap, "+.1f"), f"{owned.value:.1f}", settings]
        body.append([case.name, str(case.images), case.source, *cells, *ends])
    plain = [r for r in scored if (r["defense"], r["images"], r["known"]) == ("none", 1, True)]
    floor = mean_interval(plain, "floor_mean_psnr", image="update", run="place")
    return [
        "# Every defense against an attacker who knows it",
        "",
        *([] if len(body) == len(CASES) else ["**Incomplete: the run was not finished.**", ""]),
        f"PSNR in dB of `ig` on {len(plain)} Fashion-MNIST test images, labels unknown. The search takes "
        f"{search['iterations']} iterations with TV {search['tv_weight']:g}, from one start. The second column says "
        "how "
        "many images are in one step of FedAvg (of `secagg` one for each client). The network is the untrained "
        "LeNet of "
        "Zhu et al. (weights U(-0.5, 0.5)). `knowing` "
        "adapts to the defense (`surrogate`, `weights`, private noise, and the settings of the last column), "
        "`not knowing` runs the same search as if there were none. The truth is what "
        "the client fed; `originals` compares with its own images, which differ under mixup and instahide. Intervals: "
        f"95 % over updates. A mean color per image scores {floor.value:.1f}. Few images, one network and "
        "one seed (under mixup and instahide one for each update, which draw what is blended): differences of a few dB "
        "say nothing, and what a defense costs in accuracy is not here.",
        "",
        "Under mixup an attacker who knows takes no label as certain and searches for the shares of both. From random "
        "ones that search ends elsewhere; from the whole labels that the update gives away (`labels: joint`; who does "
        "not know takes these as they are) it does about as well as with them given. Two images are blended each with "
        "itself half the time, and then whole labels are right.",
        "",
        "Which entries were pruned is read off zeros. A grid that is laid over them afterwards has no zero, so that "
        "who knows both defenses is no better off; pruned after it, the zeros are there. Rows are measured one by one "
        "(`--only`); the machine is that of the last.",
        "",
        *table(HEAD, body),
    ]


def rows_measured_before(search: dict[str, Any]) -> tuple[list[Row], float]:
    """Return the published rows, and the CPU seconds that went into all.

    Raises:
        ValueError: these come from another search.
    """
    found = json.loads((RESULTS / "defenses.json").read_text())
    if found["search"] != search:
        raise ValueError(f"expected the search of the published rows, {found['search']}, got {search}")
    return found["rows"], found["cpu_seconds"]


def _told(found: Interval, form: str = ".1f") -> str:
    bounds = "" if found.low is None or found.high is None else f" [{found.low:{form}}, {found.high:{form}}]"
    return f"{found.value:{form}}{bounds}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--tv", type=float, default=1e-4)
    names = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="of these; all other rows stay")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rewrite:
        rewrite("defenses", lambda found: document(found["rows"], found["search"]))
        return
    images = fl.data.load("fashion_mnist").test.take(torch.arange(FIRST, FIRST + chosen.images))
    search = {"iterations": chosen.iterations, "tv_weight": chosen.tv}
    cases = [case for case in CASES if chosen.only is None or case.name in chosen.only]
    scored, spent = rows_measured_before(search) if chosen.only else ([], 0.0)
    begin = time.process_time()
    for case in cases:
        found = [row for known in (True, False) for row in attack_under_defense(case, known, images, search)]
        scored = [row for row in scored if (row["defense"], row["images"]) != (case.name, case.images)] + found
        report(scored, spent + time.process_time() - begin, search)


if __name__ == "__main__":
    main()
