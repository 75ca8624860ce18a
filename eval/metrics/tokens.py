"""How many of the ids that a client fed were read off its update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attacks.analytic.tokens import TOKENS
from attacks.network.embeddings import embedded_ids
from fl.tensors import Value, dense
from fl.types import Task


def token_scores(found: Mapping[str, Value], task: Task, inputs: Tensor) -> dict[str, float | int | None]:
    """Return which share of the ids that occur in a batch was read, and which share of those read occurs.

    Args:
        found: what an attack recovered; ids int64 (M,) stand under `tokens/` and the name of an embedding's weight.
        task: whose network embeds the ids.
        inputs: of the batch (B, C, H, W).

    Returns:
        `tokens` and `tokens_read`, the number of ids that occur and that were read, all embeddings counted alike, with
        `tokens_recall` and `tokens_precision`; nothing where the attack reads none.
    """
    read = {name.removeprefix(TOKENS): value for name, value in found.items() if name.startswith(TOKENS)}
    if not read:
        return {}
    true = embedded_ids(task, inputs)
    pairs = [({*true.get(name, ())}, {*dense(ids).long().tolist()}) for name, ids in read.items()]
    hits = sum(len(mine & own) for own, mine in pairs)
    occurring, told = sum(len(own) for own, _ in pairs), sum(len(mine) for _, mine in pairs)
    return {
        "tokens": occurring,
        "tokens_read": told,
        "tokens_recall": hits / occurring if occurring else None,
        "tokens_precision": hits / told if told else None,
    }
