"""Methods with differential privacy in their smallest form, each with noise where it can stand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import worlds

from fl.defense import Defense
from fl.federation import Federation
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.ppsgd import PPSGD
from fl.privacy.private_method import PrivateMethod

EVERY: dict[str, PrivateMethod] = {
    "dp-fedavg": DPFedAvg.example(),
    "centaur": Centaur.example(),
    "ppsgd": PPSGD.example(),
    "ppsgd, no common classifier": replace(PPSGD.example(), parametrization=DPFedAvg().parametrization),
    "dp-hyperfl": DPHyperFL.example(),
    "dp-hyperfl, hypernetwork": replace(DPHyperFL.example(), noise_on="hypernetwork"),
}
ALL = pytest.mark.parametrize("name", list(EVERY))


def federation_of(method: PrivateMethod, rounds: int = 0) -> Federation:
    return worlds.federation(method, Defense(), worlds.task(), rounds=rounds)


def as_published(method: PrivateMethod) -> PrivateMethod:
    return replace(method, mode="as-published")
