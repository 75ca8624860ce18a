"""Methods that later work rests on, in their smallest form: does the core hold them?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from support import worlds
from torch import Tensor, nn
from torch.func import vjp

from fl.client import Gradient, Network
from fl.defense import Defense
from fl.method import Download, Method, ServerState, Step, mean
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetwork import Hypernetwork
from fl.parametrisation import Generated
from fl.privacy import private_gradient
from fl.tensors import Payloads, Tensors, add, combine, dense, norm, scaled, zeros
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
class PFedHN(FedAvg):
    """pFedHN (Shamsian et al., ICML 2021, Algorithm 1): the server's hypernetwork makes every client's model."""

    name: ClassVar[str] = "pfedhn"
    server_lr: float = 0.01

    def scope(self, name: str, task: Task) -> Scope:
        return Scope.SERVER if name.startswith("server.") else Scope.SHARED

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        some = next(iter(task.parameters.values()))
        own: Tensors = {"server.embeddings": torch.randn(clients, 4, generator=generator).to(some)}
        for name, value in task.parameters.items():
            own[f"server.{name}.weight"] = torch.randn(value.numel(), 4, generator=generator).to(some) * 0.01
            own[f"server.{name}.bias"] = value.flatten()
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={"hypernet": own})

    def made(self, own: Tensors, client: int, task: Task) -> dict[str, Tensor]:
        v = dense(own["server.embeddings"])[client]
        flat = {k: dense(own[f"server.{k}.weight"]) @ v + dense(own[f"server.{k}.bias"]) for k in task.parameters}
        return {name: value.view(task.parameters[name].shape) for name, value in flat.items()}

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        return Download(self.made(server.own["hypernet"], client, task), server.buffers)  # type: ignore[arg-type]

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        own = server.own["hypernet"]
        for u in uploads:
            _, pull = vjp(lambda own, client=u.client: self.made(own, client, task), own)
            own = combine(own, pull({name: dense(value) for name, value in u.update.items()})[0], -self.server_lr)
        return replace(server, own={"hypernet": own}, round=server.round + 1)


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


class ZeroNet(nn.Module):
    """Features choose (noisily) a classifier of two layers for every single image."""

    def __init__(self, task: Task, generator: torch.Generator, experts: int = 3, width: int = 4) -> None:
        super().__init__()
        self.body, features = copy.deepcopy(task.model.body), dict(task.model.named_modules())["body.fc1"].out_features
        self.sizes = [(width, features), (width,), (task.num_classes, width), (task.num_classes,)]
        shapes = {"gate": (features, experts), "noisy": (features, experts)}
        shapes |= {"chunks": (len(self.sizes), experts), "hyper": (2 * experts, width * features)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        f = self.body(x)
        scores = f @ self.gate if z is None else f @ self.gate + z * nn.functional.softplus(f @ self.noisy)
        e = scores.softmax(-1)
        made = []
        for chunk, size in zip(self.chunks, self.sizes, strict=True):  # h(e), chunk by chunk
            flat = torch.cat([e, chunk.expand_as(e)], -1) @ self.hyper
            made.append(flat[:, : torch.Size(size).numel()].reshape(-1, *size))
        hidden = torch.relu(torch.einsum("bhf,bf->bh", made[0], f) + made[1])
        return torch.einsum("bkh,bh->bk", made[2], hidden) + made[3], e


@dataclass(frozen=True, kw_only=True)
class HyperFedZero(FedAvg):
    """HyperFedZero (Zhou et al.): weights of the classifier for every sample, and losses that balance the batch."""

    name: ClassVar[str] = "hyperfedzero"
    per_sample: ClassVar[bool] = False

    def client_model(self, task: Task) -> nn.Module:
        return ZeroNet(task, torch.Generator().manual_seed(0))

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        size = (len(batch), task.parameters["gate"].shape[1])
        if generator is None:
            return {"z": batch.inputs.new_zeros(size)}
        return {"z": torch.randn(size, generator=generator).to(batch.inputs)}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        logits, e = network(batch.inputs, step.draws["z"])
        usage = e.sum(0)
        entropy = -(e * e.log()).sum(-1).mean()
        return nn.functional.cross_entropy(logits, batch.labels) + usage.var() / usage.mean() + entropy

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        return network(inputs)[0]


@dataclass(frozen=True, kw_only=True)
class HFN(Generated):
    """HyperFedNet: an embedding for every block of 2x2 channels of the second convolution, two linear layers."""

    name: ClassVar[str] = "hfn"
    block: int = 2
    embedding: int = 3

    def scope(self, name: str) -> Scope:
        return Scope.SHARED if name.startswith("hypernet.") else Scope.PRIVATE

    def generates(self, task: Task) -> list[str]:
        return ["body.conv2.weight"]

    def initial(self, task: Task, generator: torch.Generator) -> Tensors:
        n, v, (out, inside, f, _) = self.block, self.embedding, task.parameters["body.conv2.weight"].shape
        shapes = {
            "hypernet.in.weight": (n, v, v),
            "hypernet.in.bias": (n, v),
            "hypernet.out.weight": (n * f * f, v),
            "hypernet.out.bias": (n * f * f,),
            "embeddings": (out // n, inside // n, v),
        }
        made = {k: torch.randn(s, generator=generator, dtype=torch.float64) * 0.3 for k, s in shapes.items()}
        return {**{k: w for k, w in task.parameters.items() if k not in self.generates(task)}, **made}

    def generate(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        p = {name: dense(value) for name, value in params.items()}
        hidden = torch.einsum("iuv,OIv->OIiu", p["hypernet.in.weight"], p["embeddings"]) + p["hypernet.in.bias"]
        blocks = hidden @ p["hypernet.out.weight"].mT + p["hypernet.out.bias"]  # (O, I, i, o * f * f)
        shape = task.parameters["body.conv2.weight"].shape
        filters = blocks.unflatten(-1, (self.block, *shape[2:])).permute(0, 3, 1, 2, 4, 5)
        return {"body.conv2.weight": filters.reshape(shape)}


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020, Eq. 2): a spring to where the round began."""

    name: ClassVar[str] = "fedprox"
    mu: float = 0.1

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        g = grad(params, batches[0])
        return {name: add(v, add(params[name], step.start[name], -1.0), self.mu) for name, v in g.items()}


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
TINY = Hypernetwork.example()
PROBES: dict[str, Probe] = {
    "fedavg+norm": Probe(FedAvg(**MOVING), task=worlds.task(batch_norm=True)),
    "fedper+norm": Probe(FedPerNorm(**MOVING), task=worlds.task(batch_norm=True)),
    "scaffold": Probe(Scaffold(**{**MOVING, "momentum": 0.0})),
    "pfedhn": Probe(PFedHN(**MOVING)),
    "dp-sgd": Probe(FedAvg(**MOVING), DPSGD()),
    "dp-sgd+hyperfl": Probe(HyperFL.example(), DPSGD()),
    "hyperfedzero": Probe(HyperFedZero(**MOVING)),
    "fedprox+hfn": Probe(FedProx(**MOVING, parametrisation=HFN()), task=worlds.deeper()),
    "fedprox+hypernetwork": Probe(FedProx(**MOVING, parametrisation=TINY)),
    "fedsam": Probe(FedSAM(**MOVING)),
    "fedsam+hypernetwork": Probe(FedSAM(**MOVING, max_norm=1.0, parametrisation=TINY)),
}
