"""HyperFL's hypernetwork: an embedding, one hidden layer, one linear head for each generated tensor."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl.parametrization import Generated, parametrizations
from fl.ranges import Width
from fl.tensors import LowRank, Tensors, dense, matvec, rmatvec
from fl.types import Scope, Task

EMBEDDING = "embedding"
TRUNK_WEIGHT, TRUNK_BIAS = "hypernet.trunk.weight", "hypernet.trunk.bias"


def head_weight(name: str) -> str:
    """Return the name of the weight of the head that generates `name`."""
    return f"hypernet.heads.{name}.weight"


def head_bias(name: str) -> str:
    """Return the name of the bias of the head that generates `name`."""
    return f"hypernet.heads.{name}.bias"


@parametrizations.register("hypernetwork")
@dataclass(frozen=True, kw_only=True)
class Hypernetwork(Generated):
    """theta_k = W_k relu(W_0 v + b_0) + b_k for every tensor of the extractor (HyperFL, section 3 and Eq. 3-6).

    The heads' gradients are outer products and stay so (`LowRank`), through momentum, decay and clipping.

    Attributes:
        embedding: size of the client embedding v, drawn from N(0, 1).
        hidden: size of the hidden layer.
        init: "published" draws every layer by PyTorch's default, which makes generated weights about ten times too
            wide and kills the hidden layer in the first round; "scaled" multiplies the heads' weights by 0.1;
            "network" does so and lets the heads' biases start at the network's own initial values, so that what is
            generated starts near them (Bias-HyperInit, Beck et al., CoRL 2022): without it normalization layers
            start near zero instead of one, and HyperFL-LPM's adapters pass nothing on.
        bias: whether the heads have biases (the published ones do).

    Raises:
        ValueError: `init` is "network" and there are no biases.
    """

    structured: ClassVar[bool] = True

    embedding: Width = 64
    hidden: Width = 128
    init: Literal["published", "scaled", "network"] = "published"
    bias: bool = True

    def __post_init__(self) -> None:
        if self.init == "network" and not self.bias:
            raise ValueError("init='network' puts the network's initial values into the heads' biases: set bias=True")

    @classmethod
    def example(cls) -> Hypernetwork:
        """Return a tiny one."""
        return cls(embedding=3, hidden=6, init="scaled")

    def scope(self, name: str) -> Scope | None:
        """The hypernetwork is shared, the embedding is private."""
        if name == EMBEDDING:
            return Scope.PRIVATE
        return Scope.SHARED if name.startswith("hypernet.") else None

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return hypernetwork and embedding from `generator`, the classifier from `task.model`."""
        made = set(self.generates(task))
        some = next(iter(task.parameters.values()))
        params: Tensors = {name: value for name, value in task.parameters.items() if name not in made}

        def uniform(*shape: int, fan_in: int) -> Tensor:
            bound = 1 / math.sqrt(fan_in)  # nn.Linear's default, for weights and biases alike
            return torch.empty(*shape).uniform_(-bound, bound, generator=generator).to(some)

        params[TRUNK_WEIGHT] = uniform(self.hidden, self.embedding, fan_in=self.embedding)
        params[TRUNK_BIAS] = uniform(self.hidden, fan_in=self.embedding)
        factor = 1.0 if self.init == "published" else 0.1
        for name in self.generates(task):
            size = task.parameters[name].numel()
            params[head_weight(name)] = uniform(size, self.hidden, fan_in=self.hidden) * factor
            if self.init == "network":
                params[head_bias(name)] = task.parameters[name].detach().flatten().clone()
            elif self.bias:
                params[head_bias(name)] = uniform(size, fan_in=self.hidden) * factor
        params[EMBEDDING] = torch.randn(self.embedding, generator=generator).to(some)
        return params

    def lift(self, params: Tensors) -> Tensors:
        """Return head weights as bases of structured matrices."""
        return {
            name: LowRank.of(value)
            if name.startswith("hypernet.heads.") and isinstance(value, Tensor) and value.ndim == 2
            else value
            for name, value in params.items()
        }

    def preactivation(self, params: Tensors) -> Tensor:
        """Return W_0 v + b_0 (hidden,)."""
        return matvec(params[TRUNK_WEIGHT], dense(params[EMBEDDING])) + dense(params[TRUNK_BIAS])

    def generate(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return the extractor of the client whose embedding is in `params`."""
        return self.from_hidden(params, torch.relu(self.preactivation(params)), task)

    def from_hidden(self, params: Tensors, hidden: Tensor, task: Task) -> dict[str, Tensor]:
        """Return the extractor generated from the hidden activations (hidden,)."""
        made = {}
        for name in self.generates(task):
            flat = matvec(params[head_weight(name)], hidden)
            if self.bias:
                flat = flat + dense(params[head_bias(name)])
            made[name] = flat.view(task.parameters[name].shape)
        return made

    def diagnostics(self, params: Tensors) -> dict[str, float]:
        """Return how many hidden units are active (with none, every client gets the heads' biases)."""
        return {"active_units": float((self.preactivation(params) > 0).sum())}

    def pull_back(self, params: Tensors, grads: dict[str, Tensor], task: Task, live: Collection[str]) -> Tensors:
        """Return outer products for the heads, plain tensors for the rest."""
        result: Tensors = {name: grads[name] for name in live if name in task.parameters}
        if len(result) == len(live):
            return result
        embedding = dense(params[EMBEDDING])
        z = self.preactivation(params)
        hidden = torch.relu(z)
        back = torch.zeros_like(hidden)
        for name in self.generates(task):
            g = grads[name].reshape(-1)
            back = back + rmatvec(params[head_weight(name)], g)
            result[head_weight(name)] = LowRank.outer(g, hidden)
            if self.bias:
                result[head_bias(name)] = g
        back = back * (z > 0)
        result[TRUNK_WEIGHT] = back[:, None] * embedding
        result[TRUNK_BIAS] = back
        result[EMBEDDING] = rmatvec(params[TRUNK_WEIGHT], back)
        return {name: result[name] for name in live}
