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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

import attacks
import fl.models
from attacks.base import NotApplicable
from benchmarks.common import RESULTS, machine, publish, table
from benchmarks.leakage import searches
from benchmarks.performance import profile_loops
from benchmarks.performance.noise_data import BATCH, federation, victims
from benchmarks.performance.profile_loops import seconds
from fl.engines import EngineName
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.types import Task

T = TypeVar("T")
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


def apart(work: Callable[..., T], *settings: object) -> T:
    """`work` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *settings).result()


# ---- (a) -------------------------------------------------------------------------------------------------------------
def time_attacks(network: str, count: int) -> dict[str, float]:
    """Return one call of `ig` on so many victims."""
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
    """Return a call of `ig` on so many victims, to be made."""
    views = victims(network, count)
    attack = attacks.build({"name": "ig", "iterations": iterations})

    def call() -> None:
        results = attack.run(views, list(range(count)))
        assert not any(isinstance(result, NotApplicable) for result in results)

    return call


def part_a(networks: Sequence[str] = ATTACKED, counts: Sequence[int] = VICTIMS) -> list[dict[str, Any]]:
    """Victims in one call of `ig`."""
    return [{"network": n, "victims": count, **apart(time_attacks, n, count)} for n in networks for count in counts]


# ---- (b) -------------------------------------------------------------------------------------------------------------
def method_of(name: str, epochs: int) -> tuple[Method, EngineName]:
    """Return a method at its published constants, and the engine for it."""
    if name == "fedavg":
        return FedAvg(lr=0.02, batch_size=BATCH, epochs=epochs), "loop"
    return HyperFL(batch_size=BATCH, epochs=epochs), "factored"


def trained(network: str, name: str, clients: int, each: int, epochs: int) -> dict[str, float]:
    """Return one round of so many clients."""
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
        | apart(time_size, name, settings, each, count)
        for name, settings in sizes
    ]
    return {"networks": networks, "hidden": [{"hidden": width, **apart(widened, width, each)} for width in hidden]}


def time_size(name: str, settings: dict[str, Any], each: int, count: int) -> dict[str, float]:
    """Return what the size of a network costs: a client's round, then so many iterations of a search."""
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
    """Return what so many hidden units of the hypernetwork cost: a round of all clients, per client."""
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


def known_parts(before: dict[str, Any]) -> dict[str, Any]:
    """Return the parts measured before, and on what processor each."""
    parts = {key: value for key, value in before.items() if key in PARTS}
    known = before.get("processors", {})
    return {**parts, "processors": {key: known.get(key, before["machine"]["processor"]) for key in parts}}


# ---- the page -------------------------------------------------------------------------------------------------------
INTRODUCTION = [
    "# Cost as work grows",
    "",
    "How to read it: all times are CPU seconds of one thread, so that a busy machine changes them little. What should "
    "grow with the work (time and memory of a table's largest case over its smallest) is told per victim or per "
    "client; a column that stays flat is one whose cost is proportional to the work. Memory is the peak of resident "
    "memory of a process that runs one case and nothing else, above what it held after torch was loaded and a tiny "
    "case had run (MiB). Images are noise, since only cost is measured. Searches of (a) to (c) are too short to be "
    "recorded (attacks/gradient_matching/engine/traced_objective.py): those of thousands of iterations "
    "are up to 1.4 times as fast, see speed.md.",
    "",
]


def page(found: Mapping[str, Any]) -> list[str]:
    """Return all parts there are."""
    sections: dict[str, Callable[[Any], list[str]]] = {
        "a": _victims,
        "b": _clients,
        "c": _sizes,
        "d": _loops,
        "e": _searches,
    }
    lines = list(INTRODUCTION)
    for part, section in sections.items():
        if part in found:
            lines += [*section(found[part]), "", f"Measured on: {found['processors'][part]}.", ""]
    return lines[:-1]


def _victims(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        [
            row["network"],
            row["victims"],
            f"{row['image_iterations_per_second']:.0f}",
            f"{row['mib_above']:.0f}",
            f"{row['mib_above'] / row['victims']:.1f}",
        ]
        for row in rows
    ]
    head = ["network", "victims", "image-iterations per CPU s", "MiB above", "MiB per victim"]
    return [
        "## (a) Victims in one call of `ig`",
        "",
        "Views of single images under FedSGD, made in the same process and counted with it. The search puts at most 32 "
        "victims into a stack, fewer where a CPU's caches hold fewer gradients, so its own memory stops growing there; "
        "what goes on growing are the views and what is compared with them. From 64 victims on four iterations are "
        "timed: these rates differed by up to three times between two runs, memory hardly; (e) times more of them.",
        "",
        *table(head, cells),
    ]


