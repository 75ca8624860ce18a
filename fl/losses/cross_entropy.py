"""Cross entropy: one class for each example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fl.losses import Loss, losses

ONE_CLASS = (
    "the loss is cross entropy, which is 0 with one output; for one logit of a yes or no give loss='bce', for a number "
    "loss='mse'"
)
"""Why a classifier of one output is refused."""
FROM_ONE = "where classes are numbered from 1, take labels - 1"
"""What helps where a label is one more than there may be."""
ROUNDING = 1e-3
"""Deviation of a sum of probabilities from 1 that is allowed."""


@losses.register("cross-entropy")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Mean cross entropy of softmax(outputs), as torch.nn.CrossEntropyLoss has it (Bridle, 1990).

    Outputs are logits (B, K), K >= 2. Targets are classes int64 (B,), or probabilities (B, K).
    """

    is_cross_entropy: ClassVar[bool] = True
    outputs: ClassVar[str] = "logits (B, K)"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch."""
        return functional.cross_entropy(outputs, targets)

    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse what is no logits (B, K) of two classes or more."""
        if outputs.ndim != 2:
            hint = ""
            if outputs.ndim > 2:
                hint = (
                    "; for a class of every pixel or step give loss='segmentation' (of classes that come last with "
                    "output=lambda found: found.movedim(-1, 1)), for numbers loss='mse'"
                )
            elif outputs.ndim == 1:
                hint = "; for one logit of a yes or no give loss='bce', for a number loss='mse'"
            raise ValueError(f"expected a model that returns logits (B, K), got {tuple(outputs.shape)}{hint}")
        if outputs.shape[1] < 2:
            raise ValueError(f"expected a model of 2 outputs or more, got {outputs.shape[1]}: {ONE_CLASS}")

    def prepare(self, targets: Tensor, output_shape: torch.Size) -> Tensor:
        """Return classes int64 (B,)."""
        classes = output_shape[0]
        if targets.ndim != 1 or targets.dtype != torch.int64:
            got = f"{targets.dtype} {tuple(targets.shape)}"
            raise ValueError(f"expected labels int64 ({len(targets)},), got {got}{_conversion_hint(targets, classes)}")
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            hint = f"; {FROM_ONE}" if count_from_one(targets, output_shape) else ""
            raise ValueError(
                f"expected labels in [0, {classes}), got {int(targets.min())} to {int(targets.max())}{hint}"
            )
        return targets

    def targets_in_words(self, count: int, output_shape: torch.Size) -> str:
        """Return a class for each."""
        return f"labels int64 ({count},)"

    def relax(self, variables: Tensor) -> Tensor:
        """Return probabilities (B, K)."""
        return variables.softmax(-1)

    def harden(self, variables: Tensor) -> Tensor:
        """Return classes (B,)."""
        return variables.argmax(-1)

    def every_target(self, output_shape: torch.Size, limit: int) -> Tensor | None:
        """Return all classes, or the first `limit` of them."""
        return torch.arange(min(output_shape[0], limit))

    def errors(self, found: Tensor, true: Tensor) -> Tensor:
        """Return 1 for a wrong class."""
        found, true = (labels.argmax(1) if labels.ndim == 2 else labels for labels in (found, true))
        return (found != true.to(found.device)).double()


def count_from_one(labels: Tensor, output_shape: torch.Size) -> bool:
    """Return whether the classes of examples are numbered from 1, as the last one's number of outputs says."""
    whole = labels.ndim == 1 and labels.dtype == torch.int64 and len(labels) > 0 and len(output_shape) == 1
    return whole and int(labels.min()) >= 1 and int(labels.max()) == output_shape[0]


def _conversion_hint(targets: Tensor, classes: int) -> str:
    """Return how classes are made of such targets; nothing where nobody can know."""
    if targets.ndim == 2 and targets.shape[1] == classes and bool(((targets.sum(1) - 1).abs() < ROUNDING).all()):
        if bool((targets.amax(1) == 1).all()):
            return "; of one-hot labels take .argmax(1)"
        return "; probabilities of classes need a loss of their own: a function of the outputs and the targets"
    if targets.ndim == 2 and targets.shape[1] == classes > 1 and not targets.is_complex():
        if bool(((targets == 0) | (targets == 1)).all()):
            return "; for several labels of an example, each a yes or no, give loss='bce'"
        return "; for a number of each output give loss='mse', for chances of several labels loss='bce'"
    flat = ".flatten()" if targets.ndim == 2 and targets.shape[1] == 1 else ""
    if (targets.ndim != 1 and not flat) or targets.is_complex():
        return ""
    if targets.is_floating_point() and not bool((targets == targets.round()).all()):
        return (
            f"; for numbers give loss='mse', for chances of a yes or no loss='bce', each with {classes} of an example"
        )
    numbers = ", or, if they are no classes, give loss='bce' or 'mse'" if targets.is_floating_point() else ""
    return f"; take {flat}{'' if targets.dtype == torch.int64 else '.long()'} of them{numbers}"
