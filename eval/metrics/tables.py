"""How much of a table's rows came back: TabLeak's accuracy, by category and by number, and the exact match rate."""

from __future__ import annotations

import torch
from torch import Tensor

from fl.inputs.form import InputForm

TOLERANCE = 0.319
"""Standard deviations of its column by which a number may be off and still count as right (Vero et al., ICML 2023, and
their code)."""
Score = dict[str, float | None]
NOT_FOUND: Score = {"row_accuracy": 0.0, "exact_match": 0.0}
"""Of a row that nothing came back for."""


def table_scores(found: Tensor, true: Tensor, form: InputForm) -> list[Score]:
    """Return, for each row, the share of its columns that are right.

    A category is right where its most likely value is the true one, a number where it is within `TOLERANCE` of its
    column's standard deviation (`InputForm.tolerances`). A category counts once, however many one-hot columns it has.

    Args:
        found: rows (N, F, 1, 1) in [0, 1], in the order of the true ones.
        true: likewise.
        form: which says what columns there are.

    Returns:
        `row_accuracy` over all, `categories_right` and `numbers_right` of each kind, None where there are none;
        `exact_match`, 1 where all columns are right and else 0, whose mean is the exact match rate (Österberg Nilsson
        et al., 2026, who count a row so by TabLeak's accuracy).
    """
    found, true = (rows.detach().cpu().double().flatten(1) for rows in (found, true))
    categories = [found[:, a:b].argmax(1) == true[:, a:b].argmax(1) for a, b in form.categories]
    numbers = list(form.numbers)
    allowed = TOLERANCE * form.tolerances()[numbers]
    near = (found[:, numbers] - true[:, numbers]).abs() <= allowed
    one_hot = torch.stack(categories, 1) if categories else near[:, :0]
    both = torch.cat([one_hot, near], 1).double()
    return [
        {
            "row_accuracy": float(both[i].mean()),
            "exact_match": float(both[i].all()),
            "categories_right": _share(one_hot[i]),
            "numbers_right": _share(near[i]),
        }
        for i in range(len(true))
    ]


def _share(right: Tensor) -> float | None:
    return float(right.double().mean()) if right.numel() else None
