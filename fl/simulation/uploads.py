"""What the clients of a round have sent so far, in bounded memory where the server takes no more than its mean."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from fl.method import Method, mean
from fl.tensors import LowRank, Value, dense
from fl.types import Upload

MAX_SEPARATE_BYTES = 2**27
"""Bytes of uploads kept apart: those of 5 clients of HyperFL at its published settings, or of 300 of its networks."""


class Uploads:
    """The uploads of a round.

    Where the server's rule is the weighted mean, uploads of more than `MAX_SEPARATE_BYTES` bytes are joined into one
    that stands for all of them: their mean, with their weights' sum. A round of any length then needs the memory of a
    few clients; one of fewer bytes is untouched, to the bit.

    Args:
        method: of the federation.
    """

    def __init__(self, method: Method) -> None:
        self.joins = method.aggregates_mean_only  # another rule looks at single clients
        self.kept: list[Upload] = []
        self.bytes = 0

    def add(self, upload: Upload) -> None:
        """Take in what one more client sent."""
        self.kept.append(upload)
        self.bytes += memory_bytes(upload)
        if self.joins and self.bytes > MAX_SEPARATE_BYTES and len(self.kept) > 1:
            self.kept = [merge_uploads(self.kept)]
            self.bytes = memory_bytes(self.kept[0])


def merge_uploads(uploads: list[Upload]) -> Upload:
    """Return one upload with the mean and the weight of all; further payloads are left out, as the mean's rule does.

    Args:
        uploads: at least one.
    """
    first = uploads[0]
    update = {n: _smaller_form(mean(uploads, lambda upload, n=n: upload.update[n])) for n in first.update}  # type: ignore[misc]
    buffers = {
        n: dense(mean(uploads, lambda upload, n=n: upload.buffers[n]))  # type: ignore[misc]
        for n, value in first.buffers.items()
        if value.is_floating_point()
    }
    return Upload(first.client, sum(upload.weight for upload in uploads), update, buffers=buffers)


def _smaller_form(value: Value) -> Value:
    """Return it dense where a structured matrix's factors have more numbers than the matrix itself."""
    if not isinstance(value, LowRank):
        return value
    rank = sum(len(term.left) for term in value.terms)
    return dense(value) if rank * sum(value.size) > value.numel() else value


def memory_bytes(upload: Upload) -> int:
    """Return what an upload keeps in memory; of structured updates their factors, as bases are the server's own."""
    total = 0
    for value in [*upload.update.values(), *upload.buffers.values()]:
        base = value.base if isinstance(value, LowRank) else None
        parts = [part for part in pytree.tree_leaves(value) if isinstance(part, Tensor) and part is not base]
        total += sum(part.numel() * part.itemsize for part in parts)
    return total
