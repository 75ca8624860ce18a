"""Searches and rounds on a GPU: `python -m benchmarks.performance.gpu`.

Searches: image-iterations per second of the clock, one by one as one writes it by hand, one by one and in stacks as we
do it; the whole evaluation of 50 images and 10,000 iterations. Exact inversion: seconds of an image there and on the
machine's CPU. Rounds: seconds of 20 clients, client by client and in stacks.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch

import attacks
import fl.data
import fl.models
from attacks.base import Reconstruction
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.traced_objective import CapturedGraph
from benchmarks.common import publish, table
from benchmarks.leakage.whole import COUNT, ITERATIONS, SETTINGS, WHOLE, photographs, victims
from benchmarks.performance.noise_data import BATCH, federation
from benchmarks.performance.speed import NETWORKS, by_hand
from eval.run.federation_data import resolve_device
from fl.engines import EngineName
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.seeds import stream
from fl.view import ServerView

REPEATS = 3
EXACT = {"hyperfl-grey": 9, "hyperfl-colour": 5}
"""Photographs that are solved for on each network; the first is not timed."""


def seconds(run: Callable[[], object]) -> float:
    """Of the clock, until the device is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def searching(views: list[ServerView], *, compiled: bool = False) -> tuple[Callable[[int], None], float]:
    """Return a function that runs so many iterations of IG on the views together, and the seconds to prepare it."""
    attack = attacks.build(
        {"name": "ig", "iterations": ITERATIONS, "compile": compiled, "max_parallel_trials": len(views)}
    )
    assert isinstance(attack, GradientMatching)
    given = [attack.build_problem(view) for view in views]
    starts = [attack.initial_variables(problem, 0, i) for i, problem in enumerate(given)]
    rows = {k: torch.stack([s[k] for s in starts]) for k in starts[0]}
    stack = ProblemBatch(given, compiled=compiled)

    def prepare() -> None:
        while stack.traced is None and stack.steady_evaluations < 100:
            stack.evaluate(rows)
            stack.expect_iterations(ITERATIONS, rows)

    ready = seconds(prepare)
    if not isinstance(stack.traced, CapturedGraph):
        raise RuntimeError("expected a search replayed as a CUDA graph, got none: see the log")

    def run(iterations: int) -> None:
        settings = attacks.build({"name": "ig", "iterations": iterations})
        assert isinstance(settings, GradientMatching)
        settings.search(stack, rows, [stream(0, "noise", i) for i in range(len(views))])

    return run, ready


def rate(run: Callable[[int], None], iterations: int, count: int) -> float:
    """Image-iterations per second, of the median repeat."""
    run(5)
    return statistics.median(iterations * count / seconds(lambda: run(iterations)) for _ in range(REPEATS))


KINDS = {"one": (1, False), f"{COUNT}": (COUNT, False), f"{COUNT}, compiled": (COUNT, True)}


def searches(name: str, mode: Literal["color", "gray"], size: int) -> dict[str, Any]:
    """Image-iterations per second on one network, and the seconds until the first of each kind was ready."""
    task = fl.models.build(name, num_classes=10, seed=0).to(device="cuda")
    pictures = photographs(mode, size, "cuda")
    views = victims(task, pictures, FedAvg(lr=1.0, steps=1, batch_size=None), COUNT)
    found, ready = {"by hand": rate(by_hand(task.to(device="cuda"), pictures), 100, 1)}, {}
    for label, (count, compiled) in KINDS.items():
        run, ready[label] = searching(views[:count], compiled=compiled)
        found[label] = rate(run, 300, count)
        del run
        torch.cuda.empty_cache()
    return {"image_iterations_per_second": found, "seconds_to_record": ready}


def whole(name: str) -> dict[str, float]:
    """Return the seconds of 50 images and 10,000 iterations of one attack on the color network, recording included."""
    task = fl.models.build("hyperfl-colour", num_classes=10, seed=0).to(device="cuda")
    views = victims(task, photographs("color", 32, "cuda"), WHOLE[name], COUNT)
    attack = attacks.build({"name": name, **SETTINGS[name], "iterations": ITERATIONS, "max_parallel_trials": COUNT})
    taken = seconds(partial(attack.run, views, list(range(COUNT))))
    torch.cuda.empty_cache()
    return {f"{name} on {WHOLE[name].name}": taken}