def _clients(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        [
            row["network"],
            row["method"],
            row["clients"],
            f"{row['each']} x {row['epochs']}",
            f"{row['seconds_per_client']:.3f}",
            f"{row['mib_above']:.0f}",
            f"{row['mib_images']:.0f}",
            f"{row['mib_whole']:.0f}",
        ]
        for row in rows
    ]
    head = ["network", "method", "clients", "images x epochs", "CPU s per client", "MiB above", "of these images"]
    return [
        "## (b) Clients in one process",
        "",
        "One round without scoring: `fedavg` by the loop, `hyperfl` by factors; batches of 50. Images are what the "
        'clients hold; "whole process" includes torch itself. The rows of 600 images are the published amount of work.',
        "",
        *table([*head, "whole process, MiB"], cells),
    ]


def _sizes(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    networks = [
        [
            row["network"],
            f"{row['parameters']:,}",
            f"{row['client_round']:.3f}",
            f"{row['iterations']:.0f}",
            f"{max(row['mib_above'], 0.0):.0f}",
        ]
        for row in found["networks"]
    ]
    widths = [
        [row["hidden"], f"{row['parameters']:,}", f"{row['client_round']:.3f}", f"{max(row['mib_above'], 0.0):.0f}"]
        for row in found["hidden"]
    ]
    return [
        "## (c) Size of the network",
        "",
        "FedAvg, one epoch over 100 images; iterations of `ig` on one image. Memory is that of both in turn.",
        "",
        *table(["network", "parameters", "CPU s per client round", "`ig` iterations per CPU s", "MiB above"], networks),
        "",
        "HyperFL's hypernetwork for hyperfl-grey, by the units of its hidden layer (128 in the paper); one epoch of "
        "each phase over 100 images, four clients trained by factors, aggregation included.",
        "",
        *table(["hidden units", "parameters shared", "CPU s per client round", "MiB above"], widths),
    ]


def _loops(found: Mapping[str, Any]) -> list[str]:
    names = list(found["loops"][0]["parts"])
    looped = any(row["name"].startswith("hyperfl, loop") for row in found["loops"])
    one_by_one = "; by the loop each client has a hypernetwork of its own" if looped else ""
    cells = [
        [
            row["name"],
            f"{row['gflop'] * 1e3:,.1f}",
            f"{row['seconds'] * 1e3:,.2f}",
            f"{row['share']:.0%}",
            *(f"{row['parts'][name]:.0%}" for name in names),
        ]
        for row in found["loops"]
    ]
    return [
        "## (d) Where the time goes",
        "",
        "`ig`: one iteration of one trial, alone or in a stack of so many, before and after its evaluation is "
        "recorded, as in searches of hundreds of iterations (by autograd the shares on the right are of a whole call "
        "of few iterations). Local rounds: one client, one epoch over 200 images (HyperFL: of each phase, 10 clients "
        f"together by factors{one_by_one}), aggregation included. "
        "Operations are multiplications and additions in convolutions and matrix products "
        "(forward, backward and, in `ig`, the derivative of the backward pass). The peak is that of a product of two "
        f"square matrices of side 2,048 in float32 on one thread, {found['peak_gflop_per_second']:.0f} GFLOP/s here. "
        "Another library makes the convolutions, which may come above it. The last "
        "columns are shares of a profiled run's time: operators by group, each without those it calls, and what lies "
        "between them (Python, autograd's own work, the profiler's).",
        "",
        *table(["loop", "MFLOP", "CPU ms", "of the peak", *names], cells),
    ]


def _searches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [[row["attack"], row["network"], *(f"{rate:.0f}" for rate in row["rates"])] for row in rows]
    return [
        "## (e) Every search",
        "",
        "Image-iterations per CPU second by the number of victims in one call, each a single image in one step (for "
        "`joint`, `bilevel` and `peel+ig` one of HyperFL, with its label to be found). Taken between one iteration and "
        "the next, after those in which a search is set up and recorded, as all are whose default length is worth it "
        "(not `rog`). The four searches for each image of `gradinversion` count as four images. `bilevel` searches for "
        "the embedding first, then for the image, where an iteration moves image and classifier in turn.",
        "",
        *table(["attack", "network", *(f"{count} victims" for count in rows[0]["victims"])], cells),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure this part, and keep the others as they were")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "scaling.json"
    before = json.loads(path.read_text()) if chosen.only and path.exists() else {}
    found = known_parts(before)
    for key, part in PARTS.items():
        if chosen.only in (None, key):
            found[key] = part()
            found["processors"][key] = machine()["processor"]
    publish("scaling", found, page(found))


if __name__ == "__main__":
    main()
