"""The weighted least squares (3) of the package: its normal equations, and their solution by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.analytic.maxpool.conv_pool_layer import ConvPoolLayer
from attacks.analytic.maxpool.equations import Equations
from attacks.analytic.maxpool.gaussian_prior import GaussianPrior
from attacks.analytic.maxpool.spd_linalg import gram
from attacks.search_control import check_time_limit

Preconditioner = Literal["channels", "mean", "whole"]
"""What `NormalEquations.solve` inverts."""
MAX_ITERATIONS = 200
"""Iterations of conjugate gradients."""
MAX_DENSE_UNKNOWNS = 4096
"""Unknowns up to which a dense matrix of all of them is factorized."""


@dataclass(frozen=True)
class NormalEquations:
    """Normal equations in X: one matrix for every channel alike, and the outputs' equations, which join channels.

    Solved by conjugate gradients, with each channel's own block inverted for a preconditioner: where the gradient's
    equations, which keep channels apart, outnumber those of the outputs, a few iterations do.

    Attributes:
        layer: whose input is X; average pooling merged into it.
        gradient_form: quadratic form of the gradient's equations in each channel (I, H W, H W), or in all alike
            (H W, H W).
        weights: of the outputs' equations (O, L).
        rhs: right-hand side (I, H W).
        prior: what is added to the matrix, or None.
    """

    layer: ConvPoolLayer
    gradient_form: Tensor
    weights: Tensor
    rhs: Tensor
    prior: GaussianPrior | None = None

    @classmethod
    def of(
        cls,
        equations: Equations,
        selection: Tensor,
        gradient_std: Tensor,
        output_std: Tensor,
        exceeding: Tensor | None = None,
        prior: GaussianPrior | None = None,
        per_equation: bool = False,
    ) -> NormalEquations:
        """Return the normal equations, averaged over positions that are not decided.

        The spread of the patches within a cell counts as variance of the gradient's equations, so that cells which
        are not decided yet hold X back instead of averaging it.

        Args:
            equations: of the layer.
            selection: q, the probability of each position (O, K, P).
            gradient_std: standard deviation of the gradient's equations, by filter (O,).
            output_std: standard deviation of the outputs' equations.
            exceeding: 1 where a position is to be pulled down to the target although it was not passed on (O, K, P).
            prior: what is expected of X beside them.
            per_equation: weigh each of the gradient's equations by its own rounding, which every channel has another
                of.
        """
        layer = equations.layer
        output_layer = layer.merged_convolution if layer.is_average else layer
        weights = _output_weights(equations, selection, output_std, exceeding)
        rhs = output_layer.backpropagate(
            output_layer.scatter(weights * equations.target_minus_bias[..., None])
        ).flatten(1)
        gradient_form, gradient_rhs = _gradient_terms(equations, selection, gradient_std, per_equation)
        rhs = rhs + gradient_rhs
        if prior is not None:
            rhs = rhs + prior.shift
        return cls(output_layer, gradient_form, output_layer.scatter(weights), rhs, prior)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the matrix times X (I, H W)."""
        outputs = self.layer.linear_outputs(x.view(self.layer.shape))
        from_gradient = (x[:, None] @ self.gradient_form)[:, 0]
        result = from_gradient + self.layer.backpropagate(self.weights * outputs).flatten(1)
        return result if self.prior is None else result + self.prior @ x

    def dense(self) -> Tensor:
        """Return the matrix itself (N, N)."""
        filters, count = self.layer.filters, self.gradient_form.shape[-1]
        matrix = self.layer.quadratic_form(torch.einsum("om,ol,on->lmn", filters, self.weights, filters))
        for i, own in enumerate(self.gradient_form.expand(self.layer.shape[0], -1, -1)):
            matrix[i * count : (i + 1) * count, i * count : (i + 1) * count] += own
        return matrix if self.prior is None else matrix.add_(self.prior.dense)

    def solve(self, start: Tensor, tolerance: float = 1e-3, *, preconditioner: Preconditioner = "channels") -> Tensor:
        """Return X (I, H, W), from `start` on, once the preconditioned residual is `tolerance` of the right-hand side.

        Args:
            start: where to begin (I, H, W).
            tolerance: of the preconditioned residual, relative to the right-hand side's.
            preconditioner: what is inverted. "channels" is each channel's own block. "mean" is the same with the mean
                of what outputs say of the channels: cheap, and enough for a wide tolerance. "whole" is the matrix
                itself: dear, but one or two iterations do (up to `MAX_DENSE_UNKNOWNS`, else "channels").
        """
        if preconditioner == "whole" and start.numel() <= MAX_DENSE_UNKNOWNS:
            matrix = self.dense()[None]
        else:
            mean = preconditioner == "mean"
            own = self.layer.mean_block(self.weights)[None] if mean else self.layer.channel_blocks(self.weights)
            matrix = own + self.gradient_form
            matrix = matrix if self.prior is None else matrix + self.prior.channel_blocks
        return self._conjugate_gradients(start.flatten(1), _cholesky(matrix), tolerance).view(self.layer.shape)

    def _conjugate_gradients(self, x: Tensor, factor: Tensor, tolerance: float) -> Tensor:
        """Return X (I, H W) from its start on, preconditioned by the Cholesky factors of `_cholesky`."""
        residual = self.rhs - self(x)
        rhs_norm = (self.rhs * _solve_blocks(self.rhs, factor)).sum()
        direction = preconditioned = _solve_blocks(residual, factor)
        norm = (residual * preconditioned).sum()
        for _ in range(MAX_ITERATIONS):
            if not norm > tolerance**2 * rhs_norm:
                break
            check_time_limit()
            image = self(direction)
            length = norm / (direction * image).sum()
            x, residual = x + length * direction, residual - length * image
            preconditioned = _solve_blocks(residual, factor)
            before, norm = norm, (residual * preconditioned).sum()
            direction = preconditioned + norm / before * direction
        return x


