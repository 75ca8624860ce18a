"""Updates of weights into which adapters of low rank were merged: no gradient of these weights."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.update.float_rounding import relative_rounding
from fl.tensors import LowRank, dense
from fl.view import ServerView

LOW_SHARE = 0.5
"""Share of a matrix's sides up to which a rank is low."""
NEGLIGIBLE, ROUNDING_MARGIN = 1e-3, 4.0
"""Share of the largest singular value that counts as none, and how many times the rounding of weights."""
LARGEST = 2**22
"""Numbers of a matrix up to which its rank is taken: in a second or so."""


def find_merged_adapter(view: ServerView) -> str:
    """Return that only matrices moved, by low ranks, and nothing beside them; empty where the update is none of these.

    A step on the weights themselves moves the biases beside them and the scales of norms, too. A merged adapter
    (Hu et al., ICLR 2022: W + B A) moves neither.

    Args:
        view: of a captured update.
    """
    if any(isinstance(value, LowRank) for value in view.update.values()):
        return ""
    sent = {name: dense(value) for name, value in view.update.items()}
    still = [name for name, value in sent.items() if value.ndim == 1 and not bool(value.any())]
    moved = {name: value for name, value in sent.items() if bool(value.any())}
    if not still or not moved or any(value.ndim < 2 for value in moved.values()):
        return ""
    if not all(bool(value.isfinite().all()) and value.numel() <= LARGEST for value in moved.values()):
        return ""
    ranks = [_rank(value, ROUNDING_MARGIN * relative_rounding(view, name)) for name, value in moved.items()]
    if any(rank > LOW_SHARE * min(len(v), v[0].numel()) for rank, v in zip(ranks, moved.values(), strict=True)):
        return ""
    if any(int(value.flatten(1).any(1).sum()) <= rank for rank, value in zip(ranks, moved.values(), strict=True)):
        return ""  # a few rows that were sent have that rank, too
    names = f"{', '.join(list(moved)[:3])}{f' and {len(moved) - 3} more' if len(moved) > 3 else ''}"
    return (
        f"only matrices moved ({names}), by a rank of {max(ranks)} at most, and no bias or scale beside them: adapters "
        "that were merged into the weights (LoRA's merge_and_unload) move so, and their change is no gradient of the "
        "weights: give the adapters' own tensors, before and after, with PEFT's model. Or only matrices are trained: "
        "let your function freeze the rest (requires_grad_(False))"
    )


def _rank(value: Tensor, rounding: float) -> int:
    singular = torch.linalg.svdvals(value.flatten(1).double())
    return int((singular > max(NEGLIGIBLE, rounding) * singular[0]).sum())
