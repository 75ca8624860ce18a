"""What the privacy filters of NVFlare and Flower leave to attackers: `python -m benchmarks.leakage.framework_filters`.

Needs HYPERLEAK_DATA. Updates are one step of SGD on one picture of CIFAR-10, of Flower's quickstart CNN and of a small
perceptron, both untrained. Each filter is measured at its framework's defaults (where it has none, at those of a public
project, or ours) and at a stronger or weaker setting. Exact attacks know the filter; the search is run knowing it and
not knowing it. A case is written to the results as soon as it is done (`--only`, `--rewrite`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import attacks
import fl.data
from attacks.base import Reconstruction, Result
from benchmarks.common import known_rows, publish, results_parser, rewrite, start, table
from benchmarks.exact.residual import attempt
from defenses import defenses
from defenses.nvflare_svt import NVFlareSVT
from eval.metrics import image as metrics
from eval.metrics.baselines import baseline_images
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.layers import Normalize
from fl.seeds import stream
from fl.tensors import Tensors, dense, dot
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel

PAGE = "framework_filters"
FIRST, DELTA, STEP_SIZE = 2000, 1e-5, 0.1
"""The first of the test images used; of all epsilons; of the client's one step."""
TV_WEIGHT = 1e-4
"""Of the search's total variation."""
MAX_SECONDS = 20.0
"""CPU seconds of an exact attack on a picture, after which nothing was found."""
SHAPE, CLASSES = (3, 32, 32), 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A filter at one setting.

    Attributes:
        filter_: as the page has it.
        setting: in words.
        defense: as a config has it.
        stated: epsilon of a round by the framework's own words; None where it claims none.
        deep: whether the exact attack that takes long is made on the CNN, too.
    """

    filter_: str
    setting: str
    defense: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    stated: float | None = None
    deep: bool = True

    @property
    def key(self) -> str:
        """What tells it from others."""
        return f"{self.filter_}: {self.setting}"

    def build(self) -> Defense:
        """Return the defense."""
        return defenses.build(dict(self.defense))


CASES = (
    Case("none", "-"),
    Case("PercentilePrivacy", "NVFlare's defaults", {"name": "nvflare-percentile"}),
    Case(
        "PercentilePrivacy",
        "smallest half, gamma 1",
        {"name": "nvflare-percentile", "percentile": 50.0, "gamma": 1.0},
        deep=False,
    ),
    Case("PercentilePrivacy", "smallest 95 %", {"name": "nvflare-percentile", "percentile": 95.0}),
    Case("SVTPrivacy", "NVFlare's defaults", {"name": "nvflare-svt"}),
    Case(
        "SVTPrivacy",
        "90 % sent, epsilon 21, noise_var 2 (NVFlare's BraTS18)",
        {"name": "nvflare-svt", "fraction": 0.9, "epsilon": 21.0, "noise_var": 2.0},
    ),
    Case("ExcludeVars", "NVFlare's defaults (no name)", {"name": "nvflare-exclude-vars"}, deep=False),
    Case("ExcludeVars", "the classifier", {"name": "nvflare-exclude-vars", "pattern": "^head"}, deep=False),
    Case(
        "LocalDpMod",
        "FLIP's: clip 1, sensitivity 1e-4, epsilon 10",
        {"name": "flower-local-dp", "sensitivity": 1e-4, "epsilon": 10.0},
        10.0,
        deep=False,
    ),
    Case("LocalDpMod", "ours: clip 1, sensitivity 1, epsilon 1", {"name": "flower-local-dp"}, 1.0, deep=False),
    Case("fixed clipping", "Flower's example: norm 10", {"name": "flower-fixed-clipping"}, deep=False),
    Case("fixed clipping", "norm 0.1", {"name": "flower-fixed-clipping", "clipping_norm": 0.1}, deep=False),
    Case("adaptive clipping", "Flower's defaults: norm 0.1", {"name": "flower-adaptive-clipping"}, deep=False),
    Case(
        "adaptive clipping",
        "after 20 rounds in which all were clipped",
        {"name": "flower-adaptive-clipping", "clipping_norm": 0.1 * 2.718281828459045**-2},
        deep=False,
    ),
)
LAYERS = {
    "cnn": lambda: [
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    ],
    "mlp": lambda: [nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, CLASSES)],
}
NETWORKS = {"mlp": "perceptron, 64 units", "cnn": "Flower's quickstart CNN"}
ITERATIONS = {"mlp": 300, "cnn": 100}
"""Of a search, which takes five times as long on the CNN."""


def network(kind: str, seed: int) -> Task:
    """Return a network of a seed, its weights drawn as PyTorch draws them, its classifier named `head`."""
    *body, head = LAYERS[kind]()
    draw = stream(seed, "weights")
    for layer in (*body, head):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            for value in layer.parameters():
                nn.init.uniform_(value, -(layer.weight[0].numel() ** -0.5), layer.weight[0].numel() ** -0.5, draw)
    mean = std = (0.5,) * 3
    layers = OrderedDict[str, nn.Module](normalize=Normalize(mean, std), body=nn.Sequential(*body), head=head)
    return Task(nn.Sequential(layers), SHAPE, CLASSES, head="head.", mean=mean, std=std)


def observe(kind: str, defense: Defense, picture: Batch, number: int, *, known: bool = True) -> ServerView:
    """Return what the server sees of one step on a picture."""
    client = Client(network(kind, number), FedAvg(lr=STEP_SIZE, steps=1, batch_size=None), defense)
    threat = ThreatModel(knows_defense=known)
    return Federation(client, [ClientData(picture, picture)], seed=number).observe(0, threat=threat)[0]


# ---- one case --------------------------------------------------------------------------------------------------------
def measure(case: Case, kind: str, data: Batch, iterations: int) -> list[Row]:
    """Return what attacks make of each picture behind a filter, and how far the filter moved the update."""
    defense = case.build()
    pictures = [data.take(torch.tensor([number])) for number in range(len(data))]
    rows: list[Row] = []
    for number, picture in enumerate(pictures):
        view = observe(kind, defense, picture, number)
        plain = observe(kind, Defense(), picture, number)
        row: Row = {"case": case.key, "network": kind, "victim": number, **distance(view.update, plain.update)}
        row["numbers"] = sum(value.numel() for value in plain.update.values())
        row["floor"] = float(metrics.psnr(baseline_images(picture.inputs)["mean"], picture.inputs)[0])
        row["analytic"] = {**exact("analytic", view, picture), "features": features(view, kind, picture, number)}
        if case.deep or kind == "mlp":
            row["cascade"] = exact("cascade", view, picture)
        rows.append(row)
    for known in (True, False):
        if known or case.defense["name"] not in {"none", "nvflare-exclude-vars"}:
            views = [observe(kind, defense, picture, i, known=known) for i, picture in enumerate(pictures)]
            search = attacks.build({"name": "ig", "iterations": iterations, "tv_weight": TV_WEIGHT})
            found = search.run(views, list(range(len(views))))
            for row, result, picture in zip(rows, found, pictures, strict=True):
                row["knowing" if known else "not knowing"] = psnr(result, picture)
    return rows


def exact(name: str, view: ServerView, picture: Batch) -> Row:
    """Return what an exact attack finds of a picture, or why nothing."""
    kept: list[Result] = []

    def attack() -> Result:
        kept.append(attacks.build(name)(view))
        return kept[0]

    row = attempt(attack, picture, MAX_SECONDS)
    verified = bool(kept and isinstance(kept[0], Reconstruction) and kept[0].verified)
    fixed = kept[0].fixed if kept and isinstance(kept[0], Reconstruction) else None
    share = float(fixed.double().mean()) if fixed is not None else 0.0
    chosen = ("reason", "error", "note", "psnr", "exact", "false", "seconds")
    return {**{key: row[key] for key in chosen if row.get(key)}, "verified": verified, "fixed": share}


def features(view: ServerView, kind: str, picture: Batch, number: int) -> Row | None:
    """Return whether `analytic` verifies what the first linear layer was given, and how far that is off."""
    result = attacks.build("analytic")(view)
    if not isinstance(result, Reconstruction) or "features" not in result.private:
        return None
    model = network(kind, number).model
    body = model.get_submodule("body")
    first = next(i for i, layer in enumerate(body.children()) if isinstance(layer, nn.Linear))
    with torch.no_grad():
        true = nn.Sequential(model.get_submodule("normalize"), *list(body.children())[:first])(picture.inputs)
    found = dense(result.private["features"]).view_as(true)
    return {"verified": bool(result.verified), "off": float((found - true).norm() / true.norm())}


def distance(sent: Tensors, plain: Tensors) -> Row:
    """Return how far an update was moved, relative to itself, and its cosine with what was sent; gaps count as zero."""
    true: Tensors = {name: dense(value).double() for name, value in plain.items()}
    whole: Tensors = {name: dense(sent.get(name, torch.zeros_like(dense(v)))).double() for name, v in plain.items()}
    off: Tensors = {name: dense(whole[name]) - dense(value) for name, value in true.items()}
    size, length = math.sqrt(float(dot(true, true))), math.sqrt(float(dot(whole, whole)))
    return {
        "moved": math.sqrt(float(dot(off, off))) / size,
        "cosine": float(dot(whole, true)) / (size * length) if length else 0.0,
        "sent": sum(int((dense(value) != 0).sum()) for value in sent.values()),
    }


def psnr(result: Result, picture: Batch) -> float | None:
    """Return how near a search's picture is."""
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return None
    return float(metrics.psnr(result.inputs, picture.inputs)[0])


