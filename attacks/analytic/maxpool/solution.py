"""A layer's input, how far it may be off, and when to believe it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.maxpool.equations import MIN_RELATIVE_NOISE, Equations
from attacks.analytic.maxpool.normal_equations import MAX_DENSE_UNKNOWNS, NormalEquations
from attacks.analytic.maxpool.refinement import Fit, choose_activation_sides, evaluate, resolve_ties
from attacks.analytic.maxpool.spd_linalg import Factor

OPEN_CELL_ERROR = 1e-3
"""Residual of a pooling cell, relative to the outputs' root mean square, above which its position is not found."""
SATISFIED_ERROR = 1e-5
"""Equations left unexplained by less than this share are taken for satisfied, in float32."""


@dataclass(frozen=True)
class Ambiguity:
    """Which numbers of an input are on another level in another input that explains about as much.

    Attributes:
        entries: which (I, H, W).
        other_positions: those of them for which it selects other positions (I, H, W): what inequalities rule out at
            the positions found says nothing of it.
    """

    entries: Tensor
    other_positions: Tensor

    @classmethod
    def none(cls, x: Tensor) -> Ambiguity:
        """Return an ambiguity in which no number of an input like `x` (I, H, W) is ambiguous."""
        empty = torch.zeros_like(x, dtype=torch.bool)
        return cls(empty, empty)

    @classmethod
    def between(cls, solution: LayerSolution, other: LayerSolution) -> Ambiguity:
        """Return what differs in `other`, which explains about as much."""
        entries = other.fit.x != solution.fit.x
        moved = (other.fit.selection != solution.fit.selection).any(-1)
        moved = moved & solution.equations.target_known  # of others only a bound is known
        return cls(entries, entries & moved.any())

    def __or__(self, other: Ambiguity) -> Ambiguity:
        """Return the union."""
        return Ambiguity(self.entries | other.entries, self.other_positions | other.other_positions)


