"""In which mode batch normalization counts as having trained: by the numbers of its batch, or by those it has kept."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from fl.view import ServerView


def normalization_mode(view: ServerView) -> str:
    """Return "training" or "evaluation", the former where some of it trained so; "" where no mode changes an update.

    Batch normalization that keeps no statistics takes those of the batch in both modes.

    Args:
        view: what the server saw.
    """
    norms = [module for module in view.client.task.model.modules() if isinstance(module, _BatchNorm)]
    trained = [module.training for module in norms if module.running_mean is not None]
    return "" if not trained else "training" if any(trained) else "evaluation"


def other_mode(mode: str) -> str:
    """Return the mode that a client may have trained in instead."""
    return "evaluation" if mode == "training" else "training"
