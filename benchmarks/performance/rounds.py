"""Seconds of one local round per client, method by method.

Run it by `python -m benchmarks.performance.rounds [--official DIR] [--clock]`.

DIR is the folder `cnn` of the HyperFL authors' code (https://github.com/Pengxin-Guo/HyperFL, no licence: get your own
copy, and take `.cuda()` out of models/cnn.py to run it on a CPU). CPU seconds, everything in turns in one process with
one thread (`processes` apart, whose workers count), so that the ratios hold on a busy machine too. `--clock` also takes
seconds of the clock with all cores, each in its own way (our worker processes, the authors' threads), which needs an
idle machine; what is not measured is kept as it was.

HyperFL comes before further methods, and a round of everybody does not count. The authors' code asks for fresh memory
at every step, and how long that takes depends on what the process did before (3.4 to 5.3 CPU seconds for the same round
on one machine).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fl.models
from benchmarks.common import RESULTS, machine, publish, table
from benchmarks.performance.noise_data import BATCH, federation, images
from fl.engines import EngineName
from fl.method import Method, methods

FEDAVG, FACTORED, AUTHORS = "FedAvg, loop", "HyperFL, factored", "HyperFL, the authors' code"
Row = dict[str, Any]
IMAGES, EPOCHS, REPEATS, WORKERS = 600, 5, 3, 2
OFFICIAL = {"hyperfl-colour": "CifarCNN_Hyper", "hyperfl-grey": "CNN_FMNIST_Hyper"}
FEW = 2
"""Clients that show what one costs where engines train them one by one."""
SCALED = {"name": "hyperfl", "parametrization": {"name": "hypernetwork", "init": "scaled"}}
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    FEDAVG: {"name": "fedavg"},
    "DP-FedAvg, loop": {"name": "dp-fedavg", "mode": "as-published", "lr": 0.02},
    "FedPer, loop": {"name": "fedper"},
    "FedRep, loop": {"name": "fedrep", "head_epochs": 1},
    "pFedHN, loop": {"name": "pfedhn", "steps": None},
    "HyperFL with scaled heads, loop": SCALED,
}
"""Methods by what they are called here, without what all have in common."""
NONE: dict[str, Any] = {"on": {}, "clients": 0, "rows": []}
"""A part that was never measured."""


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        run: one round, of so many `clients`.
        close: afterwards.
    """

    run: Callable[[], None]
    clients: int
    close: Callable[[], None] = lambda: None


def method(settings: dict[str, Any]) -> Method:
    """Return a method by its settings, with as many epochs in batches of one size as all others."""
    common: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS}
    if settings["name"] in ("fedavg", "fedper", "fedrep"):
        common["lr"] = 0.02
    return methods.build({**common, **settings})


def our_contender(network: str, trained: Method, engine: EngineName, clients: int, workers: int = 1) -> Contender:
    """Rounds of a federation of ours, aggregation included."""
    task = fl.models.build(network, num_classes=10, seed=0)
    run = federation(task, trained, clients=clients, each=IMAGES, engine=engine, workers=workers)

    def once() -> None:
        run.step(evaluate=False)

    here = len(multiprocessing.active_children())
    while len(multiprocessing.active_children()) < here + workers - 1:
        once()  # processes start once there has been work for as long as that takes
    return Contender(once, clients, run.close)


def hyperfl(network: str, clients: int, folder: Path | None) -> dict[str, Contender]:
    """HyperFL, FedAvg and the authors' code, if it is there."""
    rule = method({"name": "hyperfl"})
    found = {
        FEDAVG: our_contender(network, method({"name": "fedavg"}), "loop", FEW),
        "HyperFL, loop": our_contender(network, rule, "loop", FEW),
        FACTORED: our_contender(network, rule, "factored", clients),
    }
    return found | ({AUTHORS: official(folder, network, 1)} if folder else {})


def further(network: str, clients: int) -> dict[str, Contender]:
    """Further methods and engines, beside FedAvg and HyperFL."""
    fedavg, rule, scaled = (method(s) for s in ({"name": "fedavg"}, {"name": "hyperfl"}, SCALED))
    found = {name: our_contender(network, method(settings), "loop", FEW) for name, settings in ONE_BY_ONE.items()}
    found |= {
        FACTORED: our_contender(network, rule, "factored", clients),
        "HyperFL with scaled heads, factored": our_contender(network, scaled, "factored", clients),
        "FedAvg, vmap": our_contender(network, fedavg, "vmap", clients),
    }
    if Path("/proc/self/stat").exists():  # what workers have spent is read there
        found |= {
            f"FedAvg, loop in {WORKERS} processes": our_contender(network, fedavg, "loop", clients, WORKERS),
            f"HyperFL, factored in {WORKERS} processes": our_contender(network, rule, "factored", clients, WORKERS),
        }
    return found