def exact(name: str, mode: Literal["color", "gray"], size: int, device: str) -> dict[str, Any]:
    """Return the seconds that `cascade` takes for an image on the device, without the first one, and its answers."""
    task = fl.models.build(name, num_classes=10, seed=0).to(device=device)
    views = victims(task, photographs(mode, size, device), FedAvg(lr=1.0, steps=1, batch_size=None), EXACT[name])
    attack, taken, verified = attacks.build("cascade"), [], 0
    for view in views:
        began = time.perf_counter()
        result = attack(view)
        verified += isinstance(result, Reconstruction) and bool(result.verified)
        taken.append(time.perf_counter() - began)
    return {"seconds": statistics.median(taken[1:]), "verified": verified, "of": len(views)}


def rounds() -> Iterator[tuple[str, str, EngineName, float]]:
    """Network, method, engine, seconds of a round of 20 clients of 600 images each, 5 epochs in batches of 50."""
    methods: dict[str, tuple[Method, tuple[EngineName, ...]]] = {
        "FedAvg": (FedAvg(lr=0.02, batch_size=BATCH, epochs=5), ("loop", "vmap")),
        "FedPer": (FedPer(lr=0.02, batch_size=BATCH, epochs=5), ("loop", "vmap")),
        "HyperFL": (HyperFL(batch_size=BATCH, epochs=5), ("factored",)),
    }
    for network in ("hyperfl-colour", "hyperfl-grey"):
        for name, (method, engines) in methods.items():
            for engine in engines:
                task = fl.models.build(network, num_classes=10, seed=0).to(device="cuda")
                run = federation(task, method, clients=20, each=600, engine=engine)
                run.step(evaluate=False)
                yield network, name, engine, seconds(partial(run.step, evaluate=False))
                del run
                torch.cuda.empty_cache()


def copied() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    one = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(one)
    other.copy_(one)
    return 2 * one.numel() / statistics.median(seconds(lambda: other.copy_(one)) for _ in range(10))


def page(result: dict[str, Any]) -> list[str]:
    """Return what has been measured so far, in Markdown, with a `note` on what was special that day, if any."""
    lines = [
        f"# Searches and rounds on a GPU ({result['device']})",
        "",
        "Image-iterations of IG per second of the clock, batch 1, single precision; in brackets the ratio to a loop "
        f"written by hand for one image. Medians of {REPEATS} repeats, recording not counted.",
        "",
    ]
    rows = []
    for network, part in result["searches"].items():
        found = part["image_iterations_per_second"]
        rows.append([network, *[f"{found[k]:.0f} ({found[k] / found['by hand']:.1f}x)" for k in ("by hand", *KINDS)]])
    lines += table(["network", "by hand", *KINDS], rows)
    if result["whole"]:
        lines += ["", f"The whole search, {COUNT} images, {ITERATIONS:,} iterations, recording included:", ""]
        lines += table(["search", "seconds"], [[k, f"{v:.0f}"] for k, v in result["whole"].items()])
    if result.get("exact"):
        lines += ["", "Exact inversion (`cascade`), there and on the CPU, median seconds an image:", ""]
        rows = [[*r[:2], f"{r[2]['seconds']:.1f}", f"{r[2]['verified']} of {r[2]['of']}"] for r in result["exact"]]
        lines += table(["network", "on", "seconds", "verified"], rows)
    if result["rounds"]:
        lines += [
            "",
            "One round of 20 clients with 600 images each. Each trains for five epochs, in batches of 50:",
            "",
        ]
        lines += table(["network", "method", "engine", "seconds"], [[*r[:3], f"{r[3]:.2f}"] for r in result["rounds"]])
    copy = result["copy_bytes_per_second"] / 1e12
    lines += ["", f"A large copy on the device moves {copy:.1f} TB/s, read and written."]
    return [*lines, "", result["note"]] if "note" in result else lines


def main() -> None:
    """Measure, and write after each part what there is: time on such a machine is short."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    resolve_device("cuda")  # in single precision
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_per_second": copied(),
        "searches": {},
        "whole": {},
        "exact": [],
        "rounds": [],
    }
    for name, mode, size in NETWORKS:
        result["searches"][name] = searches(name, mode, size)
        publish("gpu", result, page(result))
    result["whole"] |= whole("ig")
    for name, mode, size in NETWORKS:
        for device in ("cuda", "cpu") if name in EXACT else ():
            result["exact"].append([name, device, exact(name, mode, size, device)])
    publish("gpu", result, page(result))
    for row in rounds():
        result["rounds"].append(row)
        publish("gpu", result, page(result))
    result["whole"] |= whole("joint")  # the longest, hence the last
    publish("gpu", result, page(result))


if __name__ == "__main__":
    main()
