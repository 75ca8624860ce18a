"""Reads a recorded network as a sequence of pieces: weighted layers, and what stands between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attacks.network.operation_recognition import (
    ElementwiseAffine,
    LinearMap,
    Reshape,
    as_row,
    contains_weighted_branch,
    has_trained_weight,
    merge_segments,
    parameters_behind,
    product_operands,
    recognize,
)
from attacks.network.operation_trace import Graph, Node, Ref, Segment

MAX_MERGED = 12
"""Parts of a forward between two layers that are tried to be read as one."""


ParameterNames = tuple[tuple[str, Tensor | None], tuple[str, Tensor | None] | None]
"""Names of a layer's weight and bias in the update, with the places of their numbers there; None for no bias."""


@dataclass(frozen=True)
class Piece:
    """One step of a chain.

    Attributes:
        module: that does the same; None where there is none.
        place: where it stands in the model, in words.
        input: what it was given by the probe (1, ...).
        output: what it returned for that.
        sources: names of the parameters and buffers that it uses.
        refusal: why there is no such module.
        name: of a weighted layer; empty for any other.
        names: of its weight and bias in the update, where they are not `name.weight` and `name.bias`.
        places: where each number of them stands in the parameter of that name, where they lie otherwise.
        normalizes: whether it is a log-softmax at the end, which cross entropy does not see.
        factors: by which each number of the weight is multiplied before the layer takes it, as they lie there; None
            where it is taken as it is. Only who asks for such layers is given them.
    """

    module: nn.Module | None
    place: str
    input: Tensor
    output: Tensor
    sources: frozenset[str] = frozenset()
    refusal: str = ""
    name: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Tensor] = field(default_factory=dict)
    normalizes: bool = False
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        for end in ("input", "output"):
            object.__setattr__(self, end, as_row(getattr(self, end)))


def read_pieces(graph: Graph) -> Iterator[Piece]:
    """Yield what the network does from the image to what it returns, piece by piece."""
    segments = graph.segments()
    between: list[Segment] = []
    skip = 0
    for i, segment in enumerate(segments):
        if i < skip:
            continue
        node = graph.nodes[segment.nodes[0]]
        unfolded = _read_unfolded(graph, segments[i : i + MAX_MERGED])
        if unfolded is None and (len(segment.nodes) > 1 or not has_trained_weight(graph, node)):
            between.append(segment)
            continue
        below, between = _read_between(graph, between), []
        piece, count = unfolded or (_read_weighted(graph, node, segment), 1)
        piece, taken = _absorb_bias(graph, piece, segments[i + count :])
        skip = i + count + taken
        if unfolded is not None:
            piece, taken = _absorb_reshaping(graph, piece, segments[skip:])
            skip += taken
        piece = _absorb_padding(below, piece)
        yield from below
        yield piece
    above = _read_between(graph, between)
    if above and above[-1].refusal and _log_softmax(graph, segments[-1]):
        above[-1] = replace(above[-1], module=nn.Identity(), refusal="", normalizes=True)
    yield from above


def _log_softmax(graph: Graph, segment: Segment) -> bool:
    node = graph.nodes[segment.nodes[0]]
    return len(segment.nodes) == 1 and node.operation == "log_softmax" and node.args[1] in {1, -1}


def read_layer(graph: Graph, number: int, *, scaled: bool = False) -> tuple[Piece, int]:
    """Return the weighted layer of one operation, wherever that stands, and the number of the operation that ends it.

    A bias may be added after the product, by an operation of its own.

    Args:
        graph: of the network.
        number: of the operation.
        scaled: whether linear layers count whose weight's numbers are each multiplied by a factor first.
    """
    node = graph.nodes[number]
    start = next(ref for ref in node.refs if graph.depends_on_image(ref))
    piece = _read_weighted(graph, node, Segment((number,), start, Ref(number)))
    if scaled and piece.module is None and node.operation != "convolution":
        made = _linear(graph, node, piece, scaled=True)
        piece = piece if isinstance(made, str) else replace(made, refusal="")
    following = _only_users(graph, Ref(number))
    piece, taken = _absorb_bias(graph, piece, following)
    return piece, following[taken - 1].nodes[0] if taken else number


