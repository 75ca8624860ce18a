"""What is left of the updates of Flower's quickstart: `python -m benchmarks.leakage.quickstart`.

Its network (two convolutions with max pooling, three fully connected layers; 62,006 parameters), its loader's
normalization, and clients that train by Adam or by plain SGD: one step of one picture, one step of a batch of 32, and
an epoch in batches of 32. Each update is attacked by all that applies to it. Pictures are of CIFAR-10's test set
(needs HYPERLEAK_DATA), the network is a new one each time. A row is written as soon as it is done, and the same call
goes on where it was stopped.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attacks as attack_registry
from attacks.base import NotApplicable, Reconstruction, Result
from attacks.search_control import SearchControl
from benchmarks.common import known_rows, machine, publish, results_parser, rewrite, start, table
from benchmarks.reliability.screening import pictures, quickstart_cnn
from eval.metrics.image import psnr
from eval.metrics.matching import assign
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import derive_seed
from fl.types import Batch
from fl.view import ServerView

PAGE = "quickstart"
FIRST_PICTURE = 2000
CLASSES = 10
SECONDS = 300.0
"""After which an attack on one update is ended."""
log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of update.

    Attributes:
        examples: of the client.
        method: that it trains by.
        attacks: that are tried, by name or settings.
        count: of updates.
        searched: how many of them a search is made on; None is all.
    """

    examples: int
    method: FedAvg
    attacks: tuple[str | dict[str, Any], ...]
    count: int = 5
    searched: int | None = None


IG = {"name": "ig", "iterations": 1000, "restarts": 1}
SIZED = {"name": "adaptive-step+ig", "iterations": 300, "restarts": 1}
SHORT, SHORTEST = {**IG, "iterations": 100}, {**IG, "iterations": 50}
SGD = FedAvg(lr=0.01, steps=1, batch_size=None)
ADAM = FedAvg(lr=1e-3, steps=1, batch_size=None, optimizer="adam")
SGD_EPOCH = FedAvg(lr=0.01, epochs=1, batch_size=32)
ADAM_EPOCH = FedAvg(lr=1e-3, epochs=1, batch_size=32, optimizer="adam")
KINDS = {
    "one picture, one step of SGD": Kind(1, SGD, ("analytic", "cascade", IG)),
    "one picture, one step of Adam": Kind(1, ADAM, ("adaptive-step", SIZED, {**IG, "iterations": 300}), searched=2),
    "32 pictures, one step of SGD": Kind(32, SGD, ("analytic", "cascade", SHORT), count=2, searched=1),
    "32 pictures, one step of Adam": Kind(32, ADAM, ({**SIZED, "iterations": 100}, SHORT), count=2, searched=1),
    "96 pictures, an epoch of SGD": Kind(96, SGD_EPOCH, ("cascade", SHORTEST), count=2, searched=1),
    "96 pictures, an epoch of Adam": Kind(96, ADAM_EPOCH, ("adaptive-step", SHORTEST), count=2, searched=1),
}


def observe(kind: Kind, number: int) -> tuple[ServerView, nn.Module, Batch]:
    """Return the server's view of update `number`, its network and its pictures."""
    model = quickstart_cnn(number)
    first = FIRST_PICTURE + number * kind.examples
    batch = pictures().take(torch.arange(first, first + kind.examples))
    seed = derive_seed(number, "quickstart")
    return from_batch(model, batch.inputs, batch.labels, method=kind.method, seed=seed)[0], model, batch


def measure(name: str, kind: Kind, settings: str | dict[str, Any]) -> Row:
    """Return what an attack finds in the updates of a kind."""
    attack = attack_registry.build(settings)
    updates = []
    count = kind.count if isinstance(settings, str) or kind.searched is None else kind.searched
    for number in range(count):
        view, model, batch = observe(kind, number)
        result = attack(view, seed=number, control=SearchControl(time_limit=SECONDS))
        updates.append(score_result(result, model, batch))
        log.info("%s, %s: %s", name, attack_registry.label(attack), json.dumps(updates[-1]))
    return {
        "kind": name,
        "attack": attack_registry.label(attack),
        "iterations": settings.get("iterations") if isinstance(settings, dict) else None,
        "examples": kind.examples,
        "updates": updates,
        "processor": machine()["processor"],
    }


