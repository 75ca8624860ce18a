"""Linear layers that are given pixels number by number, wherever they stand, and what flows back into them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.network.layer_sequence import read_layer
from attacks.network.linear_layers import reused_parameters
from attacks.network.operation_recognition import PRODUCTS, has_trained_weight
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.network.pixel_origin import pixel_origin
from fl.losses import Loss


@dataclass(frozen=True)
class PixelLayer:
    """A linear layer whose input (n,) is made of pixels: each number of one pixel, or a constant.

    Attributes:
        weight: name of its weight in the update.
        places: where each number of the weight (m, n) stands there; None where they lie alike.
        node: number of the operation that multiplies by it.
        offset: its input of a black image (n,).
        slope: by how much each number grows with its pixel (n,); 0 of a constant.
        index: which pixel that is (n,), row by row.
    """

    weight: str
    places: Tensor | None
    node: int
    offset: Tensor
    slope: Tensor
    index: Tensor

    def arrange(self, sent: Tensor) -> Tensor:
        """Return what was sent of the weight as it lies in the layer (m, n)."""
        return sent if self.places is None else sent.flatten()[self.places.to(sent.device)].contiguous()

    def is_given_the_same(self, other: PixelLayer) -> bool:
        """Return whether another layer has the same input."""
        return (
            self.offset.shape == other.offset.shape
            and torch.equal(self.index, other.index)
            and torch.allclose(self.offset, other.offset)
            and torch.allclose(self.slope, other.slope)
        )


def pixel_layers(graph: Graph, names: Collection[str]) -> list[PixelLayer]:
    """Return the linear layers that are given pixels, in the order they run.

    Left out are weights that the network uses more than once: their gradients are sums.

    Args:
        graph: what the network computes from one image.
        names: of the weights that are asked for.
    """
    found: list[PixelLayer] = []
    reused = reused_parameters(graph)
    for number in graph.used_operations():
        node = graph.nodes[number]
        if node.operation not in PRODUCTS or not has_trained_weight(graph, node):
            continue
        origin = pixel_origin(graph, next(ref for ref in node.refs if graph.depends_on_image(ref)))
        if origin is None:  # before the layer is read, which takes longer
            continue
        piece, _ = read_layer(graph, number)
        name = piece.names.get("weight", "")
        if name not in names or name in reused or not isinstance(piece.module, nn.Linear):
            continue
        if len(origin[0]) == piece.module.in_features:
            found.append(PixelLayer(name, piece.places.get("weight"), number, *origin))
    return found


@dataclass(frozen=True)
class PixelNetwork:
    """A network as a function of pictures and of what its pixel layers return, each picture by itself.

    Attributes:
        graph: what it computes from one image.
        layers: its pixel layers.
    """

    graph: Graph
    layers: Sequence[PixelLayer]

    def signals(self, pictures: Tensor, targets: Tensor, loss: Loss) -> list[Tensor]:
        """Return what flows back into each layer (K, N, m) from each picture with each target.

        Args:
            pictures: (N, C, H, W), in double precision.
            targets: (K, ...).
            loss: of one example.
        """
        outputs, leaves = self._run(pictures)
        rows = [self._differentiate(outputs, leaves, t.expand(len(pictures), *t.shape), loss) for t in targets]
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    def paired_signals(self, pictures: Tensor, targets: Tensor, loss: Loss) -> list[Tensor]:
        """Return what flows back into each layer (N, m) from each picture with its own target (N, ...)."""
        return self._differentiate(*self._run(pictures), targets, loss)

    def _differentiate(self, outputs: Tensor, leaves: list[Tensor], targets: Tensor, loss: Loss) -> list[Tensor]:
        with torch.enable_grad():
            mean = loss(outputs, targets.to(outputs.device))
        grads = torch.autograd.grad(mean, leaves, retain_graph=True, allow_unused=True)
        found = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
        return [grad.flatten(1) * len(outputs) for grad in found]

    def _run(self, pictures: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs (N, ...), and what each layer returns as the leaves that they are computed from."""
        graph, ends = self.graph, [layer.node for layer in self.layers]
        assert graph.returned is not None
        flow = graph.used_operations()
        lower, upper = [n for n in flow if n <= max(ends)], [n for n in flow if n not in ends]
        end = graph.returned

        def below(image: Tensor) -> tuple[Tensor, ...]:
            values = graph.replay_values(lower, {Ref(IMAGE): image})
            return tuple(values[Ref(number)] for number in ends)

        def above(image: Tensor, *given: Tensor) -> Tensor:
            known = {Ref(number): value for number, value in zip(ends, given, strict=True)}
            return graph.replay(upper, end, {Ref(IMAGE): image, **known})

        images = pictures[:, None].to(graph.image)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # it is none beside a loop
            with torch.no_grad():
                leaves = [leaf.detach().clone().requires_grad_() for leaf in torch.func.vmap(below)(images)]
            with torch.enable_grad():
                outputs = torch.func.vmap(above)(images, *leaves)
        return outputs[:, 0], leaves
