"""Attack strength on real images.

Run it by `python -m benchmarks.leakage.leakage idlg|ig|hyperfl` (needs HYPERLEAK_DATA, but for ig).

idlg     iDLG, or DLG, on the LeNet of Zhu et al., 32 CIFAR-10 test images x 3 seeds, one start and up to four.
ig       IG on four photographs, four seeds, beside a hand-written loop on the same victims.
hyperfl  What HyperFL gives away beside plain FedAvg: the published attacks, peel+ig, and paired differences.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import fmean
from typing import Any

import torch

import attacks
import fl.data
import fl.models
from attacks.base import Attack, NotApplicable, Reconstruction, Result
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch, stack_variables
from attacks.gradient_matching.engine.problem import MatchingProblem, Variables
from attacks.gradient_matching.ig import InvertingGradients
from benchmarks.common import RESULTS, hyperfl_conditions, publish, rewrite, table
from eval.metrics.score import Row, score
from eval.metrics.statistics import mean_interval, median, paired_difference, success_rate
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.types import Batch, Task, Truth
from fl.view import ServerView

IMAGES, SEEDS = 32, 3
TV = 1e-2
ITERATIONS = {"l2": 6000, "cosine": 10_000}  # of iDLG; most trials end long before, once they have converged
TITLES = {"idlg": "iDLG", "dlg": "DLG"}
KEPT: dict[str, dict[str, Any]] = {"idlg": {"history_size": 50}, "dlg": {}}
"""What differs from the attack's defaults: iDLG was measured with the 50 pairs that it kept then; now both keep 100."""
NOTES = {
    "idlg": "All keep 50 pairs of steps and gradient changes, half of what the attack keeps by default.",
    "dlg": "The label is searched for together with the image; `cosine` is the attack's default in all its settings.",
}
LOWER = 50  # iterations of bilevel's search for the embedding: each runs the whole hypernetwork
BILEVEL = {"lower_iterations": LOWER, "head_lr": 1e-3}  # that step size was the default when this was measured
Seen = tuple[ServerView, Truth]


def observe_images(task: Task, method: Method, images: Batch, seed: int) -> list[Seen]:
    """Return one view for each image, of a client that trains on it alone from the server's initial state."""
    federation = Federation(Client(task, method), [ClientData(images, images)], seed=seed)
    return [federation.observe(0, data=images.take(torch.tensor([i]))) for i in range(len(images))]


def score_results(results: Sequence[Result], victims: Sequence[Seen], seed: int, **tags: Any) -> list[Row]:
    """Scores of a stack of results."""
    found = []
    for i, (result, (_, truth)) in enumerate(zip(results, victims, strict=True)):
        if isinstance(result, NotApplicable):
            raise ValueError(f"expected a reconstruction, got: {result.reason}")
        found += [{**row, "image": i, "seed": seed, **tags} for row in score(result, truth)]
    return found


def timed(attack: Attack, victims: Sequence[Seen], seed: int) -> tuple[list[Result], float]:
    """Results and CPU seconds."""
    begin = time.process_time()
    results = attack.run([view for view, _ in victims], [1000 * seed + i for i in range(len(victims))])
    return results, time.process_time() - begin


def idlg_part(part: tuple[str, str, int, int, int]) -> tuple[list[Row], dict[str, float]]:
    """Sixteen of a seed's images from `begin` on, with one start and, if asked, up to four: rows, and CPU seconds."""
    name, objective, starts, seed, begin = part
    torch.set_num_threads(1)
    images = fl.data.load("cifar10").test.take(torch.arange(begin, begin + 16))
    task = fl.models.build("lenet-zhu", num_classes=10, seed=seed)
    victims = observe_images(task, FedAvg(lr=1.0, steps=1, batch_size=None), images, seed)
    settings = {"name": name, "objective": objective, "iterations": ITERATIONS[objective], **KEPT[name]}
    one, spent = timed(attacks.build(settings), victims, seed + begin)
    found, seconds = {"one": one}, {"one": spent}
    if starts > 1:
        found["four"], more = _restarted({**settings, "restarts": starts - 1}, one, victims, SEEDS + seed + begin)
        seconds["four"] = spent + more
    scored = []
    for called, results in found.items():
        data = score_results(results, victims, seed, starts=called, objective=objective)
        scored += [{**row, "image": row["image"] + begin} for row in data]
    return scored, seconds