def _only_users(graph: Graph, ref: Ref) -> list[Segment]:
    """Return the operations that follow a tensor one after the other, as long as nothing else takes what they take."""
    found: list[Segment] = []
    used = graph.used_operations()
    while ref != graph.returned:
        users = [number for number in used if ref in graph.nodes[number].refs]
        if len(users) != 1 or len(graph.nodes[users[0]].outputs) != 1:
            break
        found.append(Segment((users[0],), ref, Ref(users[0])))
        ref = Ref(users[0])
    return found


def _read_weighted(graph: Graph, node: Node, segment: Segment) -> Piece:
    """Return a convolution or a linear layer, by its own module."""
    taken, given = graph.value(segment.start), graph.value(segment.end)
    piece = Piece(None, str(node), taken, given, node.sources)
    made = _convolution(graph, node, piece) if node.operation == "convolution" else _linear(graph, node, piece)
    return replace(piece, refusal=made) if isinstance(made, str) else made


def _convolution(graph: Graph, node: Node, piece: Piece) -> Piece | str:
    _, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if piece.input.ndim != 4 or transposed:
        return f"{node}: only convolutions over two dimensions that are not transposed are handled"
    if groups != 1:
        return f"{node}: groups are not handled"
    parameters = _parameter_names(graph, node, weight, bias)
    if isinstance(parameters, str):
        return parameters
    value = graph.value(weight)
    layer = nn.Conv2d(
        value.shape[1],
        value.shape[0],
        tuple(value.shape[2:]),  # type: ignore[arg-type]
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        bias=bias is not None,
        device="meta",
    )
    return _with_parameters(piece, layer, graph, value, bias, parameters)


def _read_unfolded(graph: Graph, segments: Sequence[Segment]) -> tuple[Piece, int] | None:
    """Return a convolution written as a product of its weight with all patches, and how many segments it takes.

    It is told by its numbers: what it returns is what a convolution of the same weight does.

    Args:
        graph: of the network.
        segments: the first may take the patches out (`unfold`).
    """
    node = graph.nodes[segments[0].nodes[0]]
    taken = graph.value(segments[0].start)
    if len(segments[0].nodes) > 1 or node.operation != "im2col" or taken.ndim != 4:
        return None
    product = _first_product(graph, segments)
    if product is None:
        return None
    _, kernel, dilation, padding, stride = node.args
    parts = _patch_weight(graph, graph.nodes[segments[product].nodes[0]], (taken.shape[1], *_pair(kernel)))
    if parts is None:
        return None
    weight, bias, parameters = parts
    with torch.no_grad():
        right = nn.functional.conv2d(taken, weight, None, _pair(stride), _pair(padding), _pair(dilation))
    for end in range(product, len(segments)):
        last = graph.nodes[segments[end].nodes[0]]
        if last.operation == "add" and bias is None:
            bias = _added_parameter(graph, last)
            other = None if bias is None else graph.as_parameter(bias)
            if bias is None or other is None or graph.value(bias).numel() != len(weight):
                return None
            parameters = parameters[0], other
        shift = graph.value(bias).view(1, -1, 1, 1) if bias is not None else 0.0
        given, expected = graph.value(segments[end].end), right + shift
        if given.numel() == expected.numel() and torch.allclose(given.flatten(), expected.flatten(), 1e-9, 1e-9):
            layer = nn.Conv2d(
                weight.shape[1],
                len(weight),
                _pair(kernel),
                stride=_pair(stride),
                padding=_pair(padding),
                dilation=_pair(dilation),
                bias=bias is not None,
                device="meta",
            )
            whole = [graph.nodes[number] for segment in segments[: end + 1] for number in segment.nodes]
            sources = frozenset[str]().union(*(one.sources for one in whole))
            piece = Piece(None, str(graph.nodes[segments[product].nodes[0]]), taken, given, sources)
            return _with_parameters(piece, layer, graph, weight, bias, parameters), end + 1
    return None


def _added_parameter(graph: Graph, node: Node) -> Ref | None:
    """Return what is made of parameters and added, once, to what flows."""
    one, other, factor = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else 1
    added = other if isinstance(one, Ref) and graph.depends_on_image(one) else one
    return added if factor == 1 and isinstance(added, Ref) and parameters_behind(graph, added) else None


