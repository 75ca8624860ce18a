"""Screenings of updates as federations run them: `python -m benchmarks.reliability.screening`.

Two questions: how long a screening takes, and what it shows, of updates with a planted leak and of ordinary ones; and
how often it says "leaked" of updates by DP-SGD, where nothing can be proved. The screener is told that these were plain
steps of SGD, which is the worst that it can be told. Every update is of a network of its own and of pictures of
CIFAR-10's test set (needs HYPERLEAK_DATA). Results are written after each row, and the same call goes on where it was
stopped; `--limit` bounds the updates of a row.
"""

from __future__ import annotations

import copy
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from benchmarks.common import known_rows, machine, publish, results_parser, rewrite, start, table
from benchmarks.exact.residual_networks import drawn
from benchmarks.exact.residual_victims import resnet18
from defenses.dp_sgd import DPSGD
from defenses.prune import Prune
from defenses.quantize import Quantize
from defenses.signsgd import SignSGD
from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.screening import Screener, Screening
from fl.capture import from_batch
from fl.data.sources.npz_files import find_file, read_batch
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.layers import Normalize
from fl.seeds import derive_seed
from fl.tensors import dense
from fl.types import Batch

PAGE = "screening"
SHAPE = (3, 32, 32)
FIRST_PICTURE = 2000
"""Of the test set: those before it were used to develop attacks."""
VERDICTS = {
    "leaked": "leaked",
    "not shown to leak": "not shown",
    "not decided": "not decided",
    "failed": "failed",
}
"""Columns, by verdict."""
log = logging.getLogger(__name__)
Row = dict[str, Any]


def quickstart_cnn(seed: int) -> nn.Module:
    """Return the network of Flower's quickstart, with what its loader does to pixels in front."""
    return drawn(_quickstart_cnn, seed)


def _quickstart_cnn() -> nn.Module:
    body = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    top = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(Normalize((0.5,) * 3, (0.5,) * 3), *body, *top)


def mlp(seed: int) -> nn.Module:
    """Return a network whose first layer takes the picture."""
    return drawn(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10)), seed)


@dataclass(frozen=True)
class Kind:
    """A kind of update.

    Attributes:
        network: makes the model of a seed.
        examples: of the client.
        method: that it trains by.
        seconds: of a screening.
        noise: multiplier of DP-SGD's noise, at a clip of 1; None is no DP-SGD.
        defense: that compresses the update; the screener is told nothing of it.
        count: of updates.
        in_evaluation_mode: whether the model is.
    """

    network: Callable[[int], nn.Module]
    examples: int
    method: FedAvg
    seconds: float = 2.0
    noise: float | None = None
    defense: Defense | None = None
    count: int = 10
    in_evaluation_mode: bool = False


STEP = FedAvg(lr=0.01, steps=1, batch_size=None)
ADAM = FedAvg(lr=1e-3, epochs=1, batch_size=32, optimizer="adam")
FROZEN = replace(STEP, train_mode=False)
SPARSE, COARSE, SIGNS = Prune(ratio=0.95), Quantize(bits=4), SignSGD()
PLANTED = {
    "quickstart CNN, one picture, one step of SGD": Kind(quickstart_cnn, 1, STEP),
    "quickstart CNN, 32 pictures, one step of SGD": Kind(quickstart_cnn, 32, STEP),
    "quickstart CNN, 32 pictures, an epoch of Adam": Kind(quickstart_cnn, 32, ADAM),
    "dense network, one picture, one step of SGD": Kind(mlp, 1, STEP),
    **{
        f"{name}, one picture, {how}": Kind(network, 1, STEP, defense=defense)
        for name, network in (("quickstart CNN", quickstart_cnn), ("dense network", mlp))
        for how, defense in (("the largest 5 % sent", SPARSE), ("4 bits", COARSE), ("signs", SIGNS))
    },
    "ResNet-18, one picture, one step of SGD": Kind(resnet18, 1, FROZEN, seconds=20.0, in_evaluation_mode=True),
    "ResNet-18, 32 pictures, one step of SGD": Kind(resnet18, 32, FROZEN, seconds=20.0, in_evaluation_mode=True),
}
PRIVATE = {
    f"{name}, {examples} picture{'s' if examples > 1 else ''}, noise {noise:g}": Kind(
        network, examples, STEP, noise=noise, count=125
    )
    for name, network in (("quickstart CNN", quickstart_cnn), ("dense network", mlp))
    for examples in (1, 8)
    for noise in (0.1, 1.0)
}
KINDS = {**PLANTED, **PRIVATE}


