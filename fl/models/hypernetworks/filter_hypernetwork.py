"""HyperFedNet's hypernetwork: one embedding for every basic filter, two linear layers that make the filter of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl.parametrization import Generated, parametrizations
from fl.ranges import Width
from fl.tensors import Tensors, Value, dense
from fl.types import Scope, Task

HYPERNET, EMBEDDINGS = "hypernet.", "embeddings."
Shape = tuple[int, int, int, int]
"""Of a basic filter: output channels, input channels, kernel height and width."""


def layer_names(shape: Shape) -> tuple[str, str, str, str]:
    """Return the names of the tensors for filters of `shape`: W_i (in, d, v), B_i (in, d), W_out (n, d), B_out (n,).

    n is the number of weights of one input channel: output channels x height x width, in this order.
    """
    key = f"{HYPERNET}{shape_name(shape)}."
    return f"{key}in.weight", f"{key}in.bias", f"{key}out.weight", f"{key}out.bias"


def embeddings_name(shape: Shape, weight: str) -> str:
    """Name of the embeddings (tiles of output channels, tiles of input channels, v) that make the weight `weight`."""
    return f"{EMBEDDINGS}{shape_name(shape)}.{weight}"


def shape_name(shape: Shape) -> str:
    """Return a shape in a name: `16x16x3x3`."""
    return "x".join(map(str, shape))


def embedded_weights(names: Mapping[str, object]) -> dict[Shape, list[str]]:
    """Return the convolution weights that parameters of these names make, by the shape of their basic filter."""
    found: dict[Shape, list[str]] = {}
    for name in names:
        if name.startswith(EMBEDDINGS):
            shape, weight = name.removeprefix(EMBEDDINGS).split(".", 1)
            out, inside, height, width = map(int, shape.split("x"))
            found.setdefault((out, inside, height, width), []).append(weight)
    return found


@parametrizations.register("filters")
@dataclass(frozen=True, kw_only=True)
class Filters(Generated):
    """Convolutions put together from generated basic filters (HyperFedNet, Chen et al., 2024, section IV-B, Figure 3).

    For input channel i of basic filter j, `F_ji = W_out (W_i v_j + B_i) + B_out`: one matrix and bias per input
    channel, no activation, hidden size d = size of the embeddings. Larger filters are tiled, every tile from an
    embedding of its own. Only the hypernetwork is shared: 320, 75,920 and 282,768 numbers for embeddings of 1, 64, 128,
    half of the paper's cost per round (Figure 7, Table III), which counts up and down. Everything else stays local.

    Attributes:
        embedding: size of every embedding, drawn from N(0, 1).
        block: output and input channels of a basic filter: convolutions are generated whose channels are multiples of
            these, the others (the first one, 1x1 shortcuts) stay the network's own. None takes, for each kernel size
            of all convolutions but the first, the largest block that tiles them: for networks of few channels such as
            LeNet, for which the paper gives none.
        local: whether the network's own weights and its batch-norm statistics stay with the client, whatever the
            method; False leaves them to the method.
        regenerate: "step" generates the filters anew in every step; "round" once a round, and lets them move by
            themselves from there beside hypernetwork and embeddings (Algorithm 1, lines 19 and 23, to the letter).
        init: "he" starts generated weights with variance 2 / (inputs of a basic filter); "default" draws both layers
            as PyTorch does linear ones, which makes weights of standard deviation 1/3. The paper gives neither.
    """

    embedding: Width = 128
    block: tuple[Width, Width] | None = (16, 16)
    local: bool = True
    regenerate: Literal["step", "round"] = "step"
    init: Literal["he", "default"] = "he"

    def __post_init__(self) -> None:
        if self.embedding < 1:
            raise ValueError(f"expected embedding >= 1, got {self.embedding}")
        if self.block is not None and min(self.block) < 1:
            raise ValueError(f"expected a block of at least 1 output and 1 input channel, got {self.block}")

    @classmethod
    def example(cls) -> Filters:
        """Return a tiny one, of two tiles on the network "tiny"."""
        return cls(embedding=3, block=(2, 1))

    def scope(self, name: str) -> Scope | None:
        """The hypernetwork is shared; embeddings are private, and the network's own weights where they are local."""
        if name.startswith(HYPERNET):
            return Scope.SHARED
        if name.startswith(EMBEDDINGS) or self.local:
            return Scope.PRIVATE
        return None

    def basic(self, task: Task) -> dict[str, Shape]:
        """Return the basic filter of every generated weight."""
        kernels = {name: tuple(w.shape) for name, w in task.parameters.items() if w.ndim == 4 and w.shape[-1] > 1}
        if self.block is not None:
            out, inside = self.block
            tiled = {name: s for name, s in kernels.items() if s[0] % out == 0 and s[1] % inside == 0}
            return {name: (out, inside, s[2], s[3]) for name, s in tiled.items()}
        rest = dict(list(kernels.items())[1:])
        result: dict[str, Shape] = {}
        for name, (_, _, height, width) in rest.items():
            alike = [s for s in rest.values() if s[2:] == (height, width)]
            out, inside = (math.gcd(*(s[i] for s in alike)) for i in (0, 1))
            result[name] = (out, inside, height, width)
        return result

    def generates(self, task: Task) -> list[str]:
        """Return the names of the generated convolution weights."""
        return list(self.basic(task))

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return hypernetworks and embeddings from `generator`, everything else from `task.model`.

        Raises:
            ValueError: the network has no convolution that the basic filter tiles.
        """
        basic = self.basic(task)
        if not basic:
            raise ValueError(f"expected convolutions that blocks of {self.block or 'any'} channels tile, got none")
        some = next(iter(task.parameters.values()))
        params: Tensors = {name: value for name, value in task.parameters.items() if name not in basic}

        def uniform(*shape: int, fan_in: int) -> Tensor:
            bound = 1 / math.sqrt(fan_in)  # nn.Linear's default, for weights and biases alike
            return torch.empty(*shape).uniform_(-bound, bound, generator=generator).to(some)

        d = self.embedding
        for shape in dict.fromkeys(basic.values()):
            names, n = layer_names(shape), shape[0] * shape[2] * shape[3]
            params[names[0]], params[names[1]] = uniform(shape[1], d, d, fan_in=d), uniform(shape[1], d, fan_in=d)
            factor = self._factor(shape)
            params[names[2]] = uniform(n, d, fan_in=d) * factor
            params[names[3]] = uniform(n, fan_in=d) * factor
        for weight, shape in basic.items():
            out, inside = task.parameters[weight].shape[:2]
            tiles = (out // shape[0], inside // shape[1], d)
            params[embeddings_name(shape, weight)] = torch.randn(tiles, generator=generator).to(some)
        return params

    def _factor(self, shape: Shape) -> float:
        """Return what the last layer is multiplied by at the start."""
        if self.init == "default":
            return 1.0
        hidden = (1 + 1 / self.embedding) / 3  # variance: of v 1, of every weight 1 / (3 fan_in)
        return math.sqrt(2 / math.prod(shape[1:]) / ((hidden + 1 / self.embedding) / 3))

    def lift(self, params: Tensors) -> Tensors:
        """Return the parameters, with the generated filters beside them where these move by themselves."""
        return params if self.regenerate == "step" else {**params, **self.filters(params)}

    def network(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return filters that move by themselves as they are, the others generated; the rest is the network's own."""
        moved = all(name in params for name in task.parameters)
        made = {} if moved else self.generate(params, task)
        return {name: dense(params[name]) if name in params else made[name] for name in task.parameters}

    def generate(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return the generated convolution weights (out, in, height, width)."""
        return self.filters(params)

    def filters(self, params: Mapping[str, Value]) -> dict[str, Tensor]:
        """Return the generated convolution weights, by name; the parameters alone say which there are."""
        result = {}
        for shape, weights in embedded_weights(params).items():
            own = [dense(params[embeddings_name(shape, weight)]) for weight in weights]
            layers = [dense(params[name]) for name in layer_names(shape)]
            flat = torch.cat([v.reshape(-1, v.shape[-1]) for v in own])
            blocks = basic_filters(flat, layers, shape).split([v.shape[0] * v.shape[1] for v in own])
            for weight, v, mine in zip(weights, own, blocks, strict=True):
                result[weight] = assemble_filter(mine.unflatten(0, v.shape[:2]))
        return result


def hidden_activations(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return W_i v_j + B_i (J, in, d) from embeddings (J, v)."""
    return torch.einsum("idv,jv->jid", weight, embeddings) + bias


def basic_filters(embeddings: Tensor, layers: list[Tensor], shape: Shape) -> Tensor:
    """Return basic filters (J, *shape) from embeddings (J, v) and the four tensors of `layer_names`."""
    rows = hidden_activations(embeddings, layers[0], layers[1]) @ layers[2].mT + layers[3]
    return rows.unflatten(-1, (shape[0], shape[2], shape[3])).transpose(1, 2)


def assemble_filter(blocks: Tensor) -> Tensor:
    """Return one filter (a * out, b * in, height, width) from its tiles (a, b, out, in, height, width)."""
    return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)
