"""Labels from the update alone."""

from __future__ import annotations

from torch import Tensor

from fl.tensors import Tensors, dense
from fl.types import ServerView


def classifier(view: ServerView, update: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """The classifier's part of an update: weight (K, d) and bias (K,), each None where it is not shared."""
    mine = {n: dense(v) for n, v in update.items() if n.startswith(view.task.head)}
    rows = [v for v in mine.values() if v.ndim == 2 and v.shape[0] == view.task.num_classes]
    biases = [v for v in mine.values() if v.ndim == 1 and v.shape[0] == view.task.num_classes]
    return (rows[-1] if rows else None), (biases[-1] if biases else None)


def idlg(view: ServerView, update: Tensors) -> Tensor | None:
    """The label of a single image (1,), or None where the view does not give it away.

    Under cross entropy the logit gradient p - y is negative for the true class alone (iDLG, Zhao et al. 2020, Eq. 3).
    It is the classifier's bias gradient; without a bias, each row of the weight gradient is it times the features, so
    the true row alone points against all others (Eq. 4, which needs no sign of the features).

    Args:
        view: of one image in one or more steps.
        update: the observed one, decay removed.
    """
    if view.batch_size != 1:
        return None
    weight, bias = classifier(view, update)
    if bias is not None:
        return bias.argmin().view(1)
    if weight is None:
        return None
    return ((weight @ weight.mT) < 0).sum(1).argmax().view(1)
