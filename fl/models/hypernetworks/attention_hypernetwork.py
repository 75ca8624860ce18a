"""HyperGenFL's hypernetwork: from the embeddings of some clients to the weight each has in each layer's mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional

from fl.tensors import Tensors, dense

DECODE_WEIGHT, DECODE_BIAS = "decode.weight", "decode.bias"


@dataclass(frozen=True, kw_only=True)
class AttentionHypernetwork:
    """Attention between clients, then one score per client and layer (HyperGenFL, Chen et al., CIKM 2025, Eq. 4-7).

    Embeddings s (clients, E) become z = softmax(MHA(s) + s), where the softmax runs over the E numbers of a client, and
    every layer l of the network has scores relu(w_l z_c + b_l) + floor, divided by their sum over the clients. Further
    attention layers stand before the softmax, each added to its input. That, the axis of the softmax, the number of
    heads and the floor are not given in the paper. Attention is torch's (query, key, value and output with biases) and
    starts as it does; the decoders start as `nn.Linear`.

    Attributes:
        layers: of the network whose means are weighted.
        embedding: E.
        depth: attention layers.
        heads: of each of them; E is a multiple of it.
        floor: lambda, which keeps the sum of scores above zero.

    Raises:
        ValueError: a size below 1, heads that do not divide E, or a floor that is not above 0.
    """

    layers: int
    embedding: int = 128
    depth: int = 1
    heads: int = 4
    floor: float = 1e-3

    def __post_init__(self) -> None:
        for key in ("layers", "embedding", "depth", "heads"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")
        if self.embedding % self.heads:
            raise ValueError(f"expected heads that divide embedding={self.embedding}, got {self.heads}")
        if not 0 < self.floor < math.inf:
            raise ValueError(f"expected floor > 0, got {self.floor}")

    def initial_parameters(self, generator: torch.Generator, like: Tensor | None = None) -> Tensors:
        """Return fresh parameters.

        Args:
            generator: draws in float32, so that every type and device starts from the same numbers.
            like: whose type and device the result takes; float32 on the CPU without it.
        """
        size = self.embedding
        params: Tensors = {}

        def uniform(name: str, bound: float, *shape: int) -> None:
            params[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)

        for i in range(self.depth):
            uniform(f"attention.{i}.in.weight", math.sqrt(6 / (4 * size)), 3 * size, size)
            uniform(f"attention.{i}.out.weight", 1 / math.sqrt(size), size, size)
            params |= {f"attention.{i}.in.bias": torch.zeros(3 * size), f"attention.{i}.out.bias": torch.zeros(size)}
        uniform(DECODE_WEIGHT, 1 / math.sqrt(size), self.layers, size)
        uniform(DECODE_BIAS, 1 / math.sqrt(size), self.layers)
        return params if like is None else {name: dense(value).to(like) for name, value in params.items()}

    def weights(self, params: Tensors, embeddings: Tensor) -> Tensor:
        """Return each client's share in the mean of each layer (clients, layers), from embeddings (clients, E)."""
        scores = self.scores(params, embeddings)
        return scores / scores.sum(0)

    def scores(self, params: Tensors, embeddings: Tensor) -> Tensor:
        """Return Eq. 5 before the division by the sum (clients, layers); `floor` where the decoder is silent."""
        x = embeddings
        for i in range(self.depth):
            x = x + self._attend(params, i, x)
        decoded = functional.linear(x.softmax(-1), dense(params[DECODE_WEIGHT]), dense(params[DECODE_BIAS]))
        return torch.relu(decoded) + self.floor

    def pull_back(self, params: Tensors, embeddings: Tensor, grads: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return what a gradient of the shares is for hypernetwork and embeddings.

        The vector-Jacobian product of `weights`.

        Args:
            params: of the hypernetwork.
            embeddings: (clients, E).
            grads: of the shares (clients, layers).

        Returns:
            Gradients of `params`, by name, and of the embeddings.
        """
        own = {name: dense(value) for name, value in params.items()}
        made, back = vjp(lambda own, embeddings: self.weights(own, embeddings), own, embeddings)[1](grads)
        return made, back

    def _attend(self, params: Tensors, index: int, x: Tensor) -> Tensor:
        """Return multi-head attention of all clients to all clients (Vaswani et al., 2017)."""
        weight, bias, out, after = (
            dense(params[f"attention.{index}.{part}"]) for part in ("in.weight", "in.bias", "out.weight", "out.bias")
        )
        # (clients, 3 E) to three times (heads, clients, E / heads)
        query, key, value = functional.linear(x, weight, bias).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attention = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        return functional.linear((attention @ value).transpose(0, 1).flatten(1), out, after)
