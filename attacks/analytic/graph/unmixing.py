r"""Unmixing: which combinations of a batch's mixed signals belong to a single image, found by their zeros.

**Symbols.** B distinct images, C channels, P positions. Image b sends m_cpb through channel c at position p. Linear
algebra on a gradient (`shift_structure`) gives the columns

    y_cp = A^T m_cp,   y_cp and m_cp in R^B,                                                    (1)

with one unknown invertible A (B, B). Sought are the columns v_b of A^-1, up to order and factors: y_cp . v_b = m_cpb.

**Two values** (`unmix_two_valued`, by `two_valued_unmixing`). Where global average pooling follows a ReLU, an image
sends one number g_cb back to all positions of a channel that the ReLU let pass, and nothing to the others. Of a leaky
ReLU of slope a < 1, it sends a g_cb to these:

    m_cpb = g_cb t_cpb,   t_cpb = 1 where s_cpb = 1, a where s_cpb = 0.                          (2)

1. The differences y_cp - y_cq of a channel's positions are sparse in the images' directions, as s_cpb - s_cqb is 0 more
   often than not. They are whitened such that all count alike whatever their size (Tyler's estimator), which makes the
   images' directions nearly orthogonal, and scaled to length 1: x_n.
2. Orthonormal directions u that maximize the sum of (x_n . u)^4 are near the sparsest ones. All are found together, by
   the fixed point U <- polar(X^T (X U)^3) (Zhai et al., Complete dictionary learning via l4-norm maximization, JMLR
   2020; SPEAR++, Bakarsky et al., 2025, unmixes the gradients of linear layers by such means).
3. Each is then refined for itself, without orthogonality. Given v, each channel has its best level g_c and pattern s_c
   (a threshold on the sorted values). Given these, v minimizes the weighted sum of squares of

       r_cp(v) = (y_cp - t_cp sum_q t_cq y_cq / sum_q t_cq^2) . v,                              (3)

   as an eigenvector. Weights are 1 / (r^2 + epsilon^2) with falling epsilon (iteratively reweighted least squares).
4. Missing images are looked for again where those found are not: in the orthogonal complement, from other rows, and
   from what was rejected. Images with one label have nearly proportional g, and where their patterns agree, so that
   differences of them are sparse, too: such a rejected direction is started from again with images found added.

**Sparse rows** (`unmix_sparse`, by `sparse_unmixing`). Below the top a ReLU silences a good part of an image's
numbers, the others are arbitrary. All is the same with rows y_n in place of differences, and r_n(v) = y_n . v in
place of (3).

**Sparse rows with none below zero** (`nonnegative`), as of what a ReLU returns. Images that are alike share most
of their zeros, and such rows say nothing: they are zero whatever the direction. The rows left span a cone whose facets
are the images'. So linear programs give further directions.

**When a direction is confirmed.** All three conditions are needed. Let u be the direction that the fitted equations
r(v) = 0 exclude least: their matrix's second eigenvector.

- *It is fixed.* Noise, estimated from what the fitted equations leave, moves the image's signals by no more than
  `MAX_ERROR` of their size (`errors`): the usual covariance of least squares.
- *It fits where u does not.* A combination v of several images fits equations that all of them fit. Those leave the
  images' whole span open, u is in it, and r(u) = 0 there. So only channels (or rows) with r(u) != 0 count.
- *Chance does not fit so many of them.* See `log_chance`. Of n that count, f fit. v has B - 1 free numbers, that can
  make k fit. If a wrong direction fits one with a probability of at most q, the chance that it does is at most

      C(n, k) exp(-(n - k) KL((f - k) / (n - k) || q)),                                         (4)

  KL the divergence between two coins (Chernoff's bound). It must be below `MAX_FALSE_ACCEPTANCE`.

For two values, a channel counts if it has both levels, and k = ceil((B - 1) / (P - 1)). q = `MAX_FALSE_FIT` is
measured: the combinations of two images that fit best are differences of two with the same label, that have two values
where one's pattern holds the other's. On untrained ResNets 38 to 56 % of channels were so, 27 % or less in all other
false minima. For sparse rows k = B - 1, all rows within `WIDE` times the noise of zero count, and those in the inmost
part of them fit, which is q of them where no zeros heap up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attacks.analytic.graph.sparse_unmixing import NonnegativeSparseUnmixing, SparseUnmixing
from attacks.analytic.graph.two_valued_unmixing import TwoValuedUnmixing
from attacks.analytic.graph.unmixing_search import Unmixing, UnmixingProblem, search
from fl.seeds import stream


def unmix_two_valued(columns: Tensor, *, slope: float = 0.0, rounds: int = 8, seed: int = 0) -> Unmixing:
    """Return the directions in which each channel sends one number, or `slope` times it, at every position.

    Args:
        columns: (C, P, B), B the number of *distinct* images, as the rank of the convolution's gradient over P tells
            (`shift_structure.count_images`). Equal pictures have equal patterns and proportional signals if they have
            one label: they are one column, and the direction found has the sum of their signals. Different pictures
            with the same label are no trouble.
        slope: of the activation below zero, a; 0 of a ReLU.
        rounds: the search ends after so many rounds that found no further image.
        seed: of the draws.

    Returns:
        What was found. Fewer than B directions are confirmed where noise, counts or rounds did not allow more.
    """
    return _unmix(partial(TwoValuedUnmixing, slope), columns, rounds, stream(seed, "unmix", "two-valued"))


def unmix_sparse(rows: Tensor, *, nonnegative: bool = False, rounds: int = 8, seed: int = 0) -> Unmixing:
    """Return the directions in which many rows are exactly zero: the signals (or features) of single images.

    Args:
        rows: (N, B), B the number of distinct images; a quarter or more of the rows should be zero for each image.
        nonnegative: whether no image's number is below zero, as of what a ReLU returns. Fewer zeros do then.
        rounds: the search ends after so many rounds that found no further image.
        seed: of the draws.

    Returns:
        What was found. Fewer than B directions are confirmed where noise, counts or rounds did not allow more.
    """
    kind = NonnegativeSparseUnmixing if nonnegative else SparseUnmixing
    return _unmix(kind, rows, rounds, stream(seed, "unmix", "sparse"))


def _unmix(
    problem: Callable[[Tensor, torch.Generator], UnmixingProblem], mixed: Tensor, rounds: int, draw: torch.Generator
) -> Unmixing:
    """Return what the search finds in mixed signals (..., B), brought to float64 and a largest number of 1."""
    mixed = mixed.double()
    return search(problem(mixed / mixed.abs().max().clamp_min(1e-300), draw), rounds, draw)
