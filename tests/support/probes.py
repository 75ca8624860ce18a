"""Methods that later work rests on, in their smallest form: does the core hold them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from support import worlds

from fl.client import Gradient
from fl.defense import Defense
from fl.method import Download, Method, ServerState, Step, mean
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.fedprox import FedProx
from fl.methods.hyperfl import HyperFL
from fl.methods.pfedhn import PFedHN
from fl.models.filter_hypernetwork import Filters
from fl.models.hypernetwork import Hypernetwork
from fl.privacy import private_gradient
from fl.tensors import Payloads, Tensors, add, combine, norm, scaled, zeros
from fl.types import Batch, Scope, Task, Upload


@dataclass(frozen=True, kw_only=True)
class FedPerNorm(FedPer):
    """FedPer (Arivazhagan et al., 2019): the head stays local, and here batch normalisation."""

    name: ClassVar[str] = "fedper+norm"

    def scope(self, name: str, task: Task) -> Scope:
        return Scope.PRIVATE if "norm" in name else super().scope(name, task)


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II)."""

    name: ClassVar[str] = "scaffold"

    def init_memory(self, params: Tensors, task: Task) -> Payloads:
        return {"control": zeros(params, params)}

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        g = combine(grad(params, batches[0]), step.memory["control"], -1.0)
        return combine(g, step.received["control"])

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        drift = scaled(combine(step.start, params, -1.0), 1 / (steps * self.lr))
        change = combine(drift, step.received["control"], -1.0)
        return {"control": change}, {"control": combine(step.memory["control"], change)}

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={"control": zeros(params, params)})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        return Download(server.shared, server.buffers, server.own)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        share = len(uploads) / server.clients
        control = {
            name: add(value, mean(uploads, lambda u, name=name: u.extra["control"][name]), share)  # type: ignore[misc]
            for name, value in server.own["control"].items()
        }
        return replace(super().aggregate(server, uploads, task), own={"control": control})


@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """DP-SGD (Abadi et al., CCS 2016, Algorithm 1) as a defence."""

    name: ClassVar[str] = "dp-sgd"
    clip: float = 0.5
    noise_multiplier: float = 0.0

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        return private_gradient(
            grad, params, batch, clip=self.clip, noise_multiplier=self.noise_multiplier, generator=generator
        )


@dataclass(frozen=True, kw_only=True)
class FedSAM(FedAvg):
    """FedSAM (Qu et al., ICML 2022, Algorithm 1): the gradient where the loss is worst nearby."""

    name: ClassVar[str] = "fedsam"
    rho: float = 0.05

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        g = grad(params, batches[0])
        up = {name: add(params[name], v, self.rho / norm(g)) for name, v in g.items()}
        return grad({**params, **up}, batches[0])


@dataclass(frozen=True)
class Probe:
    """A method, a defence and a network that belong together."""

    method: Method
    defense: Defense = field(default_factory=Defense)
    task: Task = field(default_factory=worlds.task)


MOVING: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "epochs": 2, "batch_size": 2}
TINY, FILTERS = Hypernetwork.example(), Filters(embedding=3, block=(2, 2))
PROBES: dict[str, Probe] = {
    "fedavg+norm": Probe(FedAvg(**MOVING), task=worlds.task(batch_norm=True)),
    "fedper+norm": Probe(FedPerNorm(**MOVING), task=worlds.task(batch_norm=True)),
    "scaffold": Probe(Scaffold(**{**MOVING, "momentum": 0.0})),
    "pfedhn-pc": Probe(replace(PFedHN.example(), head="private")),
    "dp-sgd": Probe(FedAvg(**MOVING), DPSGD()),
    "dp-sgd+hyperfl": Probe(HyperFL.example(), DPSGD()),
    "fedprox+hfn": Probe(FedProx(**MOVING, parametrisation=FILTERS), task=worlds.deeper()),
    "fedprox+hypernetwork": Probe(FedProx(**MOVING, parametrisation=TINY)),
    "fedsam": Probe(FedSAM(**MOVING)),
    "fedsam+hypernetwork": Probe(FedSAM(**MOVING, max_norm=1.0, parametrisation=TINY)),
}
