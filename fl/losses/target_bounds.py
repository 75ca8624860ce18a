"""Targets that a function of the user's own must not be tried with, as PyTorch would read beyond its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TargetBoundsCheck(TorchFunctionMode):
    """A mode in which connectionist temporal classification refuses targets that are none of its classes.

    PyTorch does not check them (`torch.nn.functional.ctc_loss`): the process may end.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "ctc_loss":
            _check_alignment(*args, **kwargs)
        return func(*args, **kwargs)


def _check_alignment(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> None:
    """Check what is not checked elsewhere.

    Args:
        log_probs: (T, N, C), or (T, C) of one example.
        targets: (N, S), or all in a row.
        input_lengths: (N,).
        target_lengths: (N,).

    Raises:
        ValueError: a target is no class, or lengths say that there are more of them than there are.
    """
    classes, lengths = log_probs.shape[-1], torch.as_tensor(target_lengths)
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
        raise ValueError(f"ctc_loss takes targets from 0 to {classes - 1}, got {int(targets.min())} to {targets.max()}")
    room = targets.shape[1] if targets.ndim == 2 else targets.numel()
    asked = lengths.max() if targets.ndim == 2 else lengths.sum()
    if lengths.numel() and (int(lengths.min()) < 0 or int(asked) > room):
        raise ValueError(f"ctc_loss takes target_lengths up to the {room} targets there are, got {lengths.tolist()}")
    steps = torch.as_tensor(input_lengths)
    if steps.numel() and not (int(steps.min()) >= 0 and int(steps.max()) <= log_probs.shape[0]):
        raise ValueError(f"ctc_loss takes input_lengths up to {log_probs.shape[0]}, got {steps.tolist()}")
