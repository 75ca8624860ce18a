"""Finds the linear layers of a network that are given one vector per image, however forward is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.network.layer_chain import trace_view
from attacks.network.layer_sequence import Piece, read_layer, read_pieces
from attacks.network.operation_recognition import PRODUCTS, ElementwiseAffine, Permutation, Reshape, has_trained_weight
from attacks.network.operation_trace import Graph, trace_operations
from attacks.network.pixel_origin import pixel_origin
from attacks.network.reading_cache import cached_reading
from attacks.result import NotApplicable
from fl.view import ServerView


@dataclass(frozen=True)
class PixelOrigin:
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
        """Return the pixels (N, n) behind inputs (N, n)."""
        found = torch.empty_like(inputs)
        found[:, self.index.to(inputs.device)] = (inputs - self.offset.to(inputs)) / self.slope.to(inputs)
        return found


@dataclass(frozen=True)
class VectorLayer:
    """A linear layer as the network uses it.

    Attributes:
        name: of the layer.
        names: of its "weight" and "bias" in the update.
        places: where each number of them stands there, where they lie otherwise.
        origin: how its input is made of the pixels; None where it is not, number by number.
        node: number of the operation in the recorded network that returns what the layer does.
        factors: by which each number of the weight is multiplied before the layer takes it, as they lie there; None
            where it is taken as it is.
    """

    name: str
    names: Mapping[str, str]
    places: Mapping[str, Tensor]
    origin: PixelOrigin | None
    node: int
    factors: Tensor | None = None

    def arrange(self, kind: str, sent: Tensor) -> Tensor:
        """Return what was sent of the layer's "weight" or "bias", as it lies in the layer."""
        return sent.flatten()[self.places[kind].to(sent.device)].contiguous() if kind in self.places else sent


@dataclass(frozen=True)
class VectorLayers:
    """The linear layers of a network.

    Attributes:
        layers: those with a bias that are given one vector per image, in the order they run, by name.
        reused: the parameters that the network uses more than once, so that their gradients are sums.
    """

    layers: Mapping[str, VectorLayer]
    reused: frozenset[str]


def vector_layers(view: ServerView) -> VectorLayers:
    """Return the linear layers with a bias, none where the network can't be followed.

    Args:
        view: what the server saw.
    """
    return cached_reading(view, "vector layers", lambda: _read_vector_layers(view), _count_numbers)


def _count_numbers(found: VectorLayers) -> int:
    return sum(places.numel() for layer in found.layers.values() for places in layer.places.values())


def _read_vector_layers(view: ServerView) -> VectorLayers:
    found = trace_view(view, view.device)
    if isinstance(found, NotApplicable):
        return VectorLayers({}, frozenset())
    _, graph = found
    return VectorLayers(_vector_layers(graph), reused_parameters(graph))


def reused_parameters(graph: Graph) -> frozenset[str]:
    """Return the parameters that more than one operation on what becomes of the image takes."""
    uses: dict[str, int] = {}
    for number in graph.used_operations():
        taken = [graph.origins(ref) for ref in graph.nodes[number].refs if not graph.depends_on_image(ref)]
        for name in frozenset[str]().union(*taken) & graph.parameters:
            uses[name] = uses.get(name, 0) + 1
    return frozenset(name for name, count in uses.items() if count > 1)


def _vector_layers(graph: Graph) -> dict[str, VectorLayer]:
    layers: dict[str, VectorLayer] = {}
    first = _first_piece(graph)
    for number in graph.used_operations():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not has_trained_weight(graph, node):
            continue
        (piece, end), origin = read_layer(graph, number, scaled=True), None
        if first is not None and first[0].place == str(node) and first[0].name == piece.name:
            piece, origin = first
        elif piece.factors is not None:
            origin = _origin_of_input(graph, number)
        if piece.name and piece.names["bias"] and piece.name not in layers:
            layers[piece.name] = VectorLayer(piece.name, piece.names, piece.places, origin, end, piece.factors)
    return layers


def _origin_of_input(graph: Graph, number: int) -> PixelOrigin | None:
    """Return how the input of a product is made of the pixels, each of them once; None where it is not."""
    found = pixel_origin(graph, next(ref for ref in graph.nodes[number].refs if graph.depends_on_image(ref)))
    if found is None or not bool((found[1] != 0).all()):
        return None
    places = torch.arange(graph.image.numel(), device=found[2].device)
    return PixelOrigin(*found) if torch.equal(found[2].sort().values, places) else None


def _first_piece(graph: Graph) -> tuple[Piece, PixelOrigin] | None:
    """Return the linear layer that is given the image itself, number by number, if that comes first."""
    below: list[nn.Module] = []
    for piece in read_pieces(graph):
        if isinstance(piece.module, nn.Linear):
            return piece, _pixel_origin(graph.image, below)
        if not isinstance(piece.module, nn.Identity | nn.Flatten | Reshape | ElementwiseAffine | Permutation):
            return None
        below.append(piece.module)
    return None


def _pixel_origin(image: Tensor, below: list[nn.Module]) -> PixelOrigin:
    zero, index = torch.zeros_like(image), torch.arange(image.numel(), device=image.device)
    offset, top = zero, zero + 1
    with torch.no_grad():
        for module in below:
            offset, top = module(offset), module(top)
            index = index[module.index] if isinstance(module, Permutation) else index
    return PixelOrigin(offset.flatten(), (top - offset).flatten(), index)


def operation_outputs(model: nn.Module, node: int, images: Tensor) -> Tensor | None:
    """Return what an operation of the recorded network returns for each of several images (N, m).

    Args:
        model: the network.
        node: number of the operation.
        images: (N, C, H, W).
    """
    rows = []
    for image in images:
        graph = trace_operations(model, image[None])
        if isinstance(graph, str) or node >= len(graph.nodes):
            return None
        rows.append(graph.nodes[node].outputs[0].flatten())
    return torch.stack(rows)
