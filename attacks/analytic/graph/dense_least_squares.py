r"""The last steps of a search with the whole Jacobian, and what error is left in each number of the picture.

Conjugate gradients hardly move along directions that features hardly tell: behind trained networks singular values of J
lie four orders apart. A small picture's J^T J fits into memory, and one factorization solves for all directions at
once. With J the Jacobian of the m residuals r by the n numbers of a picture,

    A = J^T J,    d = -A^-1 J^T r,    sigma_i^2 = s^2 (A^-1)_ii,    s^2 = |r|^2 / (m - n),

d is Gauss and Newton's step and sigma_i the standard error of number i, where errors of the features are alike and
independent. s is not taken to be less than the features' stated noise. Errors need not be alike, so who asks for sigma
should hold against it what else is known of them.

Features that a ReLU closed are no equations: they bound what goes into it to one side. A search ends next to such a
bound, or just beyond, where what lies above the ReLU would be told by an activation that is closed in truth. So J is
taken beside the picture, where these are closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph.feature_inversion import AT_NOISE, InvertedImages, are_at_levels, are_near
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget, ResidualJacobian
from attacks.analytic.graph.linearization import Forward
from attacks.search_control import check_time_limit

MAX_NUMBERS, MAX_ENTRIES = 3072, 3 * 10**8
"""Numbers of a picture and entries of its Jacobian up to which that is made: 32 by 32 pixels, 1.2 GB in float32."""
EQUATIONS = 3.0
"""Equations for each number of a picture by which steps go."""
MAX_STEPS = 4
"""Gauss-Newton steps, at most."""
SETTLED = 0.1 / 255
"""Largest change of a pixel after which no further step is taken."""
MAX_STEP = 16 / 255
"""Largest change of a pixel in a first step from a picture that was near."""
SMALL_STEP = 1 / 255
"""Largest change of a pixel up to which the next step goes by the same Jacobian: to make it takes most of the time."""
CLOSED_BY = 1e-5
"""Share of a target's root mean square below zero at which an activation is closed for certain in float32."""
MOST_CLOSED = 1024
"""Activations that may have to be closed."""
FARTHEST = 0.5 / 255
"""Largest change of a pixel that closing them may take."""
MOVING = 1e-6
"""Share of the largest derivative below which an activation is moved by no picture."""
AT_ONCE = 64
"""Columns of the Jacobian that are computed together."""
BLOCK = 2048
"""Equations that are added to J^T J together, in float64."""


@dataclass(frozen=True)
class DenseSolution:
    """Where Gauss and Newton's steps end.

    Attributes:
        images: (1, C, H, W).
        errors: shaped like them, the standard error of each number; infinite where J^T J or its pieces are not known.
    """

    images: Tensor
    errors: Tensor


def finish_densely(
    forward: Forward, single_forward: Forward, targets: Sequence[FeatureTarget], found: InvertedImages
) -> InvertedImages:
    """Return found images, the near ones of which that are not at whole levels were searched on for with all of J.

    Args:
        forward: from images to features, as in `invert_features`.
        single_forward: the same in single precision.
        targets: the features.
        found: where a search has ended.
    """
    problem = FeatureProblem.of(forward, single_forward, targets)
    near = are_near(found, problem.noise) & ~are_at_levels(found.images)
    images, residual = found.images.clone(), found.residual.clone()
    for place in near.nonzero()[:, 0].tolist():
        one = problem.select(torch.arange(len(near), device=near.device) == place)
        solution = solve_densely(one, images[place : place + 1])
        if solution is None:
            continue
        missed = one.relative_residual(solution.images)
        if bool((missed <= residual[place]).all()):
            images[place], residual[place] = solution.images[0], missed[0]
    return replace(found, images=images, residual=residual, converged=residual <= AT_NOISE * problem.noise)


def solve_densely(problem: FeatureProblem, images: Tensor) -> DenseSolution | None:
    """Return where steps from one near picture end, with the errors left; None where the Jacobian is too large.

    Args:
        problem: the features of this picture.
        images: (1, C, H, W), in the targets' type.
    """
    problem = _first_equations(problem, EQUATIONS * images.numel())
    entries = images.numel() * sum(int(_compared(target).sum()) for target in problem.targets if target.counts)
    if images.numel() > MAX_NUMBERS or entries > MAX_ENTRIES:
        return None
    freedom = sum(target.equations for target in problem.targets if target.counts) - images.numel()
    jacobian = factor = None
    for _ in range(MAX_STEPS):
        check_time_limit()
        beside = _close_activations(problem, images)
        is_new = jacobian is None or factor is None
        if jacobian is None or factor is None:
            jacobian = _jacobian(problem, images if beside is None else beside)
            factor, failed = torch.linalg.cholesky_ex(_gram(jacobian))
            if bool(failed) or freedom <= 0:
                break
        residuals = _residuals(problem, images)
        step = -torch.cholesky_solve(_product(jacobian, residuals)[:, None], factor).reshape(images.shape)
        if not bool((step.abs() < MAX_STEP).all()):
            break
        images = images + step
        # where some open that are closed in truth, the errors left would be those of too many equations
        if not (is_new and beside is not None and bool((step.abs() <= SMALL_STEP).all())):
            jacobian = None
        if bool((step.abs() <= SETTLED).all()):
            if beside is None:
                break
            spread = torch.cholesky_inverse(factor).diagonal().clamp_min(0).sqrt().reshape(images.shape)
            noise = problem.noise * problem.size / len(residuals) ** 0.5
            return DenseSolution(images, max(float(residuals.norm()) / freedom**0.5, noise) * spread)
    return DenseSolution(images, torch.full_like(images, float("inf")))


