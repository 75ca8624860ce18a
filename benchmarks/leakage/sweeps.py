"""The small grids of `benchmarks.leakage.settings`: which settings of a search, on which victims."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import fl.data
import fl.models
from benchmarks.leakage.leakage import Seen
from defenses import defenses
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork

SHORT_NAMES = {
    "tv": "tv_weight",
    "group": "group_weight",
    "statistics": "statistics_weight",
    "clamped": "clamp_upsampled",
}
"""Settings that the page calls by a shorter name."""

STEP: dict[str, Any] = {"steps": 1, "batch_size": None}
CLIENTS, IMAGES, TESTED = 5, 300, 200
"""Of the federation that trains a network before it is attacked: clients, images of each, and test images."""
TRAINING = FedAvg(lr=0.05, momentum=0.5, weight_decay=5e-4, epochs=5, batch_size=50)


@dataclass(frozen=True)
class Sweep:
    """A grid.

    Attributes:
        attack: its name.
        network: of the victims, one step on one image each.
        dataset: of the images.
        grid: values by setting, as the page calls it (`SHORT_NAMES`).
        iterations: of every search; of `lti` the steps of its training.
        method: of the victims.
        fixed: settings that all have and the attack has not by default.
        images: for choosing, and as many others to measure on.
        rounds: of training by plain FedAvg before the attacks; 0 leaves the network untrained.
        defense: of the victims, known to the attacker.
        published: whether the preset of that name, where there is one, is tried beside the grid.
        options: of the network, beside its defaults.
        beside: settings of the grid that the page has whether they are the best or not.
    """

    attack: str
    network: str
    dataset: str
    grid: Mapping[str, tuple[Any, ...]]
    iterations: int
    method: Method = field(default_factory=lambda: FedAvg(lr=1.0, **STEP))
    fixed: Mapping[str, Any] = field(default_factory=dict)
    images: int = 8
    rounds: int = 0
    defense: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    published: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """All of it in words: what tells it from the others."""
        grid = ", ".join(f"{key} of {', '.join(number(value) for value in row)}" for key, row in self.grid.items())
        fixed = "".join(f", {key} {number(value)}" for key, value in self.fixed.items())
        what = f"`{self.attack}` on `{self.called}` ({self.method.name}, {self.dataset}{self.where})"
        return f"{what}, {self.images} images, {self.iterations} iterations{fixed}: {grid}"

    @property
    def called(self) -> str:
        """The network in words."""
        return self.network + "".join(f", {key} {number(value)}" for key, value in self.options.items())

    @property
    def where(self) -> str:
        """Training and defense in words, empty where there is neither."""
        after = f", after {self.rounds} rounds" if self.rounds else ""
        name, *settings = self.defense.values()
        return after + ("" if name == "none" else f", {' '.join([name, *map(number, settings)])}")

    def points(self) -> list[dict[str, Any]]:
        """Return every combination."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def victims(self, first: int) -> list[Seen]:
        """Views of one step on each of the test images from number `first` on."""
        data = fl.data.load(self.dataset)
        chosen = data.test.take(torch.arange(first, first + self.images))
        world = trained(self.network, self.dataset, self.rounds, **self.options)
        seen = Federation(Client(world.client.task, self.method, defenses.build(dict(self.defense))), world.data)
        if self.rounds:
            seen.server = world.server
        return [seen.observe(0, data=chosen.take(torch.tensor([i]))) for i in range(len(chosen))]

    def accuracy(self) -> float:
        """Of the network that is attacked, on test images, in [0, 1]."""
        return trained(self.network, self.dataset, self.rounds, **self.options).score(0)


@cache
def trained(network: str, dataset: str, rounds: int, **options: Any) -> Federation:
    """Return a small federation on training images, its network after so many rounds of FedAvg."""
    data = fl.data.load(dataset)
    shape = {"input_shape": tuple(data.test.inputs.shape[1:])} if network == "lenet-zhu" else {}
    task = fl.models.build(network, num_classes=len(data.class_names), seed=0, **shape, **options)
    test = data.test.take(torch.arange(len(data.test))[:TESTED])
    parts = torch.arange(len(data.train))[: CLIENTS * IMAGES].chunk(CLIENTS)
    clients = [ClientData(data.train.take(part), test) for part in parts]
    run = Federation(Client(task, TRAINING), clients)
    for _ in range(rounds):
        run.step(evaluate=False)
    return run


def setting_name(called: str) -> str:
    """Return the name of a setting that the page calls `called`."""
    return SHORT_NAMES.get(called, called)


def page_name(setting: str) -> str:
    """Return what the page calls a setting."""
    return next((short for short, name in SHORT_NAMES.items() if name == setting), setting)


