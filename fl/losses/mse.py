"""Squared error: numbers for each example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fl.losses import Loss, losses


@losses.register("mse")
@dataclass(frozen=True, kw_only=True)
class SquaredError(Loss):
    """Mean squared error over all outputs, as torch.nn.MSELoss has it (Bishop, 2006, section 1.2.5).

    Outputs are numbers (B,) or (B, ...); targets are of the same shape.
    """

    is_linear_in_targets: ClassVar[bool] = True
    outputs: ClassVar[str] = "numbers (B,) or (B, ...)"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch and its outputs."""
        return functional.mse_loss(outputs, targets.to(outputs.dtype))

    def target_of_outputs(self, outputs: Tensor, signal: Tensor) -> Tensor | None:
        """Return the numbers y of the gradient 2 (f - y) / n of n outputs f."""
        return outputs - signal * (outputs[0].numel() / 2)

    @property
    def has_exact_targets(self) -> bool:
        """No: a number is as good as it is near."""
        return False
