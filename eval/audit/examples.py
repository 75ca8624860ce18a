"""Examples that a user gives beside a model: inputs of whatever form, and a target for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl.inputs.form import Inputs, tensors_of
from fl.types import Batch

MOST_NAMED = 4
"""Examples that an error names, at most."""


@dataclass(frozen=True)
class Examples:
    """Inputs and their targets.

    Attributes:
        inputs: one tensor (N, ...), several in the order of forward's arguments, or several by their names.
        labels: (N, ...), in the form that the loss takes.
        source_labels: of all examples of which these are a part; None where they are all.
    """

    inputs: Inputs
    labels: Tensor
    source_labels: Tensor | None = None

    @classmethod
    def of(cls, given: Examples | Batch) -> Examples:
        """Return a batch as examples."""
        return given if isinstance(given, Examples) else cls(given.inputs, given.labels)

    def __len__(self) -> int:
        return len(tensors_of(self.inputs)[0])

    def part(self, which: slice) -> Examples:
        """Return some of them."""
        whole = self.labels if self.source_labels is None else self.source_labels
        return replace(self._map(lambda value: value[which]), labels=self.labels[which], source_labels=whole)

    def stated(self) -> tuple[int, ...] | Inputs:
        """Return the shape of one example, or an example where no shape says what inputs are: of the largest ids."""
        if isinstance(self.inputs, Tensor) and self.inputs.is_floating_point():
            return tuple(self.inputs.shape[1:])
        return self._map(lambda value: value[:1] if value.is_floating_point() else value.amax(0, keepdim=True)).inputs

    def to(self, device: torch.device) -> Examples:
        """Return them on a device."""
        return replace(self._map(lambda value: value.to(device)), labels=self.labels.to(device))

    def like(self, model: nn.Module) -> Examples:
        """Return floating-point inputs in the type of the model's first such parameter, others as they are."""
        kinds = [weight.dtype for weight in model.parameters() if weight.is_floating_point()]
        return self._map(lambda value: value.to(kinds[0]) if kinds and value.is_floating_point() else value)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Examples:
        if isinstance(self.inputs, Tensor):
            return replace(self, inputs=change(self.inputs))
        if isinstance(self.inputs, Mapping):
            return replace(self, inputs={name: change(value) for name, value in self.inputs.items()})
        return replace(self, inputs=tuple(map(change, self.inputs)))


def check_examples(source: str, inputs: object, labels: object) -> Examples:
    """Return inputs and their targets as they were given, if they are any.

    Args:
        source: what gave them, for errors.
        inputs: a tensor, several, or several by name.
        labels: a tensor.

    Raises:
        ValueError: they are no tensors, are none, not as many of both, or hold numbers that are not finite.
    """
    if not isinstance(inputs, Tensor | Mapping | tuple | list):
        raise ValueError(f"expected {source} to give inputs as a tensor, got {type(inputs).__name__}")
    tensors = tensors_of(inputs)
    if not tensors or not all(isinstance(value, Tensor) and value.ndim and len(value) for value in tensors):
        got = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in tensors]
        shown = got[0] if len(got) == 1 else got or "none"
        raise ValueError(
            f"expected {source} to give at least one image, as (N, C, H, W), or inputs (N, ...), got {shown}"
        )
    if not isinstance(labels, Tensor) or not labels.ndim or len(labels) != len(tensors[0]):
        got_label = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"expected {source} to give one label per image, int64 ({len(tensors[0])},), got {got_label}; of another "
            "loss a target for each example"
        )
    for value in (*tensors, labels):
        _check_finite(source, "labels" if value is labels else "images", value)
    return Examples(inputs, labels)


def _check_finite(source: str, what: str, value: Tensor) -> None:
    """Refuse images or targets among which some are no finite numbers, saying which are."""
    if not value.is_floating_point():
        return
    odd = (~value.isfinite()).flatten(1).any(1) if value.ndim > 1 else ~value.isfinite()
    if not bool(odd.any()):
        return
    which = odd.nonzero().flatten().tolist()
    some = f"{', '.join(map(str, which[:MOST_NAMED]))}{', ...' if len(which) > MOST_NAMED else ''}"
    raise ValueError(
        f"expected finite numbers from {source}, got NaN or infinite ones in {len(which)} of {len(value)} {what} "
        f"({some}, counted from 0): leave these out"
    )