def _output_weights(equations: Equations, selection: Tensor, output_std: Tensor, exceeding: Tensor | None) -> Tensor:
    """Return weights of the outputs' equations (O, K, P); of averages, (O, K, 1)."""
    if equations.layer.is_average:
        weights = equations.target_known[..., None].to(selection)
    else:
        weights = selection * equations.target_known[..., None]
    if exceeding is not None:
        weights = weights + exceeding * (1 - weights)
    return weights / (output_std**2 + equations.target_std**2)[..., None]


def _gradient_terms(
    equations: Equations, selection: Tensor, gradient_std: Tensor, per_equation: bool
) -> tuple[Tensor, Tensor]:
    """Return what the gradient adds to the matrix (H W, H W), or (I, H W, H W), and to the right-hand side."""
    layer = equations.layer
    signal = equations.signal / gradient_std[:, None]
    maps = layer.gradient_map(layer.scatter(selection * signal[..., None]))
    by_channel = (equations.gradient / gradient_std[:, None]).view(layer.weight.shape).transpose(0, 1).flatten(1)
    factors = equations.precision_factors(gradient_std) if per_equation else None
    if factors is None:
        form = gram(maps)
    else:
        factors = factors.view(layer.weight.shape).transpose(0, 1).flatten(1)
        form = torch.stack([gram(own.sqrt()[:, None] * maps) for own in factors])
        by_channel = by_channel * factors
    if layer.positions_unknown:
        form += layer.within_cell_form(_selection_covariance(selection, signal))
    return form, by_channel @ maps


def _selection_covariance(selection: Tensor, signal: Tensor) -> Tensor:
    """Return the covariance of the indicators of where a cell's signal goes, summed over filters (K, P, P)."""
    squares = signal.square()
    result = -torch.einsum("ok,okp,okr->kpr", squares, selection, selection)
    result.diagonal(dim1=1, dim2=2).add_((squares[..., None] * selection).sum(0))
    return result


def _cholesky(blocks: Tensor) -> Tensor:
    """Return factors of positive semi-definite matrices, with as small a multiple of the identity as they need.

    Of others, or what is not finite, whatever comes out.
    """
    mean = blocks.diagonal(dim1=1, dim2=2).mean()
    ridge = 1e-13 * mean
    while True:
        raised = blocks + ridge * torch.eye(blocks.shape[-1]).to(blocks)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not bool(failed.any()) or not ridge < mean:  # not a number is neither
            return factor
        ridge = ridge * 100


def _solve_blocks(x: Tensor, factor: Tensor) -> Tensor:
    """Return the inverse times X (I, H W), of blocks channel by channel, of one for all channels or of one matrix."""
    if len(factor) == 1:
        return torch.cholesky_solve(x.view(-1, factor.shape[-1]).mT, factor[0]).mT.reshape_as(x)
    return torch.cholesky_solve(x[..., None], factor)[..., 0]
