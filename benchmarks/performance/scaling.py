"""Cost as work grows, in CPU seconds and memory: `python -m benchmarks.performance.scaling [--only a|b|c|d|e]`.

Victims in one call of an attack (a), clients in one process (b), size of the networks (c), where the time goes (d,
`benchmarks.performance.profile_loops`), and every search (e, `benchmarks.leakage.searches`). One thread. Every case of
(a) to (c) runs in a process of its own, so that its peak of memory is its own. A part that is left out keeps what was
measured last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import attacks
import fl.models
from attacks.base import NotApplicable
from benchmarks.common import RESULTS, machine, publish
from benchmarks.leakage import searches
from benchmarks.performance import profile_loops
from benchmarks.performance.noise_data import BATCH, federation, victims
from benchmarks.performance.profile_loops import seconds
from benchmarks.performance.scaling_page import page
from fl.engines import EngineName
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hypernetwork import Hypernetwork
from fl.types import Task

MIB = 2**20
VICTIMS = (1, 4, 16, 64, 256)
ATTACKED = ("hyperfl-grey", "hyperfl-colour", "lenet-zhu", "mlp")
ITERATIONS = 256
"""Times victims, in every case of (a), but at least `FEWEST` iterations."""
FEWEST = 4
CLIENTS = (4, 20, 100, 400)
TRAINED = ("hyperfl-grey", "hyperfl-colour")
PUBLISHED = {"clients": 20, "each": 600, "epochs": 5}
SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("mlp", {"widths": (width,)}) for width in (50, 200, 800)),
    *((name, {}) for name in ("lenet-zhu", "hyperfl-grey", "hyperfl-colour", "lenet", "zenkenet", "resnet20")),
)
HIDDEN = (32, 128, 512)


# ---- memory and time -------------------------------------------------------------------------------------------------
def memory() -> tuple[float, float]:
    """MiB resident in this process now, and at most so far."""
    status = Path("/proc/self/status")
    if not status.exists():  # no word of the present: the peak so far stands for it
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
        return peak, peak
    found = dict(line.split(":", 1) for line in status.read_text().splitlines())
    now, peak = (int(found[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))  # in kB
    return now, peak


def apart(work: Callable[..., dict[str, float]], *settings: object) -> dict[str, float]:
    """`work` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *settings).result()


