"""How exact the peel is, by local work, initialization and route.

Run it by `python -m benchmarks.hyperfl.peel` (needs HYPERLEAK_DATA).

Relative errors of the recovered extractor and embedding for one client of HyperFL at the published constants, on
real images, before any round and after one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

import fl.data
import fl.models
from attacks.base import NotApplicable
from attacks.hypernetworks.peel import HypernetPeel
from benchmarks.common import publish, table
from fl.client import Client
from fl.data.partitions.dominant_classes import DominantGroups
from fl.federation import ClientData, Federation
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.tensors import dense, sub
from fl.types import Batch, Truth
from fl.view import ServerView

VICTIMS = (("fashion_mnist", "hyperfl-grey", 0.01), ("cifar10", "hyperfl-colour", 0.02))
INITS = ("scaled", "published")
WORK = ("1 step, B=1", "1 step, B=50", "1 epoch", "5 epochs")
ROUTES = ("auto", "trunk", "heads")
CLIENTS = 5
"""One of each group of classes."""


@dataclass(frozen=True)
class Row:
    """One measurement; errors are relative, None where the peel says nothing."""

    dataset: str
    init: str
    bias: bool
    rounds: int
    work: str
    upload: str
    route: str
    active: int
    chosen: str
    extractor: float | None
    embedding: float | None
    residual: float | None
    verified: bool


def federation(dataset: str, network: str, method: HyperFL) -> Federation:
    """Return the first clients of HyperFL's partition of 20."""
    images = fl.data.load(dataset)
    split = DominantGroups(train_size=592, test_size=197)(images)
    parts = [ClientData(images.train.take(split.train[i]), images.test.take(split.test[i])) for i in range(CLIENTS)]
    return Federation(Client(fl.models.build(network, num_classes=images.num_classes), method), parts)


def local_work(method: HyperFL, work: str, data: Batch) -> tuple[HyperFL, Batch]:
    """Return the local rule and the images it sees."""
    if "step" in work:
        count = int(work.partition("B=")[2])
        return replace(method, steps=1, head_epochs=0, batch_size=None), data.take(torch.arange(count))
    return replace(method, epochs=int(work.split()[0])), data


def uploaded(view: ServerView) -> ServerView:
    """Return the update as the difference of two dense float32 models."""
    return replace(
        view, update={n: dense(view.shared[n]) - dense(sub(view.shared[n], u)) for n, u in view.update.items()}
    )


def error(found: Tensor, truth: Tensor) -> float:
    """Return the relative error."""
    return float((found - truth).norm() / truth.norm())


def measure(view: ServerView, truth: Truth, route: str) -> dict[str, object]:
    """Return what one route finds."""
    peeled = HypernetPeel(route=route).solve(view)  # type: ignore[arg-type]
    if isinstance(peeled, NotApplicable):
        return {"chosen": peeled.reason, "extractor": None, "embedding": None, "residual": None, "verified": False}
    found, true = (torch.cat([w[n].flatten() for n in truth.extractor]) for w in (peeled.extractor, truth.extractor))
    v = None if peeled.embedding is None else error(peeled.embedding.float(), dense(truth.private[EMBEDDING]))
    return {
        "chosen": peeled.route,
        "extractor": error(found, true),
        "embedding": v,
        "residual": peeled.residual,
        "verified": peeled.verified,
    }


def rows_of(dataset: str, network: str, lr: float, init: str, bias: bool) -> list[Row]:
    """Return all measurements of one victim."""
    generator = Hypernetwork(init=init, bias=bias)  # type: ignore[arg-type]
    method = HyperFL(lr=lr, parametrization=generator)
    run = federation(dataset, network, method)
    rows = []
    for rounds in (0, 1):
        if rounds:
            run.run_round()
        params = {**run.download(0).shared, **run.clients[0].private}
        active = int((generator.preactivation(params) > 0).sum())
        for work in WORK:
            rule, data = local_work(method, work, run.data[0].train)
            view, truth = run.observe(0, data=data, client=Client(run.client.base, rule))
            for upload, seen in (("factored", view), ("dense", uploaded(view))):
                for route in ROUTES:
                    found = measure(seen, truth, route)
                    rows.append(Row(dataset, init, bias, rounds, work, upload, route, active, **found))  # type: ignore[arg-type]
    return rows


def format_error(value: float | None) -> str:
    """Return a relative error for the table."""
    return "-" if value is None else f"{value:.1e}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for dataset, network, lr in VICTIMS
        for init in INITS
        for bias in (True, False)
        for row in rows_of(dataset, network, lr, init, bias)
    ]
    publish("peel", {"rows": [asdict(row) for row in rows]}, document(rows))


def document(rows: Sequence[Row]) -> list[str]:
    """Return the results in words."""
    lines = [
        "# Relative error of the peel",
        "",
        "HyperFL at its published constants: momentum .5 and decay 5e-4. Gradients are clipped at 50, and batches",
        "are of 50. The",
        "classifier's own epoch comes first but for single steps. The client is the first of 20 and has 592 images.",
        'Uploads are dense (parameters before minus after), in float32. "active" counts hidden units at the start of',
        "the round, of 128. With no unit active the extractor is the heads' biases and the embedding has no effect.",
        "The",
        "extractor is that at the start of the round; `verified` is the peel's own word, without the truth.",
        "",
    ]
    groups: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row.upload == "dense":
            groups.setdefault((row.dataset, row.init, row.bias, row.rounds, row.work), {})[row.route] = row
    cells = []
    for (dataset, init, bias, rounds, work), found in groups.items():
        auto = found["auto"]
        cells.append(
            [
                dataset,
                init,
                "yes" if bias else "no",
                rounds,
                auto.active,
                work,
                auto.chosen,
                *[format_error(found[route].extractor) for route in ROUTES],
                format_error(auto.embedding),
                "yes" if auto.verified else "no",
            ]
        )
    head = ["images", "init", "head biases", "rounds before", "active", "local work", "route taken"]
    head += ["extractor", "by trunk", "by heads", "embedding", "verified"]
    return lines + table(head, cells)


if __name__ == "__main__":
    main()
