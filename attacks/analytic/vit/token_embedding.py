"""Finds how a vision transformer makes tokens of an image: the patch layer and the position embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from attacks.base import NotApplicable
from attacks.network.linear_layers import PixelOrigin
from attacks.network.operation_recognition import (
    ElementwiseAffine,
    has_trained_weight,
    merge_segments,
    parameters_behind,
    permuted_places,
    product_operands,
    recognize,
    replay_segment,
)
from attacks.network.operation_trace import Graph, Ref, Segment
from fl.seeds import stream


@dataclass(frozen=True)
class TokenEmbedding:
    """How a network makes tokens of an image.

    Attributes:
        position: name of the parameter that is added to the tokens.
        weight: name of the patch layer's weight.
        graph: the recorded network.
        layer_node: number of the patch layer's operation.
        between: what stands between its outputs and the sum.
        places: where each of its numbers stands in that; None where they lie alike.
        origin: how the patch layer's input is made of pixels.
    """

    position: str
    weight: str
    graph: Graph
    layer_node: int
    between: Segment | None
    places: Tensor | None
    origin: PixelOrigin

    @property
    def names(self) -> tuple[str, str]:
        """The two parameters."""
        return self.position, self.weight

    @property
    def signal_shape(self) -> tuple[int, int]:
        """Patches of an image, and numbers of a token."""
        width, patches = self.patch_signals(torch.zeros_like(self.graph.tensors[self.position])).shape
        return patches, width

    @classmethod
    def of(cls, graph: Graph) -> TokenEmbedding | NotApplicable:
        """Return the token embedding of a recorded network, or why it has none."""
        below: list[Segment] = []
        above: list[Segment] = []
        layer: int | None = None
        for segment in graph.segments():
            node = graph.nodes[segment.nodes[0]]
            alone = len(segment.nodes) == 1
            if layer is None and alone and has_trained_weight(graph, node):
                layer = segment.nodes[0]
            elif layer is None:
                below.append(segment)
            elif alone and node.operation == "add" and (found := _position_embedding(graph, segment)) is not None:
                return cls._with_weight(graph, layer, below, above, *found)
            elif not alone and any(has_trained_weight(graph, graph.nodes[n]) for n in segment.nodes):
                break
            else:
                above.append(segment)
        return NotApplicable("no learned position embedding is added to tokens that one layer makes of the image")

    @classmethod
    def _with_weight(
        cls,
        graph: Graph,
        layer: int,
        below: list[Segment],
        above: list[Segment],
        name: str,
        places: Tensor | None,
    ) -> TokenEmbedding | NotApplicable:
        node = graph.nodes[layer]
        origin = _pixel_origin(graph, below)
        if origin is None:
            return NotApplicable(f"what lies between the image and {node} is no new order and scaling", limit=True)
        weight = graph.as_parameter(_weight_ref(graph, layer))
        if weight is None:
            return NotApplicable(f"the weight of {node} is computed from other parameters", limit=True)
        if node.operation == "convolution" and (node.args[6] or node.args[8] != 1 or node.args[1] is None):
            return NotApplicable(f"{node}: groups and transposed convolutions are not handled", limit=True)
        between = merge_segments(above) if above else None
        found = cls(name, weight[0], graph, layer, between, places, origin)
        if not found.is_affine():
            return NotApplicable(f"what lies between {node} and the sum with {name} is not affine", limit=True)
        return found

    def _add_input(self, outputs: Tensor) -> Tensor:
        """Return what the embedding is added to, from the patch layer's outputs."""
        if self.between is None:
            return outputs
        return replay_segment(self.graph, self.between, outputs)

    def is_affine(self) -> bool:
        """Return whether the tokens are that in the patch layer's outputs."""
        like = self.graph.value(Ref(self.layer_node))
        one, other = (torch.randn(like.shape, generator=stream(i, "april"), dtype=like.dtype).to(like) for i in (0, 1))
        with torch.no_grad():
            none, first, second, both = (self._add_input(x) for x in (0 * one, one, other, 2 * one - 3 * other))
        return torch.allclose(both - none, 2 * (first - none) - 3 * (second - none), rtol=1e-8, atol=1e-9)

    def patch_signals(self, sent: Tensor) -> Tensor:
        """Return what flows back into the patch layer (D, T), from the position embedding's gradient."""
        placed = sent.flatten()[self.places] if self.places is not None else sent
        like = self.graph.value(Ref(self.layer_node))
        with torch.enable_grad():
            at = torch.zeros_like(like).requires_grad_()
            tokens = self._add_input(at)
            (back,) = torch.autograd.grad((tokens * placed.reshape(tokens.shape)).sum(), at)
        if self.graph.nodes[self.layer_node].operation == "convolution":
            return back[0].flatten(1)
        return back.flatten(0, -2).mT if self._flows_first else back.flatten(0, -2)

    @property
    def _flows_first(self) -> bool:
        return self.graph.depends_on_image(product_operands(self.graph.nodes[self.layer_node])[0])

    def patch_gradient(self, sent: Tensor) -> Tensor:
        """Return the patch layer's gradient (D, F)."""
        ref = _weight_ref(self.graph, self.layer_node)
        found = self.graph.as_parameter(ref)
        assert found is not None
        value = self.graph.value(ref)
        placed = (sent if found[1] is None else sent.flatten()[found[1]]).reshape(value.shape)
        if self.graph.nodes[self.layer_node].operation == "convolution":
            return placed.flatten(1)
        return placed.flatten(0, -2).mT if self._flows_first else placed.flatten(0, -2)

    def patches(self, images: Tensor) -> Tensor:
        """Return what the patch layer is given (T, F) of pixels (1, C, H, W)."""
        made = self.origin.offset + self.origin.slope * images.flatten()[self.origin.index]
        given = made.view(self._layer_input.shape)
        if self.graph.nodes[self.layer_node].operation == "convolution":
            return functional.unfold(given, **self._unfold_settings)[0].mT
        return given.flatten(0, -2) if self._flows_first else given.flatten(0, -2).mT

    @property
    def _layer_input(self) -> Tensor:
        node = self.graph.nodes[self.layer_node]
        return self.graph.value(next(ref for ref in node.refs if self.graph.depends_on_image(ref)))

    @property
    def _unfold_settings(self) -> dict[str, tuple[int, int]]:
        _, weight, _, stride, padding, dilation, *_ = self.graph.nodes[self.layer_node].args
        pair: Callable[[list[int]], tuple[int, int]] = lambda x: (x[0], x[-1])  # noqa: E731
        kernel = self.graph.value(weight).shape
        return {
            "kernel_size": (kernel[2], kernel[3]),
            "dilation": pair(dilation),
            "padding": pair(padding),
            "stride": pair(stride),
        }

    def pixels(self, patches: Tensor) -> Tensor:
        """Return the pixels (1, n) behind patches (T, F); what no patch holds is gray, what several do their mean."""
        if self.graph.nodes[self.layer_node].operation == "convolution":
            columns, size = patches.mT[None], tuple(self._layer_input.shape[2:])
            whole, often = (
                functional.fold(part, size, **self._unfold_settings) for part in (columns, torch.ones_like(columns))
            )
            given = torch.where(often > 0, whole / often.clamp_min(1), 0.0)
            found = self.origin.pixels(given.flatten()[None])
            seen = torch.empty_like(found)
            seen[:, self.origin.index] = often.flatten()[None]
            return torch.where(seen > 0, found, 0.5)
        given = patches if self._flows_first else patches.mT
        return self.origin.pixels(given.reshape(1, -1))


