"""What a private step costs: `python -m benchmarks.performance.dp [--repeats 5]`.

In CPU seconds of one thread, everything in turns in one process, so that the ratios hold on a busy machine too. The
loop is what the HyperFL authors' code does (dp_fedavg.py, its lines in our words): one backward pass for every image
through the graph of the whole batch, each clipped and added up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import fl.models
from benchmarks.common import publish, table
from fl.client import Client, LossGradient
from fl.gradient import autograd_derivative
from fl.local.optimizers import OptimState, optimize
from fl.method import Method, Step
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.privacy.dp_sgd import Privatization, private_gradient
from fl.privacy.private_method import PrivateMethod
from fl.seeds import stream
from fl.tensors import Tensors
from fl.types import Batch, Task

NETWORKS = {"hyperfl-grey": (1, 28, 28), "hyperfl-colour": (3, 32, 32)}
BATCH, CLIP, SIGMA = 100, 0.04, 10.0
TARGET = 3.5
"""Plain steps that a private one was to take at most."""
PLAIN, PRIVATE, GRAPH, LOOP = "plain step", "private step", "private step with a graph", "the authors' loop"
HYPER, EXTRACTOR, WHOLE = "HyperFL, plain step", "noise on the extractor", "noise on the hypernetwork"
QUIET = "clipped on the hypernetwork, no noise"
Run = Callable[[], object]


@dataclass(frozen=True)
class Stepper:
    """Steps of a method on one batch, always from the same parameters.

    Attributes:
        method: whose step.
        task: with the network.
        batch: the images.
        way: another way to the gradient than the method's own.
    """

    method: Method
    task: Task
    batch: Batch
    way: Callable[..., Tensors] | None = None

    def prepared(self) -> Run:
        """Return one step: gradient and optimizer."""
        client = Client(self.task, self.method)
        params = self.method.parametrization.lift(self.method.initial_parameters(client.task, stream(0, "init")))
        phase = self.method.phases(client.task, 0)[-1]
        groups, buffers = phase.assign(params), client.task.buffers
        draws = self.method.draw(self.batch, client.task, stream(0, "draws"))
        step = Step(client.task, params, {}, {}, draws, 0)
        grad = LossGradient(client, step, tuple(groups), buffers, client.task.model, None, autograd_derivative)

        def run() -> Tensors:
            with torch.no_grad():
                if self.way is None:
                    found = self.method.gradient(grad, params, [self.batch], step)
                else:
                    found = self.way(grad, params, self.batch)
                return optimize(phase, groups, params, found, OptimState())[0]

        return run


def graphed(grad: LossGradient, params: Tensors, batch: Batch) -> Tensors:
    """Return the private gradient by `vmap`, which attacks differentiate through."""
    method = grad.client.method
    assert isinstance(method, PrivateMethod)
    how = Privatization(
        clip=CLIP, noise_multiplier=SIGMA, denominator=method.denominator(), clip_target=method.clip_target
    )
    return private_gradient(grad, params, batch, how, method.step_noise(grad.step.draws))


def authors(task: Task, batch: Batch) -> Run:
    """Return the per-sample loop of the authors' code, on a copy of the network."""
    model = task.to().model
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.5, weight_decay=5e-4)
    noise = stream(0, "loop")

    def run() -> None:
        losses = nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        summed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for loss in losses:
            loss.backward(retain_graph=True)
            clip_grad_norm_(model.parameters(), CLIP)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                summed[name] += parameter.grad
            model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = (summed[name] + CLIP * SIGMA * torch.randn(parameter.shape, generator=noise)) / BATCH
        optimizer.step()
        model.zero_grad()

    return run


def contenders(network: str) -> dict[str, Run]:
    """Return all steps on one network."""
    task = fl.models.build(network, num_classes=10, seed=0)
    draw = stream(0, "images")
    inputs = torch.rand(BATCH, *NETWORKS[network], generator=draw).to(memory_format=torch.channels_last)
    batch = Batch(inputs, torch.randint(0, 10, (BATCH,), generator=draw))
    settings: dict[str, Any] = {"noise_multiplier": SIGMA, "clip": CLIP, "batch_size": BATCH, "images": 1000}
    private, hyper = DPFedAvg(**settings), DPHyperFL(**settings)
    return {
        PLAIN: Stepper(FedAvg(momentum=0.5, weight_decay=5e-4), task, batch).prepared(),
        PRIVATE: Stepper(private, task, batch).prepared(),
        GRAPH: Stepper(private, task, batch, graphed).prepared(),
        LOOP: authors(task, batch),
        HYPER: Stepper(HyperFL(), task, batch).prepared(),
        EXTRACTOR: Stepper(hyper, task, batch).prepared(),
        WHOLE: Stepper(replace(hyper, noise_on="hypernetwork"), task, batch).prepared(),
        QUIET: Stepper(replace(hyper, noise_on="hypernetwork", noise_multiplier=0.0), task, batch).prepared(),
    }


def measure(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of every step, in turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            if turn:
                seconds[name].append(time.process_time() - began)
    return seconds


def spread(ratios: list[float]) -> str:
    """From the least to the largest."""
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, raw = [], {}
    over: dict[str, list[float]] = {}
    for network in NETWORKS:
        raw[network] = measure(contenders(network), chosen.repeats)
        middle = {name: statistics.median(found) for name, found in raw[network].items()}
        for name, value in middle.items():
            base = PLAIN if name in (PLAIN, PRIVATE, GRAPH, LOOP) else HYPER
            over.setdefault(name, []).append(value / middle[base])
            rows.append([network, name, f"{value * 1e3:.1f}", f"{over[name][-1]:.1f}"])
    lines = [
        "# What a private step costs",
        "",
        f"CPU milliseconds of one step on {BATCH} images, one thread, median of {chosen.repeats} turns, and the ratio "
        "to the plain step of FedAvg or HyperFL. Noise included: for the hypernetwork 14 or 15 million numbers in "
        "every step, and nothing stays an outer product.",
        "",
        *table(["network", "step", "ms", "over plain"], rows),
        "",
        f"A private step was to take {TARGET} plain ones at most. With noise on the hypernetwork it takes "
        f"{spread(over[WHOLE])}: too many. Clipping alone takes {spread(over[QUIET])}, since the norm "
        "of each image asks for the product of its own gradient with all heads, where a plain step needs one such "
        "product; the rest is the noise, and an update that is dense with it. With noise on the extractor, the "
        f"default, it takes {spread(over[EXTRACTOR])}.",
    ]
    publish("dp", {"cpu_seconds_per_step": raw, "batch": BATCH}, lines)


if __name__ == "__main__":
    main()
