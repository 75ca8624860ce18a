"""APRIL reads a picture off a position embedding's gradient (Lu et al., CVPR 2022, arXiv 2112.14087)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attacks.base import Attack, NotApplicable, Reconstruction, Result, attacks
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import trace_view
from attacks.network.linear_layers import PixelOrigin
from attacks.network.operation_recognition import (
    ElementwiseAffine,
    has_trained_weight,
    merge_segments,
    parameters_behind,
    product_operands,
    recognize,
)
from attacks.network.operation_trace import Graph, Ref, Segment
from attacks.update.float_rounding import relative_rounding
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.training_phases import training_phases
from fl.ranges import OpenShare
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

HALF_LEVEL = 0.5 / 255
"""Half a level of 8 bits, in pixel units."""
WORST_PIXEL_FACTOR = 5.0
"""How far the worst pixel may be off, in root mean squares of all."""
MIN_SIGNAL_TO_ROUNDING = 30.0
"""How many times its rounding a direction of the signals must be, relative to the largest, to be told."""
MIN_SINGULAR_VALUE = 1e-9
"""Share of the largest singular value below which an equation says nothing."""


@attacks.register("april")
@dataclass(frozen=True, kw_only=True)
class April(Attack):
    """Solves for the patches of one image by the gradients of position embedding and patch layer (Lu et al., 2022).

    A vision transformer adds a learned number to each of the D numbers of each of its T tokens z = W x_t + b + p_t. So
    dL/dp is what flows back into the tokens, and dL/dW = sum over t of (dL/dp_t) x_t^T: linear equations for the
    patches, D for the T unknowns of each place in a patch. They fix the picture if the T signals are independent, which
    takes T <= D. Attention, labels and classifier above play no part.

    Both parameters are found by what the network does with them (`attacks.network.operation_trace`): the layer is a
    convolution, or a linear layer that is given patches; between its outputs and the sum with the embedding anything
    affine may stand, such as a class token put before the others, and between image and layer a normalization and a new
    order.

    Threat model: an honest-but-curious server that knows the weights and sees one step on one image.

    Attributes:
        fits: verified where no more than this share of dL/dW is unexplained, the signals are independent, and rounding,
            magnified by the condition number of the equations, puts the worst pixel off by less than half a level of 8
            bits, as far as that can be estimated.
    """

    plain: ClassVar[str] = (
        "reads the picture off a vision transformer's update: what flowed back into its patches is in the position "
        "embedding's."
    )

    fits: OpenShare = 1e-3

    @classmethod
    def example(cls) -> April:
        """Return the attack as it is."""
        return cls()

    def attack_view(self, view: ServerView, seed: int) -> Result:
        """Attack one view; nothing is random."""
        gradient = exact_step_gradient(view, batches=True)
        if isinstance(gradient, NotApplicable):
            return gradient
        found = trace_view(view, view.device)
        if isinstance(found, NotApplicable):
            return found
        tokens = TokenEmbedding.of(found[1])
        if isinstance(tokens, NotApplicable):
            return tokens
        for name in (tokens.position, tokens.weight):
            if name not in gradient:
                return NotApplicable(f"the gradient of {name} was not sent")
        count = sum(sum(step) for steps in training_phases(view)[1] or () for step in steps)
        if count != 1:
            return NotApplicable(
                f"the signals of {count} images are summed in the gradient of {tokens.position}: it takes one"
            )
        sent = {n: dense(gradient[n]).detach().double() for n in (tokens.position, tokens.weight)}
        if not all(bool(value.any()) for value in sent.values()):
            return NotApplicable(f"{tokens.position} or {tokens.weight} did not move by more than rounding")
        signal, weight = tokens.patch_signals(sent[tokens.position]), tokens.patch_gradient(sent[tokens.weight])
        if signal.shape[1] > signal.shape[0]:
            equations = f"{signal.shape[0]} equations ({tokens.weight}) for {signal.shape[1]} patches"
            return NotApplicable(f"{equations} at each of {weight.shape[1]} places: too few", limit=True)
        return self._solve_patches(view, tokens, signal / signal.norm(), weight / signal.norm())

    def _solve_patches(
        self, view: ServerView, tokens: TokenEmbedding, signal: Tensor, weight: Tensor
    ) -> Reconstruction:
        """Return the picture, from signals (D, T) and the patch layer's gradient (D, F)."""
        left, sizes, right = torch.linalg.svd(signal, full_matrices=False)
        doubt = sum(relative_rounding(view, name) for name in (tokens.position, tokens.weight))
        told = sizes > max(MIN_SINGULAR_VALUE, MIN_SIGNAL_TO_ROUNDING * doubt) * sizes[0]
        patches = right[told].mT @ ((left[:, told].mT @ weight) / sizes[told, None])
        off = float((weight - signal @ patches).norm() / weight.norm())
        pixels = tokens.pixels(patches).view(1, *view.task.input_shape)
        again = tokens.patches(pixels)
        off = max(off, float((weight - signal @ again).norm() / weight.norm()))
        condition = float(sizes[0] / sizes[-1]) if bool(told.all()) else float("inf")
        sharp = WORST_PIXEL_FACTOR * max(doubt, off) * condition * float(pixels.square().mean().sqrt()) <= HALF_LEVEL
        labels, note = single_label(view)
        if not bool(told.all()):
            few = f"what flows back into {len(told)} patches has {int(told.sum())} independent directions alone"
            note = "; ".join(filter(None, (note, few)))
        return Reconstruction(
            inputs=pixels.clamp(0, 1).to(view.dtype),
            labels=labels,
            objective=off,
            private={"condition": torch.tensor(condition)},
            knowledge=() if view.labels is None else ("labels",),
            verified=bool(told.all()) and sharp and off <= self.fits,
            note=note,
        )


