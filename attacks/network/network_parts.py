"""Parts of a network as modules: the recorded operations above or below one of its layers, with their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from attacks.network.layer_chain import make_trace
from attacks.network.layer_sequence import read_layer
from attacks.network.operation_recognition import PRODUCTS, has_trained_weight, product_operands
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.result import NotApplicable
from fl.view import ServerView


@dataclass(frozen=True)
class UpperPart:
    """What a network computes from what one of its linear layers is given.

    Attributes:
        model: takes the layer's inputs (N, n, 1, 1) and returns what the network does. It has all parameters and
            buffers of the network, by their names.
        names: of the parameters that only this part uses.
    """

    model: nn.Module
    names: frozenset[str]


def network_above(view: ServerView, weight: str, count: int) -> UpperPart | None:
    """Return the network of `view` from a linear layer's input up.

    Args:
        view: what the server saw; nothing of it may be private.
        weight: name of the layer's weight.
        count: of the images that it is given at once.

    Returns:
        None where the network can't be traced, the layer sees more than one input per image, or something of the image
        reaches what the network returns by another way.
    """
    found = make_trace(view, view.device, count=count, dtype=view.dtype)
    if isinstance(found, NotApplicable):
        return None
    model, graph = found
    start = _layer_input(graph, weight)
    if start is None or graph.value(start).ndim != 2 or count not in graph.value(start).shape:
        return None
    segments = graph.segments()
    starts = [segment.start for segment in segments]
    if start not in starts:
        return None
    flow = [number for segment in segments[starts.index(start) :] for number in segment.nodes]
    used = frozenset[str]().union(*(graph.nodes[number].sources for number in flow))
    below = set(graph.used_operations()).difference(flow)
    shared = frozenset[str]().union(*(graph.nodes[number].sources for number in below))
    run = _replay_from(graph, start, flow)
    return UpperPart(ReplayedNetwork(model, run), (used - shared) & graph.parameters)


def network_below(view: ServerView, weight: str) -> nn.Module | None:
    """Return the network of `view` up to what a linear layer returns, for one image; None where it can't be traced.

    It has the parameters and buffers that this part uses, by their names.

    Args:
        view: what the server saw.
        weight: name of the layer's weight.
    """
    found = make_trace(view, view.device, dtype=view.dtype)
    if isinstance(found, NotApplicable):
        return None
    model, graph = found
    product = _product_with(graph, weight)
    if product is None:
        return None
    end = Ref(read_layer(graph, product)[1])
    nodes = graph.operations_behind(end)
    sources = frozenset({ref.node for number in nodes for ref in graph.nodes[number].refs if ref.node < IMAGE})

    def run(images: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        known = {Ref(number): tensors[name] for number, name in graph.sources.items() if name in tensors}
        return graph.replay(nodes, end, {Ref(IMAGE): images, **known})

    return ReplayedNetwork(model, run, {graph.sources[number] for number in sources})


def _product_with(graph: Graph, weight: str) -> int | None:
    """Return the number of the first product with the parameter of this name, or None where there is none."""
    for number in graph.used_operations():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not has_trained_weight(graph, node):
            continue
        first, second = product_operands(node)
        found = graph.as_parameter(second if graph.depends_on_image(first) else first)
        if found is not None and found[0] == weight:
            return number
    return None


def _layer_input(graph: Graph, weight: str) -> Ref | None:
    """Return what the first product with the parameter of this name is given, or None where there is none."""
    number = _product_with(graph, weight)
    if number is None:
        return None
    first, second = product_operands(graph.nodes[number])
    return first if graph.depends_on_image(first) else second


Replay = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def _replay_from(graph: Graph, start: Ref, flow: list[int]) -> Replay:
    """Return the function of the layer's inputs (N, n) and of parameters and buffers by name."""
    assert graph.returned is not None
    returned, shape = graph.returned, graph.value(start).shape
    # with what makes operands of the parameters: a transposed weight, say
    taken = {ref for number in flow for ref in graph.nodes[number].refs if not graph.depends_on_image(ref)}
    nodes = sorted({*flow, *(n for ref in taken for n in graph.operations_behind(ref))})

    def run(inputs: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        given = inputs.flatten(1)
        given = given if given.shape == shape else given.mT
        known = {Ref(number): tensors[name] for number, name in graph.sources.items() if name in tensors}
        return graph.replay(nodes, returned, {start: given, **known})

    return run


class ReplayedNetwork(nn.Module):
    """A recorded part of a network as a module with parameters and buffers of the whole.

    Args:
        model: the whole.
        run: what the part makes of its inputs, and of parameters and buffers by name.
        names: of those that it has; None takes all.
    """

    takes_centered: bool = False
    """Whether what it is given may have a mean of zero in each example, whatever it is of."""
    moves_levels: bool = False
    """Whether numbers that are given of pictures at levels of 8 bits are not at such levels."""

    def __init__(self, model: nn.Module, run: Replay, names: Collection[str] | None = None) -> None:
        super().__init__()
        self.run = run
        for name, parameter in model.named_parameters():
            if names is None or name in names:
                _owner(self, name).register_parameter(name.rpartition(".")[2], parameter)
        kept = model.state_dict().keys()
        for name, value in model.named_buffers():
            if name in kept and (names is None or name in names):
                _owner(self, name).register_buffer(name.rpartition(".")[2], value)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the part makes of its inputs."""
        tensors: dict[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return self.run(inputs, tensors)


def _owner(root: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the tensor of this name; it is made where there is none."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root