def _restarted(
    settings: dict[str, Any], one: Sequence[Result], victims: Sequence[Seen], seed: int
) -> tuple[list[Result], float]:
    """Return the better of the first start and further ones, which are made where the first did not get close."""
    attack = attacks.build(settings)
    assert isinstance(attack, GradientMatching)
    missed = [i for i, r in enumerate(one) if isinstance(r, Reconstruction) and r.objective > attack.success_threshold]
    again, spent = timed(attack, [victims[i] for i in missed], seed) if missed else ([], 0.0)
    best = list(one)
    for i, other in zip(missed, again, strict=True):
        first = one[i]
        assert isinstance(first, Reconstruction)
        assert isinstance(other, Reconstruction)
        best[i] = other if other.objective < first.objective else first
    return best, spent


def run_idlg(name: str, objectives: Sequence[str], seeds: int, starts: int) -> None:
    """Success rates of iDLG or DLG with one start and up to four; two processes. Other objectives' results stay."""
    found = RESULTS / f"{name}.json"
    before = json.loads(found.read_text()) if found.exists() else {"rows": [], "cpu_seconds": {}}
    scored: list[Row] = [row for row in before["rows"] if row["objective"] not in objectives]
    seconds: dict[tuple[str, str], float] = {}
    for key, spent in before["cpu_seconds"].items():
        objective, called = key.split()
        if objective not in objectives:
            seconds[objective, called] = spent
    parts = [
        (name, o, starts, seed, begin) for o in objectives for seed in range(seeds) for begin in range(0, IMAGES, 16)
    ]
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for part, (data, times) in zip(parts, pool.map(idlg_part, parts), strict=True):
            scored += data
            for called, more in times.items():
                seconds[part[1], called] = seconds.get((part[1], called), 0.0) + more
            _report_idlg(name, scored, seconds, seeds, complete=part == parts[-1])


def _report_idlg(
    name: str, scored: list[Row], seconds: dict[tuple[str, str], float], seeds: int, *, complete: bool
) -> None:
    body = []
    for (objective, starts), spent in seconds.items():
        data = [row for row in scored if (row["objective"], row["starts"]) == (objective, starts)]
        body.append([objective, starts, len(data), *_line(data, spent)])
    lines = [
        f"# {TITLES[name]}, LeNet of Zhu et al. (sigmoid, weights U(-0.5, 0.5)), batch 1",
        "",
        *([] if complete else ["**Incomplete: the run was not finished; read the number of runs.**", ""]),
        f"{IMAGES} CIFAR-10 test images x {seeds} seed{'s' if seeds > 1 else ''} (network and attack). A right search "
        "finds the image or fails, so read the success rate. Of several starts the best is chosen by the attack's own "
        "objective; a further one is made only while that is above 3e-9 of where it began. The objective `l2` is the "
        "authors' (6000 evaluations); `cosine` is the same search on the directions of the gradients (10,000; those "
        f"that have converged end before). {NOTES[name]}",
        "",
        *table(
            [
                "objective",
                "starts",
                "runs",
                "PSNR mean [95 %]",
                "median",
                ">= 40 dB [95 %]",
                "labels right",
                "mean-color baseline",
                "CPU s",
            ],
            body,
        ),
    ]
    publish(name, {"rows": scored, "cpu_seconds": {" ".join(k): v for k, v in seconds.items()}}, lines)


def _line(data: list[Row], seconds: float) -> list[object]:
    psnr, rate = mean_interval(data), success_rate(data, 40.0)
    labels = sum(bool(row["label_correct"]) for row in data)
    assert rate.low is not None
    assert rate.high is not None
    floor = mean_interval(data, "floor_mean_psnr").value
    return [
        f"{psnr.value:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
        f"{median(data):.1f}",
        f"{100 * rate.value:.0f} % [{100 * rate.low:.0f}, {100 * rate.high:.0f}]",
        f"{labels}/{len(data)}",
        f"{floor:.1f}",
        f"{seconds:.0f}",
    ]


ANCHORS: list[tuple[str, str, dict[str, Any], dict[str, Any], list[float | None]]] = [
    (
        "LeNet (Zhu), TV 1e-2, 4800 iterations",
        "color",
        {"name": "lenet-zhu", "normalize": True, "init": "redrawn"},
        {"iterations": 4800, "tv_weight": 1e-2},
        [19.1, 26.8, None, None],
    ),
    (
        "HyperFL color, TV 1e-6, 10,000 iterations",
        "color",
        {"name": "hyperfl-colour"},
        {"iterations": 10_000, "tv_weight": 1e-6},
        [12.0, 18.4, 13.9, 17.4],
    ),
    (
        "HyperFL color, TV 1e-4, 3000 iterations",
        "color",
        {"name": "hyperfl-colour"},
        {"iterations": 3000, "tv_weight": 1e-4},
        [12.2, 17.9, 13.9, 18.8],
    ),
    (
        "HyperFL gray, TV 1e-6, 10,000 iterations",
        "gray",
        {"name": "hyperfl-grey"},
        {"iterations": 10_000, "tv_weight": 1e-6},
        [16.1, 19.2, 19.1, None],
    ),
    (
        "HyperFL gray, TV 1e-4, 3000 iterations",
        "gray",
        {"name": "hyperfl-grey"},
        {"iterations": 3000, "tv_weight": 1e-4},
        [25.1, 18.1, 20.4, 36.5],
    ),
]
"""Setting, image mode, network, attack, and the PSNR measured with a hand-written loop on the same victims."""


