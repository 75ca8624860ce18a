"""R-GAP: recursive gradient attack on privacy (Zhu and Blaschko, ICLR 2021, arXiv 2010.07733)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attacks.analytic.recursive.layerwise_inversion import LayerwiseInversion
from attacks.base import attacks


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
