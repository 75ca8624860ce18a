"""What a loss of one's own returns, held against what it has to return: one number that has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def expect_number(name: str, value: object) -> Tensor:
    """Return the mean loss of a batch, a floating-point tensor ().

    Args:
        name: whose it is, in words: "the loss focal".
        value: what was returned.

    Raises:
        ValueError: it is something else; says what, and what to return.
    """
    if isinstance(value, Tensor) and not value.ndim and value.is_floating_point() and value.layout is torch.strided:
        return value
    got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    hint = _hint(value)
    raise ValueError(
        f"expected {name} to return one number, a floating-point tensor (), got {got}{hint and '; '}{hint}"
    )


def _hint(value: object) -> str:
    """Return what to return instead; "" where nobody can tell."""
    if value is None:
        return "is its return missing?"
    if isinstance(value, tuple | list | dict):
        return "return the loss alone"
    if not isinstance(value, Tensor):
        return "return the tensor that PyTorch computes, without float(...), .item() or .numpy(): it has the gradient"
    if value.layout is not torch.strided:
        return "return value.to_dense()"
    if value.is_complex():
        return "return a real one (value.real or value.abs())" + (", its mean over the batch" if value.ndim else "")
    if not value.is_floating_point():
        return "whole numbers and truth values have no gradient: count no errors, sum a smooth measure of them"
    return "return the mean over the batch (reduction='mean')"
