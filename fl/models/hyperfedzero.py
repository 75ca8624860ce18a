"""HyperFedZero's networks: an extractor of distribution embeddings, its noise, and a classifier they decide on."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.layers import Normalize
from fl.models.building_blocks.per_sample import PerSampleNetwork, WithSampleTensors
from fl.models.hypernetworks.chunked import ChunkedHypernetwork, fitting_chunk
from fl.types import Task

Kind = Literal["conv", "mlp"]
CHANNELS, GRID, WIDTH = (8, 16), 4, 32
"""Of the extractors: channels of the two convolutions, side of what they are pooled to, units of the hidden layer."""


def build_extractor(kind: Kind, input_shape: tuple[int, int, int], size: int) -> nn.Sequential:
    """Return a small network (B, C, H, W) to (B, size).

    The paper says only that it is compact, so both layouts are ours.

    Args:
        kind: "conv" is two 3x3 convolutions with stride 2 and ReLU, averaged to 4x4, and a linear layer; "mlp" is a
            hidden layer of 32 units with ReLU.
        input_shape: (C, H, W).
        size: of what comes out.
    """
    layers = OrderedDict[str, nn.Module]()
    if kind == "conv":
        before = input_shape[0]
        for i, after in enumerate(CHANNELS, start=1):
            layers |= {f"conv{i}": nn.Conv2d(before, after, 3, stride=2, padding=1), f"act{i}": nn.ReLU()}
            before = after
        layers |= {"pool": nn.AdaptiveAvgPool2d(GRID), "flatten": nn.Flatten()}
        layers["fc"] = nn.Linear(before * GRID**2, size)
    else:
        layers |= {"flatten": nn.Flatten(), "fc1": nn.Linear(math.prod(input_shape), WIDTH), "act1": nn.ReLU()}
        layers["fc"] = nn.Linear(WIDTH, size)
    return nn.Sequential(layers)


class Embedder(nn.Module):
    """f and noisy: images to the logarithms of their distribution embeddings e (HyperFedZero, Eq. 3).

    Args:
        task: whose images and normalization.
        kind: layout of both networks.
        size: of an embedding, P.
    """

    def __init__(self, task: Task, kind: Kind, size: int) -> None:
        super().__init__()
        self.normalize = Normalize(task.mean, task.std)
        self.extractor, self.noisy = (build_extractor(kind, task.input_shape, size) for _ in range(2))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the logarithms of e (B, P) from pixels (B, C, H, W), with the noise z (B, P), or none."""
        x = self.normalize(x)
        scores = self.extractor(x)
        if z is not None:
            scores = scores + z * functional.softplus(self.noisy(x))
        return functional.log_softmax(scores, -1)


class ZeroNet(nn.Module):
    """The paper's Opt. 2: for every image a classifier h(e) of its own.

    Args:
        task: whose network is the template of the classifiers.
        kind: layout of extractor and noise network.
        size: of an embedding, P.
        hidden: units of the hypernetwork's hidden layers.
        chunk: weights it makes at a time; None takes what brings the sum of all parameters nearest to the template's.
        chunk_embedding: size of a chunk's embedding.
    """

    def __init__(
        self, task: Task, kind: Kind, size: int, hidden: Sequence[int], chunk: int | None, chunk_embedding: int
    ) -> None:
        super().__init__()
        self.embedder = Embedder(task, kind, size)
        self.classifier = PerSampleNetwork(task.model)
        total = self.classifier.total
        if chunk is None:
            rest = total - sum(p.numel() for p in self.embedder.parameters())
            chunk = fitting_chunk(rest, size, total, chunk_embedding, hidden)
        self.hypernet = ChunkedHypernetwork(size, total, chunk, chunk_embedding, hidden)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, K) of pixels (B, C, H, W); with noise z (B, P), as in training, log e (B, P) too."""
        log_e = self.embedder(x, z)
        logits = self.classify(x, log_e.exp())
        return logits if z is None else (logits, log_e)

    def classify(self, x: Tensor, e: Tensor) -> Tensor:
        """Return logits (B, K) of pixels (B, C, H, W) by the classifiers of e (B, P)."""
        logits: Tensor = self.classifier(x, self.hypernet(e))
        return logits


class ConditionedLayer(WithSampleTensors):
    """A linear layer or convolution to whose input e is joined.

    For a linear layer this is the layer of (x, e). A convolution is given each entry of e as a further channel, of
    which it sees the one position in the middle of its kernel.

    Args:
        inner: the layer, which keeps its parameters.
        size: of e.
    """

    def __init__(self, inner: nn.Linear | nn.Conv2d, size: int) -> None:
        super().__init__(inner)
        self.condition = nn.Parameter(torch.empty(len(inner.weight), size))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns, (B, out, ...)."""
        y: Tensor = self.inner(x)
        shift = functional.linear(self.given["e"], self.condition)
        return y + shift.view(*shift.shape, *[1] * (y.ndim - 2))


class JoinedNet(nn.Module):
    """The paper's Opt. 1: one classifier, given e beside the image (the ablation of Table 2).

    Args:
        task: whose network the classifier is; e is joined to the input of its first linear layer or convolution.
        kind: layout of extractor and noise network.
        size: of an embedding, P.

    Raises:
        ValueError: the network has no such layer.
    """

    def __init__(self, task: Task, kind: Kind, size: int) -> None:
        super().__init__()
        self.embedder = Embedder(task, kind, size)
        self.classifier = copy.deepcopy(task.model)
        first = next((n for n, m in self.classifier.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        if not first:
            raise ValueError(f"expected a network with a linear layer or convolution inside, got {task.model}")
        parent, _, last = first.rpartition(".")
        layer = self.classifier.get_submodule(first)
        self.joined = first
        setattr(self.classifier.get_submodule(parent), last, ConditionedLayer(layer, size))  # type: ignore[arg-type]

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, K) of pixels (B, C, H, W); with noise z (B, P), as in training, log e (B, P) too."""
        log_e = self.embedder(x, z)
        logits = self.classify(x, log_e.exp())
        return logits if z is None else (logits, log_e)

    def classify(self, x: Tensor, e: Tensor) -> Tensor:
        """Return logits (B, K) of pixels (B, C, H, W) and e (B, P)."""
        layer = self.classifier.get_submodule(self.joined)
        layer.given = {"e": e}  # type: ignore[assignment]
        try:
            logits: Tensor = self.classifier(x)
        finally:
            layer.given = {}  # type: ignore[assignment]
        return logits


def draw_initial(model: ZeroNet | JoinedNet, generator: torch.Generator) -> None:
    """Fill a network: layers by PyTorch's default, chunk embeddings N(0, 1); the joined classifier keeps its own."""
    with torch.no_grad():
        initialize(model.embedder, generator)
        if isinstance(model, ZeroNet):
            initialize(model.hypernet.layers, generator)
            model.hypernet.chunks.copy_(torch.randn(model.hypernet.chunks.shape, generator=generator))
        else:
            weight = model.classifier.get_submodule(model.joined).get_parameter("condition")
            bound = weight.shape[1] ** -0.5
            weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
