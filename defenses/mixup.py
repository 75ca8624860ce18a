"""Mixup: a client feeds blends of its images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from defenses import defenses
from fl.data.partitions.label_skew import dirichlet
from fl.defense import Defense
from fl.ranges import Weight
from fl.types import Batch, Task


@defenses.register("mixup")
@dataclass(frozen=True, kw_only=True)
class Mixup(Defense):
    """Each image of a batch is blended with another one of it, labels likewise (Zhang et al., ICLR 2018, section 2).

    x = l x_i + (1 - l) x_j with l ~ Beta(alpha, alpha), one l for a batch and the j a random order of it, as in the
    authors' code. An image that meets itself stays as it is, so a batch of one is not defended.

    The images fed are the blends: they are the truth that attacks are scored against, with labels as probabilities
    (B, K) of which the largest counts; `Trace.indices` says which image the larger share was drawn for where l > 1/2.
    An attacker who knows it takes no label as certain and searches for probabilities. What it finds are blends; it does
    not take them apart, though they give the originals away: labels tell l and which images were blended, and there are
    as many blends as images.

    Attributes:
        alpha: of the Beta distribution (1 on CIFAR-10, 0.1 to 0.4 on ImageNet); 0 is no defense.

    Raises:
        ValueError: if `alpha` is negative.
    """

    plain: ClassVar[str] = "the client trains on pictures blended of two."

    alpha: Weight = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"expected alpha >= 0, got {self.alpha}")

    def transform_batch(self, batch: Batch, task: Task, generator: torch.Generator) -> Batch:
        """Return the blends, with labels (B, K)."""
        if self.alpha == 0:
            return batch
        share = float(dirichlet(np.full(2, self.alpha), 1, generator)[0, 0])  # of two shares: a Beta distribution
        partner = torch.randperm(len(batch), generator=generator)
        shares = batch.inputs.new_tensor([share, 1 - share]).expand(len(batch), 2)
        return blend_images(batch, torch.stack([torch.arange(len(batch)), partner], 1), shares, task)


def blend_images(batch: Batch, members: Tensor, shares: Tensor, task: Task) -> Batch:
    """Blend k images each.

    Args:
        batch: of B images; labels as numbers or as probabilities.
        members: (n, k) indices below B.
        shares: (n, k), rows of sum 1.
        task: says how many classes there are.

    Returns:
        n images, with labels (n, K) of the images' type.
    """
    members = members.to(batch.inputs.device)
    labels = batch.labels if batch.labels.ndim == 2 else functional.one_hot(batch.labels, task.num_classes)
    images = torch.einsum("nk,nkchw->nchw", shares, batch.inputs[members])
    return Batch(images.clamp(0, 1), torch.einsum("nk,nkc->nc", shares, labels.to(shares)[members]))