# ---- budgets ---------------------------------------------------------------------------------------------------------
def budgets(case: Case, numbers: int) -> tuple[float | None, float | None]:
    """Return epsilon of a round by the framework's words, and by our accountant; None where none is claimed."""
    defense = case.build()
    if isinstance(defense, NVFlareSVT):
        return defense.stated_epsilon(numbers), defense.release_epsilon(numbers, DELTA)
    statement = defense.privacy(FedAvg(), network("mlp", 0), [1], 1)
    return case.stated, None if statement is None else statement.epsilon


def cosines(sizes: Sequence[int] = (62_006, 7_033_290)) -> list[Row]:
    """Return what SVTPrivacy's defaults leave of updates with heavy tails, as large as a small and a large network."""
    rows = []
    for size in sizes:
        draw = stream(size, "cosines")
        update: Tensors = {
            "": torch.randn(size, generator=draw) * torch.randn(size, generator=draw).mul(1.5).exp() * 1e-4
        }
        defense = NVFlareSVT()
        sent = defense.transform_update(update, stream(size, "svt"))
        told = {"numbers": size, **distance(sent, update), "stated": defense.stated_epsilon(size)}
        rows.append({**told, "accounted": defense.release_epsilon(size, DELTA)})
    return rows


# ---- the page --------------------------------------------------------------------------------------------------------
def document(rows: Sequence[Row], cosines: Sequence[Row]) -> list[str]:
    """Return the results in words."""
    count = max((row["victim"] for row in rows), default=0) + 1
    head = [
        "filter",
        "setting",
        "moved",
        "cosine",
        "epsilon stated",
        "ours",
        "analytic",
        "cascade",
        "ig knowing",
        "not",
    ]
    lines = [
        "# The privacy filters of NVFlare and Flower, by attackers who know them",
        "",
        f"{count} pictures of CIFAR-10, each the one of an update: one step of SGD (step size {STEP_SIZE:g}) of an "
        "untrained network that normalizes its pixels. `moved` is how far the filter moved the update, in units of the "
        "update, `cosine` that of both. Exact attacks know the filter: the cell counts pictures that are right to the "
        "8-bit pixel, with the median PSNR of the pictures handed out, or counts refusals. On the CNN `analytic` gives "
        "what the first linear layer was given: the cell counts such features that it verifies, with the median of how "
        "far they are off, relative to themselves. An empty cell of "
        "`cascade` was not run, as it takes minutes there and ends without an exact picture anyway "
        "([cascade_ends](cascade_ends.md)). It was stopped after "
        f"{MAX_SECONDS:g} CPU seconds. `ig` is a search from one start, the median PSNR of an attacker who knows the "
        "filter and of one who does not; one that stays below the mean color has found nothing. A few pictures of two "
        "networks: differences of a few dB say nothing.",
        "",
    ]
    for kind, words in NETWORKS.items():
        mine = [row for row in rows if row["network"] == kind]
        if not mine:
            continue
        floor = statistics.median(row["floor"] for row in mine)
        told = (
            f"A search takes {ITERATIONS[kind]} iterations. The mean color of each picture alone scores {floor:.1f} dB."
        )
        lines += [f"## {words}", "", told, ""]
        body = [_line(case, [row for row in mine if row["case"] == case.key]) for case in CASES]
        lines += [*table(head, [line for line in body if line]), ""]
    false = sum(bool(row[name].get("false")) for row in rows for name in ("analytic", "cascade") if name in row)
    lines += [f"Pictures called verified that are wrong: {false}.", "", *_budget_words(), "", *_cosine_lines(cosines)]
    reasons = {row["case"]: row["cascade"]["reason"] for row in rows if "reason" in row.get("cascade", {})}
    lines += ["", "Reasons of `cascade` where it refused:", "", *(f"- `{k}`: `{v}`" for k, v in reasons.items())]
    return [*lines, "", *_worse_words()]


