"""Batches, several local steps, earlier rounds, labels.

Run it by `python -m benchmarks.hyperfl.several_steps` (needs HYPERLEAK_DATA).

What the other pages leave at one step on one image, each question on real images and untrained networks: how searches
do on larger batches, what they do about several local steps with and without their order, what a server gains that
watched the same images before, how exact `peel` stays over a whole round, and which labels an update tells. Every
row is kept; only what the results lack is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from attacks.base import NotApplicable
from benchmarks.common import RESULTS, publish, rewrite
from benchmarks.hyperfl import several_steps_read
from benchmarks.hyperfl.several_steps_cases import SETS, Case, cases
from benchmarks.hyperfl.several_steps_page import page
from benchmarks.leakage.leakage import Seen
from eval.metrics.score import Row, score
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hypernetwork import Hypernetwork
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel

FIRST = 400
"""The first of the test images attacked."""
OTHERS, OWN = 8, 300
"""Clients that train between watched rounds, and the training images of each."""
WATCHED = 4
"""The round in which an attack with a history is made, counted from 1; the network is the same however long that is."""
COLUMNS = ("psnr", "ssim", "floor_mean_psnr", "label_correct", "label_overlap", "failure")


def rule(case: Case) -> Method:
    """How its clients train."""
    settings: dict[str, Any] = {"lr": 0.01, **case.work}
    if case.method == "FedAvg":
        return FedAvg(**settings)
    return HyperFL(head_epochs=0, parametrization=Hypernetwork(init="scaled"), **settings)


def task(case: Case, seed: int) -> Task:
    """Its network, untrained."""
    shape = {"input_shape": (3, 32, 32)} if case.network == "lenet-zhu" else {}
    return fl.models.build(case.network, num_classes=10, seed=seed, **shape)


def victims(case: Case) -> Iterator[Seen]:
    """Each update is of images and a network of its own."""
    test = fl.data.load(SETS[case.network]).test
    threat = ThreatModel(history_rounds=case.rounds - 1, **dict.fromkeys(case.knows, True))
    for number in range(case.updates):
        begin = FIRST + number * case.images
        images = test.take(torch.arange(begin, begin + case.images))
        yield watched(case, images, threat, number)


def watched(case: Case, images: Batch, threat: ThreatModel, seed: int) -> Seen:
    """The last of the rounds; before it the images' client and others train the network."""
    others: list[ClientData] = []
    if case.section == "history":
        train = fl.data.load(SETS[case.network]).train
        shares = torch.arange(OTHERS * OWN).split(OWN)
        others = [ClientData(train.take(share), images) for share in shares]
    run = Federation(Client(task(case, seed), rule(case)), [ClientData(images, images), *others], seed=seed)
    past: tuple[ServerView, ...] = ()
    if case.section == "history":
        for _ in range(WATCHED - 1):
            past += (run.observe(0, threat=threat, history=past)[0],)
            run.run_round()
    return run.observe(0, threat=threat, history=past)


def measured(case: Case) -> dict[str, Any]:
    """Rows of every image, or the reason why there are none."""
    seen = list(victims(case))
    begin = time.process_time()
    results = attacks.build(case.spec).run([view for view, _ in seen], list(range(len(seen))))
    seconds = time.process_time() - begin
    rows: list[Row] = []
    for update, (result, (_, truth)) in enumerate(zip(results, seen, strict=True)):
        if isinstance(result, NotApplicable):
            return {"reason": result.reason, "seconds": seconds, "rows": []}
        for row in score(result, truth):
            number = update * case.images + row["image"]
            rows.append({"image": number, "update": update, **{key: row[key] for key in COLUMNS}})
    return {"seconds": seconds, "rows": rows}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew, not only what the results lack")
    parser.add_argument("--rewrite", action="store_true", help="write the page anew from what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rewrite:
        rewrite("several_steps", lambda known: page(known["searches"], known["read"]))
        return
    before = RESULTS / "several_steps.json"
    kept = json.loads(before.read_text()) if before.exists() else {}
    searches, read = kept.get("searches", {}), kept.get("read", {})
    for name, measure in several_steps_read.QUESTIONS.items():
        if given.again or name not in read:  # one after the other: a stop loses nothing
            read[name] = measure()
            report(searches, read)
    for case in cases():
        if given.again or case.name not in searches:
            searches[case.name] = measured(case)
            report(searches, read)
    report(searches, read)


def report(searches: dict[str, Any], read: dict[str, Any]) -> None:
    """Write what there is so far of what is still asked."""
    found = {case.name: searches[case.name] for case in cases() if case.name in searches}
    publish("several_steps", {"searches": found, "read": read}, page(found, read))


if __name__ == "__main__":
    main()
