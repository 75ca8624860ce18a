"""Iterations of IG per CPU-second, alone and in stacks, beside a plain loop: `python -m benchmarks.performance.speed`.

The loop is what one writes by hand for one image and one network: autograd twice, Adam on the sign, one cosine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import nn

import attacks
import fl.data
import fl.models
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.batching import ProblemBatch
from attacks.gradient_matching.engine.problem import MatchingProblem
from attacks.gradient_matching.engine.traced_objective import (
    MIN_EVALUATIONS_TO_COMPILE,
    STEADY_EVALUATIONS,
    _CompiledWithFallback,
)
from benchmarks.common import publish, table
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView

NETWORKS: tuple[tuple[str, Literal["color", "gray"], int], ...] = (
    ("hyperfl-colour", "color", 32),
    ("lenet-zhu", "color", 32),
    ("hyperfl-grey", "gray", 28),
)
STACKS = {
    **{f"stack of {count}": (count, False) for count in (1, 4, 16, 64)},
    **{f"compiled, {count}": (count, True) for count in (1, 16, 64)},
}
REPEATS = 3


def by_hand(task: Task, images: Batch) -> Callable[[int], None]:
    """Return a function that makes so many iterations of IG on the first image."""
    model, label = task.model, images.labels[:1]
    weights = list(model.parameters())
    for weight in weights:
        weight.requires_grad_()
    loss = nn.functional.cross_entropy(model(images.inputs[:1]), label)
    observed = [g.detach() for g in torch.autograd.grad(loss, weights)]
    guess = torch.rand(1, *task.input_shape, generator=torch.Generator().manual_seed(0)).to(images.inputs)
    guess.requires_grad_()
    solver = torch.optim.Adam([guess], lr=0.1)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            solver.zero_grad()
            value = nn.functional.cross_entropy(model(guess), label)
            grads = torch.autograd.grad(value, weights, create_graph=True)
            dot = sum((g * o).sum() for g, o in zip(grads, observed, strict=True))
            mine = torch.stack([g.square().sum() for g in grads]).sum()
            theirs = torch.stack([o.square().sum() for o in observed]).sum()
            across = (guess[..., 1:] - guess[..., :-1]).abs().mean()
            down = (guess[..., 1:, :] - guess[..., :-1, :]).abs().mean()
            objective = 1 - dot / (mine * theirs).sqrt() + 1e-4 * (across + down)
            guess.grad = torch.autograd.grad(objective, guess)[0].sign()
            solver.step()
            with torch.no_grad():
                guess.clamp_(0, 1)

    return run


def our_iterations(view: ServerView, count: int, compiled: bool) -> tuple[Callable[[int], None], float]:
    """Return a function that runs so many iterations on a stack of `count` trials, and the seconds to record it."""
    problem = MatchingProblem(view, torch.zeros(1, dtype=torch.int64), "cosine", 1e-4)
    attack = attacks.build("ig")
    assert isinstance(attack, GradientMatching)
    starts = [attack.initial_variables(problem, 0, r) for r in range(count)]
    stack = ProblemBatch([problem] * count, compiled=compiled)
    rows = {k: torch.stack([s[k] for s in starts]) for k in starts[0]}
    stack.evaluate(rows)  # whatever is made once
    begin = time.perf_counter()  # the C++ compiler is another process
    for _ in range(STEADY_EVALUATIONS):  # as a search of thousands of iterations tells it
        stack.expect_iterations(MIN_EVALUATIONS_TO_COMPILE, rows)
    recording = time.perf_counter() - begin
    if compiled and not isinstance(stack.traced, _CompiledWithFallback):
        raise RuntimeError("nothing was compiled: install a C++ compiler")

    def run(iterations: int) -> None:
        settings = attacks.build({"name": "ig", "iterations": iterations})
        assert isinstance(settings, GradientMatching)
        noise = [stream(0, "noise", r) for r in range(count)]
        settings.search(stack, rows, noise)

    return run, recording


def rate(run: Callable[[int], None], iterations: int, images: int) -> float:
    """Image-iterations per CPU-second."""
    begin = time.process_time()
    run(iterations)
    return iterations * images / (time.process_time() - begin)


def spread(seconds: list[float]) -> str:
    """Least to most."""
    return f"{min(seconds):.1f} to {max(seconds):.1f}"


def main() -> None:
    """Measure, in turn within each repeat, and write the medians."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with TemporaryDirectory() as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty  # else a second run would time how long it takes to read files
        measure()


def measure() -> None:
    """All networks."""
    torch.set_num_threads(1)
    rows, raw, costs = [], {}, dict[bool, list[float]]()
    for name, mode, size in NETWORKS:
        images = fl.data.load("photos", mode=mode, size=size).train
        task = fl.models.build(name, num_classes=10, seed=0)
        federation = Federation(Client(task, FedAvg(lr=1.0, steps=1, batch_size=None)), [ClientData(images, images)])
        view, _ = federation.observe(0, data=images.take(torch.tensor([0])))
        loop = by_hand(task, images)
        stacks = {}
        for label, (count, compiled) in STACKS.items():
            stacks[label], recording = our_iterations(view, count, compiled)
            costs.setdefault(compiled, []).append(recording)
        found: dict[str, list[float]] = {"by hand": [], **{label: [] for label in STACKS}}
        for _ in range(REPEATS):
            found["by hand"].append(rate(loop, 200, 1))
            for label, run in stacks.items():
                count, _ = STACKS[label]
                found[label].append(rate(run, max(200 // count, 5), count))
        raw[name] = found
        hand = statistics.median(found["by hand"])
        middle = [statistics.median(values) for values in found.values()]
        rows.append([name, *[f"{value:.0f} ({value / hand:.1f}x)" for value in middle]])
    lines = [
        "# Image-iterations of IG per CPU-second, one thread, batch 1",
        "",
        f"Medians of {REPEATS} interleaved repeats; in brackets the ratio to a loop written by hand for one image. "
        f"Ours as in a search of thousands of iterations, that is recorded first, which took {spread(costs[False])} "
        f"seconds and is not counted. With `compiled: true` it is recorded and compiled, in {spread(costs[True])} "
        "seconds.",
        "",
        *table(["network", "by hand", *STACKS], rows),
    ]
    taken = {"compiled" if compiled else "recorded": seconds for compiled, seconds in costs.items()}
    publish("speed", {"image_iterations_per_cpu_second": raw, "seconds_to_record": taken}, lines)


if __name__ == "__main__":
    main()