STARTS = 4
"""Of each photograph: seeds of the attack. One start is a lottery."""


@dataclass(frozen=True, kw_only=True)
class Measured(InvertingGradients):
    """IG whose results have the objective itself, not its share of each start's: several can be compared."""

    def build_result(
        self, problem: MatchingProblem, row: Variables, objective: float, history: tuple[float, ...]
    ) -> Reconstruction:
        """Return the result with the objective in its own unit."""
        value, _ = ProblemBatch([problem]).evaluate(stack_variables([row]))
        return replace(super().build_result(problem, row, objective, history), objective=float(value))


def run_ig() -> None:
    """IG on astronaut, chelsea, coffee and rocket beside the anchors, `STARTS` seeds in one stack."""
    out, lines, seconds = [], list[list[str]](), dict[str, float]()
    for what, mode, network, settings, anchor in ANCHORS:
        images = fl.data.load("photos", mode=mode, size=32 if mode == "color" else 28).train
        task = fl.models.models.build(network).build_task(num_classes=62 if mode == "gray" else 10, seed=0)
        victims = observe_images(task, FedAvg(lr=1.0, steps=1, batch_size=None), images, 0)
        views = [view for view, _ in victims]
        begin = time.process_time()
        results = Measured(**settings).run(
            views * STARTS, [1000 * s + i for s in range(STARTS) for i in range(len(views))]
        )
        seconds[what] = time.process_time() - begin
        data = [score_results(results[s * len(views) :][: len(views)], victims, s, setting=what) for s in range(STARTS)]
        out += [row for one in data for row in one]
        lines += _photographs(what, data, anchor, seconds[what])
        text = [
            "# IG on four photographs, PSNR in dB, batch 1, untrained networks, label recovered",
            "",
            "The anchors are a hand-written loop with the settings of Geiping et al. on the same victims, one start. "
            f"Ours are {STARTS} seeds of the attack, one start each: the mean (least to most). The best of them is that"
            f" of the least objective, as `restarts={STARTS}` takes it, without the truth. CPU seconds of all "
            f"{STARTS * len(views)} searches.",
            "",
            *table(["setting", "what", "astronaut", "chelsea", "coffee", "rocket", "CPU s"], lines),
        ]
        publish("ig_photos", {"rows": out, "cpu_seconds": seconds}, text)


def _photographs(
    what: str, data: Sequence[Sequence[Row]], anchor: Sequence[float | None], seconds: float
) -> list[list[str]]:
    """Lines of one setting; `data` has a list of rows for each seed."""
    columns = list(zip(*data, strict=True))
    ours = [[row["psnr"] for row in column] for column in columns]
    best = [min(column, key=lambda row: row["objective"])["psnr"] for column in columns]
    floors = [row["floor_mean_psnr"] for row in data[0]]
    return [
        [what, "one start", *[f"{fmean(o):.1f} ({min(o):.1f} to {max(o):.1f})" for o in ours], f"{seconds:.0f}"],
        [what, f"best of {len(data)} by objective", *[f"{b:.1f}" for b in best], ""],
        [what, "anchor", *["-" if a is None else f"{a:.1f}" for a in anchor], ""],
        [what, "mean-color baseline", *[f"{f:.1f}" for f in floors], ""],
    ]


def run_hyperfl(dataset: str, iterations: int) -> None:
    """HyperFL under the published attacks and the peel, beside FedAvg under the same search."""
    images = fl.data.load(dataset).test.take(torch.arange(IMAGES))
    network, lr = ("hyperfl-grey", 0.01) if images.inputs.shape[1] == 1 else ("hyperfl-colour", 0.02)
    one_step: dict[str, Any] = {"lr": lr, "steps": 1, "batch_size": None}
    found: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for seed in range(SEEDS):
        task = fl.models.build(network, num_classes=10, seed=seed)
        plain = observe_images(task, FedAvg(**one_step), images, seed)
        hidden = observe_images(
            task, HyperFL(head_epochs=0, parametrization=Hypernetwork(init="scaled"), **one_step), images, seed
        )
        search = {"iterations": iterations, "tv_weight": TV}
        for method, name, settings, victims in (
            ("FedAvg", "ig", search, plain),
            ("FedAvg", "headless+ig", search, plain),
            ("HyperFL", "peel+ig", search, hidden),
            ("HyperFL", "joint", search, hidden),
            ("HyperFL", "bilevel", {**search, **BILEVEL}, hidden),
        ):
            results, spent = timed(attacks.build({"name": name, **settings}), victims, seed)
            key = f"{method}: {name}"
            seconds[key] = seconds.get(key, 0.0) + spent
            found.setdefault(key, []).extend(score_results(results, victims, seed, method=method, attack=name))
            _report(dataset, iterations, found, seconds, complete=seed == SEEDS - 1 and name == "bilevel")


