"""A hypernetwork that never leaves the server: from one embedding to every tensor of a client's network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional

from fl.tensors import Tensors, dense

HYPERNETWORK, OPTIMIZER = "hypernetwork", "optimizer"
"""Payloads of `ServerState.own` in methods that have one."""
EMBEDDINGS = "embeddings"
"""Name of the clients' embeddings (N, E), beside the hypernetwork's own parameters."""


def embedding_of(own: Tensors, client: int) -> Tensor:
    """Return the client's embedding (E,); the mean of all for one that never takes part."""
    every = dense(own[EMBEDDINGS])
    return every[client] if client < len(every) else every.mean(0)


def layer_weight(index: int) -> str:
    """Return the name of the weight of hidden layer `index`, from 0."""
    return f"mlp.{index}.weight"


def layer_bias(index: int) -> str:
    """Return the name of the bias of hidden layer `index`, from 0."""
    return f"mlp.{index}.bias"


def server_head_weight(name: str) -> str:
    """Return the name of the weight of the head that generates `name`."""
    return f"heads.{name}.weight"


def server_head_bias(name: str) -> str:
    """Return the name of the bias of the head that generates `name`."""
    return f"heads.{name}.bias"


@dataclass(frozen=True, kw_only=True)
class ServerHypernetwork:
    """A multi-layer perceptron with one linear head for each generated tensor.

    The server of pFedHN (Shamsian et al., ICML 2021, section 3.2) and of hFedF has one; both keep it, and one embedding
    for each client, in `ServerState.own`. Functional: an object holds settings only, and nothing is changed in place.
    One head for each tensor is the same as one for each layer: the heads are linear, so weight and bias are rows of it.

    Attributes:
        shapes: of the generated tensors, by name.
        embedding: size E of the embedding.
        hidden: units of each linear layer before the heads, in order.
        activation: after the layers; LeakyReLU has slope 0.01.
        last_activation: whether it also follows the last of them; pFedHN's and hFedF's heads read that layer as it is.

    Raises:
        ValueError: nothing to generate, or a size below 1.
    """

    shapes: Mapping[str, torch.Size]
    embedding: int
    hidden: tuple[int, ...]
    activation: Literal["relu", "leaky-relu"] = "relu"
    last_activation: bool = False

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ValueError("expected at least one tensor to generate, got none")
        if self.embedding < 1:
            raise ValueError(f"expected embedding >= 1, got {self.embedding}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"expected at least one hidden layer, each of >= 1 units, got {self.hidden}")

    def initial_parameters(self, generator: torch.Generator, like: Tensor | None = None) -> Tensors:
        """Return every layer and head as `nn.Linear` starts: U(-1/sqrt(fan in), 1/sqrt(fan in)), weights and biases.

        Args:
            generator: draws in float32, so that every type and device starts from the same numbers.
            like: whose type and device the result takes; float32 on the CPU without it.
        """
        params: Tensors = {}

        def linear(weight: str, bias: str, outputs: int, inputs: int) -> None:
            bound = 1 / math.sqrt(inputs)
            for name, shape in ((weight, (outputs, inputs)), (bias, (outputs,))):
                drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
                params[name] = drawn if like is None else drawn.to(like)

        for i, (inputs, outputs) in enumerate(pairwise((self.embedding, *self.hidden))):
            linear(layer_weight(i), layer_bias(i), outputs, inputs)
        for name, shape in self.shapes.items():
            linear(server_head_weight(name), server_head_bias(name), shape.numel(), self.hidden[-1])
        return params

    def generate(self, params: Tensors, embedding: Tensor) -> dict[str, Tensor]:
        """Return every tensor of `shapes`, made from `embedding` (E,)."""
        x = embedding
        for i in range(len(self.hidden)):
            x = functional.linear(x, dense(params[layer_weight(i)]), dense(params[layer_bias(i)]))
            if self.last_activation or i < len(self.hidden) - 1:
                x = torch.relu(x) if self.activation == "relu" else functional.leaky_relu(x, 0.01)
        result = {}
        for name, shape in self.shapes.items():
            weight, bias = params[server_head_weight(name)], params[server_head_bias(name)]
            result[name] = functional.linear(x, dense(weight), dense(bias)).view(shape)
        return result

    def pull_back(self, params: Tensors, embedding: Tensor, grads: Tensors) -> tuple[dict[str, Tensor], Tensor]:
        """Return what a gradient of the generated tensors is for the generator: its vector-Jacobian product.

        Args:
            params: of the hypernetwork.
            embedding: (E,).
            grads: of every generated tensor, by name.

        Returns:
            Gradients of `params`, by name, and of the embedding (E,).
        """
        own = {name: dense(value) for name, value in params.items()}
        pull = vjp(lambda own, embedding: self.generate(own, embedding), own, embedding)[1]
        made, back = pull({name: dense(grads[name]) for name in self.shapes})
        return made, back

    def pull_back_update(self, own: Tensors, client: int, update: Tensors) -> Tensors:
        """Return what one client's update is for the hypernetwork that generated its network and for all embeddings."""
        grads, back = self.pull_back(own, embedding_of(own, client), update)
        rows = torch.zeros_like(dense(own[EMBEDDINGS]))
        rows[client] = back
        return {**grads, EMBEDDINGS: rows}
