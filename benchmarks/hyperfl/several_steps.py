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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from attacks.base import NotApplicable
from attacks.rewriting.first_step import FirstStep
from benchmarks.common import RESULTS, hyperfl_conditions, publish, rewrite, table
from benchmarks.hyperfl import several_steps_read
from benchmarks.hyperfl.several_steps_cases import SEARCH, SETS, SIGMOID_TV, Case, cases
from benchmarks.hyperfl.several_steps_read import CLIENTS, EVEN, SIZES, UPDATES
from benchmarks.leakage.leakage import Seen
from eval.metrics.score import Row, score
from eval.metrics.statistics import Interval, mean_interval, paired_difference, success_rate
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
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
    """Return how its clients train."""
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
    """Return the last of the rounds; before it the images' client and others train the network."""
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


def measure_case(case: Case) -> dict[str, Any]:
    """Return the rows of every image, or the reason why there are none."""
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


# ---- the page -------------------------------------------------------------------------------------------------------


def written(interval: Interval, number: Callable[[float], str] = lambda value: f"{value:.1f}") -> str:
    """Return a figure with its interval."""
    low, high = interval.low, interval.high
    if low is None or high is None:
        return number(interval.value)
    return f"{number(interval.value)} [{number(low)}, {number(high)}]"


def grouped(rows: Sequence[Row], *columns: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows of equal values in these columns, in order of their first."""
    keys = dict.fromkeys(tuple(row[column] for column in columns) for row in rows)
    for key in keys:
        yield key, [row for row in rows if tuple(row[column] for column in columns) == key]


def of_peel(rows: Sequence[Row]) -> list[str]:
    """Errors by optimizer and local work."""
    body = []
    columns = ("extractor", "embedding", "mean", "start")
    for (optimizer, work), mine in grouped(rows, "optimizer", "work"):
        errors = [written(mean_interval(mine, column), _short) for column in columns]
        body.append([optimizer, work, *errors, f"{sum(row['verified'] for row in mine)} of {len(mine)}"])
    head = ["optimizer", "local work", "extractor", "embedding", "gradient: mean along the round", "at the start"]
    return [
        f"HyperFL's split in {CLIENTS} clients of 600 images, before any round. Batches are of 50; step size and "
        "clipping are the published ones. Relative errors, mean over clients with its interval. The gradient that "
        "is read off the "
        "update is compared, at the factor that suits it best, with the *mean along the round* of what the client's "
        "steps computed (weighted as momentum and clipping do), and with that of all its images *at the start*, which "
        "attacks for one step take it for: 1 is no better than nothing. *Verified* is the peel's own word.",
        "",
        *table([*head, "verified"], body),
    ]


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def of_labels(rows: Sequence[Row]) -> list[str]:
    """Return the shares of labels by rounds of training, rule and size of the batch."""
    body = []
    for (rounds, accuracy, rule), mine in grouped(rows, "rounds", "accuracy", "rule"):
        by_size = {size: [row for row in mine if row["size"] == size] for size in SIZES}
        cells = [written(mean_interval(part, "known"), lambda value: f"{100 * value:.0f}") for part in by_size.values()]
        body.append([f"{rounds} ({accuracy:.0%})", rule, *cells])
    refused = sum(row["refused"] for row in rows)
    return [
        "Percent of an update's labels that a rule tells, each label counted as often as it is there; "
        f"{UPDATES} updates of test images in their order for each batch size, with 95 % intervals, after so many "
        "rounds of FedAvg (accuracy in brackets). *Signs*: every class whose bias has a negative gradient, once. "
        "*Counts*: `attacks/labels/recovery.py`, on one step, on one whose bias was not sent, and on four steps of a "
        f"quarter of the batch each (of one image: of it each time). *{EVEN.capitalize()}*: every class as "
        f"often, drawn without the update: what the size alone tells. {refused} of {len(rows)} guesses were "
        "refused; such a guess tells none.",
        "",
        *table(["rounds", "rule", *(f"B = {size}" for size in SIZES)], body),
        "",
        f"Counts on one step less what is dealt out evenly, B = {SIZES[-1]}:",
        "",
        *table(["rounds of training", "points"], [*_over_even(rows)]),
    ]


def _over_even(rows: Sequence[Row]) -> Iterator[list[object]]:
    """Paired differences for the largest batch, in points, by rounds."""
    for (rounds,), mine in grouped([row for row in rows if row["size"] == SIZES[-1]], "rounds"):
        counts, even = ([row for row in mine if row["rule"] == rule] for rule in ("counts", EVEN))
        gain = paired_difference(counts, even, "known")
        yield [rounds, written(gain, lambda value: f"{100 * value:+.0f}")]


Found = Mapping[str, Mapping[str, Any]]
Done = Sequence[tuple[Case, Mapping[str, Any]]]
"""Cases with what came of them."""
FIGURES = [
    "images",
    "PSNR dB [95 %]",
    ">= 20 dB",
    "mean color dB",
    "labels right",
    "on their image",
    "CPU s an update",
]


def page(searches: Found, read: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return all figures, of what was measured so far.

    Args:
        searches: rows or reasons, by `Case.name`.
        read: rows of `several_steps_read.QUESTIONS`.
    """
    every = cases()
    done = [(case, searches[case.name]) for case in every if case.name in searches]
    lines = [
        "# Batches, several steps, earlier rounds and labels",
        "",
        "FedAvg and HyperFL (heads scaled, its classifier at rest), Fashion-MNIST on `hyperfl-grey`, CIFAR-10 on "
        "`lenet-zhu`; untrained where nothing else is said, every update of test images and a network of its own. "
        f"Searches are `ig` of {SEARCH['iterations']} iterations: short ones, so that rows compare with each other and "
        f"not with those of other pages. TV is {SEARCH['tv_weight']:g}, on `lenet-zhu` {SIGMOID_TV:g}. No labels "
        "are given. Reconstructions are assigned to the images they are nearest to; intervals are 95 % over "
        "images, which takes those of one update as independent. *Mean color* is what a guess of each image's own "
        "mean color would get; *labels right* counts a batch's labels in whatever order, *on their image* those that "
        "came back with their image.",
        "",
        hyperfl_conditions("scaled", "as each table says, mostly 0.01"),
        "",
    ]
    if len(done) < len(every) or len(read) < 2:
        lines += ["**Incomplete: not all rows were measured.**", ""]
    for title, text, part in (
        ("Batches in one step", _of_batches, "batches"),
        ("Several local steps", _of_steps, "steps"),
        ("An exact attack on two steps", _of_exact, "exact"),
        ("The same images in earlier rounds", _of_history, "history"),
    ):
        chosen = [(case, value) for case, value in done if case.section == part]
        lines += [f"## {title}", "", *text(chosen), ""] if chosen else []
    for title, show, part in (
        ("A hypernetwork after a whole local round", of_peel, "peel"),
        ("Labels alone", of_labels, "labels"),
    ):
        lines += [f"## {title}", "", *show(read[part]), ""] if part in read else []
    return lines[:-1]


def _of_batches(done: Done) -> list[str]:
    head = ["method", "network", "batch", "attack", *FIGURES]
    body = [[case.method, case.network, case.images, case.attack, *figures(case, value)] for case, value in done]
    return [
        "FedAvg's labels are read off its classifier. Behind `peel` the classifier is private: of one image it is cut "
        "off, of more it is searched for together with images and labels.",
        "",
        *table(head, body),
        "",
        "PSNR less that of the mean color, dB:",
        "",
        *table(["method", "network", "smallest batch", "gain", "largest batch", "gain"], [*over_the_floor(done)]),
    ]


def over_the_floor(done: Done) -> Iterator[list[object]]:
    """How far the smallest and the largest batch of each network are above the mean color."""
    for method, network in dict.fromkeys((case.method, case.network) for case, _ in done):
        mine = [(case, value) for case, value in done if (case.method, case.network) == (method, network)]
        ends = [min(mine, key=lambda one: one[0].images), max(mine, key=lambda one: one[0].images)]
        cells = [(case.images, written(gain(value["rows"]), signed)) for case, value in ends]
        yield [method, f"`{network}`", *(cell for pair in cells for cell in pair)]


def gain(rows: Sequence[Row]) -> Interval:
    """Return the mean of what an image is above its mean color."""
    return mean_interval([{**row, "gain": row["psnr"] - row["floor_mean_psnr"]} for row in rows], "gain")


def signed(value: float) -> str:
    """Return a difference."""
    return f"{value:+.1f}"


def _of_steps(done: Done) -> list[str]:
    head = ["method", "images of an update", "local work", "attack", *FIGURES]
    body = [[case.method, case.images, case.trained, case.attack, *figures(case, value)] for case, value in done]
    return [
        "*Unrolled* searches predict every local step, *surrogate* takes all for one, *first-step* corrects that by "
        "what a first reconstruction says of the later steps. Without the true order a search takes the likeliest of "
        "100 by what the labels tell, or the images in turn; where the classifier is private nothing can be ranked. "
        "With it, labels begin where the batches make them likeliest, and are searched for.",
        "",
        *table(head, body),
        *reasons(done),
        "",
        "Unrolled less `surrogate`, on the same images:",
        "",
        *table(["method", "images of an update", "local work", "attack", "dB"], [*over_the_surrogate(done)]),
    ]


def over_the_surrogate(done: Done) -> Iterator[list[object]]:
    """Paired differences, work by work."""
    for method, images, work in dict.fromkeys((case.method, case.images, case.trained) for case, _ in done):
        mine = {c.attack: v["rows"] for c, v in done if (c.method, c.images, c.trained) == (method, images, work)}
        base = mine.get("surrogate")
        others = {name: rows for name, rows in mine.items() if name.startswith("unrolled") and rows and base}
        for name, rows in others.items():
            yield [method, images, work, name, written(paired_difference(rows, base or ()), signed)]


def _of_exact(done: Done) -> list[str]:
    head = ["images of an update", "local work", "attack", *FIGURES]
    body = [[case.images, case.trained, case.attack, *figures(case, value)] for case, value in done]
    return [
        f"FedAvg, `first-step+cascade` with {done[0][0].spec['first']['corrections']} corrections "
        f"({FirstStep().corrections} by default), each of which asks `cascade` anew. One update each: read the times, "
        "not the figures.",
        "",
        *table(head, body),
        *reasons(done),
    ]


def _of_history(done: Done) -> list[str]:
    head = ["method", "batch", "rounds watched", "attack", *FIGURES]
    body = [[case.method, case.images, case.rounds, case.attack, *figures(case, value)] for case, value in done]
    return [
        "The attack is made in the fourth round, on one step of the client on all its images, with none or more of the "
        "rounds before it beside; other clients train in these. `peel` cuts the private classifier off in each; where "
        "it is searched for (several images or steps), earlier rounds are not used, as it may have moved on.",
        "",
        *table(head, body),
        "",
        "Less what one round gives, on the same images:",
        "",
        *table(["method", "rounds watched", "dB"], [*_over_one_round(done)]),
    ]


def _over_one_round(done: Done) -> Iterator[list[object]]:
    """Paired differences, by method and rounds."""
    alone = {(case.method, case.images): value["rows"] for case, value in done if case.rounds == 1}
    for case, value in done:
        base = alone.get((case.method, case.images))
        if case.rounds > 1 and base:
            yield [case.method, case.rounds, written(paired_difference(value["rows"], base), signed)]


def figures(case: Case, value: Mapping[str, Any]) -> list[str]:
    """Return the cells of a case under `FIGURES`."""
    rows = value["rows"]
    if not rows:
        return ["not applicable", "-", "-", "-", "-", "-", "-"]
    floor, rate = mean_interval(rows, "floor_mean_psnr").value, success_rate(rows, 20.0).value
    return [
        f"{len(rows)}",
        written(mean_interval(rows)),
        f"{rate:.0%}",
        f"{floor:.1f}",
        mean_share(rows, "label_overlap"),
        mean_share(rows, "label_correct"),
        f"{value['seconds'] / case.updates:.1f}",
    ]


def mean_share(rows: Sequence[Row], column: str) -> str:
    """Return the mean of a share over all images, where it is known."""
    known = [float(row[column]) for row in rows if row[column] is not None]
    return f"{sum(known) / len(known):.0%}" if known else "-"


def reasons(done: Done) -> list[str]:
    """Return why rows are not applicable, each reason once."""
    why = {f"{case.attack} ({case.method}): {value['reason']}." for case, value in done if "reason" in value}
    return ["", *(f"- Not applicable: {one}" for one in sorted(why))] if why else []


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
            searches[case.name] = measure_case(case)
            report(searches, read)
    report(searches, read)


def report(searches: dict[str, Any], read: dict[str, Any]) -> None:
    """Write what there is so far of what is still asked."""
    found = {case.name: searches[case.name] for case in cases() if case.name in searches}
    publish("several_steps", {"searches": found, "read": read}, page(found, read))


if __name__ == "__main__":
    main()
