"""Digests of tensors and plain values: equal for equal content."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def digest(*values: object) -> str:
    """Return the SHA-256 of trees of tensors and plain values, in hexadecimal."""
    total = hashlib.sha256()
    leaves, tree = pytree.tree_flatten(values)
    total.update(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total.update(repr((leaf.shape, leaf.dtype)).encode())
            total.update(leaf.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()
