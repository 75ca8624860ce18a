"""Cuts a traced network with batch normalization in training mode into residual blocks.

A block is relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x)), where the shortcut is x itself, a normalized
convolution, or another map without parameters, such as one that drops pixels and adds channels of zeros. What an
operation is, is told by what it does to numbers; names and modules do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.batch_normalization import BatchStatistics, TracedNormalization
from attacks.analytic.graph.batch_statistics import BatchNormalization, NormalizedConvolution
from attacks.analytic.graph.batch_statistics_blocks import LinearShortcut, NormalizedBlock
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.network.operation_trace import Ref
from fl.seeds import stream

Normalizations = Mapping[int, TracedNormalization]
"""By the operation of the convolution below."""


NO_SHORTCUT = (
    "is neither what they take, nor a normalized convolution of it, nor linear in it; blocks of three convolutions are "
    "not solved in training mode"
)
"""What is the matter with a shortcut that leads elsewhere."""


class NoBlockError(Exception):
    """What lies below an activation is no residual block that can be solved."""


@dataclass(frozen=True)
class TracedBlock:
    """A residual block of a traced network.

    Attributes:
        block: its layers, with all that a server sees of them.
        output: what its last activation returns.
        hidden: h, the input of its second convolution.
        taken: x, its input.
    """

    block: NormalizedBlock
    output: Ref
    hidden: Ref
    taken: Ref


@dataclass(frozen=True)
class BlockChain:
    """Residual blocks, each fed by the next.

    Attributes:
        blocks: the top one first.
        end: why there is none further down, in words.
    """

    blocks: tuple[TracedBlock, ...]
    end: str


def cut_into_blocks(network: NetworkGraph, norms: Normalizations, statistics: BatchStatistics) -> BlockChain:
    """Return the residual blocks of a network, from the topmost activation that ends one down to where they end.

    Args:
        network: the graph, of a trace at the number of images.
        norms: its normalizations in training mode.
        statistics: of the client's batch.
    """
    cutter = _Cutter(network, norms, statistics)
    blocks: list[TracedBlock] = []
    end = ""
    for activation in sorted(network.activations, reverse=True):
        out = Ref(activation)
        if network.graph.value(out).ndim != 4 or (blocks and out != blocks[-1].taken):
            continue
        try:
            blocks.append(cutter.cut(out))
        except NoBlockError as error:
            if blocks:
                return BlockChain(tuple(blocks), str(error))
            end = end or str(error)
    return BlockChain(tuple(blocks), end or "it has no activation behind a convolution")


@dataclass(frozen=True)
class _Cutter:
    network: NetworkGraph
    norms: Normalizations
    statistics: BatchStatistics

    def cut(self, out: Ref) -> TracedBlock:
        """Return the block that an activation ends.

        Raises:
            NoBlockError: it ends none.
        """
        upper, rest = self._split_sum(out)
        hidden = self.network.layer_input(upper.convolution)
        lower = self._norm_at(self._taken_by_activation(hidden))
        if lower is None:
            raise NoBlockError(f"{self._name(upper)} takes no activation of a normalized convolution")
        taken = self.network.layer_input(lower.convolution)
        second = self._layer(upper)
        if second.stride != 1:
            raise NoBlockError(f"{self._name(upper)} has a stride")
        users = {lower.convolution}
        if rest == taken:
            shortcut: NormalizedConvolution | LinearShortcut | None = None
            users |= {self.network.flows_into(out.node)[0].node}
        elif (norm := self._norm_at(rest)) is not None:
            if self.network.layer_input(norm.convolution) != taken:
                raise NoBlockError(f"{self._name(norm)} takes another input than the block")
            shortcut = self._layer(norm)
            users |= {norm.convolution}
        else:
            shortcut, first = self._linear_shortcut(
                taken, rest, f"the shortcut around {self._name(lower)} and {self._name(upper)}"
            )
            users |= {first}
        if set(self.network.consumers[taken]) != users or self.network.consumers[hidden] != [upper.convolution]:
            raise NoBlockError(f"what {self._name(lower)} or {self._name(upper)} takes is used elsewhere, too")
        block = NormalizedBlock(self._layer(lower), second, shortcut)
        return TracedBlock(block, out, hidden, taken)

    def _taken_by_activation(self, out: Ref) -> Ref:
        """Return what goes into the ReLU that made a tensor."""
        activation = self.network.activations.get(out.node)
        if activation is None or activation.slope != 0:
            raise NoBlockError(f"{self._place(out)} is no ReLU")
        return self.network.flows_into(out.node)[0]

    def _place(self, ref: Ref) -> str:
        return "the image" if ref.node < 0 else str(self.network.graph.nodes[ref.node])

    def _split_sum(self, out: Ref) -> tuple[TracedNormalization, Ref]:
        """Return the normalized convolution and the other tensor whose sum an activation takes."""
        total = self._taken_by_activation(out)
        parts = self.network.flows_into(total.node) if total.node >= 0 else []
        if len(parts) != 2 or not self._is_sum(total, parts):
            raise NoBlockError(f"{self._place(out)} takes no sum of a normalized convolution and a shortcut")
        for part, rest in (parts, parts[::-1]):
            norm = self._norm_at(part)
            if norm is not None and self._is_inner(norm):
                return norm, rest
        raise NoBlockError(f"neither side of what {self._place(out)} takes is a normalized convolution behind another")

    def _is_inner(self, norm: TracedNormalization) -> bool:
        """Return whether a normalized convolution takes what only it takes, from an activation behind another one."""
        hidden = self.network.layer_input(norm.convolution)
        if hidden.node not in self.network.activations or len(self.network.consumers[hidden]) != 1:
            return False
        return self._norm_at(self.network.flows_into(hidden.node)[0]) is not None

    def _is_sum(self, total: Ref, parts: list[Ref]) -> bool:
        like = self.network.graph.value(total)
        draws = [torch.randn(like.shape, generator=stream(key, "sum"), dtype=like.dtype).to(like) for key in (0, 1)]
        if any(self.network.graph.value(part).shape != like.shape for part in parts):
            return False
        with torch.no_grad():
            made = self.network.run(total.node, dict(zip(parts, draws, strict=True)))
        return torch.allclose(made, draws[0] + draws[1])

    def _norm_at(self, ref: Ref) -> TracedNormalization | None:
        """Return the normalization that makes a tensor which nothing else than one operation takes."""
        found = next((norm for norm in self.norms.values() if norm.returned == ref), None)
        return found if found is not None and len(self.network.consumers[ref]) == 1 else None

    def _name(self, norm: TracedNormalization) -> str:
        return self.network.layers[norm.convolution].name

    def _layer(self, norm: TracedNormalization) -> NormalizedConvolution:
        """Return a convolution and its normalization with all that a server sees of them."""
        layer, graph = self.network.layers[norm.convolution], self.network.graph
        kernel = layer.weight.shape[2:]
        padded = layer.padding == (kernel[0] // 2, kernel[1] // 2) and all(k % 2 == 1 for k in kernel)
        even = layer.stride[0] == layer.stride[1] and layer.dilation == (1, 1) and padded
        if not even or layer.groups != 1:
            raise NoBlockError(f"{layer.name} is no convolution of one group that is padded by half its odd kernel")
        if not (norm.gamma_name and norm.beta_name):
            raise NoBlockError(
                f"no gradients of a weight and a bias of the normalization behind {layer.name} were sent"
            )
        moments = self.statistics.moments(graph.value(Ref(norm.convolution)))
        if moments is None:
            raise NoBlockError(f"no buffer keeps the batch's statistics of what {layer.name} returns")
        bias = graph.nodes[norm.convolution].args[2]
        mean = moments[0] if bias is None else moments[0] - graph.value(bias)
        batch, _, height, width = layer.output_shape
        seen = BatchNormalization(
            gamma=norm.gamma,
            beta=norm.beta,
            gamma_gradient=self.network.gradient[norm.gamma_name].flatten(),
            beta_gradient=self.network.gradient[norm.beta_name].flatten(),
            mean=mean,
            variance=moments[1],
            count=batch * height * width,
            eps=norm.eps,
        )
        size = (layer.input_shape[2], layer.input_shape[3])
        return NormalizedConvolution(layer.weight, layer.gradient, layer.stride[0], size, batch, seen, layer.name)

    def _linear_shortcut(self, start: Ref, end: Ref, name: str) -> tuple[LinearShortcut, int]:
        """Return the map without parameters from a block's input to its sum, and its first operation."""
        nodes: list[int] = []
        at = end
        while at != start:
            flows = list(dict.fromkeys(self.network.flows_into(at.node))) if at.node > start.node else []
            if len(flows) != 1 or at.node in self.network.layers or not self.network.is_affine(at.node):
                raise NoBlockError(f"{name} {NO_SHORTCUT}")
            if self.network.consumers[at] != [nodes[-1]] if nodes else len(self.network.consumers[at]) != 1:
                raise NoBlockError(f"{name} is used elsewhere, too")
            nodes.append(at.node)
            at = flows[0]
        graph, order = self.network.graph, nodes[::-1]
        like = graph.value(start)

        def apply(values: Tensor) -> Tensor:
            return graph.replay(order, end, {start: values})

        if bool(apply(torch.zeros_like(like)).any()):
            raise NoBlockError(f"{name} adds constants")
        return LinearShortcut(apply, like), order[0]
