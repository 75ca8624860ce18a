"""Which ids the embeddings of a network are given."""

from __future__ import annotations

import copy
from contextlib import suppress

import torch
from torch import Tensor, nn

from attacks.network.operation_trace import MODEL_ERRORS
from fl.types import Task


def embedding_weights(model: nn.Module) -> dict[str, int | None]:
    """Return the row that stands for padding, which no gradient reaches, or None, by the name of an embedding's weight.

    Embeddings whose weight another module has as well are left out.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for value in module.parameters(recurse=False):
            owners[id(value)] = owners.get(id(value), 0) + 1
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        names[id(module.weight)]: module.padding_idx
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and owners[id(module.weight)] == 1
    }


def embedded_ids(task: Task, inputs: Tensor) -> dict[str, list[int]]:
    """Return the ids that each embedding of a network is given, by the name of its weight, padding left out.

    Args:
        task: with the network.
        inputs: of it (B, C, H, W).
    """
    padding, found = embedding_weights(task.model), lookups(task, inputs)
    return {name: sorted({*ids.unique().tolist()} - {padding[name]}) for name, ids in found.items()}


def lookups(task: Task, inputs: Tensor) -> dict[str, Tensor]:
    """Return all that each embedding of a network looks up, as often as it does, by the name of its weight.

    Args:
        task: with the network.
        inputs: of it (B, C, H, W).
    """
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
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(*MODEL_ERRORS):
        model(inputs)
    return {name: torch.cat(ids) for name, ids in found.items()}
