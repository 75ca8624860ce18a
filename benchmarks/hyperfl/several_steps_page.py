"""From what `benchmarks.hyperfl.several_steps` measured to a page: a table for each question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attacks.rewriting.first_step import FirstStep
from benchmarks.common import hyperfl_conditions, table
from benchmarks.hyperfl.several_steps_cases import SEARCH, SIGMOID_TV, Case, cases
from benchmarks.hyperfl.several_steps_read_page import of_labels, of_peel, written
from eval.metrics.statistics import Interval, mean_interval, paired_difference, success_rate

Row = dict[str, Any]
Found = Mapping[str, Mapping[str, Any]]
Done = Sequence[tuple[Case, Mapping[str, Any]]]
"""Cases with what came of them."""
FIGURES = [
    "images",
    "PSNR dB [95 %]",
    ">= 20 dB",
    "mean colour dB",
    "labels right",
    "on their image",
    "CPU s an update",
]


def page(searches: Found, read: Mapping[str, Sequence[Row]]) -> list[str]:
    """All figures, of what was measured so far.

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
        f"Searches are `ig` of {SEARCH['iterations']} iterations with TV {SEARCH['tv_weight']:g} ({SIGMOID_TV:g} on "
        "`lenet-zhu`): short ones, so that rows compare with each other and not with those of other pages. No labels "
        "are given. Reconstructions are assigned to the images they are nearest to; intervals are 95 % over "
        "images, which takes those of one update as independent. *Mean colour* is what a guess of each image's own "
        "mean colour would get; *labels right* counts a batch's labels in whatever order, *on their image* those that "
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
        *(f"- {line}" for line in over_the_floor(done)),
    ]


def over_the_floor(done: Done) -> Iterator[str]:
    """How far the smallest and the largest batch of each network are above the mean colour."""
    for method, network in dict.fromkeys((case.method, case.network) for case, _ in done):
        mine = [(case, value) for case, value in done if (case.method, case.network) == (method, network)]
        ends = [min(mine, key=lambda one: one[0].images), max(mine, key=lambda one: one[0].images)]
        gains = [f"{written(gain(value['rows']), signed)} dB at B = {case.images}" for case, value in ends]
        yield f"{method} on `{network}`, PSNR less that of the mean colour: {', '.join(gains)}."


def gain(rows: Sequence[Row]) -> Interval:
    """Mean of what an image is above its mean colour."""
    return mean_interval([{**row, "gain": row["psnr"] - row["floor_mean_psnr"]} for row in rows], "gain")


def signed(value: float) -> str:
    """A difference."""
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
        *(f"- {line}" for line in over_the_surrogate(done)),
    ]


def over_the_surrogate(done: Done) -> Iterator[str]:
    """Paired differences, work by work."""
    for method, images, work in dict.fromkeys((case.method, case.images, case.trained) for case, _ in done):
        mine = {c.attack: v["rows"] for c, v in done if (c.method, c.images, c.trained) == (method, images, work)}
        base = mine.get("surrogate")
        others = {name: rows for name, rows in mine.items() if name.startswith("unrolled") and rows and base}
        gains = [f"{name} {written(paired_difference(rows, base or ()), signed)} dB" for name, rows in others.items()]
        if gains:
            yield f"{method}, {_images(images)}, {work}: {'; '.join(gains)}."


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"


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
        *(f"- {line}" for line in _over_one_round(done)),
    ]


def _over_one_round(done: Done) -> Iterator[str]:
    """Paired differences, by method and rounds."""
    alone = {(case.method, case.images): value["rows"] for case, value in done if case.rounds == 1}
    for case, value in done:
        base = alone.get((case.method, case.images))
        if case.rounds > 1 and base:
            gain = written(paired_difference(value["rows"], base), signed)
            yield f"{case.method}, {case.rounds} rounds: {gain} dB."


def figures(case: Case, value: Mapping[str, Any]) -> list[str]:
    """The cells of a case under `FIGURES`."""
    rows = value["rows"]
    if not rows:
        return ["not applicable", "-", "-", "-", "-", "-", "-"]
    floor, rate = mean_interval(rows, "floor_mean_psnr").value, success_rate(rows, 20.0).value
    return [
        f"{len(rows)}",
        written(mean_interval(rows)),
        f"{rate:.0%}",
        f"{floor:.1f}",
        share(rows, "label_overlap"),
        share(rows, "label_correct"),
        f"{value['seconds'] / case.updates:.1f}",
    ]


def share(rows: Sequence[Row], column: str) -> str:
    """The mean of a share over all images, where it is known."""
    known = [float(row[column]) for row in rows if row[column] is not None]
    return f"{sum(known) / len(known):.0%}" if known else "-"


def reasons(done: Done) -> list[str]:
    """Why rows are not applicable, each reason once."""
    why = {f"{case.attack} ({case.method}): {value['reason']}." for case, value in done if "reason" in value}
    return ["", *(f"- Not applicable: {one}" for one in sorted(why))] if why else []