@dataclass(frozen=True)
class LayerSolution:
    """A layer's input with the equations it answers, in which the sides of an activation's bend are chosen.

    Attributes:
        equations: of the layer.
        fit: the input, and what it leaves of them.
        determined: which numbers all inputs on levels share that explain the equations at the positions found
            (I, H, W); None where it was not looked at, or the input is on no levels.
        entry_std: standard deviation of each number (I, H, W), where it was computed on the way: by what was left then.
        disputed: which numbers are on another level in what explains about as much at other positions (I, H, W), as
            far as that was looked at.
    """

    equations: Equations
    fit: Fit
    determined: Tensor | None = None
    entry_std: Tensor | None = None
    disputed: Tensor | None = None

    @classmethod
    def of(cls, equations: Equations, fit: Fit) -> LayerSolution:
        """Return `fit` with undecided outputs on the side of the bend that it explains best."""
        return cls(*choose_activation_sides(equations, fit))

    def with_input(self, x: Tensor) -> LayerSolution:
        """Return the solution with another input (I, H, W) of these equations, at the positions that follow from it."""
        own = evaluate(self.equations, x)
        return LayerSolution(self.equations, evaluate(self.equations, x, resolve_ties(self.equations, own)))

    def chose_sides_of(self, equations: Equations) -> bool:
        """Return whether targets on either side of an activation's lowest value are known that were not before."""
        return equations.other_target is not None and bool(
            (self.equations.target_known & ~equations.target_known).any()
        )

    @property
    def is_satisfied(self) -> bool:
        """Whether the equations are explained up to rounding, or up to the gradient's own noise."""
        return self.fit.error < self.tolerance

    @property
    def tolerance(self) -> float:
        """What may be left unexplained, at most, where the equations are explained."""
        return max(SATISFIED_ERROR, 5 * self.equations.gradient_noise)

    @property
    def is_proven(self) -> bool:
        """Whether all is explained, and by nothing else."""
        return self.is_satisfied and self.determined is not None and bool(self.determined.all())

    @property
    def progress_description(self) -> str:
        """How far the search got, in words."""
        equations = self.equations
        off = (equations.layer.pooled_outputs(self.fit.x) - equations.target).abs()
        far = off > OPEN_CELL_ERROR * equations.output_scale + 5 * equations.target_std
        count, total = int((far & equations.target_known).sum()), int(equations.target_known.sum())
        cells = f"{count} of {total} pooling cells open, " if equations.layer.positions_unknown else ""
        unknown, short = self.fit.x.numel(), ""
        if equations.count < unknown:
            short = f" ({equations.count} equations for {unknown} numbers leave {unknown - equations.count} open)"
        return f"{cells}{self.fit.error:.1e} of the equations unexplained{short}"

    @property
    def input_signal(self) -> Tensor:
        """The loss's derivative with respect to the input (I, H, W)."""
        layer = self.equations.layer
        return layer.backpropagate(layer.scatter(self.fit.selection * self.equations.signal[..., None]))

    def normal_equations(self) -> NormalEquations:
        """Return the equations at the positions found, each trusted as far as it is explained."""
        equations, fit = self.equations, self.fit
        std = equations.gradient_std(fit.x, fit.selection, equations.residual(fit.x, fit.selection))
        std = std.maximum(equations.noise_floor)  # with less, rounding would fill in what no equation determines
        output_std = equations.output_scale * max(fit.output_error, equations.gradient_noise, MIN_RELATIVE_NOISE)
        return NormalEquations.of(equations, fit.selection, std, output_std, per_equation=True)

    def deviations(self) -> Tensor:
        """Return the standard deviation of each number of the input (I, H, W), by how far the equations are off.

        As it was seen on the way, if it was.
        """
        if self.entry_std is not None:
            return self.entry_std
        matrix = self.normal_equations().dense()
        matrix.diagonal().add_(1e-15 * matrix.diagonal().mean())
        factor = Factor.of(matrix)
        if factor is None:
            return torch.full_like(self.fit.x, float("inf"))
        return factor.variances().sqrt().view_as(self.fit.x)

    def relative_uncertainty(self, most: float = 30.0) -> Tensor:
        """Return how far each number of the input may be off (I, H, W), relative to their root mean square.

        From the gradient's equations alone, which keep channels apart; where these leave a number open, or too nearly
        so (`most` times), from all of them, where there are few enough numbers. Of more numbers it is the share of the
        equations left unexplained there. What is not known at all is off by as much as it is.
        """
        x, few = self.fit.x, self.fit.x.numel() <= MAX_DENSE_UNKNOWNS
        if not self.equations.layer.positions_unknown and few:
            return self._relative_deviations()
        left = max(self.fit.gradient_error, self.equations.gradient_noise)
        factor, failed = torch.linalg.cholesky_ex(self.normal_equations().gradient_form)
        if bool(failed.any()):
            return self._relative_deviations().clamp_min(left) if few else torch.full_like(x, left)
        alone = torch.cholesky_inverse(factor).diagonal(dim1=-2, dim2=-1).sqrt() / x.square().mean().sqrt()
        alone = alone.view(-1, *x.shape[1:]).expand_as(x)
        doubtful = alone >= most * left
        if few and bool(doubtful.any()):
            return torch.where(doubtful, self._relative_deviations().clamp_min(left), alone)
        return torch.where(doubtful, left, alone)

    def _relative_deviations(self) -> Tensor:
        return (self.deviations() / self.fit.x.square().mean().sqrt()).nan_to_num(1.0).clamp_max(1.0)

    def with_ambiguity(self, ambiguity: Ambiguity, before: LayerSolution | None = None) -> LayerSolution:
        """Return the solution with nothing marked as determined that is ambiguous, or was open or disputed `before`."""
        determined, disputed = self.determined, ambiguity.other_positions
        for one in (self, before):
            if one is not None and one.disputed is not None:
                disputed = disputed | one.disputed
        if determined is not None:
            determined = determined & ~ambiguity.entries & ~disputed
            if before is not None and before.determined is not None:
                determined = determined & before.determined
        return replace(self, determined=determined, disputed=disputed)

    def better_of(self, other: LayerSolution | None) -> LayerSolution:
        """Return the one that leaves less unexplained."""
        return self if other is None or self.fit.error < other.fit.error else other
