"""The memory of a search is told before it begins: right within a factor of two, and kept to."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support import worlds

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.gradient_matching.engine import memory_estimate
from attacks.gradient_matching.engine.base import GradientMatching
from attacks.gradient_matching.engine.memory_estimate import GIB, SPARE, _bytes_with_steps, bytes_per_trial
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.view import ServerView

MEASURED = """
import os, torch
from attacks.base import build
from attacks.gradient_matching.engine.memory_estimate import bytes_per_trial
from attacks.gradient_matching.engine.batching import ProblemBatch
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.models import build as network

torch.set_num_threads(1)
given = network("hyperfl-colour", num_classes=10, seed=0)
images = torch.rand(8, *given.input_shape, generator=torch.Generator().manual_seed(0))
def problem(steps):
    method = FedAvg(lr=0.01, steps=steps, batch_size=8)
    view, _ = from_batch(given.model, images, torch.arange(8), method=method, head=given.head)
    return build("ig").build_problem(view)
long, short = problem(16), problem(1)
row = build("ig").initial_variables(long, 0, 0)
def resident(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024
def measure(stack):
    rows = {k: torch.stack([v] * stack) for k, v in row.items()}
    estimate = stack * bytes_per_trial(long, row)
    ProblemBatch([short] * stack).evaluate(rows)  # whatever is loaded and set up once
    with open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")  # forget the peak so far
    before = resident("VmRSS")
    ProblemBatch([long] * stack).evaluate(rows)
    print(estimate, resident("VmHWM") - before, flush=True)
for stack in (1, 4):
    if not os.fork():
        measure(stack)
        os._exit(0)
    os.wait()
"""


def view_of(steps: int, n: int = 4) -> ServerView:
    task, images = worlds.task(), worlds.images(n, "memory")
    method = FedAvg(lr=0.1, steps=steps, batch_size=2, momentum=0.5)
    return from_batch(task.model, images.inputs, images.labels, method=method, head=task.head)[0]


def searching(**settings: Any) -> GradientMatching:
    built = attacks.build({"name": "ig", "iterations": 3, **settings})
    assert isinstance(built, GradientMatching)
    return built


def estimate(view: ServerView) -> int:
    problem = searching().build_problem(view)
    return bytes_per_trial(problem, searching().initial_variables(problem, 0, 0))


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_two_steps_tell_of_all(steps: int) -> None:
    view = view_of(steps)
    problem = searching().build_problem(view)
    whole = SPARE * _bytes_with_steps(problem, searching().initial_variables(problem, 0, 0), [steps])
    assert estimate(view) == pytest.approx(whole, rel=0.02)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="reads the resident set from /proc")
@pytest.mark.slow
def test_the_estimate_is_right_within_a_factor_of_two() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(pairs) == 2
    assert all(0.5 < told / measured < 2 for told, measured in pairs)


def test_what_does_not_fit_is_refused_with_the_way_out() -> None:
    view = view_of(40)
    limit = estimate(view) / GIB / 2
    refused = searching(memory_limit_gib=limit)(view)
    assert isinstance(refused, NotApplicable)
    assert "40 local step(s)" in refused.reason
    assert "surrogate+" in refused.reason
    found = attacks.build({"name": "surrogate+ig", "iterations": 3, "memory_limit_gib": limit})(view)
    assert isinstance(found, Reconstruction)


def test_a_stack_is_as_large_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(6)
    sizes = []
    search = GradientMatching.search

    def watched(self: GradientMatching, stack: Any, *args: Any) -> Any:
        sizes.append(len(stack.problems))
        return search(self, stack, *args)

    monkeypatch.setattr(GradientMatching, "search", watched)
    few = searching(restarts=5, memory_limit_gib=2.5 * estimate(view) / GIB)(view, seed=1)
    many = searching(restarts=5)(view, seed=1)
    weights = sum(weight.numel() for weight in view.client.task.parameters.values())
    monkeypatch.setattr(memory_estimate, "CACHE", 2.5 * weights * view.dtype.itemsize)
    searching(restarts=5)(view, seed=1)
    assert sizes == [2, 2, 1, 5, 2, 2, 1]
    assert isinstance(few, Reconstruction)
    assert isinstance(many, Reconstruction)
    assert torch.allclose(few.inputs, many.inputs, atol=1e-9)  # type: ignore[arg-type]


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_limit_gib: expected a (whole )?number > 0"):
        searching(memory_limit_gib=0.0)
