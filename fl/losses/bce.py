"""Binary cross entropy: a yes or no, or many for each example."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fl.losses import Loss, expect_dimensions, losses


@losses.register("bce")
@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Mean binary cross entropy over all outputs, as torch.nn.BCEWithLogitsLoss has it (Cox, 1958).

    Outputs are logits (B,) or (B, K), one for each label. Targets are of the same shape, 0 or 1 or in between.

    Attributes:
        logits: whether outputs are logits; if not, they are probabilities, as behind a sigmoid of the model's own
            (torch.nn.BCELoss).
    """

    outputs: ClassVar[str] = "a logit (B,) or logits (B, K), one for each label"

    logits: bool = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch and its labels."""
        if self.logits:
            return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))
        return functional.binary_cross_entropy(outputs, targets.to(outputs.dtype))

    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse what is no logits (B, K), and numbers beyond [0, 1] that should be probabilities."""
        expect_dimensions(outputs, f"{self.outputs} under loss 'bce'", at_least=2)
        if not self.logits and not bool(((outputs >= 0) & (outputs <= 1)).all()):
            low, high = float(outputs.min()), float(outputs.max())
            raise ValueError(
                f"expected probabilities in [0, 1] under bce with logits=False, got {low:.4g} to {high:.4g}; logits go "
                "with loss='bce' alone"
            )

    def prepare(self, targets: Tensor, output_shape: torch.Size) -> Tensor:
        """Return numbers in [0, 1] of the outputs' shape."""
        targets = super().prepare(targets.float() if targets.dtype == torch.bool else targets, output_shape)
        low, high = float(targets.min()), float(targets.max())
        if low < 0 or high > 1:
            raise ValueError(f"expected labels of bce that are 0 or 1, or between, got {low:.4g} to {high:.4g}")
        return targets

    def relax(self, variables: Tensor) -> Tensor:
        """Return probabilities."""
        return variables.sigmoid()

    def harden(self, variables: Tensor) -> Tensor:
        """Return 0 or 1 for each label."""
        return (variables > 0).to(variables.dtype)

    def every_target(self, output_shape: torch.Size, limit: int) -> Tensor | None:
        """Return all combinations of labels, if they are few."""
        count = output_shape.numel()
        if count > 30 or 2**count > limit:
            return None
        return torch.tensor([*itertools.product((0.0, 1.0), repeat=count)]).view(-1, *output_shape)

    def target_of_signal(self, signal: Tensor) -> Tensor | None:
        """Return the labels: the gradient p - y is negative where the label is 1 alone (as iDLG's, class by class)."""
        return (signal < 0).to(signal.dtype)[None] if bool((signal != 0).all()) else None

    def errors(self, found: Tensor, true: Tensor) -> Tensor:
        """Return the share of labels that are wrong."""
        return ((found >= 0.5) != (true.to(found.device) >= 0.5)).flatten(1).double().mean(1)
