"""The linear layers of a network that are given one vector per image, however forward is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.network.interlayer_maps import Reshape, Scaling
from attacks.network.layer_chain import graph_of
from attacks.network.layer_sequence import Piece, layer_of, pieces_of
from attacks.network.operation_recognition import PRODUCTS, Permuted, weighs
from attacks.network.operation_trace import Graph, traced
from attacks.result import NotApplicable
from fl.view import ServerView


@dataclass(frozen=True)
class Origin:
    """How a layer's input is made of the pixels: number by number.

    Attributes:
        offset: the input (n,) of a black image.
        slope: by how much each number of it grows with its pixel (n,).
        index: which pixel that is (n,), row by row.
    """

    offset: Tensor
    slope: Tensor
    index: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """The pixels (N, n) behind inputs (N, n)."""
        found = torch.empty_like(inputs)
        found[:, self.index.to(inputs.device)] = (inputs - self.offset.to(inputs)) / self.slope.to(inputs)
        return found


@dataclass(frozen=True)
class FlatLayer:
    """A linear layer as the network uses it.

    Attributes:
        name: of the layer.
        names: of its "weight" and "bias" in the update.
        places: where each number of them stands there, where they lie otherwise.
        origin: how its input is made of the pixels; None where it is not, number by number.
        node: number of the operation in the recorded network.
    """

    name: str
    names: Mapping[str, str]
    places: Mapping[str, Tensor]
    origin: Origin | None
    node: int

    def arranged(self, kind: str, sent: Tensor) -> Tensor:
        """What was sent of the layer's "weight" or "bias", as it lies in the layer."""
        return sent.flatten()[self.places[kind].to(sent.device)] if kind in self.places else sent


def flat_layers(view: ServerView) -> dict[str, FlatLayer]:
    """The linear layers with a bias, in the order they run, by name; none where the network can't be followed."""
    found = graph_of(view, view.device)
    if isinstance(found, NotApplicable):
        return {}
    _, graph = found
    layers: dict[str, FlatLayer] = {}
    first = _first(graph)
    for number in graph.alive():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not weighs(graph, node):
            continue
        piece, origin = layer_of(graph, number), None
        if first is not None and first[0].place == str(node) and first[0].name == piece.name:
            piece, origin = first
        if piece.name and piece.names["bias"] and piece.name not in layers:
            layers[piece.name] = FlatLayer(piece.name, piece.names, piece.places, origin, number)
    return layers


def _first(graph: Graph) -> tuple[Piece, Origin] | None:
    """The linear layer that is given the image itself, number by number, if that comes first."""
    below: list[nn.Module] = []
    for piece in pieces_of(graph):
        if isinstance(piece.module, nn.Linear):
            return piece, _origin(graph.image, below)
        if not isinstance(piece.module, nn.Identity | nn.Flatten | Reshape | Scaling | Permuted):
            return None
        below.append(piece.module)
    return None


def _origin(image: Tensor, below: list[nn.Module]) -> Origin:
    zero, index = torch.zeros_like(image), torch.arange(image.numel(), device=image.device)
    offset, top = zero, zero + 1
    with torch.no_grad():
        for module in below:
            offset, top = module(offset), module(top)
            index = index[module.index] if isinstance(module, Permuted) else index
    return Origin(offset.flatten(), (top - offset).flatten(), index)


def outputs_of(model: nn.Module, node: int, images: Tensor) -> Tensor | None:
    """What an operation of the recorded network returns for each of several images (N, m)."""
    rows = []
    for image in images:
        graph = traced(model, image[None])
        if isinstance(graph, str) or node >= len(graph.nodes):
            return None
        rows.append(graph.nodes[node].outputs[0].flatten())
    return torch.stack(rows)
