"""Which ids the embeddings of a network are given."""

from __future__ import annotations

import copy
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attacks.network.lookup_functions import LookupFunctions
from attacks.network.operation_trace import MODEL_ERRORS
from fl.seeds import stream
from fl.types import Task

RANDOM_EXAMPLES = 6
"""Examples made up, beside one of the least ids and one of the largest, which tell what is looked up for all."""
_FOUND: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], list[dict[str, Tensor]], frozenset[str]]] = (
    WeakKeyDictionary()
)
"""Lookups of networks, and the weights whose columns are looked up; kept for an attack and its score."""


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
    """Return the names of the weights whose rows or columns a network looks up, by modules or by functions."""
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
    return _asked(task)[0]


def columns_looked_up(task: Task) -> frozenset[str]:
    """Return the names of the weights (d, V) whose columns one-hot vectors look up, such as a linear layer's."""
    return _asked(task)[1]


def _asked(task: Task) -> tuple[list[dict[str, Tensor]], frozenset[str]]:
    """Return the lookups of made-up examples, and the weights whose columns they look up."""
    shape, found, columns = _FOUND.get(task.model, ((), [], frozenset()))
    if shape != task.input_shape:
        draw, weight = stream(0, "unconditional ids"), next(task.model.parameters())
        examples = [torch.rand(1, *task.input_shape, generator=draw) for _ in range(RANDOM_EXAMPLES)]
        examples += [torch.zeros(1, *task.input_shape), torch.ones(1, *task.input_shape)]
        noted = [_look_up(task, example.to(weight.device, weight.dtype)) for example in examples]
        found, columns = [ids for ids, _ in noted], frozenset[str]().union(*(names for _, names in noted))
        _FOUND[task.model] = task.input_shape, found, columns
    return found, columns


def lookups(task: Task, inputs: Tensor) -> dict[str, Tensor]:
    """Return all that each embedding of a network looks up, as often as it does, by the name of its weight.

    Args:
        task: with the network.
        inputs: of it (B, C, H, W).
    """
    return _look_up(task, inputs)[0]


def _look_up(task: Task, inputs: Tensor) -> tuple[dict[str, Tensor], set[str]]:
    """Return what inputs look up, as `lookups`, and the weights whose columns they look up."""
    model = copy.deepcopy(task.model).eval()
    known, found = embedding_weights(model), dict[str, list[Tensor]]()
    names = {id(value): name for name, value in model.named_parameters()}

    def note(module: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> None:
        name, ids = names[id(module.weight)], args[0] if args else given.get("input")
        if isinstance(ids, Tensor) and name in known:
            found.setdefault(name, []).append(ids.flatten())

    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_pre_hook(note, with_kwargs=True)
    noted = LookupFunctions(names)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(*MODEL_ERRORS), noted:
        model(inputs)
    # modules call functions in turn, so that these count where no module was called
    by_functions = noted.looked_up()
    return {name: torch.cat(ids) for name, ids in (by_functions | found).items()}, noted.columns & {*by_functions}
