"""Measured parts of a federation: memory and seconds of many clients, of what each keeps, and of large networks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import attacks
import fl.models
from attacks.base import NotApplicable
from benchmarks.performance.noise_data import federation
from benchmarks.performance.scaling import MIB, memory
from fl.federation import Federation
from fl.method import Method, methods
from fl.methods.fedavg import FedAvg
from fl.runtime import tensor_archives
from fl.simulation import checkpoint, uploads
from fl.types import Task

TINY: dict[str, Any] = {"widths": (8,)}
"""The network of those cases in which clients are counted: 6,370 parameters."""
CLIENTS = 10_000
IMAGES_EACH = 4
SCORED = 1_000
"""Clients that are scored; all would take as many times longer."""
COUNTED = ("fedavg", "ditto")
"""Methods whose clients keep nothing, and a network each."""
NETWORKS = {"hfedf": "hfedf-cnn", "hyperfednet": "hfn-lenet", "hyperfedzero": "mlp"}
"""Networks of methods that do not train the one that all others are measured on."""
DIVERGING_EXAMPLES = frozenset({"hfedf", "hyperfednet", "hyperfedzero"})
"""Methods whose example trains too fast for those; their defaults are taken."""
NETWORK = "hyperfl-grey"
WIDTHS = (250, 900, 3_000, 9_600)
"""Of both hidden layers of a perceptron on 28 x 28 pixels; the last has 1e8 parameters."""
BATCH = 16
AGGREGATED = {"clients": 60, "width": 900}
"""Together more bytes than are kept apart where the server takes the mean."""


def seconds_of(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Return the seconds of a call: of the processor, so that other work on the machine changes them little."""
    began = clock()
    work()
    return clock() - began


# ---- many clients ----------------------------------------------------------------------------------------------------
def clients(name: str, count: int, scored: int) -> dict[str, float]:
    """Measure a federation of so many clients of a tiny network, who all train in its round.

    Args:
        name: of the method, at its defaults.
        count: of clients.
        scored: how many of them are scored.
    """
    torch.set_num_threads(1)
    task, method = fl.models.build("mlp", num_classes=10, seed=0, **TINY), methods.build({"name": name})
    federation(task, method, clients=1, each=2, engine="loop").step(evaluate=False)  # loads what is loaded at first use
    before, began = memory()[0], time.process_time()
    run = federation(task, method, clients=count, each=IMAGES_EACH, engine="loop")
    built, mib = time.process_time() - began, memory()[0] - before
    trained = seconds_of(lambda: run.step(evaluate=False))
    number = sum(value.numel() for value in task.parameters.values())
    return {
        "clients": count,
        "parameters": number,
        "seconds_build": built,
        "mib_images": mib,
        "seconds_round": trained,
        "mib_after": memory()[0] - before,
        "mib_peak": memory()[1] - before,
        "seconds_scored": seconds_of(lambda: run.accuracy(range(scored))) * count / scored,
        **stored(run),
    }


def stored(run: Federation) -> dict[str, float]:
    """Measure a checkpoint of a federation: its bytes, and the seconds on the wall to write and to read it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "state.npz"
        written = seconds_of(lambda: checkpoint.save(path, run), time.perf_counter)
        return {
            "bytes_checkpoint": float(path.stat().st_size),
            "seconds_write": written,
            "seconds_read": seconds_of(lambda: checkpoint.load(path, run), time.perf_counter),
        }


# ---- what each client keeps ------------------------------------------------------------------------------------------
def states() -> list[dict[str, Any]]:
    """Return for every method what one more client keeps and has the server keep, in networks, after a round."""
    torch.set_num_threads(1)
    return [state(name) for name in methods.names()]


def state(name: str) -> dict[str, Any]:
    """Return what one more client of a method keeps, and has the server keep, as shares of the network's bytes.

    Also whether uploads are kept apart. Of methods that can't be trained here the reason.
    """
    try:
        few, many = (_after_a_round(name, count) for count in (2, 4))
    except (ValueError, FileNotFoundError) as error:
        return {"method": name, "reason": " ".join(str(error).split())[:160]}
    network = few["network"]
    return {
        "method": name,
        "client": (many["clients"] - few["clients"]) / 2 / network,
        "server": (many["server"] - few["server"]) / 2 / network,
        "kept_apart": not few["joins"],
    }


def _after_a_round(name: str, count: int) -> dict[str, Any]:
    task = fl.models.build(NETWORKS.get(name, NETWORK), num_classes=10, seed=0)
    run = federation(task, _method(name, task), clients=count, each=8, engine="loop")
    run.step(evaluate=False)
    return {
        "network": sum(value.numel() * value.itemsize for value in task.parameters.values()),
        "clients": distinct_bytes(run.clients, without=[run.server, run.private_init]),
        "server": distinct_bytes(run.server),
        "joins": run.client.method.aggregates_mean_only,
    }


def _method(name: str, task: Task) -> Method:
    """Return a method by its own example; one that needs public images gets some of the network's size."""
    found = methods.get(name)
    if name in DIVERGING_EXAMPLES:
        return methods.build({"name": name})
    example = found.example()
    if public := getattr(example, "public", None):
        example = replace(example, public=replace(public, size=task.input_shape[-1]))
    made: Method = example
    return made