def _first_product(graph: Graph, segments: Sequence[Segment]) -> int | None:
    """Return which segment is a product with a parameter, where those before it have none."""
    for i, segment in enumerate(segments):
        node = graph.nodes[segment.nodes[0]]
        if len(segment.nodes) > 1 or (node.sources and not has_trained_weight(graph, node)):
            return None
        if node.sources:
            return i
    return None


def _patch_weight(
    graph: Graph, node: Node, patch: tuple[int, int, int]
) -> tuple[Tensor, Ref | None, ParameterNames] | None:
    """Return the weight (O, C, h, w) by which a product multiplies patches (C, h, w), and what it adds."""
    if node.operation == "convolution":
        return None
    first, second = product_operands(node)
    flows_first = graph.depends_on_image(first)
    weight = second if flows_first else first
    value, bias = graph.value(weight), node.args[0] if node.operation in {"addmm", "baddbmm"} else None
    if bias is not None and (not flows_first or node.args[3:] not in ([1, 1], [1.0, 1.0])):
        return None
    parameters = _parameter_names(graph, node, weight, bias)
    matrix = value.flatten(0, -2).T if flows_first else value.flatten(0, -2)
    if isinstance(parameters, str) or matrix.shape[1] != math.prod(patch):
        return None
    if bias is not None and graph.value(bias).numel() != len(matrix):
        return None
    (name, places), rest = parameters
    places = _element_indices(value) if places is None else places
    places = (places.flatten(0, -2).T if flows_first else places.flatten(0, -2)).reshape(-1, *patch)
    shaped = matrix.reshape(-1, *patch).contiguous()
    same = graph.tensors[name].shape == shaped.shape and torch.equal(places, _element_indices(shaped))
    return shaped, bias, ((name, None if same else places), rest)


def _absorb_reshaping(graph: Graph, piece: Piece, following: Sequence[Segment]) -> tuple[Piece, int]:
    """Return a convolution with the step that gives what it returns the shape (1, O, H, W), and how many those are."""
    if not following or len(following[0].nodes) > 1:
        return piece, 0
    taken, given = graph.value(following[0].start), graph.value(following[0].end)
    same = taken.numel() == given.numel() and torch.equal(taken.flatten(), given.flatten())
    return (replace(piece, output=given), 1) if same and given.ndim == 4 else (piece, 0)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return numbers[0], numbers[-1]


def _linear(graph: Graph, node: Node, piece: Piece, *, scaled: bool = False) -> Piece | str:
    """Read a linear layer off a product of one row, or one column, with a matrix."""
    first, second = product_operands(node)
    flows_first = graph.depends_on_image(first)
    flow, weight = (first, second) if flows_first else (second, first)
    value, taken = graph.value(weight), graph.value(flow)
    if len(piece.input) != 1 or taken.numel() != (value.shape[-2] if flows_first else value.shape[-1]):
        return f"{node} sees more than one input per image"
    bias = node.args[0] if node.operation in {"addmm", "baddbmm"} else None
    if bias is not None and (
        node.args[3:] not in ([1, 1], [1.0, 1.0]) or (isinstance(bias, Ref) and graph.depends_on_image(bias))
    ):
        return f"{node} adds something else than a bias"
    factors = graph.as_scaled_parameter(weight) if scaled else None
    parameters = _parameter_names(graph, node, weight, bias, None if factors is None else factors[:2])
    if isinstance(parameters, str):
        return parameters
    matrix = value.flatten(0, -2).T if flows_first else value.flatten(0, -2)
    if isinstance(bias, Ref) and graph.value(bias).numel() != len(matrix):
        return f"{node} adds one bias to several outputs"
    (name, places), rest = parameters[0], parameters[1]
    places = _element_indices(value) if places is None else places
    places = places.flatten(0, -2).T if flows_first else places.flatten(0, -2)
    sent = graph.tensors[name]
    same = sent.shape == matrix.shape and torch.equal(places, _element_indices(matrix))
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
    read = _with_parameters(piece, layer, graph, matrix, bias, ((name, None if same else places), rest))
    if factors is None:
        return read
    return replace(read, factors=factors[2].flatten(0, -2).T if flows_first else factors[2].flatten(0, -2))