@dataclass(frozen=True)
class TokenEmbedding:
    """How a network makes tokens of an image.

    Attributes:
        position: name of the parameter that is added to the tokens.
        weight: name of the patch layer's weight.
        graph: the recorded network.
        layer_node: number of the patch layer's operation.
        between: what stands between its outputs and the sum.
        added_ref: what is added, made of `position`.
        places: where each of its numbers stands in that; None where they lie alike.
        origin: how the patch layer's input is made of pixels.
    """

    position: str
    weight: str
    graph: Graph
    layer_node: int
    between: Segment | None
    added_ref: Ref
    places: Tensor | None
    origin: PixelOrigin

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
            elif alone and node.operation == "add" and (added := _position_embedding(graph, segment)) is not None:
                return cls._with_weight(graph, layer, below, above, *added)
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
        added: Ref,
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
        found = cls(name, weight[0], graph, layer, between, added, places, origin)
        if not found.is_affine():
            return NotApplicable(f"what lies between {node} and the sum with {name} is not affine", limit=True)
        return found

    def _add_input(self, outputs: Tensor) -> Tensor:
        """Return what the embedding is added to, from the patch layer's outputs."""
        if self.between is None:
            return outputs
        return self.graph.replay(self.between.nodes, self.between.end, {self.between.start: outputs})

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


def _position_embedding(graph: Graph, segment: Segment) -> tuple[Ref, str, Tensor | None] | None:
    """Return what a sum adds to each number of each token, the parameter that it is made of, and where that lies."""
    node = graph.nodes[segment.nodes[0]]
    other = [arg for arg in node.args[:2] if isinstance(arg, Ref) and parameters_behind(graph, arg)]
    taken = graph.value(segment.start)
    if len(other) != 1 or taken.ndim < 3 or (len(node.args) > 2 and node.args[2] != 1):
        return None
    found, value = graph.as_parameter(other[0]), graph.value(other[0])
    if found is None or value.numel() != taken.numel() or len(taken) != 1:
        return None
    return other[0], *found


def _pixel_origin(graph: Graph, below: list[Segment]) -> PixelOrigin | None:
    """Return how what the patch layer is given is made of pixels, or None where that is no new order and scaling."""
    image = graph.image
    offset, top = torch.zeros_like(image), torch.ones_like(image)
    index = torch.arange(image.numel(), device=image.device)
    with torch.no_grad():
        for segment in below:
            taken = graph.value(segment.start)
            run = _SegmentReplay(graph, segment)
            order = run.permutation(taken)
            if order is None and not isinstance(recognize(graph, segment), ElementwiseAffine):
                return None
            index = index if order is None else index[order]
            offset, top = run(offset.view(taken.shape)), run(top.view(taken.shape))
    return PixelOrigin(offset.flatten(), (top - offset).flatten(), index)


@dataclass(frozen=True)
class _SegmentReplay:
    graph: Graph
    segment: Segment

    def __call__(self, x: Tensor) -> Tensor:
        return self.graph.replay(self.segment.nodes, self.segment.end, {self.segment.start: x})

    def permutation(self, taken: Tensor) -> Tensor | None:
        """Return where each number that comes out stood, if all do once; the images' dimension may move."""
        numbers = torch.arange(taken.numel(), dtype=taken.dtype, device=taken.device)
        noise = torch.randn(taken.shape, generator=stream(2, "april"), dtype=taken.dtype).to(taken)
        index = self(numbers.view_as(taken)).flatten().round().long()
        if len(index) != taken.numel() or not bool((index.sort().values == numbers).all()):
            return None
        return index if torch.equal(self(noise).flatten(), noise.flatten()[index]) else None