# ---- (a) -------------------------------------------------------------------------------------------------------------
def attacked(network: str, count: int) -> dict[str, float]:
    """One call of `ig` on so many victims."""
    torch.set_num_threads(1)
    search(network, min(count, 2), 1)()  # loads what is loaded on first use
    before, _ = memory()
    search(network, count, 1)()  # asks for the memory, which takes time only once
    few = seconds(search(network, count, 1))
    iterations = max(ITERATIONS // count, FEWEST)
    many = seconds(search(network, count, 1 + iterations))
    return {
        "image_iterations_per_second": count * iterations / max(many - few, 1e-9),
        "mib_above": memory()[1] - before,
    }


def search(network: str, count: int, iterations: int) -> Callable[[], None]:
    """A call of `ig` on so many victims, to be made."""
    views = victims(network, count)
    attack = attacks.build({"name": "ig", "iterations": iterations})

    def call() -> None:
        results = attack.run(views, list(range(count)))
        assert not any(isinstance(result, NotApplicable) for result in results)

    return call


def part_a(networks: Sequence[str] = ATTACKED, counts: Sequence[int] = VICTIMS) -> list[dict[str, Any]]:
    """Victims in one call of `ig`."""
    return [{"network": n, "victims": count, **apart(attacked, n, count)} for n in networks for count in counts]


# ---- (b) -------------------------------------------------------------------------------------------------------------
def method_of(name: str, epochs: int) -> tuple[Method, EngineName]:
    """A method at its published constants, and the engine for it."""
    if name == "fedavg":
        return FedAvg(lr=0.02, batch_size=BATCH, epochs=epochs), "loop"
    return HyperFL(batch_size=BATCH, epochs=epochs), "factored"


def trained(network: str, name: str, clients: int, each: int, epochs: int) -> dict[str, float]:
    """One round of so many clients."""
    torch.set_num_threads(1)
    method, engine = method_of(name, epochs)
    task = fl.models.build(network, num_classes=10, seed=0)
    federation(task, method, clients=1, each=2, engine=engine).step(evaluate=False)  # loads what is loaded on first use
    before, _ = memory()
    run = federation(task, method, clients=clients, each=each, engine=engine)
    spent = seconds(lambda: run.step(evaluate=False))
    data = sum(own.train.inputs.numel() * own.train.inputs.itemsize for own in run.data) / MIB
    return {"seconds_per_client": spent / clients, "mib_above": memory()[1] - before, "mib_images": data} | {
        "mib_whole": memory()[1]
    }


def part_b(
    networks: Sequence[str] = TRAINED, counts: Sequence[int] = CLIENTS, each: int = 100, epochs: int = 1
) -> list[dict[str, Any]]:
    """Clients in one process; then as many as published, with their work."""
    cases = [{"clients": count, "each": each, "epochs": epochs} for count in counts]
    published = [PUBLISHED] if counts == CLIENTS else []
    return [
        {"network": network, "method": name, **case, **apart(trained, network, name, *case.values())}
        for network in networks
        for name, further in (("fedavg", []), ("hyperfl", published))
        for case in (*cases, *further)
    ]


# ---- (c) -------------------------------------------------------------------------------------------------------------
def part_c(
    sizes: Sequence[tuple[str, dict[str, Any]]] = SIZES,
    hidden: Sequence[int] = HIDDEN,
    each: int = 100,
    count: int = 32,
) -> dict[str, list[dict[str, Any]]]:
    """Networks under FedAvg and `ig`, one client; hidden widths of the hypernetwork, four clients."""
    networks = [
        {"network": name + "".join(f", {key} {value}" for key, value in settings.items())}
        | apart(sized, name, settings, each, count)
        for name, settings in sizes
    ]
    return {"networks": networks, "hidden": [{"hidden": width, **apart(widened, width, each)} for width in hidden]}


def sized(name: str, settings: dict[str, Any], each: int, count: int) -> dict[str, float]:
    """What the size of a network costs: a client's round, then so many iterations of a search."""
    torch.set_num_threads(1)
    search("mlp", 1, 1)()  # loads what is loaded on first use
    before, _ = memory()
    task: Task = fl.models.build(name, num_classes=10, seed=0, **settings)
    run = federation(task, method_of("fedavg", 1)[0], clients=1, each=each, engine="loop")
    once = _fastest(lambda: run.step(evaluate=False))
    call = profile_loops.searching(task, 1)
    spent = max(_fastest(lambda: call(1 + count)) - _fastest(lambda: call(1)), 1e-9)
    numbers = sum(p.numel() for p in task.parameters.values())
    return {"parameters": numbers, "client_round": once, "iterations": count / spent, "mib_above": memory()[1] - before}


def widened(width: int, each: int, clients: int = 4) -> dict[str, float]:
    """What so many hidden units of the hypernetwork cost: a round of all clients, per client."""
    torch.set_num_threads(1)
    search("mlp", 1, 1)()  # loads what is loaded on first use
    before, _ = memory()
    task = fl.models.build("hyperfl-grey", num_classes=10, seed=0)
    method = HyperFL(batch_size=BATCH, epochs=1, parametrization=Hypernetwork(hidden=width))
    run = federation(task, method, clients=clients, each=each, engine="factored")
    numbers = sum(value.numel() for value in run.server.shared.values())
    spent = _fastest(lambda: run.step(evaluate=False)) / clients
    return {"parameters": numbers, "client_round": spent, "mib_above": memory()[1] - before}


def _fastest(work: Callable[[], object]) -> float:
    """CPU seconds of the faster of two calls: the first one also loads what is loaded on first use."""
    return min(seconds(work) for _ in range(2))


# ---- all -------------------------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], Any]] = {
    "a": part_a,
    "b": part_b,
    "c": part_c,
    "d": profile_loops.loops,
    "e": searches.searches,
}


def kept(before: dict[str, Any]) -> dict[str, Any]:
    """The parts measured before, and on what processor each."""
    parts = {key: value for key, value in before.items() if key in PARTS}
    known = before.get("processors", {})
    return {**parts, "processors": {key: known.get(key, before["machine"]["processor"]) for key in parts}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure this part, and keep the others as they were")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "scaling.json"
    before = json.loads(path.read_text()) if chosen.only and path.exists() else {}
    found = kept(before)
    for key, part in PARTS.items():
        if chosen.only in (None, key):
            found[key] = part()
            found["processors"][key] = machine()["processor"]
    publish("scaling", found, page(found))


if __name__ == "__main__":
    main()