def _line(case: Case, rows: Sequence[Row]) -> list[str]:
    """Return a case's line of the table; nothing where it was not measured."""
    if not rows:
        return []
    stated, ours = budgets(case, rows[0]["numbers"])
    cells = [case.filter_, case.setting, f"{statistics.median(row['moved'] for row in rows):.3g}"]
    cells += [f"{statistics.median(row['cosine'] for row in rows):.3f}", _told(stated), _told(ours)]
    return [
        *cells,
        *(_found(name, rows) for name in ("analytic", "cascade")),
        *(_median(rows, name) for name in ("knowing", "not knowing")),
    ]


def _found(name: str, rows: Sequence[Row]) -> str:
    """Return what an exact attack found, in a cell."""
    mine = [row[name] for row in rows if name in row]
    if not mine:
        return ""
    refused = sum("reason" in row or "error" in row for row in mine)
    if refused == len(mine):
        return "refuses"
    told = [row["features"] for row in mine if row.get("features")]
    if name == "analytic" and told:
        right = sum(one["verified"] for one in told)
        return f"{right} of {len(mine)}, {statistics.median(one['off'] for one in told):.2g} off"
    decibels = [value for row in mine for value in row.get("psnr", [])]
    exact_ = sum(all(row.get("exact", [False])) for row in mine)
    return f"{exact_} of {len(mine)}" + (f", {statistics.median(decibels):.0f} dB" if decibels else "")