def _report(
    dataset: str, iterations: int, found: dict[str, list[Row]], seconds: dict[str, float], *, complete: bool
) -> None:
    flat = [row for data in found.values() for row in data]
    settings = {"dataset": dataset, "iterations": iterations}
    lines = beside_fedavg(dataset, iterations, found, seconds, complete=complete)
    publish(f"hyperfl_{dataset}", {"settings": settings, "rows": flat, "cpu_seconds": seconds}, lines)


def _known(result: dict[str, Any]) -> list[str]:
    """Return the page of results that were measured whole."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault(f"{row['method']}: {row['attack']}", []).append(row)
    return beside_fedavg(**result["settings"], found=found, seconds=result["cpu_seconds"], complete=True)


def beside_fedavg(
    dataset: str, iterations: int, found: dict[str, list[Row]], seconds: dict[str, float], *, complete: bool
) -> list[str]:
    """Return the page of HyperFL beside FedAvg."""
    body = []
    for key, data in found.items():
        psnr, ssim, rate = mean_interval(data), mean_interval(data, "ssim"), success_rate(data, 20.0)
        body.append(
            [
                key,
                len(data),
                f"{psnr.value:.2f} [{psnr.low:.2f}, {psnr.high:.2f}]",
                f"{median(data):.1f}",
                f"{ssim.value:.3f} [{ssim.low:.3f}, {ssim.high:.3f}]",
                f"{100 * rate.value:.0f} %",
                f"{seconds[key]:.0f}",
            ]
        )
    some = next(iter(found.values()))
    for floor, called in (("mean", "mean"), ("grey", "gray"), ("noise", "noise")):
        mean = mean_interval(some, f"floor_{floor}_psnr").value
        body.append([f"baseline: {called}", "", f"{mean:.2f}", "", "", "", ""])
    pairs = []
    reference = "HyperFL: peel+ig"
    for key, data in found.items():
        if key != reference and len(data) == len(found.get(reference, [])):
            gap = paired_difference(found[reference], data)
            pairs.append([f"{reference} minus {key}", f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"])
    return [
        f"# HyperFL beside FedAvg, {dataset}, batch 1, one step, untrained networks",
        "",
        *([] if complete else ["**Incomplete: the run was not finished; read the number of runs.**", ""]),
        f"{IMAGES} test images x {SEEDS} seeds (of network, hypernetwork and attack). The heads have the scaled "
        f"initialization. Every search for images takes {iterations} iterations with TV {TV:g}, chosen on other "
        f"images. Bilevel's search for the embedding takes {LOWER}. The server knows neither label nor classifier "
        "nor embedding of HyperFL. FedAvg starts "
        "from the network's own initial weights, HyperFL from generated ones, whose scale is another: the differences "
        "hold that, too. [same_network.md](same_network.md) has both on the same weights. Intervals: 95 % "
        "over images and seeds.",
        "",
        hyperfl_conditions("scaled", "0.01 in gray and 0.02 in color, as published"),
        "",
        *table(["method: attack", "runs", "PSNR dB [95 %]", "median", "SSIM [95 %]", ">= 20 dB", "CPU s"], body),
        "",
        *table(["paired difference in PSNR", "dB [95 %]"], pairs),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["idlg", "ig", "hyperfl"])
    parser.add_argument("--dataset", default="fashion_mnist", help="of hyperfl: fashion_mnist, handwritten62, cifar10")
    parser.add_argument("--iterations", type=int, default=1000, help="of every search of hyperfl")
    parser.add_argument("--attack", choices=list(TITLES), default="idlg", help="of idlg: DLG in its place")
    parser.add_argument("--objective", choices=["l2", "cosine"], action="append", help="of idlg; both by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of idlg")
    parser.add_argument("--starts", type=int, choices=[1, 4], default=4, help="of idlg, at most")
    parser.add_argument("--rewrite", action="store_true", help="of hyperfl: the page anew from what was measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.rewrite:
        rewrite(f"hyperfl_{chosen.dataset}", _known)
    elif chosen.part == "idlg":
        run_idlg(chosen.attack, chosen.objective or list(ITERATIONS), chosen.seeds, chosen.starts)
    elif chosen.part == "ig":
        run_ig()
    else:
        run_hyperfl(chosen.dataset, chosen.iterations)


if __name__ == "__main__":
    main()