def score_result(result: Result, model: nn.Module, batch: Batch) -> Row:
    """Return how close a result comes to the truth; None where it has nothing of a kind."""
    guess = batch.inputs.mean((2, 3), keepdim=True).expand_as(batch.inputs)
    row: Row = {"guess": psnr(guess, batch.inputs).tolist(), "labels_guess": _guessed(batch.labels.tolist())}
    if isinstance(result, NotApplicable):
        return {**row, "reason": result.reason}
    row |= {"note": result.note, "verified": bool(result.verified)}
    if result.labels is not None:
        told = result.labels.argmax(-1) if result.labels.ndim == 2 else result.labels
        row["labels"] = _overlap(told.tolist(), batch.labels.tolist())
    if len(batch) == 1 and "features" in result.private:
        row["features"] = _feature_error(result, model, batch.inputs)
    if result.inputs is not None:
        pairs = [(i, found) for i, found in enumerate(assign(result.inputs, batch.inputs)) if found is not None]
        found, true = (x[[pair[k] for pair in pairs]] for k, x in ((1, result.inputs), (0, batch.inputs)))
        row["psnr"] = psnr(found, true).tolist()
    return row


def _overlap(found: list[int], true: list[int]) -> int:
    """Return how many labels are right, whatever their order."""
    return sum(min(found.count(label), true.count(label)) for label in set(true))


def _guessed(true: list[int]) -> float:
    """Return how many labels a guess gets right on average that names every class about as often."""
    each, rest = divmod(len(true), CLASSES)
    counts = [true.count(label) for label in range(CLASSES)]
    return sum(min(count, each) + rest / CLASSES * (count > each) for count in counts)


def _feature_error(result: Reconstruction, model: nn.Module, images: Tensor) -> float:
    """Return how far what the first fully connected layer takes was recovered, relative to itself."""
    layers = list(model)  # type: ignore[call-overload]
    below = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    with torch.no_grad():
        true = nn.Sequential(*layers[:below])(images)[0]
    found = result.private["features"]
    assert isinstance(found, Tensor)
    return float((found.flatten() - true).norm() / true.norm())


def document(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the page."""
    return [
        "# Updates of Flower's quickstart",
        "",
        "The network of Flower's quickstart for PyTorch: two convolutions of 5x5 with max pooling, three fully "
        "connected layers. Its loader normalizes pixels. The network is untrained, and a new one for each update. "
        "Pictures are CIFAR-10's test images. The server knows the optimizer, its step size and how many pictures.",
        "",
        "Guess: the best picture of one color. Features: what the first fully connected layer takes, relative error. "
        "Labels: how many are right, whatever their order; in brackets, how many a guess gets right on average that "
        "names every class about as often. Fewer than that are worse than a guess. Iterations are those of a search "
        "with one start. A refusal has neither.",
        "",
        "An epoch of 96 pictures is three steps of 32. A client of the quickstart takes far more, as it holds "
        "thousands of pictures. Such epochs were not measured: a search replays every step at every iteration.",
        "",
        *table(
            [
                "update",
                "attack",
                "iterations",
                "updates",
                "labels right",
                "features",
                "median dB",
                "guess, dB",
                "what it said",
            ],
            [_line(row) for row in rows],
        ),
    ]


def _line(row: Row) -> list[object]:
    updates: list[Row] = row["updates"]
    features = [one["features"] for one in updates if "features" in one]
    shown = [value for one in updates for value in one.get("psnr", ())]
    guess = statistics.median(value for one in updates for value in one["guess"])
    said = next(filter(None, (one.get("reason") or one.get("note", "") for one in updates)), "")
    return [
        row["kind"],
        f"`{row['attack']}`",
        row["iterations"] or "-",
        len(updates),
        _labels_cell(updates, row["examples"]),
        f"{statistics.median(features):.1e}" if features else "-",
        f"{statistics.median(shown):.1f}" if shown else "-",
        f"{guess:.1f}",
        said,
    ]


def _labels_cell(updates: Sequence[Row], examples: int) -> str:
    """Return how many labels are right beside what a guess has; rows of one picture may lack the latter."""
    told = [one for one in updates if "labels" in one]
    if not told:
        return "-"
    right, of = sum(one["labels"] for one in told), len(told) * examples
    guess = sum(one.get("labels_guess", 1 / CLASSES) for one in told)
    return f"{right} of {of}, {right / of:.0%} ({guess:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = results_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    chosen = start(parser, arguments)
    if chosen.rewrite:
        rewrite(PAGE, lambda known: document(known["rows"]))
        return
    rows = {(row["kind"], row["attack"]): row for row in known_rows(PAGE)}
    wanted = [(name, settings) for name in chosen.kinds for settings in KINDS[name].attacks]
    for name, settings in wanted:
        key = (name, attack_registry.label(attack_registry.build(settings)))
        if key in rows and not chosen.again:
            continue
        rows[key] = measure(name, KINDS[name], settings)
        order = list(KINDS)
        found = sorted(rows.values(), key=lambda row: order.index(row["kind"]))
        publish(PAGE, {"rows": found}, document(found))


if __name__ == "__main__":
    main()