def record(kind: Kind, number: int) -> tuple[nn.Module, RecordedUpdate]:
    """Return the model of update `number` and the update, with the facts of plain training."""
    model = kind.network(number)
    model.train(not kind.in_evaluation_mode)
    first = FIRST_PICTURE + number * kind.examples % 2900
    batch = pictures().take(torch.arange(first, first + kind.examples))
    defense = kind.defense if kind.noise is None else DPSGD(clip=1.0, noise_multiplier=kind.noise)
    seed = derive_seed(number, "screening")
    view, _ = from_batch(model, batch.inputs, batch.labels, method=kind.method, defense=defense, seed=seed)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    after = {n: v - dense(view.update[n]) if n in view.update else v.clone() for n, v in before.items()}
    method = kind.method
    facts = TrainingFacts(
        optimizer=method.optimizer,
        lr=method.lr,
        steps=method.steps,
        epochs=method.epochs,
        batch_size=method.batch_size,
        examples=kind.examples,
    )
    return model, RecordedUpdate(before=before, after=after, training=facts)


@cache
def pictures() -> Batch:
    """CIFAR-10's test images."""
    return read_batch(find_file("cifar10_test.npz"))[0]


def measure(name: str, kind: Kind, count: int) -> Row:
    """Return what screenings of `count` updates of a kind came to."""
    found: list[Screening] = []
    for number in range(count):
        model, update = record(kind, number)
        screener = Screener(model=partial(copy.deepcopy, model), input_shape=SHAPE, seconds=kind.seconds)
        found.append(screener(update))
    shown = Counter(max((one.kind for one in each.exposures), key=_level, default="nothing") for each in found)
    return {
        "kind": name,
        "noise": kind.noise,
        "updates": count,
        "verdicts": dict(Counter(each.verdict for each in found)),
        "shown": dict(shown),
        "seconds": [each.seconds for each in found],
        "budget": kind.seconds,
        "processor": machine()["processor"],
    }


def _level(kind: str) -> int:
    return ("nothing", "labels", "features", "images").index(kind)


def document(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the page."""
    planted = [row for row in rows if row["noise"] is None]
    private = [row for row in rows if row["noise"] is not None]
    total, leaked = sum(r["updates"] for r in private), sum(r["verdicts"].get("leaked", 0) for r in private)
    return [
        "# Screening updates inside a federation",
        "",
        "A screening tries the attacks that solve, for some seconds, and counts what they prove without the true "
        "pictures. Every update is of a network of its own and of CIFAR-10's test pictures. Seconds are wall time of "
        "one process on one thread, from the recorded update to the verdict.",
        "",
        "## What it shows, and how long it takes",
        "",
        *table(
            ["update", "updates", *VERDICTS.values(), "worst shown", "budget, s", "median s (most)"],
            [
                [row["kind"], row["updates"], *_verdicts(row), _shown(row), f"{row['budget']:g}", _seconds(row)]
                for row in planted
            ],
        ),
        "",
        "A screening ends once the verdict stands: an update whose features are shown may hold more. It is told "
        "nothing of what an update was compressed by.",
        "",
        "## Updates by DP-SGD",
        "",
        "One step of DP-SGD at a clip of 1. The screener is told that it was plain SGD. `leaked` would be false here.",
        "",
        f"Of all: {leaked} of {total} called leaked.",
        "",
        *table(
            ["update", "updates", *VERDICTS.values(), "worst shown", "median s (most)"],
            [[row["kind"], row["updates"], *_verdicts(row), _shown(row), _seconds(row)] for row in private],
        ),
    ]


def _verdicts(row: Row) -> list[int]:
    return [row["verdicts"].get(verdict, 0) for verdict in VERDICTS]


def _shown(row: Row) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(row["shown"].items(), key=lambda one: -_level(one[0])))


def _seconds(row: Row) -> str:
    return f"{statistics.median(row['seconds']):.2f} ({max(row['seconds']):.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = results_parser(__doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND", help="of update"
    )
    parser.add_argument("--limit", type=int, default=10**6, help="updates of each kind")
    chosen = start(parser, arguments)
    if chosen.rewrite:
        rewrite(PAGE, lambda known: document(known["rows"]))
        return
    measure(next(iter(KINDS)), next(iter(KINDS.values())), 1)  # imports and first calls are no part of a round
    rows = {row["kind"]: row for row in known_rows(PAGE)}
    for name in chosen.kinds:
        count = min(chosen.limit, KINDS[name].count)
        if not chosen.again and rows.get(name, {}).get("updates", 0) >= count:
            continue
        rows[name] = measure(name, KINDS[name], count)
        found = [rows[known] for known in KINDS if known in rows]
        publish(PAGE, {"rows": found}, document(found))
        log.info("%s: %s", name, rows[name]["verdicts"])


if __name__ == "__main__":
    main()
