"""Gradient pruning: only some entries of the update are sent, the largest or random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from defenses import defenses
from fl.defense import Defense
from fl.ranges import ShareBelow1
from fl.tensors import Tensors, dense


@defenses.register("prune")
@dataclass(frozen=True, kw_only=True)
class Prune(Defense):
    """Sets the smallest entries of the update to zero (Zhu et al., NeurIPS 2019, section 5.2; Lin et al., ICLR 2018).

    Or random ones, the "random mask" of Konecny et al. (2016, section 2), drawn anew every round and not scaled up.
    Either way the mask shows in what is sent, and an attacker who knows the defense compares only these entries. A
    mask has no structure: an update of outer products leaves this defense dense.

    Attributes:
        ratio: share of entries set to zero, in [0, 1); 0 is no defense. The number of entries is rounded down.
        keep: the "largest" entries by absolute value, or "random" ones, each set of them equally likely.
        scope: "tensor" takes the share of each tensor, "global" of the whole update.

    Raises:
        ValueError: if `ratio` is not in [0, 1).
    """

    plain: ClassVar[str] = "only some numbers of the update are sent: the largest, or random ones."

    ratio: ShareBelow1 = 0.9
    keep: Literal["largest", "random"] = "largest"
    scope: Literal["tensor", "global"] = "tensor"

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"expected ratio in [0, 1), got {self.ratio}")

    @classmethod
    def example(cls) -> Prune:
        """Return pruning of half of every tensor."""
        return cls(ratio=0.5)

    def transform_update(self, update: Tensors, generator: torch.Generator | None) -> Tensors:
        """Return the update with its smallest entries at zero; random masks need a generator."""
        if self.ratio == 0 or (self.keep == "random" and generator is None):
            return update
        matrices = {name: dense(value) for name, value in update.items()}
        if self.scope == "tensor":
            return {name: _keep(matrix, self._transmitted_mask(matrix, generator)) for name, matrix in matrices.items()}
        kept = self._transmitted_mask(torch.cat([matrix.flatten() for matrix in matrices.values()]), generator)
        masks = kept.split([matrix.numel() for matrix in matrices.values()])
        return {
            name: _keep(matrix, mask.view(matrix.shape))
            for (name, matrix), mask in zip(matrices.items(), masks, strict=True)
        }

    def surrogate(self, predicted: Tensors, observed: Tensors) -> Tensors:
        """Return the predicted update where something was sent, zero elsewhere."""
        if self.ratio == 0:
            return predicted
        return {name: _keep(dense(value), dense(observed[name]) != 0) for name, value in predicted.items()}

    def _transmitted_mask(self, matrix: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return True at the entries of `matrix` that are sent."""
        sizes = matrix.detach().abs().flatten()
        if self.keep == "random":
            sizes = torch.rand(sizes.shape, generator=generator, dtype=sizes.dtype).to(sizes.device)
        largest = sizes.topk(matrix.numel() - int(self.ratio * matrix.numel())).indices
        return torch.zeros_like(sizes, dtype=torch.bool).scatter(0, largest, True).view(matrix.shape)


def _keep(matrix: Tensor, mask: Tensor) -> Tensor:
    """Return the entries where `mask` holds, and 0 elsewhere: a product would leave -0.0 there, which tells a sign."""
    return torch.where(mask, matrix, torch.zeros_like(matrix))