def official(folder: Path, network: str, clients: int) -> Contender:
    """Return the authors' local training, without their aggregation."""
    for absent in ("tools", "cvxpy"):  # imported there, not needed for this
        sys.modules.setdefault(absent, types.ModuleType(absent))
    sys.path.insert(0, str(folder))
    networks, rule = importlib.import_module("models.cnn"), importlib.import_module("methods.hyperfl")
    args: Any = types.SimpleNamespace(
        num_classes=10, device="cpu", lr=0.02, lr_g=0.1, momentum=0.5, embed_dim=64, hidden_dim=128
    )
    updates, task = [], fl.models.build(network, num_classes=10, seed=0)
    for i in range(clients):
        own = images(task, IMAGES, i)
        sets = [torch.utils.data.TensorDataset(b.inputs, b.labels) for b in (own, own.take(torch.arange(1)))]
        loaders = [torch.utils.data.DataLoader(s, BATCH, shuffle=True) for s in sets]
        updates.append(rule.LocalUpdate_HyperFL(i, args, *loaders, getattr(networks, OFFICIAL[network])(args)))

    def run() -> None:
        for update in updates:
            update.local_training(EPOCHS)

    return Contender(run, clients)


def measure(found: dict[str, Contender], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds per client of `REPEATS` rounds of each, in turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for contender in found.values():
        contender.run()
    for _ in range(REPEATS):
        for name, contender in found.items():
            began = clock()
            contender.run()
            seconds[name].append((clock() - began) / contender.clients)
    for contender in found.values():
        contender.close()
    return seconds


def everywhere() -> float:
    """CPU seconds of this process and of those that it has started and that are there."""
    return time.process_time() + sum(_spent(child.pid) for child in multiprocessing.active_children())


def _spent(process: int | None) -> float:
    """CPU seconds of another process, as Linux counts them (proc(5))."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def table_data(network: str, seconds: dict[str, list[float]]) -> list[Row]:
    """Return what was found."""
    return [{"network": network, "what": name, "seconds_per_client": found} for name, found in seconds.items()]


def all_cores(network: str, clients: int, folder: Path | None) -> list[Row]:
    """Return the seconds of the clock."""
    cores = os.cpu_count() or 1
    found = measure(
        {FACTORED: our_contender(network, method({"name": "hyperfl"}), "factored", clients, cores)}, time.perf_counter
    )
    if folder:
        with threads(cores):
            found |= measure({AUTHORS: official(folder, network, 1)}, time.perf_counter)
    return table_data(network, found)


def clocked(networks: Sequence[str], clients: int, folder: Path | None, before: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the clock of every network; of before, where nothing is to be measured."""
    if networks:
        measured = [row for network in networks for row in all_cores(network, clients, folder)]
        return {"on": machine(), "clients": clients, "rows": measured, "kept": False}
    return {**before.get("clock", NONE), "kept": True}


# ---- the page -------------------------------------------------------------------------------------------------------
OVER_FEDAVG, PAPER, FASTER = 1.45, 1.6, 10
"""The goals of a HyperFL round, and what its paper says of the first."""


def page(found: Mapping[str, Any], shares: Mapping[str, float]) -> list[str]:
    """Return all figures.

    Args:
        found: as kept.
        shares: of the machine's peak that loops reach, by their names in scaling.md.
    """
    single, more, clock = found["hyperfl"], found["further"], found["clock"]
    head = ["network", "what", "seconds per client", "over FedAvg", "over factored"]
    return [
        "# One local round per client",
        "",
        f"A client has {found['images']} images in batches of {found['batch']}. It trains for {found['epochs']} epochs "
        f"(HyperFL and FedRep: after one of the classifier). Figures are medians of {found['repeats']} turns. Loops "
        f"train {found['few']} clients one after the "
        "other; `factored` trains more of them, which share products, `vmap` as many at once, and processes have as "
        "many between them. Ours include the aggregation, the authors' code does not. Ratios are medians over the "
        "turns.",
        "",
        f"CPU seconds of one thread (of processes: of all of them together), {single['clients']} clients{_on(single)}:",
        "",
        *table(head, table_rows(single["rows"], [FEDAVG, FACTORED])),
        "",
        *goals(single["rows"], shares),
        "Further methods and engines, measured apart from that, with FedAvg and HyperFL once more for the ratios, "
        f"{more['clients']} clients{_on(more)}:",
        "",
        *table(head, table_rows(more["rows"], [FEDAVG, FACTORED])),
        "",
        *_clock(clock),
    ]


def table_rows(rows: Sequence[Row], bases: Sequence[str]) -> list[list[str]]:
    """Return a line for each, with ratios to these of its network."""
    return [
        [
            row["network"],
            row["what"],
            f"{statistics.median(row['seconds_per_client']):.2f}",
            *(f"{over(rows, row['network'], row['what'], base):.2f}" for base in bases),
        ]
        for row in rows
    ]


def over(rows: Sequence[Row], network: str, what: str, base: str) -> float:
    """Return how many times as long as `base` it takes, the median over the turns."""
    one, other = (seconds(rows, network, name) for name in (what, base))
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def seconds(rows: Sequence[Row], network: str, what: str) -> list[float]:
    """Per client, turn by turn; none where it was not measured."""
    return next((row["seconds_per_client"] for row in rows if (row["network"], row["what"]) == (network, what)), [])


def goals(rows: Sequence[Row], shares: Mapping[str, float]) -> list[str]:
    """Return what these figures come to beside what was wished for, network by network."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    head = ["network", "a HyperFL round, in FedAvg rounds", "the authors' code, likewise", "faster than the authors'"]
    body = []
    for network in networks:
        there = bool(seconds(rows, network, AUTHORS))
        theirs = f"{over(rows, network, AUTHORS, FEDAVG):.1f}" if there else "-"
        times = f"{over(rows, network, AUTHORS, FACTORED):.1f} times" if there else "-"
        body.append([network, f"{over(rows, network, FACTORED, FEDAVG):.2f}", theirs, times])
    body.append(["goal", f"at most {OVER_FEDAVG}", "", f"at least {FASTER} times"])
    body.append(["the paper", f"{PAPER}", "", ""])
    return [*table(head, body), "", *(line for network in networks for line in missed(network, rows, shares))]


def missed(network: str, rows: Sequence[Row], shares: Mapping[str, float]) -> list[str]:
    """Return what stands in the way of the second goal, where it was missed."""
    if not seconds(rows, network, AUTHORS) or over(rows, network, AUTHORS, FACTORED) >= FASTER:
        return []
    wanted = statistics.median(seconds(rows, network, AUTHORS)) / FASTER
    fedavg = statistics.median(seconds(rows, network, FEDAVG))
    share = shares.get(f"{FEDAVG.lower()}, {network}")
    near = (
        "" if share is None else f" That loop runs at {share:.0%} of the machine's peak ([scaling.md](scaling.md), d)."
    )
    word = "less" if wanted < fedavg else "no less"
    return [
        f"{network}: one in {FASTER} of the authors' seconds would be {wanted:.2f}. That is {word} than FedAvg itself "
        f"takes ({fedavg:.2f} s).{near}",
        "",
    ]


def _on(part: Mapping[str, Any]) -> str:
    """Return the processor of a part, where there is one."""
    return f", {part['on']['processor']}" if part["on"] else ""


def _clock(clock: Mapping[str, Any]) -> list[str]:
    """Return the seconds of the clock, where there are any."""
    if not clock["rows"]:
        return []
    on, cores = clock["on"], clock["on"]["cores"]
    return [
        f"Seconds of the clock take an idle machine. All {cores} cores are used: ours in as many processes, the "
        "authors' "
        f"in as many threads. There are {clock['clients']} clients. Measured on: processor {on['processor']}, torch "
        + on["torch"]
        + (", before what stands above:" if clock["kept"] else ":"),
        "",
        *table(["network", "what", "seconds per client", "over factored"], table_rows(clock["rows"], [FACTORED])),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, help="folder `cnn` of the authors' code")
    parser.add_argument("--clients", type=int, default=20, help="in federations whose clients are trained together")
    parser.add_argument("--clock", action="store_true", help="take seconds of the clock, too")
    parser.add_argument(
        "--only", choices=("hyperfl", "further"), help="measure this part, and keep the other as it was"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "rounds.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    parts: dict[str, Callable[[str], dict[str, Contender]]] = {
        "hyperfl": lambda network: hyperfl(network, chosen.clients, chosen.official),
        "further": lambda network: further(network, chosen.clients),
    }
    found: dict[str, Any] = {"images": IMAGES, "batch": BATCH, "epochs": EPOCHS, "repeats": REPEATS, "few": FEW}
    for part, make in parts.items():
        if chosen.only in (None, part):
            measured = [row for name in OFFICIAL for row in table_data(name, measure(make(name), everywhere))]
            found[part] = {"on": machine(), "clients": chosen.clients, "rows": measured}
        else:
            found[part] = before.get(part, NONE)
    found["clock"] = clocked([*OFFICIAL] if chosen.clock else [], chosen.clients, chosen.official, before)
    loops = json.loads((RESULTS / "scaling.json").read_text()).get("d", {}).get("loops", [])
    publish("rounds", found, page(found, {loop["name"]: loop["share"] for loop in loops}))


if __name__ == "__main__":
    main()