def _median(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(values):.1f}" if values else ""


def _told(epsilon: float | None) -> str:
    if epsilon is None:
        return "-"
    return f"{epsilon:.3g}" if epsilon < 1e5 else f"{epsilon:.1e}"


def _budget_words() -> list[str]:
    """Return what the two columns of epsilon say."""
    return [
        "`epsilon stated` is a round's by the framework's own words: what LocalDpMod is told, or what NVFlare's "
        "accountant adds up (pure differential privacy, delta 0). `ours` is what follows from clip and noise "
        f"themselves at delta {DELTA:g}, for a client that counts as nothing. For SVTPrivacy it is that of the numbers "
        "sent alone, by Renyi divergences, another client in one's place; which numbers were chosen comes on top. An "
        "epsilon above about ten promises nothing. PercentilePrivacy and ExcludeVars add no noise. Fixed and adaptive "
        "clipping add theirs to the mean at the server, which itself sees every update without it: against the server "
        "there is no epsilon, and what is measured here is the server's side.",
    ]


def _worse_words() -> list[str]:
    """Return why a search that knows a filter ends behind one that does not, as far as it was found out."""
    return [
        "## Where the search that knows does worse",
        "",
        "Searches of the perceptron from other starts, and with labels given, were looked at one by one. They are in "
        "no table.",
        "",
        "- **PercentilePrivacy, smallest half.** One picture makes the difference, and from other starts both medians "
        "move by several dB. Its searches end at local minima. In the true picture the one that knows would explain "
        "the update to rounding.",
        "- **PercentilePrivacy, smallest 95 %.** Zeros taken as exact pull pixels towards gray, which is a good guess "
        "of what is open. Inside an interval nothing pulls the search that knows.",
        "- **SVTPrivacy, 90 % sent.** The label is read off the classifier's bias, where the noise turned signs. A "
        "search for a wrong label's picture ends far away. With labels given both come nearer. Why the one that does "
        "not know still comes nearer than the other was not found out.",
        "- **SVTPrivacy at its defaults.** Both searches fit noise.",
    ]


def _cosine_lines(cosines: Sequence[Row]) -> list[str]:
    """Return what SVTPrivacy's defaults leave of updates of two sizes."""
    head = ["numbers", "sent", "cosine", "moved", "epsilon stated", "ours"]
    body = [
        [
            *(f"{row['numbers']:,}", f"{row['sent']:,}", f"{row['cosine']:+.4f}", f"{row['moved']:.2g}"),
            *(f"{row['stated']:,.0f}", f"{row['accounted']:,.0f}"),
        ]
        for row in cosines
    ]
    return [
        "## SVTPrivacy at NVFlare's defaults, by size of the network",
        "",
        "An issue of londonaicentre/FLIP, number 1145, reports an epsilon of 70,333 in one round of a DenseNet. It "
        "finds a cosine of +0.001 with the true update. Here updates are random numbers with heavy tails.",
        "",
        *table(head, body),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = results_parser(__doc__, has_again=False)
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=list(LAYERS), default=list(NETWORKS))
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these filters, or cases; other rows stay")
    chosen = start(parser, arguments)
    if chosen.rewrite:
        rewrite(PAGE, lambda found: document(found["rows"], found["cosines"]))
        return
    data = pictures(chosen.images)
    rows = known_rows(PAGE)
    told = cosines()
    for kind in chosen.networks:
        for case in CASES:
            if chosen.only is not None and not {case.filter_, case.key} & set(chosen.only):
                continue
            began = time.process_time()
            found = measure(case, kind, data, ITERATIONS[kind])
            found[0]["seconds"] = time.process_time() - began
            rows = [row for row in rows if (row["case"], row["network"]) != (case.key, kind)] + found
            publish(PAGE, {"cosines": told, "rows": rows}, document(rows, told))


def pictures(count: int) -> Batch:
    """Return the pictures."""
    return fl.data.load("cifar10").test.take(torch.arange(FIRST, FIRST + count))


if __name__ == "__main__":
    main()
