"""Where the time of the inner loops goes: floating-point operations over the machine's peak, and groups of operators.

Part (d) of `benchmarks.performance.scaling`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import attacks
import fl.models
from benchmarks.performance.noise_data import BATCH, federation, victims
from benchmarks.performance.speed import our_iterations
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.seeds import stream
from fl.types import Task

NETWORKS = ("hyperfl-colour", "lenet-zhu", "hyperfl-grey")
TRAINED = ("hyperfl-colour", "hyperfl-grey")
STACKS = (1, 16)
ITERATIONS = 96
"""Of `ig`, times trials."""
TOGETHER = 10
"""Clients that are trained by factors."""
CONVOLUTIONS, PRODUCTS = "convolutions", "matrix products"
PRODUCT_NAMES = ("mm", "bmm", "addmm", "addmv", "mv", "dot", "vdot", "baddbmm")
BETWEEN = "between operators"
REST = "elementwise and others"


@dataclass(frozen=True)
class Loop:
    """One inner loop, measured.

    Attributes:
        name: what runs.
        gflop: billions of floating-point operations in convolutions and matrix products, per iteration or client.
        seconds: CPU seconds, per iteration or client.
        share: of the peak in float32, in [0, 1].
        parts: share of the profiled time by group of operators, in [0, 1].
    """

    name: str
    gflop: float
    seconds: float
    share: float
    parts: dict[str, float]


def searching(task: Task, count: int) -> Callable[[int], None]:
    """Return a call of `ig` of so many iterations on a stack of `count` trials for one image of noise."""
    run = federation(task, FedAvg(lr=1.0, steps=1, batch_size=None), clients=1, each=1, engine="loop")
    view, _ = run.observe(0)

    def call(iterations: int) -> None:
        attacks.build({"name": "ig", "iterations": iterations, "restarts": count, "max_parallel_trials": count}).run(
            [view], [0]
        )

    return call


def _backward_of_convolution(  # the stock formula counts weights' gradients of a grouped one once for each group
    grad: Sequence[int], x: Sequence[int], w: Sequence[int], *rest: Any, out_shape: object = None, **_: object
) -> int:
    transposed, mask = rest[4], rest[7]
    forward = conv_flop_count(list(x), list(w), list(grad), transposed=transposed)
    return forward * (int(mask[0]) + int(mask[1]))


def operations(work: Callable[[], object]) -> int:
    """Floating-point operations of a call: multiplications and additions of convolutions and matrix products."""
    mapping = {torch.ops.aten.convolution_backward: _backward_of_convolution}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        work()
    return counter.get_total_flops()


def peak(size: int = 2048, repeats: int = 3) -> float:
    """Floating-point operations per CPU-second of a product of two large matrices, the best of some."""
    a, b = (torch.rand(size, size, generator=stream(0, "peak", k)) for k in range(2))
    best = float("inf")
    for _ in range(repeats):
        best = min(best, seconds(partial(torch.mm, a, b)))
    return 2 * size**3 / max(best, 1e-9)


def parts(work: Callable[[], object]) -> dict[str, float]:
    """Return shares of a call's time by group of operators, without those they call; the rest is Python."""
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
        spent = time.perf_counter() - began
    found = dict.fromkeys((CONVOLUTIONS, PRODUCTS, REST), 0.0)
    for event in seen.key_averages():
        if event.key.startswith("aten::"):
            found[_group(event.key.removeprefix("aten::"))] += event.self_cpu_time_total / 1e6 / spent
    return {**found, BETWEEN: max(0.0, 1.0 - sum(found.values()))}


def _group(operator: str) -> str:
    if "conv" in operator:
        return CONVOLUTIONS
    return PRODUCTS if operator.strip("_") in PRODUCT_NAMES else REST


def profile_loop(
    name: str, work: Callable[[], object], units: int, best: float, setup: Callable[[], object] | None = None
) -> Loop:
    """Return one loop: counted, timed and profiled.

    Args:
        name: what runs.
        work: a call of it.
        units: iterations or clients in a call.
        best: the peak.
        setup: a call with none of these, whose operations and time are taken off; also loads what is loaded on first
            use.
    """
    done = (operations(work) - (operations(setup) if setup else 0)) / units
    spent = max(seconds(work) - (seconds(setup) if setup else 0.0), 1e-9) / units
    return Loop(name, done / 1e9, spent, done / spent / best, parts(work))


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def loops(
    networks: Sequence[str] = NETWORKS,
    trained: Sequence[str] = TRAINED,
    stacks: Sequence[int] = STACKS,
    iterations: int = ITERATIONS,
    each: int = 200,
) -> dict[str, Any]:
    """Return the peak, and every loop."""
    torch.set_num_threads(1)
    best, found = peak(), []
    for network in networks:
        task = fl.models.build(network, num_classes=10, seed=0)
        for count in stacks:
            call, times = searching(task, count), max(iterations // count, 2)
            before = f"ig, by autograd, {network}, {count}"
            found.append(profile_loop(before, partial(call, times + 1), times * count, best, partial(call, 1)))
            recorded, _ = our_iterations(victims(network, 1)[0], count, compiled=False)
            after = f"ig, recorded, {network}, {count}"
            found.append(profile_loop(after, partial(recorded, times + 1), times * count, best, partial(recorded, 1)))
    for network in trained:
        task = fl.models.build(network, num_classes=10, seed=0)
        for label, method, engine, clients in (
            ("fedavg, loop", FedAvg(lr=0.02, batch_size=BATCH), "loop", 1),
            ("hyperfl, loop", HyperFL(batch_size=BATCH, epochs=1), "loop", 1),
            ("hyperfl, factored", HyperFL(batch_size=BATCH, epochs=1), "factored", TOGETHER),
        ):
            run = federation(task, method, clients=clients, each=each, engine=engine)  # type: ignore[arg-type]
            found.append(profile_loop(f"{label}, {network}", partial(run.step, evaluate=False), clients, best))
    return {"peak_gflop_per_second": best / 1e9, "loops": [asdict(loop) for loop in found]}
