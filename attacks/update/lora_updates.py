"""Updates in which only the upper matrices of low-rank adapters moved: a few numbers of each layer's input are told."""

from __future__ import annotations

from attacks.result import NotApplicable
from fl.tensors import LowRank
from fl.view import ServerView

UPPER, LOWER = "lora_B", "lora_A"
"""What PEFT calls the matrices of an adapter W + B A (Hu et al., ICLR 2022), B from 0 on."""


def refuse_lora_update(view: ServerView) -> NotApplicable | None:
    """Return what an update tells in which B alone moved of each adapter that did; None for any other.

    The gradient of B is an outer product with A x. Of the input x it tells so many numbers as A has rows. That of A is
    zero while B is, in the first step; it is not sent where A is frozen.
    """
    moved = [name for name, value in view.update.items() if isinstance(value, LowRank) or bool(value.any())]
    upper = [name for name in moved if UPPER in name]
    known = dict(view.task.model.named_parameters())
    lower = [known.get(name.replace(UPPER, LOWER)) for name in upper]
    if not upper or len(upper) < len(moved) or any(part is None or part.ndim != 2 for part in lower):
        return None
    rows, columns = next((len(part), part.shape[1]) for part in lower if part is not None)
    if rows >= columns:
        return None
    return NotApplicable(
        f"only the upper matrices of adapters moved ({upper[0]}), as in their first step, where B is 0: of what goes "
        f"into that layer they tell {rows} numbers of {columns}, what A makes of it; audit a later step, in which A "
        "moves, too"
    )
