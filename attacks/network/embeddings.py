"""Which ids the embeddings of a network are given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attacks.network.operation_trace import MODEL_ERRORS
from fl.seeds import stream
from fl.types import Task

RANDOM_EXAMPLES = 6
"""Examples made up, beside one of the least ids and one of the largest, which tell what is looked up for all."""
_FOUND: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], list[dict[str, Tensor]]]] = WeakKeyDictionary()
"""What networks looked up of these: an attack and its score ask in turn."""


def embedding_weights(model: nn.Module) -> dict[str, int | None]:
    """Return the row that stands for padding, which no gradient reaches, or None, by the name of an embedding's weight.

    Of several embeddings with one weight none stands for padding where another looks it up.
    """
    names = {id(value): name for name, value in model.named_parameters()}
    found: dict[str, int | None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in names:
            name = names[id(module.weight)]
            found[name] = module.padding_idx if found.get(name, module.padding_idx) == module.padding_idx else None
    return found


def looked_up_weights(task: Task) -> list[str]:
    """Return the names of the weights of which a network looks up rows, by modules or by functions."""
    by_functions = [name for found in lookups_of_single_examples(task) for name in found]
    return list(dict.fromkeys([*embedding_weights(task.model), *by_functions]))


def embedded_ids(task: Task, inputs: Tensor) -> dict[str, list[int]]:
    """Return the ids of examples that each embedding of a network is given, by the name of its weight.

    Padding is left out, and so is what it is given whatever the examples: positions, say, which tell nothing of them.

    Args:
        task: with the network.
        inputs: of it (B, C, H, W).
    """
    padding, always = embedding_weights(task.model), unconditional_ids(task)
    return {
        name: sorted({*ids.unique().tolist()} - {padding.get(name)} - always.get(name, set()))
        for name, ids in lookups(task, inputs).items()
    }


def unconditional_ids(task: Task) -> dict[str, set[int]]:
    """Return the ids that each embedding looks up whatever examples a network takes, by the name of its weight."""
    given = [{name: {*ids.tolist()} for name, ids in one.items()} for one in lookups_of_single_examples(task)]
    return {name: set.intersection(*(one.get(name, set()) for one in given)) for name in looked_up_weights(task)}


def lookups_of_single_examples(task: Task) -> list[dict[str, Tensor]]:
    """Return what each embedding of a network looks up of examples made up, one by one; it is not to be changed."""
    shape, found = _FOUND.get(task.model, ((), []))
    if shape != task.input_shape:
        draw, weight = stream(0, "unconditional ids"), next(task.model.parameters())
        examples = [torch.rand(1, *task.input_shape, generator=draw) for _ in range(RANDOM_EXAMPLES)]
        examples += [torch.zeros(1, *task.input_shape), torch.ones(1, *task.input_shape)]
        found = [lookups(task, example.to(weight.device, weight.dtype)) for example in examples]
        _FOUND[task.model] = task.input_shape, found
    return found


def lookups(task: Task, inputs: Tensor) -> dict[str, Tensor]:
    """Return all that each embedding of a network looks up, as often as it does, by the name of its weight.

    Args:
        task: with the network.
        inputs: of it (B, C, H, W).
    """
    model = copy.deepcopy(task.model).eval()
    known, found, by_functions = embedding_weights(model), dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    names = {id(value): name for name, value in model.named_parameters()}

    def note(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> None:
        name, ids = names[id(module.weight)], args[0] if args else given.get("input")
        if isinstance(ids, Tensor) and name in known:
            found.setdefault(name, []).append(ids.flatten())

    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_pre_hook(note, with_kwargs=True)
    noted = _Lookups(names, by_functions)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(*MODEL_ERRORS), noted:
        model(inputs)
    # modules call functions in turn, so that these count where no module was called
    return {name: torch.cat(ids) for name, ids in (by_functions | found).items()}


WHOLE = {torch.int64, torch.int32}
PLACES: dict[Callable[..., Any], tuple[int, int]] = {
    nn.functional.embedding: (1, 0),
    nn.functional.embedding_bag: (1, 0),
    torch.embedding: (0, 1),
    Tensor.__getitem__: (0, 1),
    torch.index_select: (0, 2),
    Tensor.index_select: (0, 2),
}
"""At which of their arguments functions that look up rows take weights and ids; `index_select` has its dimension 1."""


class _Lookups(TorchFunctionMode):
    """Notes which rows of parameters (V, d) functions look up: `embedding`, `index_select`, or whole numbers in []."""

    def __init__(self, names: Mapping[int, str], found: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.names, self.found = names, found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note what it looks up."""
        weight, ids = PLACES.get(func, (0, 0))
        if weight != ids and max(weight, ids) < len(args) and id(args[weight]) in self.names:
            rows, whole = args[ids], args[1] == 0 if ids == 2 else True
            if whole and args[weight].ndim == 2 and isinstance(rows, Tensor) and rows.dtype in WHOLE:
                self.found.setdefault(self.names[id(args[weight])], []).append(rows.flatten() % len(args[weight]))
        return func(*args, **(kwargs or {}))
