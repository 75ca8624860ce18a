"""R-GAP: recursive gradient attack on privacy (Zhu and Blaschko, ICLR 2021, arXiv 2010.07733)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from attacks.analytic.recursive.base import LayerwiseInversion, invert_layers, layer_gradients, layer_output_shape
from attacks.analytic.recursive.start_signal import StartSignal
from attacks.base import NotApplicable, attacks
from attacks.network.layer_chain import extract_layer_chain
from fl.seeds import stream
from fl.view import ServerView


@attacks.register("rgap")
@dataclass(frozen=True, kw_only=True)
class RGAP(LayerwiseInversion):
    """Inverts a network layer by layer with gradient, weight and padding equations (Zhu and Blaschko, ICLR 2021).

    From the last layer down, with x the input of a layer, y = W x + b its output and k = dL/dy:

    - y is the inverse of the activation at the input of the layer above, and k what flows back through it: so the
      activation must be invertible (LeakyReLU, sigmoid, tanh);
    - gradient equations K x = dL/dW, where K makes the layer's gradient of its input; weight equations W x = y - b,
      with W as a matrix; padding equations: padded values are zero. x is the least-squares solution of all together;
    - a fully connected layer needs its gradient alone.

    The paper has one logit without bias and derives its margin from <dL/dW, W>; so does this for a classifier without
    bias (any number of classes, every solution tried). With a bias the classifier's input is read off its gradient.

    Threat model: an honest-but-curious server that knows all weights below the last linear layer with a bias, and sees
    one step on one image, in a plain chain of layers. Max pooling is beyond it: see `cascade`. Float64 updates come out
    to rounding; what is lost between two float32 models limits it, the more so the deeper the network.
    """

    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = (
        "computes the input of each layer from its output and its gradient, from the last layer to the image."
    )

    @classmethod
    def example(cls) -> RGAP:
        """Return the attack as it is."""
        return cls()


@dataclass(frozen=True)
class LayerRank:
    """How far one layer's equations determine its input (R-GAP's rank analysis).

    Attributes:
        name: of the layer.
        unknown_count: numbers that come in.
        gradient_rank: how many of what the layer is given its gradient equations determine.
        rank: how many all equations do.
        condition: condition number of all equations; infinite where they leave something open.
    """

    name: str
    unknown_count: int
    gradient_rank: int
    rank: int
    condition: float

    @property
    def undetermined(self) -> int:
        """Numbers left open: none where the layer gives its input away."""
        return self.unknown_count - self.rank


def rank_analysis(view: ServerView, *, seed: int = 0, cutoff: float = 1e-10) -> tuple[LayerRank, ...] | NotApplicable:
    """Return how far each layer's equations determine its input, for any update of the network; first layer first.

    Ranks hardly depend on the image, so it takes one of noise and noise that flows back: the update is not looked at.

    Args:
        view: what the server saw; its network and weights are used.
        seed: of the noise.
        cutoff: singular values below this share of the largest count as zero.
    """
    stages = extract_layer_chain(view)
    if isinstance(stages, NotApplicable):
        return stages
    draw = stream(seed, "rank")
    pixels = torch.rand(1, *view.task.input_shape, generator=draw, dtype=torch.float64)
    top = len(stages) - 1
    signal = torch.randn(1, *layer_output_shape(stages[top]), generator=draw, dtype=torch.float64)
    start = StartSignal(top, signal)
    solved = invert_layers(stages, layer_gradients(stages, start, pixels), start, None, cutoff, math.inf)
    return tuple(
        LayerRank(stage.name, s.unknown_count, s.gradient_rank, s.rank, s.condition)
        for stage, s in zip(stages, solved, strict=True)
    )