def _jacobian(problem: FeatureProblem, images: Tensor) -> Tensor:
    """Return J^T (numbers, equations) of the residuals that are compared, in the type of products."""
    single, count = problem.to(problem.work_type), images.numel()
    at = images.to(single.work_type)
    jacobian = ResidualJacobian(single, single.linearize(at))
    found = []
    for places in torch.arange(count, device=images.device).split(AT_ONCE):
        directions = functional.one_hot(places, count).to(at).reshape(-1, *at.shape)
        found.append(_select(problem, [pushed.flatten(0, 1) for pushed in jacobian.push_many(directions)]))
    return torch.cat(found)


def _rows(problem: FeatureProblem, images: Tensor, chosen: Sequence[Tensor]) -> Tensor:
    """Return the derivatives (chosen, numbers) of chosen features, not of residuals, in the type of products."""
    single = problem.to(problem.work_type)
    features = single.linearize(images.to(single.work_type))
    wanted = torch.cat([c.flatten() for c in chosen])
    found = []
    for places in wanted.nonzero()[:, 0].split(AT_ONCE):
        weights = functional.one_hot(places, len(wanted)).to(features.values[0])
        parts = zip(weights.split([c.numel() for c in chosen], 1), chosen, strict=True)
        found.append(features.pull_many([part.reshape(-1, *c.shape) for part, c in parts]).flatten(1))
    return torch.cat(found)


def _residuals(problem: FeatureProblem, images: Tensor) -> Tensor:
    """Return the residuals (equations,) that are compared, in the targets' type."""
    return _select(problem, problem.evaluate(images))[0]


def _select(problem: FeatureProblem, residuals: Sequence[Tensor]) -> Tensor:
    """Return of residuals (b, ...) those that are compared (b, equations)."""
    pairs = zip(residuals, problem.targets, strict=True)
    return torch.cat([r.flatten(1)[:, _compared(t).flatten()] for r, t in pairs if t.counts], 1)


def _gram(jacobian: Tensor) -> Tensor:
    """Return J^T J (numbers, numbers) in float64."""
    gram = torch.zeros(len(jacobian), len(jacobian), dtype=torch.float64, device=jacobian.device)
    for part in jacobian.split(BLOCK, 1):
        gram.addmm_(part.double(), part.double().mT)
    return gram


def _product(jacobian: Tensor, residuals: Tensor) -> Tensor:
    """Return J^T r (numbers,) in float64."""
    parts = zip(jacobian.split(BLOCK, 1), residuals.double().split(BLOCK), strict=True)
    found = torch.zeros(len(jacobian), dtype=torch.float64, device=jacobian.device)
    for part, rest in parts:
        found.addmv_(part.double(), rest)
    return found


def _close_activations(problem: FeatureProblem, images: Tensor) -> Tensor | None:
    """Return an image next to this one at which activations are closed that are so in truth; None where none is near.

    These are ReLUs of targets below other targets, whose closed features are passed over in `problem`.
    """
    beside = images
    for _ in range(MAX_STEPS):
        with torch.no_grad():
            open_by = _open_by(problem, problem.forward(beside))
        number = sum(int((o > 0).sum()) for o in open_by)
        if not number:
            return beside
        if number > MOST_CLOSED:
            return None
        excess = torch.cat([o[o > 0] for o in open_by])
        rows = _rows(problem, beside, [o > 0 for o in open_by]).to(excess)
        moving = rows.norm(dim=1) > MOVING * rows.norm(dim=1).max()
        if not bool(moving.any()):  # activations that no image opens
            return beside
        system = rows[moving].cpu(), 2 * excess[moving, None].cpu()  # CUDA lacks the driver
        least = torch.linalg.lstsq(*system, driver="gelsd").solution
        beside = beside - least.to(images).reshape(images.shape)
        if not bool(((beside - images).abs() <= FARTHEST).all()):
            return None
    return None


def _open_by(problem: FeatureProblem, features: Sequence[Tensor]) -> list[Tensor]:
    """Return for each target by how much what goes into ReLUs that are closed in truth is above where they are."""
    used = [place for place, target in enumerate(problem.targets) if target.counts]
    found = []
    for place, (feature, target) in enumerate(zip(features, problem.targets, strict=True)):
        margin = CLOSED_BY * target.value.square().mean().sqrt()
        closed = (target.value == 0) & (target.rectified and place in used[:-1])
        found.append(torch.where(closed, feature + margin, torch.zeros_like(feature)))
    return found


def _first_equations(problem: FeatureProblem, wanted: float) -> FeatureProblem:
    """Return the problem of the first targets that give so many equations, weighed as they are, for one picture.

    What ReLUs closed is no equation.
    """
    targets: list[FeatureTarget] = []
    found = 0.0
    for target in problem.targets:
        target = without_closed(target)
        targets.append(target if found < wanted else replace(target, use="none"))
        found += target.equations if target.counts else 0.0
    return replace(problem, targets=tuple(targets))


def without_closed(target: FeatureTarget) -> FeatureTarget:
    """Return a target without what a ReLU closed: that bounds what goes into it, to one side."""
    if not target.rectified:
        return target
    there = target.value != 0
    return replace(target, known=there if target.known is None else there & target.known)


def _compared(target: FeatureTarget) -> Tensor:
    """Return which entries of a target are compared, boolean and shaped like it."""
    known = torch.ones_like(target.value, dtype=torch.bool)
    return known if target.known is None else target.known.expand_as(target.value)