def _weight_ref(graph: Graph, layer: int) -> Ref:
    node = graph.nodes[layer]
    pair = [node.args[1]] if node.operation == "convolution" else product_operands(node)
    return next(ref for ref in pair if isinstance(ref, Ref) and not graph.depends_on_image(ref))


def _position_embedding(graph: Graph, segment: Segment) -> tuple[str, Tensor | None] | None:
    """Return the parameter whose numbers a sum adds to those of the tokens, and where each of them lies."""
    node = graph.nodes[segment.nodes[0]]
    other = [arg for arg in node.args[:2] if isinstance(arg, Ref) and parameters_behind(graph, arg)]
    taken = graph.value(segment.start)
    if len(other) != 1 or taken.ndim < 3 or (len(node.args) > 2 and node.args[2] != 1):
        return None
    found, value = graph.as_parameter(other[0]), graph.value(other[0])
    return None if value.numel() != taken.numel() or len(taken) != 1 else found


def _pixel_origin(graph: Graph, below: list[Segment]) -> PixelOrigin | None:
    """Return how what the patch layer is given is made of pixels, or None where that is no new order and scaling."""
    image = graph.image
    offset, top = torch.zeros_like(image), torch.ones_like(image)
    index = torch.arange(image.numel(), device=image.device)
    with torch.no_grad():
        for segment in below:
            taken = graph.value(segment.start)
            run = partial(replay_segment, graph, segment)
            noise = torch.randn(taken.shape, generator=stream(2, "april"), dtype=taken.dtype).to(taken)
            order = permuted_places(run, taken, noise)  # the images' dimension may move
            if order is None and not isinstance(recognize(graph, segment), ElementwiseAffine):
                return None
            index = index if order is None else index[order]
            offset, top = run(offset.view(taken.shape)), run(top.view(taken.shape))
    return PixelOrigin(offset.flatten(), (top - offset).flatten(), index)