def number(value: float | str | Mapping[str, float]) -> str:
    """Return a setting's value, short."""
    if isinstance(value, Mapping):
        return " and ".join(f"{key} {number(each)}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:g}"


TV = {"tv": (0.0, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1), "lr": (0.1,)}
STEPS = {"tv": (3e-3, 1e-2), "lr": (0.03, 0.1, 0.3)}
LONG = {"tv": (3e-3, 1e-2, 1e-1), "lr": (0.1,)}
BOTH = {"tv": (3e-3, 1e-2), "lr": (0.1, 0.3)}
ROG = {"objective": ("l2", "cosine"), "factor": (1, 2, 4), "tv": (1e-2,)}
CODE = {"objective": ("l2", "cosine"), "factor": (2,), "tv": (1e-2,)}
CLAMPED: dict[str, Any] = {"grid": {"clamped": (False, True)}, "iterations": 500, "published": False}
LBFGS = {"objective": ("l2", "cosine"), "max_step": (0.03, 0.1, 0.3)}
BILEVEL = {"tv": (1e-6, 1e-2), "head_lr": (1e-3, 1e-2)}
LTI = {"width": (256, 512), "lr": (1e-3, 3e-3)}
GROUP = {"tv": (1e-4, 1e-2), "group": (0.0, 0.01)}
WITHOUT_GROUP = ({"tv": 1e-2, "group": 0.0},)
BALANCE: dict[str, Any] = {
    "grid": {"balance": (0.0, 0.5, 1.0)},
    "iterations": 1000,
    "beside": ({"balance": 1.0},),
    "published": False,
}
SMOOTH_BALANCE = {**BALANCE, "grid": {"tv": (3e-3, 1e-2, 1e-1), "balance": (0.0, 1.0)}, "beside": ()}
DISTANCES: dict[str, Any] = {
    "grid": {"objective": ("cosine", "l2", "l1", "simlocal")},
    "iterations": 1000,
    "beside": ({"objective": "l1"}, {"objective": "simlocal"}),
    "published": False,
}
PEEL = {"tv": (1e-6, 1e-3, 3e-3, 1e-2)}
STATISTICS: dict[str, Any] = {
    "grid": {"statistics": (0.0, 1e-3, 1e-2, 1e-1)},
    "beside": ({"statistics": 0.0},),
    "published": False,  # it weighs the statistics as the default does
}
JOINT = {"tv": (1e-6, 1e-2), "private_lr": (0.01, {"embedding": 0.1})}
SLOW = ({"tv": 1e-2, "private_lr": 0.01},)
HYPERFL = HyperFL(lr=0.01, head_epochs=0, parametrization=Hypernetwork(init="scaled"), **STEP)
GRAY, COLOR = ("hyperfl-grey", "fashion_mnist"), ("hyperfl-colour", "cifar10")
CHARACTERS, SIGMOID = ("hyperfl-grey", "handwritten62"), ("lenet-zhu", "cifar10")
NETWORKS = (GRAY, COLOR, SIGMOID)
SIGMOID_GRAY = ("lenet-zhu", "fashion_mnist")
NOISE = {"name": "noise", "std": 0.1}
LOWER = {"lower_iterations": 50}
AUXILIARY = {"auxiliary": "fashion_mnist", "part": "train"}
SWEEPS = (
    Sweep("ig", *COLOR, TV, 1000),
    Sweep("ig", *GRAY, TV, 1000),
    Sweep("ig", *CHARACTERS, TV, 1000),
    Sweep("ig", *SIGMOID, TV, 1000),
    Sweep("ig", *COLOR, STEPS, 500),
    Sweep("ig", *GRAY, STEPS, 500),
    Sweep("ig", *SIGMOID, STEPS, 500),
    Sweep("ig", *GRAY, BOTH, 1000, rounds=5),
    *(Sweep("ig", *network, LONG, 3000) for network in (GRAY, SIGMOID)),
    *(Sweep("rog", *network, ROG, 500) for network in (GRAY, COLOR)),
    *(Sweep("ig", *network, **BALANCE) for network in (*NETWORKS, CHARACTERS, SIGMOID_GRAY)),
    *(Sweep("ig", *network, **SMOOTH_BALANCE) for network in (SIGMOID, SIGMOID_GRAY)),
    *(Sweep("ig", *network, **BALANCE, rounds=5) for network in (GRAY, SIGMOID)),
    *(Sweep("ig", *network, **BALANCE, defense=NOISE) for network in (GRAY, SIGMOID_GRAY)),
    *(Sweep("ig", *network, **DISTANCES) for network in NETWORKS),
    Sweep("ig", *GRAY, **DISTANCES, rounds=5),
    *(Sweep("peel+ig", *network, PEEL, 1000, HYPERFL) for network in (GRAY, COLOR)),
    Sweep("rog", *SIGMOID, CODE, 500),
    *(Sweep("rog", *network, CODE, 500, rounds=5) for network in NETWORKS),
    Sweep("rog", *GRAY, CODE, 500, defense=NOISE),
    *(Sweep("rog", *network, **CLAMPED) for network in (GRAY, CHARACTERS, COLOR)),
    Sweep("rog", *CHARACTERS, **CLAMPED, defense=NOISE),
    *(Sweep("joint", *network, JOINT, 300, HYPERFL, images=4, beside=SLOW) for network in (GRAY, COLOR)),
    Sweep("joint", *GRAY, {"private_lr": (0.01, 0.1, {"embedding": 0.3})}, 300, HYPERFL, images=4, published=False),
    Sweep("bilevel", *GRAY, BILEVEL, 300, HYPERFL, fixed=LOWER, images=4),
    Sweep("bilevel", *COLOR, {"tv": (1e-2,), "head_lr": (1e-2,)}, 300, HYPERFL, fixed=LOWER, images=4),
    *(Sweep(name, *network, LBFGS, 500) for network in (SIGMOID, GRAY) for name in ("dlg", "idlg")),
    *(Sweep(name, *COLOR, {"objective": ("l2", "cosine")}, 500, published=False) for name in ("dlg", "idlg")),
    Sweep("lti", *SIGMOID_GRAY, LTI, 300, fixed=AUXILIARY, published=False),
    *(Sweep("gradinversion", *net, GROUP, 300, images=4, beside=WITHOUT_GROUP) for net in NETWORKS),
    Sweep("gradinversion", "resnet20", "cifar10", iterations=300, images=8, options={"blocks": 1}, **STATISTICS),
)