def _element_indices(value: Tensor) -> Tensor:
    return torch.arange(value.numel(), device=value.device).view(value.shape)


def _parameter_names(
    graph: Graph, node: Node, weight: Ref, bias: object, found: tuple[str, Tensor | None] | None = None
) -> ParameterNames | str:
    """Return the parameters that weight and bias are, or why they are none; `found` is what the weight is, if known."""
    found = found or graph.as_parameter(weight)
    if found is None:
        names = ", ".join(sorted(parameters_behind(graph, weight)))
        return f"{node}: its weight is computed from {names}, whose gradient is another than its own"
    if bias is None:
        return found, None
    if not isinstance(bias, Ref) or not parameters_behind(graph, bias):
        return found, None  # a constant
    other = graph.as_parameter(bias)
    if other is None or graph.value(bias).numel() != graph.tensors[other[0]].numel():
        return f"{node}: its bias is computed from {', '.join(sorted(parameters_behind(graph, bias)))}"
    return found, other


def _with_parameters(
    piece: Piece,
    layer: nn.Conv2d | nn.Linear,
    graph: Graph,
    weight: Tensor,
    bias: object,
    parameters: ParameterNames,
) -> Piece:
    """Return the layer with its numbers, and what they are called in the update."""
    (name, places), other = parameters
    layer.weight = _parameter(weight.contiguous(), graph.tensors[name])
    if bias is not None:
        value = graph.value(bias) if isinstance(bias, Ref) else bias
        assert isinstance(value, Tensor)
        layer.bias = _parameter(value.flatten(), graph.tensors[other[0]] if other is not None else None)
    own = name.removesuffix(".weight") if name.endswith(".weight") else name
    names = {"weight": name, "bias": other[0] if other is not None else ""}
    where = {"weight": places} if places is not None else {}
    if other is not None and (other[1] is not None or graph.tensors[other[0]].ndim != 1):
        where["bias"] = torch.arange(len(weight), device=weight.device) if other[1] is None else other[1].flatten()
    return replace(piece, module=layer, name=own, names=names, places=where)


def _parameter(value: Tensor, sent: Tensor | None) -> nn.Parameter:
    """Return a parameter of the numbers of `value`, which trains where the one that was sent does."""
    if sent is not None and sent.shape == value.shape and isinstance(sent, nn.Parameter) and torch.equal(sent, value):
        return sent
    trains = sent is not None and sent.requires_grad
    return nn.Parameter(value.detach().clone(), requires_grad=trains)


def _absorb_bias(graph: Graph, piece: Piece, following: Sequence[Segment]) -> tuple[Piece, int]:
    """Return a layer with a parameter that is added to what it returns, output by output, as its bias.

    Args:
        graph: of the network.
        piece: the layer.
        following: what comes after it; other shapes for the same numbers in the same order may come in between.

    Returns:
        The layer, and how many of the segments that follow are part of it: none where nothing is added.
    """
    layer = piece.module
    if not isinstance(layer, nn.Conv2d | nn.Linear) or layer.bias is not None:
        return piece, 0
    for i, segment in enumerate(following):
        taken, given = graph.value(segment.start), graph.value(segment.end)
        if len(segment.nodes) > 1:
            break
        if graph.nodes[segment.nodes[0]].operation == "add":
            biased = _with_bias_of(graph, piece, segment)
            return (piece, 0) if biased is None else (biased, i + 1)
        if taken.numel() != given.numel() or not torch.equal(taken.flatten(), given.flatten()):
            break
    return piece, 0


def _with_bias_of(graph: Graph, piece: Piece, segment: Segment) -> Piece | None:
    """Return the layer with what a sum adds to its outputs as its bias; None where that is no parameter of theirs."""
    node, layer = graph.nodes[segment.nodes[0]], piece.module
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    added, given = _added_parameter(graph, node), graph.value(segment.end)
    if added is None or given.numel() != piece.output.numel():
        return None
    found, value = graph.as_parameter(added), graph.value(added)
    outputs = len(layer.weight)
    if found is None or value.numel() != outputs:
        return None
    places = given.numel() // outputs  # a convolution's outputs stand channel by channel
    if not torch.equal(value.expand(given.shape).flatten(), value.flatten().repeat_interleave(places)):
        return None
    return replace(
        _with_added_bias(piece, layer, graph, value, found),
        output=given,
        sources=piece.sources | node.sources,
    )


