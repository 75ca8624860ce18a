"""A network from the input of one of its layers up: the recorded operations above it, with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from attacks.network.layer_chain import trace_view
from attacks.network.operation_recognition import PRODUCTS, has_trained_weight, product_operands
from attacks.network.operation_trace import Graph, Ref
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
        view: the server's; nothing of it may be private.
        weight: name of the layer's weight.
        count: of the images that it is given at once.

    Returns:
        None where the network can't be traced, the layer sees more than one input per image, or something of the image
        reaches what the network returns by another way.
    """
    found = trace_view(view, view.device, count=count, dtype=view.dtype)
    if isinstance(found, NotApplicable):
        return None
    model, graph = found
    start = _layer_input(graph, weight)
    if start is None or graph.value(start).ndim != 2 or count not in graph.value(start).shape:
        return None
    starts = [segment.start for segment in graph.segments()]
    if start not in starts:
        return None
    flow = [number for segment in graph.segments()[starts.index(start) :] for number in segment.nodes]
    used = frozenset[str]().union(*(graph.nodes[number].sources for number in flow))
    below = [graph.nodes[number] for number in graph.used_operations() if number not in set(flow)]
    shared = frozenset[str]().union(*(node.sources for node in below))
    return UpperPart(_ReplayedNetwork(model, _replay_from(graph, start, flow)), (used - shared) & graph.parameters)


def _layer_input(graph: Graph, weight: str) -> Ref | None:
    """Return what the first product with a parameter is given, or None where there is none."""
    for number in graph.used_operations():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not has_trained_weight(graph, node):
            continue
        first, second = product_operands(node)
        flow, factor = (first, second) if graph.depends_on_image(first) else (second, first)
        found = graph.as_parameter(factor)
        if found is not None and found[0] == weight:
            return flow
    return None


Replay = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def _replay_from(graph: Graph, start: Ref, flow: list[int]) -> Replay:
    """Return the function of the layer's inputs (N, n) and of parameters and buffers by name."""
    assert graph.returned is not None
    returned, shape = graph.returned, graph.value(start).shape
    # with what makes operands of the parameters: a transposed weight, say
    nodes = sorted({*flow, *(n for n in graph.operations_behind(returned) if not graph.nodes[n].flows)})

    def run(inputs: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        given = inputs if inputs.shape == shape else inputs.mT
        known = {Ref(number): tensors[name] for number, name in graph.sources.items() if name in tensors}
        return graph.replay(nodes, returned, {start: given, **known})

    return run


class _ReplayedNetwork(nn.Module):
    """A recorded part of a network as a module with the parameters and buffers of the whole."""

    def __init__(self, model: nn.Module, run: Replay) -> None:
        super().__init__()
        self.run = run
        for name, parameter in model.named_parameters():
            _owner(self, name).register_parameter(name.rpartition(".")[2], parameter)
        kept = model.state_dict().keys()
        for name, value in model.named_buffers():
            if name in kept:
                _owner(self, name).register_buffer(name.rpartition(".")[2], value)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the network returns (N, ...) where the layer is given `inputs` (N, n, 1, 1)."""
        tensors: dict[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return self.run(inputs.flatten(1), tensors)


def _owner(root: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the tensor of this name; it is made where there is none."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root
