"""Inverting Gradients: cosine similarity, total variation, signed Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attacks.base import attacks
from attacks.matching import Matching


@attacks.register("ig")
@dataclass(frozen=True, kw_only=True)
class InvertingGradients(Matching):
    """IG (Geiping et al., NeurIPS 2020, Eq. 4): signed Adam at 0.1, step decay, pixels kept in their box.

    The published weights of the total variation run from 1e-6 (HyperFL's protocol, with 10,000 iterations) to 1e-1;
    1e-4 suits small images and networks with max-pooling. Private tensors, where a method has any, are searched for
    together with the images.

    Attributes:
        iterations: of the search.
        tv: weight of the total variation.
    """

    plain: ClassVar[str] = "changes a guessed picture step by step until it would cause the update that was sent."

    iterations: int = 3000
    tv: float = 1e-4
