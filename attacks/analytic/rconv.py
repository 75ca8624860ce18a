"""R-CONV: inputs of convolutions from their gradients (Eltaras et al. 2024, arXiv 2406.04227; 2025, 2509.18871)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attacks.analytic.recursive.layerwise_inversion import LayerwiseInversion
from attacks.base import attacks
from fl.ranges import OpenShare


@attacks.register("rconv")
@dataclass(frozen=True, kw_only=True)
class RConv(LayerwiseInversion):
    """Inverts a network layer by layer from its gradients first, through ReLU as well (Eltaras et al. 2024, 2025).

    With x the input of a layer, o its output and A the activation:

    - the first fully connected layer: x_n = (dL/dw_nm) / (dL/db_m), here over all units m at once, dL/dx = W^T dL/db;
    - back through an activation: dL/do = dL/dA(o) * A'(o), where A' of the common activations is a function of A(o),
      the input of the layer above, which is known by then. No activation has to be inverted for this;
    - a convolution: dL/dw[d, i] = sum over outputs m of dL/do[d, m] x[r_i(m)] with r_i(m) the value that tap i sees at
      output m. These are linear equations for each channel of x by itself, kernel area times filters of them;
    - where they are too few, which is mostly so in the first layer, R-CONV takes the first layer's weight equations
      W x = o - b instead, and the extension (R-CONV++, its algorithm for large inputs) both kinds together. Here the
      gradient equations fix what they determine well, and weight equations of all outputs that are known fix the rest:
      all outputs of an invertible activation, of a ReLU only the active ones.

    Of a batch of B images the server sees the sum of their gradients. The extension has an algorithm for that, its
    third. Its text was not at hand, and the authors' public code is that of one image: what stands here is derived from
    the equations above, and need not be what the paper does. What flows back of each image has to be known first, and
    the gradient alone leaves a matrix (B, B) open by which images are mixed:

    - behind a classifier that the server knows, with mean cross entropy and more classes than images, the signal of an
      image follows from its input. That fixes the matrix, and the labels, which may repeat, whatever the activations
      (`attacks.analytic.recursive.softmax_separation`);
    - elsewhere the bend of a (leaky) ReLU below the first linear layer fixes it, as in `cascade`
    (`attacks.analytic.recursive.relu_batch_separation`);
    - a layer's gradient equations are then dL/dw[d, i] = sum over images b and outputs m of dL/do_b[d, m] x_b[r_i(m)]:
      as many as for one image, for B times the unknowns, while each image has its own weight equations.

    So a layer that just suffices for one image does not for two. Images come back in no particular order, with their
    labels; `verified` says that all of them, put through the network again, explain the gradient of every layer.

    From the extension's second algorithm this takes the joint use of both kinds of equations, in every layer. Written
    after the abstracts of both papers and the equations in the authors' public description of their code; the papers'
    texts were not at hand.

    Threat model: an honest-but-curious server that knows all weights below the last linear layer with a bias, and sees
    one step on one image, in a plain chain of layers. Of a batch it knows the size, and that it was one step; its
    labels it need not. Max pooling is beyond it: see `cascade`.

    Attributes:
        trust: what belongs to singular values of a layer's gradient equations of at least this share of the largest is
            taken from them alone; weaker equations are weighed against the weight equations.
    """

    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = (
        "computes the input of each layer from its gradient alone where that suffices, so that ReLU need not stop it."
    )
    inverts: ClassVar[bool] = False
    batches: ClassVar[bool] = True

    trust: OpenShare = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.trust < 1:
            raise ValueError(f"expected trust in (0, 1), got {self.trust}")

    @classmethod
    def example(cls) -> RConv:
        """Return the attack as it is."""
        return cls()

    @property
    def gradient_trust(self) -> float | None:
        """Gradient equations first."""
        return self.trust
