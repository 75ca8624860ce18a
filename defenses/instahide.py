"""InstaHide: a client feeds blends of its images in which random pixels are turned over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from defenses import defenses
from defenses.mixup import blend_images
from fl.defense import Defense
from fl.ranges import PositiveShare, Range
from fl.types import Batch, Task


@defenses.register("instahide")
@dataclass(frozen=True, kw_only=True)
class InstaHide(Defense):
    """Blends of k images with random signs of their pixels, labels blended too (Huang et al., ICML 2020, section 3).

    This is the paper's scheme within the client's own data: an image is blended with k - 1 others of its batch, each
    chosen by a random order of it as in the authors' code, and the shares are |N(0, 1)| brought to sum 1, drawn again
    until none is above `upper`. Blending with a public data set is not here, since a defense holds no images. Signs are
    those of pixels in [-1, 1], so that a pixel p of the box [0, 1] becomes 1 - p with probability 1/2, anew for every
    image and step. (The authors flip pixels normalized by the data's mean, which then leave the box.) A batch of fewer
    than k images blends some of them twice.

    The images fed are the truth that attacks are scored against, as under `mixup`. An attacker who knows it takes no
    label as certain and searches for probabilities. What it finds are the images fed, signs and all. The signs are no
    secret, as |2 p - 1| is the same with and without them, and from many such blends the originals can be solved for
    (Carlini et al., IEEE S&P 2021); that second half of the attack is not here.

    Attributes:
        k: images in a blend (4 within a data set).
        upper: largest share of one image, in (1 / k, 1].

    Raises:
        ValueError: a setting out of range.
    """

    plain: ClassVar[str] = "the client trains on blends of several pictures in which random pixels are turned over."

    k: Annotated[int, Range(2, 10**4)] = 4
    upper: PositiveShare = 0.65

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ValueError(f"expected k >= 2, got {self.k}")
        if not 1 / self.k < self.upper <= 1:
            raise ValueError(f"expected upper in (1 / {self.k}, 1], got {self.upper}")

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        """Return the blends with their signs, and labels (B, K)."""
        count = len(batch)
        others = [torch.randperm(count, generator=generator) for _ in range(self.k - 1)]
        members = torch.stack([torch.arange(count), *others], 1)
        shares = torch.stack([self._shares(generator) for _ in range(count)]) if count else torch.empty(0, self.k)
        mixed = blend_images(batch, members, shares.to(batch.inputs), task)
        turned = torch.rand(mixed.inputs.shape, generator=generator) < 0.5
        return Batch(torch.where(turned.to(mixed.inputs.device), 1 - mixed.inputs, mixed.inputs), mixed.labels)

    def _shares(self, generator: torch.Generator) -> Tensor:
        """Return the shares of one blend (k,)."""
        while True:
            sizes = torch.randn(self.k, generator=generator, dtype=torch.float64).abs()
            shares = sizes / sizes.sum()
            if float(shares.max()) <= self.upper:
                return shares
