"""Methods that later work rests on, in their smallest form: does the core hold them?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from support import worlds

from fl.defense import Defense
from fl.gradient import Gradient
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.fedprox import FedProx
from fl.methods.fedsam import FedSAM
from fl.methods.hyperfl import HyperFL
from fl.methods.hyperfl_lpm import HyperFLLPM
from fl.methods.pfedhn import PFedHN
from fl.methods.scaffold import Scaffold
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.privacy.dp_sgd import Privatization, private_gradient
from fl.tensors import Tensors
from fl.types import Batch, Scope, Task


@dataclass(frozen=True, kw_only=True)
class FedPerNorm(FedPer):
    """FedPer (Arivazhagan et al., 2019): the head stays local, and here batch normalization."""

    name: ClassVar[str] = "fedper+norm"

    def scope(self, name: str, task: Task) -> Scope:
        return Scope.PRIVATE if "norm" in name else super().scope(name, task)


@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """DP-SGD (Abadi et al., CCS 2016, Algorithm 1) as a defense."""

    name: ClassVar[str] = "dp-sgd"
    clip: float = 0.5
    noise_multiplier: float = 0.0

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        how = Privatization(clip=self.clip, noise_multiplier=self.noise_multiplier)
        return private_gradient(grad, params, batch, how, generator)


@dataclass(frozen=True)
class Probe:
    """A method, a defense and a network that belong together."""

    method: Method
    defense: Defense = field(default_factory=Defense)
    task: Task = field(default_factory=worlds.task)


MOVING: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "epochs": 2, "batch_size": 2}
TINY, FILTERS = Hypernetwork.example(), Filters(embedding=3, block=(2, 2))
PROBES: dict[str, Probe] = {
    "fedavg+norm": Probe(FedAvg(**MOVING), task=worlds.normed()),
    "fedper+norm": Probe(FedPerNorm(**MOVING), task=worlds.normed()),
    "scaffold-i": Probe(replace(Scaffold.example(), option="I")),
    "pfedhn-pc": Probe(replace(PFedHN.example(), head="private")),
    "dp-sgd": Probe(FedAvg(**MOVING), DPSGD()),
    "dp-sgd+hyperfl": Probe(HyperFL.example(), DPSGD()),
    "hyperfl-lpm+adapters": Probe(HyperFLLPM.example(), task=worlds.adapted()),
    "fedprox+hfn": Probe(FedProx(**MOVING, parametrization=FILTERS), task=worlds.deeper()),
    "fedprox+hypernetwork": Probe(FedProx(**MOVING, parametrization=TINY)),
    "fedsam+hypernetwork": Probe(replace(FedSAM.example(), parametrization=TINY)),
}
