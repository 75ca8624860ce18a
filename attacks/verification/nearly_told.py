"""Marks what explains nearly all of the layers that it was read from, and says that it neither clears nor convicts.

A further step on the same example, a further client of small weight, a control variate or noise puts little beside the
update of one example: the layer's equations then miss by more than rounding, and what solves them is still near the
example. A mixture of several may leave as little.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attacks.result import Reconstruction, Remark
from fl.view import ServerView

MAX_NEARLY = 0.1
"""Share of a layer's equations that one input leaves where it is all but told, as of computing in half precision."""
FAR_OUTSIDE = 0.1
"""How far outside of [0, 1] pixels are no picture. By less, what went in beside one may move black and white pixels."""
MOST_ALIKE_ROWS = 2
"""Of a matrix, whose update has one direction whatever the layer was given."""
NEARLY_TOLD = (
    "not confirmed: the {what} explains all but {share:.1g} of the layers that it was read from, as where further "
    "steps, examples or clients, a control variate or noise went into the update, or as computing in half precision "
    "(autocast) leaves it. It may be near the true one, or a mixture: state what else went in, or take that off"
)


def mark_nearly_told(view: ServerView, result: Reconstruction, pixels: Tensor | None = None) -> Reconstruction:
    """Return the result of an attack that solves, marked where it leaves little of the equations of one example.

    Args:
        view: the view that was attacked.
        result: whose objective is the share that is left.
        pixels: of its picture as they were solved for, which are next to [0, 1] in what is marked; None asks none.
    """
    if result.verified is not False or view.batch_size != 1 or not result.objective <= MAX_NEARLY:
        return result
    if pixels is not None and not bool(((pixels >= -FAR_OUTSIDE) & (pixels <= 1 + FAR_OUTSIDE)).all()):
        return result
    return replace(result, remarks=result.remarks | {Remark.NEARLY_TOLD})


def say_nearly_told(result: Reconstruction) -> Reconstruction:
    """Return a marked result with a note that says so, or without the mark where the update says more of it."""
    if Remark.NEARLY_TOLD not in result.remarks:
        return result
    if result.verified is not False or result.approximate or result.fixed is not None:
        return result.without_remarks({Remark.NEARLY_TOLD})
    if result.remarks & {Remark.CONTRADICTED, Remark.PARTLY_TOLD}:
        return result.without_remarks({Remark.NEARLY_TOLD})
    what = "input" if result.inputs is None else "picture"
    return result.with_note(NEARLY_TOLD.format(what=what, share=result.objective))
