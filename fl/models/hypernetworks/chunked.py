"""A hypernetwork that generates weights chunk by chunk, of another network for every sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_ROWS = 8192
"""Chunks of samples put through the hidden layers at once: what they hold in between grows with it."""


class ChunkedHypernetwork(nn.Module):
    """Fully connected layers with ReLU that make one chunk of the weights at a time (von Oswald et al., ICLR 2020).

    All chunks are made by the same layers; what tells them apart is a learned embedding that stands beside the input.

    Args:
        inputs: size of the input e.
        total: weights to generate.
        chunk: weights in one chunk; of the last chunk, what is too much is dropped.
        embedding: size of a chunk's embedding.
        hidden: units of each hidden layer.

    Raises:
        ValueError: a size is below 1, or there is no hidden layer.
    """

    def __init__(self, inputs: int, total: int, chunk: int, embedding: int, hidden: Sequence[int]) -> None:
        super().__init__()
        if min(inputs, total, chunk, embedding, *hidden) < 1 or not hidden:
            raise ValueError(
                f"expected at least one hidden layer and all sizes >= 1, got inputs={inputs}, total={total}, "
                f"chunk={chunk}, embedding={embedding}, hidden={tuple(hidden)}"
            )
        self.inputs, self.total = inputs, total
        self.chunks = nn.Parameter(torch.empty(-(-total // chunk), embedding))
        sizes = (inputs + embedding, *hidden, chunk)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))

    def forward(self, e: Tensor) -> Tensor:
        """Return weights (B, total), one set for each input (B, inputs)."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        mine, own = first.weight.split([self.inputs, len(first.weight[0]) - self.inputs], 1)
        # the first layer of (e, embedding) is a sum of both, so neither is repeated for the other
        sample = functional.linear(e, mine)
        chunk = functional.linear(self.chunks, own, first.bias)
        at_once = max(1, MAX_ROWS // max(1, len(e)))
        parts = [self._upper_layers(sample[:, None] + some) for some in chunk.split(at_once)]
        return torch.cat(parts, 1).flatten(1)[:, : self.total]

    def _upper_layers(self, x: Tensor) -> Tensor:
        """Return the layers above the first."""
        for layer in list(self.layers)[1:]:
            x = layer(torch.relu(x))
        return x


def count_parameters(inputs: int, total: int, chunk: int, embedding: int, hidden: Sequence[int]) -> int:
    """Return how many parameters a `ChunkedHypernetwork` of these sizes has."""
    sizes = (inputs + embedding, *hidden, chunk)
    return -(-total // chunk) * embedding + sum((before + 1) * after for before, after in pairwise(sizes))


def fitting_chunk(budget: int, inputs: int, total: int, embedding: int, hidden: Sequence[int]) -> int:
    """Return the size of chunks for which the hypernetwork's parameters come nearest to `budget`.

    Small chunks cost embeddings, large ones the last layer: of the two sizes that may fit, the larger, which makes the
    fewer chunks.
    """
    least = max(1, round((total * embedding / (hidden[-1] + 1)) ** 0.5))  # where the count has its minimum
    sizes = torch.arange(min(least, total), total + 1)
    rest = count_parameters(inputs, total, total, embedding, hidden) - total * (hidden[-1] + 1) - embedding
    counts = (total + sizes - 1) // sizes * embedding + sizes * (hidden[-1] + 1) + rest
    return int(sizes[(counts - budget).abs().argmin()])