def _with_added_bias(
    piece: Piece, layer: nn.Conv2d | nn.Linear, graph: Graph, value: Tensor, found: tuple[str, Tensor | None]
) -> Piece:
    name, places = found
    sent = graph.tensors[name]
    layer.bias = _parameter(value.flatten(), sent)
    where = dict(piece.places)
    if places is not None or sent.ndim != 1:
        where["bias"] = _element_indices(layer.bias) if places is None else places.flatten()
    return replace(piece, names={**piece.names, "bias": name}, places=where)


def _absorb_padding(before: list[Piece], piece: Piece) -> Piece:
    """Return a convolution with the zeros that were put around what it is given, as many on both sides."""
    last = before[-1] if before else None
    if not isinstance(piece.module, nn.Conv2d) or last is None or not isinstance(last.module, nn.ZeroPad2d):
        return piece
    left, right, top, bottom = last.module.padding
    if left != right or top != bottom:
        return piece
    padding = piece.module.padding
    assert not isinstance(padding, str)
    piece.module.padding = (padding[0] + top, padding[1] + left)
    before.pop()
    return replace(piece, input=last.input)


def _read_between(graph: Graph, segments: Sequence[Segment]) -> list[Piece]:
    """Return what stands between two layers in as few pieces as recognition allows, each as short as can be."""
    closed = next((i for i, segment in enumerate(segments) if contains_weighted_branch(graph, segment)), None)
    if closed is not None:  # nothing that is merged with it could be undone
        below, above = _read_between(graph, segments[:closed]), _read_between(graph, segments[closed + 1 :])
        return [*below, _read_piece(graph, segments[closed]), *above]
    if not segments:
        return []
    single = [_read_piece(graph, segment) for segment in segments]
    if not any(map(_vagueness, single)) or not 1 < len(segments) <= MAX_MERGED:
        return _simplify(single)
    best: list[tuple[int, list[Piece]]] = [(0, [])]
    for end in range(1, len(segments) + 1):
        choices = []
        for start in range(end):
            piece = single[start] if end == start + 1 else _read_piece(graph, merge_segments(segments[start:end]))
            if not piece.refusal or end == start + 1:
                cost = best[start][0] + MAX_MERGED**2 * _vagueness(piece) + (end - start) ** 2
                choices.append((cost, [*best[start][1], piece]))
        best.append(min(choices, key=lambda choice: choice[0]))
    return _simplify(best[-1][1])


def _vagueness(piece: Piece) -> int:
    """Return how little is known of a piece: nothing, or that it is linear."""
    return 2 * MAX_MERGED if piece.refusal else int(isinstance(piece.module, LinearMap | nn.ZeroPad2d))


def _read_piece(graph: Graph, segment: Segment) -> Piece:
    found = recognize(graph, segment)
    nodes = [graph.nodes[number] for number in segment.nodes]
    place, sources = str(nodes[-1]), frozenset[str]().union(*(node.sources for node in nodes))
    taken, given = graph.value(segment.start), graph.value(segment.end)
    if isinstance(found, str):
        return Piece(None, place, taken, given, sources, found)
    found.place = place  # type: ignore[assignment]
    return Piece(found, place, taken, given, sources)


def _simplify(pieces: Sequence[Piece]) -> list[Piece]:
    """Leave out pieces that do nothing, and join scalings that follow each other."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece.module, Reshape | nn.Flatten | nn.Identity) and piece.input.shape == piece.output.shape:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and isinstance(last.module, ElementwiseAffine)
            and isinstance(piece.module, ElementwiseAffine)
        ):
            found[-1] = replace(
                piece,
                module=_compose(last.module, piece.module),
                input=last.input,
                sources=last.sources | piece.sources,
            )
        else:
            found.append(piece)
    return found


def _compose(first: ElementwiseAffine, second: ElementwiseAffine) -> ElementwiseAffine:
    run: Callable[[Tensor], Tensor] = lambda x: second.run(first.run(x))  # noqa: E731
    both = ElementwiseAffine(run, first.shape, whole=first.whole and second.whole)
    both.dtype, both.device = first.dtype, first.device
    both.place = second.place
    return both
