"""What comes back of models beyond classifiers of pictures: `python -m benchmarks.leakage.own_models`.

It goes on where it was stopped: a case that stands in the results is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
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
"""Examples of each case, one in an update."""
TRIED: dict[str, Any] = {
    "analytic": "analytic",
    "cascade": "cascade",
    "ig": {"name": "ig", "iterations": 2000},
    "dlg": {"name": "dlg", "iterations": 2000, "labels": "auto", "restarts": 2},
    "tokens": "tokens",
}
CATEGORIES = ((5, 9), (9, 16), (16, 25), (25, 27))
"""Columns of the made-up table's categories, behind five numbers."""


@dataclass(frozen=True)
class Case:
    """A kind of model with examples for it.

    Attributes:
        name: of it.
        model: makes it.
        examples: makes one example's inputs and target from a generator.
        settings: of `fl.capture.from_batch`.
        tried: names of attacks in `TRIED`.
    """

    name: str
    model: Callable[[], nn.Module]
    examples: Callable[[torch.Generator], tuple[Inputs, Tensor]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tried: Sequence[str] = ("analytic", "cascade", "ig", "dlg")


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


TABLE = {"input_range": (-4, 4), "categories": CATEGORIES, "column_std": (1.0,) * 5 + (0.4,) * 22}
SEARCHES = ("cascade", "ig", "dlg")
CASES = (
    Case("table of numbers and categories, MLP", lambda: _perceptron(27, 2), _row, TABLE),
    Case("the same, sigmoid in place of biased ReLU", lambda: _smooth(27, 2), _row, TABLE, ("analytic", "ig", "dlg")),
    Case(
        "one logit, CNN, two classes of CIFAR-10", lambda: _convolutional(3, 1), _two_classes, {"loss": "bce"}, SEARCHES
    ),
    Case("five labels, MLP, faces", lambda: _perceptron(784, 5), _labeled_face, {"loss": "bce"}),
    Case("regression, MLP, faces", lambda: _perceptron(784, 1), _face_and_number, {"loss": "mse"}),
    Case("regression, CNN, faces", lambda: _convolutional(1, 1), _face_and_number, {"loss": "mse"}, SEARCHES),
    Case(
        "segmentation, two convolutions, 32x32", lambda: _segmenter(), _masked_photo, {"loss": "segmentation"}, SEARCHES
    ),
    Case("series, two channels of 48 steps, Conv1d", lambda: _over_steps(), _waves, {}, SEARCHES),
    Case("the same, GRU", Recurrent, _waves, {}, SEARCHES),
    Case("text, bag of 24 of 1,000 words", Text, _sentence, {}, ("tokens", "analytic", "ig")),
)


def _smooth(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64, bias=False), nn.Sigmoid(), nn.Linear(64, outputs))


def _segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 4, 3, padding=1))


def _over_steps() -> nn.Module:
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
        view, truth = from_batch(model, inputs, target, **case.settings)
        for name in case.tried:
            began = time.perf_counter()
            result = attacks.build(TRIED[name])(view, seed=number)
            entry: dict[str, Any] = {"case": case.name, "attack": name, "example": number}
            if isinstance(result, NotApplicable):
                found.append({**entry, "refused": result.reason})
                continue
            (row,) = score(result, truth, task=view.task)
            entry |= {"verified": result.verified, "seconds": round(time.perf_counter() - began, 1)}
            found.append({**entry, **_figures(row)})
    return found


def _figures(row: Row) -> dict[str, Any]:
    floors = [row[key] for key in row if key.startswith("floor_") and key.endswith("_psnr") and row[key] is not None]
    guesses = [row[key] for key in row if key.startswith("floor_") and key.endswith("_row_accuracy")]
    kept = ("psnr", "label_correct", "label_error", "row_accuracy", "tokens_recall", "tokens_precision")
    figures = {key: row[key] for key in kept if row.get(key) is not None}
    return {**figures, "floor": max(floors, default=None), **({"guess": max(guesses)} if guesses else {})}


def document(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The page."""
    lines = [
        "# Models beyond classifiers of pictures",
        "",
        f"Untrained models, {COUNT} examples each, one in an update, one step of SGD, float32, targets unknown to the",
        "attacker. PSNR is of numbers in their stated range, beside the best guess without the update. Columns are",
        "TabLeak's accuracy, words the share of those that occur. `ig` has 2,000 iterations; `dlg` has as many and",
        "two starts. The table's rows are made up: five normal numbers and four categories. Series are made up, too.",
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
        rows += measure(case)
        publish("own_models", {"rows": rows}, document(rows))


if __name__ == "__main__":
    main()