def distinct_bytes(found: object, without: object = ()) -> int:
    """Return the bytes of all memory that tensors of plain data and dataclasses hold, each once.

    Args:
        found: what holds them.
        without: what is not counted, as something else holds it anyway.
    """
    apart = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(without)}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(found)}
    return sum(size for place, size in sizes.items() if place not in apart)


def tensors_in(found: object) -> Iterator[Tensor]:
    """Yield all tensors in plain data, dataclasses and what torch knows the leaves of."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors_in(value)
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for value in found:
            yield from tensors_in(value)
    elif hasattr(found, "__dataclass_fields__"):
        for name in found.__dataclass_fields__:
            yield from tensors_in(getattr(found, name))
    else:
        yield from (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))


# ---- aggregation -----------------------------------------------------------------------------------------------------
def aggregation(name: str, count: int, width: int) -> dict[str, Any]:
    """Measure how many bytes of uploads a server holds at most in a round, beside those of all.

    Args:
        name: of the method.
        count: of clients.
        width: of the network's hidden layers.
    """
    torch.set_num_threads(1)
    task = perceptron(width)
    run = federation(task, methods.build({"name": name}), clients=count, each=1, engine="loop")
    most, add = [0, 0], uploads.Uploads.add

    def watched(self: uploads.Uploads, upload: Any) -> None:
        add(self, upload)
        held = sum(uploads.memory_bytes(one) for one in self.kept)
        most[:] = max(most[0], held), most[1] + uploads.memory_bytes(upload)

    uploads.Uploads.add = watched  # type: ignore[method-assign]
    try:
        run.step(evaluate=False)
    finally:
        uploads.Uploads.add = add  # type: ignore[method-assign]
    return {"method": name, "clients": count, "mib_held": most[0] / MIB, "mib_sent": most[1] / MIB}


def hypernetwork() -> dict[str, float]:
    """Return how many networks HyperFL's hypernetwork comes to, at its published size."""
    task = fl.models.build(NETWORK, num_classes=10, seed=0)
    run = federation(task, methods.build({"name": "hyperfl"}), clients=1, each=2, engine="loop")
    network = sum(value.numel() * value.itemsize for value in task.parameters.values())
    return {"networks": distinct_bytes(run.server.shared) / network}


def views(count: int) -> dict[str, float]:
    """Measure what the views of so many updates hold beside the server's own tensors, each, in networks."""
    torch.set_num_threads(1)
    task = perceptron(WIDTHS[0])
    run = federation(task, FedAvg(steps=1, batch_size=None), clients=1, each=count, engine="loop")
    seen = [run.observe(0, data=run.data[0].train.take(torch.tensor([i]))) for i in range(count)]
    own = distinct_bytes([[view.update, dict(view.task.model.named_parameters())] for view, _ in seen], run.server)
    network = sum(value.numel() * value.itemsize for value in task.parameters.values())
    return {"views": float(count), "networks": own / count / network}


# ---- large networks --------------------------------------------------------------------------------------------------
def perceptron(width: int) -> Task:
    """Return the task of a perceptron with two hidden layers of this width."""
    return fl.models.build("mlp", num_classes=10, seed=0, widths=(width, width))


def network(width: int) -> dict[str, float]:
    """Measure a network: a round of two clients, a checkpoint, a captured update, and an iteration of `ig`."""
    torch.set_num_threads(1)
    _begin_once()
    before = memory()[0]
    task = perceptron(width)
    parameters = sum(value.numel() for value in task.parameters.values())
    run = federation(task, FedAvg(lr=0.01, steps=1, batch_size=BATCH), clients=2, each=BATCH, engine="loop")
    run.step(evaluate=False)
    one = seconds_of(lambda: run.step(evaluate=False)) / 2
    longer = federation(task, FedAvg(lr=0.01, steps=5, batch_size=BATCH), clients=2, each=BATCH, engine="loop")
    five = seconds_of(lambda: longer.step(evaluate=False)) / 2
    peak = memory()[1]
    found = {
        "parameters": parameters,
        "seconds_step": max(five - one, 0.0) / 4,
        "seconds_client": one,
        "mib_round": peak - before,
        **stored(run),
    }
    view, _ = run.observe(0, data=run.data[0].train.take(torch.arange(1)))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "update.pt"
        found["seconds_capture_write"] = seconds_of(lambda: torch.save(dict(view.update), path), time.perf_counter)
        found["bytes_capture"] = float(path.stat().st_size)
        found["seconds_capture_read"] = seconds_of(lambda: tensor_archives.read_state(path), time.perf_counter)
    few, many = (seconds_of(lambda n=n: _search(view, n)) for n in (1, 3))  # type: ignore[misc]
    return {**found, "seconds_iteration": max(many - few, 0.0) / 2, "mib_attack": memory()[1] - before}


def _begin_once() -> None:
    """Do everything once on a small network: what is loaded at first use counts for no case."""
    run = federation(perceptron(8), FedAvg(steps=1), clients=1, each=2, engine="loop")
    run.step(evaluate=False)
    _search(run.observe(0)[0], 2)


def _search(view: Any, iterations: int) -> None:
    (result,) = attacks.build({"name": "ig", "iterations": iterations}).run([view], [0])
    if isinstance(result, NotApplicable):
        raise RuntimeError(result.reason)
