"""Finds what flows back into a convolution, up to one mixing of the images, from shifts of its gradient alone.

A convolution with stride 1 and zero padding that keeps the size takes H (n x K), all positions of all images one below
the other, n = B P, and gets M (C x n) back. At the offset d of its kernel its gradient is

    D_d = M S_d H,

where S_d moves each image's positions by d and puts zeros where that leads beyond the rim. Neither M nor H is known.
Shifts along different axes commute, so S_(i, -1) = S_left S_(i, 0). Let U be a basis of the columns of all D_d and
M = U R. The kernel's left column of gradients side by side is then

    U^T [D_(-1,-1), D_(0,-1), D_(1,-1)] = (R S_left R^-1) U^T [D_(-1,0), D_(0,0), D_(1,0)],

so that T_left = R S_left R^-1 follows by least squares, and T_right, T_up and T_down likewise. I - T_left T_right
projects on the first column of positions, I - T_up T_down on the first row: together they leave the B columns of R at
the first position, up to a B x B matrix, and T_left and T_up carry these to all others. It takes n <= C independent
signals, and n <= 3 K for the least squares.

Noise grows on the way from one position to the next. `layer_solves.fit_in_turn` brings M and H nearer to all D_d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_GAP = 5.0
"""How many times the next singular value the last one that counts must be, or the rank is not told."""


@dataclass(frozen=True)
class SignalColumns:
    """What flows back into a convolution, up to one mixing of the images.

    Attributes:
        columns: (C, P, B), for each channel and position a mixture of the B images, the same for all.
        gap: the last singular value of the gradient that counts over the first one that does not.
        weakest: the last one that counts over the first of all.
    """

    columns: Tensor
    gap: float
    weakest: float


def rank_gap(sizes: Tensor, rank: int) -> float:
    """Return the last of `rank` singular values that count over the next one; infinite where there is none."""
    return float(sizes[rank - 1] / sizes[rank].clamp_min(1e-300)) if rank < len(sizes) else float("inf")


def count_images(gradient: Tensor, positions: int, most: int) -> int | None:
    """Return how many distinct images a convolution's gradient is made of, or None where its rank does not tell.

    Args:
        gradient: (C, K, kh, kw).
        positions: P, of one image's outputs.
        most: images that there can be. Equal ones count once: the signals of two equal images are one column.
    """
    sizes = torch.linalg.svdvals(gradient.flatten(1))
    ratios = {b: rank_gap(sizes, b * positions) for b in range(1, most + 1) if b * positions < len(sizes)}
    best = max(ratios, key=lambda b: ratios[b], default=None)
    if best is not None and ratios[best] >= MIN_GAP:
        return best
    return most if most * positions == len(sizes) else None


def find_signal_columns(gradient: Tensor, size: tuple[int, int], images: int) -> SignalColumns:
    """Return what flows back into a convolution of stride 1 that keeps the size, up to a mixing of the images.

    Args:
        gradient: (C, K, kh, kw) of its weight, odd kernel of at least three.
        size: rows and columns of its output.
        images: how many distinct ones it saw; images x rows x columns <= min(C, 3 K).
    """
    rank = images * size[0] * size[1]
    triangle = torch.linalg.qr(gradient.flatten(1).mT, mode="r")[1]  # whose rows' lengths and angles are the gradient's
    basis, sizes, _ = torch.linalg.svd(triangle.mT, full_matrices=False)
    gap = rank_gap(sizes, rank)
    basis = basis[:, :rank]
    reduced = torch.einsum("cr,ckij->ijrk", basis, gradient)  # U^T D_d
    row, column = gradient.shape[2] // 2, gradient.shape[3] // 2
    upright = torch.cat([reduced[row + i, column] for i in (-1, 0, 1)], 1)
    level = torch.cat([reduced[row, column + j] for j in (-1, 0, 1)], 1)
    inverse_upright, inverse_level = _right_inverse(upright), _right_inverse(level)
    left, right = (torch.cat([reduced[row + i, column + j] for i in (-1, 0, 1)], 1) @ inverse_upright for j in (-1, 1))
    up, down = (torch.cat([reduced[row + i, column + j] for j in (-1, 0, 1)], 1) @ inverse_level for i in (-1, 1))
    found = columns_by_position((left, right), (up, down), size, images)
    return SignalColumns(
        torch.stack([basis @ at for at in found], 1), gap, float(sizes[rank - 1] / sizes[0].clamp_min(1e-300))
    )


def columns_by_position(
    level: tuple[Tensor, Tensor], upright: tuple[Tensor, Tensor], size: tuple[int, int], images: int
) -> list[Tensor]:
    """Return the columns of R at each position (n, B), row by row, up to one B x B mixing of the images for all.

    Args:
        level: T_left and T_right (n, n).
        upright: T_up and T_down (n, n).
        size: rows and columns of positions.
        images: B.
    """
    (left, right), (up, down) = level, upright
    eye = torch.eye(len(left), dtype=left.dtype, device=left.device)
    corner = (eye - left @ right) @ (eye - up @ down)
    first = torch.linalg.svd(corner)[0][:, :images]
    columns = []
    for _ in range(size[0]):
        at = first
        for _ in range(size[1]):
            columns.append(at)
            at = left @ at
        first = up @ first
    return columns


def _right_inverse(matrix: Tensor) -> Tensor:
    """Return X with matrix @ X = I for a matrix of full row rank, else the pseudo-inverse."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    there = s > torch.finfo(s.dtype).eps * s[:1]
    return v.mT @ (u.mT * torch.where(there, 1 / s, torch.zeros_like(s))[:, None])
