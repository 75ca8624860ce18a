"""Symmetric matrices of blocks: products, inverses at some of their rows and columns, and eigenvectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

RIDGE = 1e-13
"""Share of the largest number on the diagonal that keeps a channel's block invertible."""
CHANNELS_TOGETHER = 64
"""Channels whose blocks are inverted as one stack."""


def find_parts(matrix: Tensor) -> list[Tensor]:
    """Return the columns of a matrix in parts that no row ties together; those of zeros are one part."""
    there = matrix != 0
    part = torch.zeros(matrix.shape[1], dtype=torch.long, device=matrix.device)
    open_ = there.any(0)
    count = 0
    while bool(open_.any()):
        count += 1
        columns = torch.zeros_like(open_)
        columns[int(open_.nonzero()[0])] = True
        size = 0
        while int(columns.sum()) > size:
            size = int(columns.sum())
            columns = there[there[:, columns].any(1)].any(0)
        part[columns] = count
        open_ &= ~columns
    return [places for k in range(count + 1) if len(places := (part == k).nonzero()[:, 0])]


@dataclass(frozen=True)
class BlockMatrix:
    """A square matrix of blocks.

    Attributes:
        blocks: places (m, size) and matrices (m, size, size) of the blocks of each size.
    """

    blocks: list[tuple[Tensor, Tensor]]

    @classmethod
    def gram(cls, a: Tensor, parts: Sequence[Tensor]) -> BlockMatrix:
        """Return A^T A, where no row of A ties parts of the columns together."""
        by_size: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for places in parts:
            columns = a[:, places]
            columns = columns[(columns != 0).any(1)]
            by_size.setdefault(len(places), []).append((places, columns.mT @ columns))
        return cls(
            [(torch.stack(p), torch.stack(m)) for p, m in (zip(*pairs, strict=True) for pairs in by_size.values())]
        )

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product with x (n, K)."""
        out = torch.empty_like(x)
        for places, matrices in self.blocks:
            out[places] = matrices @ x[places]
        return out

    @property
    def numbers(self) -> int:
        """Return how many numbers the blocks hold."""
        return sum(matrices.numel() for _, matrices in self.blocks)

    def diagonal(self) -> Tensor:
        """Return the diagonal (n,)."""
        found = self.blocks[0][1].new_empty(sum(places.numel() for places, _ in self.blocks))
        for places, matrices in self.blocks:
            found[places] = matrices.diagonal(dim1=1, dim2=2)
        return found

    def invert_restricted(self, free: Tensor, added: Tensor) -> Callable[[Tensor], Tensor]:
        """Return x -> P (P M P + D)^-1 P x for every channel by itself, where M is this matrix.

        Args:
            free: where the diagonals of P are 1 and not 0 (n, K).
            added: the diagonals of D (n, K), or (K,).
        """
        added = added.expand_as(free)
        parts = free.sum(0).argsort().split(CHANNELS_TOGETHER)  # channels of about as many free numbers
        inverses = [
            (channels, places, *_invert_free(matrices, *(part[places[..., None], channels] for part in (free, added))))
            for channels in parts
            for places, matrices in self.blocks
        ]

        def invert(x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for channels, places, order, inverse in inverses:
                part = x[places[..., None], channels].permute(2, 0, 1)
                # An inverse is symmetric, and its columns lie together in memory: products from the left are faster.
                found = (part.gather(-1, order)[..., None, :] @ inverse)[..., 0, :]
                out[places[..., None], channels] = torch.zeros_like(part).scatter_(-1, order, found).permute(1, 2, 0)
            return out * free

        return invert


def _invert_free(matrices: Tensor, free: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows of blocks are kept, free ones first, and the inverses of these rows and columns.

    A channel of fewer free numbers than another has rows of others among them, which stand for themselves.

    Args:
        matrices: blocks (m, size, size).
        free: (m, size, channels).
        added: to the diagonal, likewise.

    Returns:
        (channels, m, width) and (channels, m, width, width).
    """
    free, added = free.permute(2, 0, 1), added.permute(2, 0, 1)
    width = int(free.sum(-1).max())
    order = free.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    kept = free.gather(-1, order)
    block = torch.arange(len(matrices), device=order.device)[:, None, None]
    whole = matrices[block, order[..., :, None], order[..., None, :]]
    whole = whole * kept[..., :, None] * kept[..., None, :]
    ridge = RIDGE * matrices.diagonal(dim1=1, dim2=2).max()
    whole.diagonal(dim1=-2, dim2=-1).add_(torch.where(kept, added.gather(-1, order) + ridge, 1.0))
    factor, failed = torch.linalg.cholesky_ex(whole)
    if bool(failed.any()):  # rounding of an ill-conditioned block: its diagonal preconditions as well, more slowly
        diagonal = torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1).clamp_min(ridge))
        factor = torch.linalg.cholesky_ex(torch.where(failed[..., None, None] > 0, diagonal, whole))[0]
    return order, torch.cholesky_inverse(factor)


@dataclass(frozen=True)
class Eigenbasis:
    """Eigenvectors of a symmetric matrix, block by block.

    Attributes:
        values: eigenvalues (n,), block after block.
        blocks: places (m, size) and eigenvectors (m, size, size) of the blocks of each size.
    """

    values: Tensor
    blocks: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, matrix: Tensor) -> Eigenbasis:
        """Return the eigenvectors of a matrix, block by block where zeros part it into blocks."""
        count, part = connected_components(csr_array((matrix != 0).cpu().numpy()), directed=False)
        order = torch.from_numpy(part).to(matrix.device).argsort(stable=True)
        sizes = torch.bincount(torch.from_numpy(part), minlength=count).tolist()
        values, blocks = [], []
        parts = order.split(sizes)
        for size in sorted(set(sizes)):
            places = torch.stack([places for places in parts if len(places) == size])
            found, vectors = torch.linalg.eigh(matrix[places[:, :, None], places[:, None]])
            values.append(found.clamp_min(0).flatten())
            blocks.append((places, vectors))
        return cls(torch.cat(values), blocks)

    def to(self, x: Tensor) -> Tensor:
        """Return rows x (n, K) in coordinates of the eigenvectors, block after block."""
        return torch.cat([(vectors.mT @ x[places]).flatten(0, 1) for places, vectors in self.blocks])

    def back(self, y: Tensor) -> Tensor:
        """Return rows x of their coordinates y (n, K)."""
        x = torch.empty_like(y)
        for (places, vectors), part in zip(self.blocks, y.split([p.numel() for p, _ in self.blocks]), strict=True):
            x[places] = vectors @ part.view(*places.shape, -1)
        return x
