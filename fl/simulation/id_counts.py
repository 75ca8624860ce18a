"""How many ids a user's network takes, of tokens or of categories: in all columns alike, or in each its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from fl.inputs.form import Inputs, tensors_of
from fl.models.building_blocks.model_checks import FORWARD_ERRORS
from fl.runtime.module_copies import copy_model
from fl.runtime.random_state import preserve_global_rng
from fl.simulation.capture_checks import unwrap_model

MOST_COLUMNS = 64
"""Columns of ids up to which the network is asked how many ids each takes."""
Embedding = nn.Embedding | nn.EmbeddingBag


def count_ids(model: nn.Module, inputs: Inputs) -> list[tuple[int, ...]]:
    """Return of each input how many ids it can hold: one number, or one for each column (B, F, ...) where they differ.

    It is empty where nothing tells. A copy of the model is run, in main memory; where it does not run, nothing is told.
    """
    tensors = tensors_of(inputs)
    nothing: list[tuple[int, ...]] = [()] * len(tensors)
    if not isinstance(model, nn.Module) or all(value.is_floating_point() for value in tensors):
        return nothing
    with suppress(*FORWARD_ERRORS):
        probe = copy_model(unwrap_model(model)).eval().cpu()
        given = [value[:1].cpu() for value in tensors]
        names = list(inputs) if isinstance(inputs, Mapping) else []
        asked = _Probe(probe, names, given)
        direct = asked.ids_of_embeddings()
        return [_counts(asked, number, value, direct[number]) for number, value in enumerate(tensors)]
    return nothing


def _counts(asked: _Probe, number: int, value: Tensor, known: int) -> tuple[int, ...]:
    """Return how many ids one input holds, as `count_ids`.

    Args:
        asked: the network.
        number: of the input.
        value: the input, of a whole batch.
        known: how many an embedding has that is given it as it is; 0 where none is.
    """
    if value.is_floating_point() or value.dtype == torch.bool or value.ndim < 2 or not len(value):
        return (known,) if known else ()
    if known and asked.runs(number, None, known - 1):
        return (known,)
    if not asked.most or int(value.min()) < 0 or value.shape[1] > MOST_COLUMNS or not asked.runs(number, None, 0):
        return (known,) if known else ()
    own = [int(value[:, column].max()) for column in range(value.shape[1])]
    counts = tuple(asked.largest(number, column, least) + 1 for column, least in enumerate(own))
    return counts if len(set(counts)) > 1 else counts[:1]


class _Probe:
    """A copy of a network, and an example, whose ids are exchanged to see with which it runs."""

    def __init__(self, model: nn.Module, names: Sequence[str], given: Sequence[Tensor]) -> None:
        self.model, self.names, self.given = model, names, given
        kinds = (module for module in model.modules() if isinstance(module, Embedding))
        self.most = sum(int(module.num_embeddings) for module in kinds)

    def run(self, given: Sequence[Tensor]) -> None:
        """Run the network on other inputs."""
        with torch.no_grad(), preserve_global_rng(given[0].device):
            self.model(**dict(zip(self.names, given, strict=True))) if self.names else self.model(*given)

    def runs(self, number: int, column: int | None, largest: int) -> bool:
        """Return whether the network runs where an input, or a column of it, holds that id alone."""
        changed = [value.clone() for value in self.given]
        place = changed[number] if column is None else changed[number][:, column]
        try:
            place.fill_(largest)
            self.run(changed)
        except FORWARD_ERRORS:
            return False
        return True

    def largest(self, number: int, column: int, least: int) -> int:
        """Return the largest id of a column with which the network runs.

        Args:
            number: of the input.
            column: of it.
            least: an id with which it runs.
        """
        low, high = least, max(least, self.most)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.runs(number, column, middle) else (low, middle - 1)
        return low

    def ids_of_embeddings(self) -> list[int]:
        """Return of each input how many ids an embedding has that is given it as it is; 0 where none is."""
        found = [0] * len(self.given)

        def note(module: nn.Module, args: tuple[object, ...], _given: object) -> None:
            for number, value in enumerate(self.given):
                taken = args[0] if args else None
                if isinstance(taken, Tensor) and taken.shape == value.shape and torch.equal(taken, value):
                    found[number] = max(found[number], int(module.num_embeddings))  # type: ignore[arg-type]

        kinds = [module for module in self.model.modules() if isinstance(module, Embedding)]
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in kinds]
        with suppress(*FORWARD_ERRORS):
            self.run(self.given)
        for hook in hooks:
            hook.remove()
        return found
