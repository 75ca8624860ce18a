"""Losses, by name: what a client's outputs are trained towards, and what follows for its targets.

A loss is a frozen object. It is called with a network's outputs and the targets, and knows the form of both, so that
nobody else has to ask which loss it is: how unknown targets are searched for, what one example's gradient says of its
target, and how a target that was found is compared with the true one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fl.registry import Registry

losses: Registry[Loss] = Registry("loss", "fl.losses")

MAX_NAMED = 64
"""Numbers of one target that rows of figures hold; larger ones (a mask) are left out of them."""


class Loss:
    """The base of every loss: targets of the outputs' shape (B, ...), which may be any numbers.

    A subclass is a frozen dataclass that defines `__call__`.
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Loss]] = losses
    is_cross_entropy: ClassVar[bool] = False
    """Whether it is the mean cross entropy of one class for each example, on which rules for labels rest."""
    is_linear_in_targets: ClassVar[bool] = False
    """Whether its gradient by the outputs falls in proportion to the targets, which may be any numbers."""
    outputs: ClassVar[str] = "numbers (B, ...)"
    """What it takes of a network, in words."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a number.

        Args:
            outputs: of the network (B, ...).
            targets: (B, ...), in the form that `prepare` returns, or as `relax` makes them.
        """
        raise TypeError(f"{type(self).__name__} does not define __call__()")

    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse outputs (B, ...) that the loss does not take.

        Raises:
            ValueError: says what it takes, and what was given.
        """

    def prepare(self, targets: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the targets of a batch in the form that the loss takes.

        Args:
            targets: one for each example (B, ...).
            output_shape: of one example's outputs.

        Raises:
            ValueError: they have another form; says which.
        """
        if targets.is_complex() or targets.dtype == torch.bool:
            raise ValueError(f"expected real numbers as targets of {self.name}, got {targets.dtype}")
        whole = targets.ndim == 1 and not targets.is_floating_point()
        targets = targets if targets.is_floating_point() else targets.float()
        if targets.shape[1:] != output_shape and targets.shape[1:].numel() != output_shape.numel():
            hint = "; for classes give loss=cross-entropy, or one-hot targets" if whole else ""
            raise ValueError(
                f"expected a target of shape {tuple(output_shape)} for each example, as the model's outputs, got "
                f"{tuple(targets.shape[1:])}{hint}"
            )
        if not bool(targets.isfinite().all()):
            raise ValueError("expected finite targets, got NaN or infinity")
        return targets.reshape(len(targets), *output_shape)

    def targets_in_words(self, count: int, output_shape: torch.Size) -> str:
        """Return what `count` examples need as targets, in words, such as "labels int64 (4,)".

        Args:
            count: of examples.
            output_shape: of one example's outputs.
        """
        shape = ", ".join(map(str, (count, *output_shape)))
        return f"targets of {self.name} ({shape}{'' if output_shape else ','}), as the model's outputs"

    def takes(self, outputs: Tensor, targets: Tensor) -> bool:
        """Return whether it returns a finite number, and derivatives, for such targets of a batch.

        A function of the user's own may refuse some: a batch of one class, say.

        Args:
            outputs: (B, ...).
            targets: (B, ...), in the form that `prepare` returns.
        """
        return True

    def variable_shape(self, output_shape: torch.Size) -> torch.Size | None:
        """Return the shape of what stands for one unknown target in a search; None where none can be searched for.

        Args:
            output_shape: of one example's outputs.
        """
        return output_shape

    def relax(self, variables: Tensor) -> Tensor:
        """Return the targets that a search's variables (B, ...) stand for; differentiable."""
        return variables

    def harden(self, variables: Tensor) -> Tensor:
        """Return the targets that variables (B, ...) come to at the end of a search."""
        return variables

    def every_target(self, output_shape: torch.Size, limit: int) -> Tensor | None:
        """Return all targets that an example may have (M, ...), if there are finitely many and at most `limit`."""
        return None

    def target_of_signal(self, signal: Tensor) -> Tensor | None:
        """Return the target of one example (1, ...) by the gradient of its outputs, known up to a positive factor.

        Args:
            signal: that gradient, of the shape of one example's outputs.
        """
        return None

    def target_of_outputs(self, outputs: Tensor, signal: Tensor) -> Tensor | None:
        """Return the target of one example (1, ...) by its outputs and their gradient, or None where it is not told.

        Args:
            outputs: (1, ...).
            signal: the gradient of the loss by them, in its true size.
        """
        return None

    def errors(self, found: Tensor, true: Tensor) -> Tensor:
        """Return how far targets that were found are from the true ones (N,): 0 is right.

        By default the root mean square of the difference.
        """
        return (found.double() - true.double()).reshape(len(found), -1).square().mean(1).sqrt()

    @property
    def has_exact_targets(self) -> bool:
        """Whether a target is right or wrong; if not, its error says how far it is off."""
        return True

    @property
    def takes_classes(self) -> bool:
        """Whether a target is one class for each example, of as many as there are outputs, and the whole target."""
        return self.is_cross_entropy

    def sends_back_one_direction(self, output_shape: torch.Size) -> bool:
        """Return whether what flows back into the outputs has one direction, whatever they are, under some target.

        So it has of a single number, and of the logits of two classes, where it sums to zero. Several examples of that
        target look like one then.

        Args:
            output_shape: of one example.
        """
        return output_shape.numel() == 1 or (output_shape.numel() == 2 and self.takes_classes)

    def plain(self, target: Tensor) -> list[float] | float | int | None:
        """Return one target as plain data; None where it is too large for a table."""
        return None if target.numel() > MAX_NAMED else target.tolist()


def expect_dimensions(outputs: Tensor, expected: str, *, at_least: int, at_most: int | None = None) -> None:
    """Refuse outputs of another number of dimensions.

    Args:
        outputs: of a network.
        expected: what is expected, in words.
        at_least: dimensions, the batch's included.
        at_most: likewise; None is no limit.

    Raises:
        ValueError: says what was expected, and the shape given.
    """
    if outputs.ndim < at_least or (at_most is not None and outputs.ndim > at_most):
        raise ValueError(f"expected a model that returns {expected}, got {tuple(outputs.shape)}")
