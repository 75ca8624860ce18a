"""What `benchmarks.hyperfl.several_steps` searches: whose updates, after what local work, attacked how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

STEP: dict[str, Any] = {"steps": 1, "batch_size": None}
SEARCH: dict[str, Any] = {"iterations": 300, "tv_weight": 1e-2}
SIGMOID_TV = 1e-1
"""The best on the sigmoid LeNet (settings.md)."""
IMAGES = 16
"""Images of a row, over all of its updates; an update of as many is made twice."""
SETS = {"hyperfl-grey": "fashion_mnist", "lenet-zhu": "cifar10"}
PEEL = {"FedAvg": "", "HyperFL": "peel+"}
FIRST_STEP = {"name": "first-step", "corrections": 1}


@dataclass(frozen=True)
class Case:
    """A row of the page.

    Attributes:
        section: the question that it belongs to.
        method: of the clients.
        images: of an update.
        attack: in words.
        spec: its settings.
        work: of the clients: settings of the method.
        network: of the clients; `SETS` says whose images.
        knows: what the server knows beside, as `ThreatModel` has it.
        rounds: in which the same images were watched.
        most: updates, at most.
    """

    section: str
    method: str
    images: int
    attack: str
    spec: Mapping[str, Any]
    work: Mapping[str, Any] = field(default_factory=lambda: STEP)
    network: str = "hyperfl-grey"
    knows: tuple[str, ...] = ()
    rounds: int = 1
    most: int = IMAGES

    @property
    def name(self) -> str:
        """All of it: what tells it from the others."""
        return "; ".join(f"{key} {value}" for key, value in vars(self).items())

    @property
    def updates(self) -> int:
        """How many there are."""
        return min(max(IMAGES // self.images, 2), self.most)

    @property
    def trained(self) -> str:
        """The local work in words."""
        lr, size = self.work.get("lr", 0.01), self.work["batch_size"] or self.images
        count, of = ("steps", "step") if "steps" in self.work else ("epochs", "epoch")
        number = self.work[count]
        what = f"{number} {of if number == 1 else count}"
        return f"{what} {'of' if of == 'step' else 'in steps of'} {size}, step size {lr:g}"


def search_settings(method: str, *before: str, **settings: Any) -> dict[str, Any]:
    """`ig` behind what has to come before it."""
    return {"name": PEEL[method] + "".join(f"{name}+" for name in before) + "ig", **SEARCH, **settings}


def corrected(method: str) -> dict[str, Any]:
    """`first-step+ig` with few corrections, each of them another search."""
    chain = {"name": "chain", "first": FIRST_STEP, "then": {"name": "ig", **SEARCH}}
    return {"name": "chain", "first": "peel", "then": chain} if PEEL[method] else chain


def batches() -> Iterator[Case]:
    """One step on more and more images."""
    for method in PEEL:
        for images in (1, 2, 4, 8, 16):
            yield Case("batches", method, images, f"{PEEL[method]}ig", search_settings(method))
    for images in (1, 4, 16):
        yield Case(
            "batches", "FedAvg", images, "ig", search_settings("FedAvg", tv_weight=SIGMOID_TV), network="lenet-zhu"
        )


WORK: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("FedAvg", 1, {"steps": 4, "batch_size": None}),
    ("FedAvg", 4, {"epochs": 1, "batch_size": 1}),
    ("FedAvg", 4, {"epochs": 1, "batch_size": 1, "lr": 0.1}),
    ("FedAvg", 4, {"epochs": 2, "batch_size": 2}),
    ("HyperFL", 1, {"steps": 4, "batch_size": None}),
    ("HyperFL", 4, {"epochs": 1, "batch_size": 1}),
)


def steps() -> Iterator[Case]:
    """Several local steps, attacked in every way there is."""
    for method, images, work in WORK:
        whole = work["batch_size"] is None
        known: tuple[str, ...] = () if whole else ("knows_order",)
        ways: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
            ("unrolled" if whole else "unrolled, order known", search_settings(method), known)
        ]
        if not whole:
            if not PEEL[method]:  # a classifier that is searched for ranks no order
                ways.append(("unrolled, likeliest of 100 orders", search_settings(method, orders=100), ()))
            ways.append(("unrolled, order taken in turn", search_settings(method, orders=0), ()))
        ways.append(("surrogate", search_settings(method, "surrogate"), ()))
        if images == 1 or ("lr" not in work and work["epochs"] == 1):  # it takes the longest
            ways.append(("first-step, 1 correction", corrected(method), known))
        for words, spec, knows in ways:
            yield Case("steps", method, images, words, spec, work, knows=knows)


def history() -> Iterator[Case]:
    """The same images in several rounds."""
    for method, images in (("FedAvg", 4), ("HyperFL", 1)):
        for count in (1, 2, 4):
            yield Case("history", method, images, f"{PEEL[method]}ig", search_settings(method), rounds=count)


def exact() -> Iterator[Case]:
    """An exact attack behind `first-step`, on one update each."""
    spec = {"name": "chain", "first": {**FIRST_STEP, "corrections": 2}, "then": "cascade"}
    for lr in (1e-4, 1e-2):
        work = {"steps": 2, "batch_size": None, "lr": lr}
        yield Case("exact", "FedAvg", 1, "first-step+cascade", spec, work, most=1)


def cases() -> list[Case]:
    """Return all rows."""
    return [*batches(), *steps(), *history(), *exact()]
