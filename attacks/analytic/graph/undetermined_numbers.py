"""Counts the numbers of found pictures that the features leave open.

Features may be met by other pictures, too: where a pixel lies between the strides of a kernel, or where some pixels
change the features only together. So it is asked whether the pictures come back, where each number of them is moved a
little: to first order, by least squares of what the features say of the move,

    min over d of |J d - (r + J move)|^2,

with r the residuals at the pictures, and J their Jacobian there. Iterations begin at zero and gain nothing in J's null
space. So d comes out as the move only where no part of it lies there, and where the pictures are the best there are.
They end at the level of the features' noise: what moves them less than that counts as open. What moves them more may
still be told to no better than a level of 8 bits. So it is asked again with errors e of that noise drawn and added to
the residuals. By how much d then comes out otherwise, A^-1 J^T e with A = J^T J, is what errors of the features do to
each number.

Brightness and contrast are moved by themselves, too. Normalizations take them off, and of a move
at random what is open in one direction is no more than a share of 1 / sqrt(n), for n numbers.

Features that a ReLU closed are no equations: they bound what goes into it to one side. A search ends next to such a
bound, where all above the ReLU has another J to either side. So the lowest features alone are asked.

Where iterations do not end, the standard errors of `dense_least_squares` decide for small pictures at whole levels.

Where d comes out otherwise, searches that begin beside the pictures decide, with the bounds: to either side along the
part of the move in the null space, and at random. A normalization over each image takes its contrast off: then they end
on one line through the picture. Real numbers leave that open. Whole levels do not, unless another picture of whole
levels lies on the line (`pictures_on_lines`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.analytic.graph.dense_least_squares import solve_densely, without_closed
from attacks.analytic.graph.feature_inversion import (
    AT_NOISE,
    NUDGE,
    InversionSettings,
    InvertedImages,
    draw_curvature,
    invert_features,
)
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget, ResidualJacobian, residual
from attacks.analytic.graph.linearization import Forward
from attacks.analytic.graph.picture_search import search_seconds
from attacks.analytic.graph.pixel_curvature import PixelCurvature
from attacks.verification.level_lines import pictures_on_lines
from fl.seeds import stream
from fl.tensors import per_image

UNSEEN = 1e-10
"""Share of the largest derivative up to which one is none but for rounding."""
MAX_LEVEL_DISTANCE = 0.2
"""Levels of 8 bits by which pixels may miss whole levels: that all do so by chance is out of the question."""
LEVELS_ASIDE, WIDE = 2.0, 20.0
"""Levels of 8 bits by which pixels at whole levels are moved, up or down, where a search is to bring them back, and the
standard deviation of what they are moved by to first order: two that are told only together then move apart."""
MAX_MOVED_AT_LEVELS, MAX_MOVED = 0.5, 0.1
"""Levels of 8 bits by which numbers may come back beside where they were, of pictures at whole levels and of others."""
WIDE_DRAWS = 2
"""Further searches from random beginnings far aside: each would show another direction that is open."""
NEARER = 4.0
"""Divisor of a change if a search from there does not meet the features."""
TRIES = 3
"""How often a change is tried."""
FARTHEST = 2.0
"""Times such a move that a search begins aside, at most, in the direction of the null space."""
SURE = 3.0
"""Times the largest distance from a whole level, in standard errors, that a number may be off; and standard deviations
of drawn errors likewise."""
ERROR_DRAWS = 4
"""Errors of the features that are drawn to tell what they do to each number."""
CLEAR = 300.0
"""Times what the first ones do to any number that is still no other level, where no further ones are drawn."""
MAX_ITERATIONS = 300
"""Iterations of conjugate gradients, after which a search decides."""
LOOK_BACK = 5
"""Iterations between two tests of whether they have converged."""
BELOW_NOISE = 0.3
"""Residual, in units of the noise, at which iterations end."""
ABOVE_NOISE = 3.0
"""Residual, in units of the noise, at which they end if it hardly falls."""
LEAST_FALL = 0.8
"""Share to which the residual must fall not to count as hardly falling."""


def count_undetermined(
    forward: Forward, single_forward: Forward, targets: Sequence[FeatureTarget], found: InvertedImages, seed: int
) -> int:
    """Return how many numbers of found pictures may be others, as they move no feature or only together do not.

    Of pictures away from whole levels those are all where features are known up to a factor.

    Args:
        forward: from pictures to features.
        single_forward: the same in single precision.
        targets: the features, the lowest first; guides do not count.
        found: the pictures.
        seed: of what moves them.
    """
    equations, shape = [without_closed(target) for target in targets], found.images.shape
    unseen = count_unseen_numbers(forward, equations, found.images)
    if unseen or not bool(found.converged.all()):
        return unseen
    off = (255 * found.images - (255 * found.images).round()).abs()
    draw = _draw(shape, seed, "open numbers").to(found.images)
    at_levels = bool((off < MAX_LEVEL_DISTANCE).all())
    if at_levels:  # not by chance, but a number or two may be at another level
        contrasts = _draw_contrasts(found.images, seed)
        move, aside, most = WIDE / 255 * (draw + contrasts), LEVELS_ASIDE / 255 * draw.sign(), MAX_MOVED_AT_LEVELS / 255
    elif any(target.unknown_scale for target in targets):  # a brighter or darker picture may have the same features
        return found.images.numel()
    elif (few := found.images.numel() - sum(map(_count_equations, equations))) > 0:
        return few
    else:
        move, aside, most = NUDGE * draw, NUDGE * draw, MAX_MOVED / 255
    first = next(place for place, target in enumerate(equations) if target.counts)
    lowest = [target if place == first else replace(target, use="none") for place, target in enumerate(equations)]
    lowest_problem = FeatureProblem.of(forward, single_forward, lowest)
    around = _Surroundings.of(lowest_problem, found.images, seed)
    if not at_levels and not _are_contrasts_told(around):
        return found.images.numel()
    open_part = around.null_space_part(move)
    if open_part is not None and bool((open_part.abs() <= most).all()):
        unsure = _count_unsure(around, move, open_part, seed)
        told = not unsure or (at_levels and _are_told_to_half_a_level(lowest_problem, found.images))
        return 0 if told else unsure
    problem = FeatureProblem.of(forward, single_forward, targets)
    if open_part is None:
        if at_levels and _are_told_to_half_a_level(problem, found.images):
            return 0
        open_part = move
    farthest = FARTHEST * aside.abs().mean() / open_part.abs().max()
    changes = [farthest * open_part, -farthest * open_part, aside]
    if at_levels:
        return _count_other_levels(problem, found.images, [*changes, WIDE / 255 * contrasts], seed)
    return _count_moved(found.images, _search_aside(problem, found.images, changes, seed), most)


def _count_other_levels(problem: FeatureProblem, images: Tensor, changes: Sequence[Tensor], seed: int) -> int:
    """Return how many numbers of images at whole levels may be at others, as searches that begin beside them end.

    Args:
        problem: the features.
        images: (B, C, H, W).
        changes: shaped like them, to where searches begin, beside some at random far aside.
        seed: of the searches.
    """
    far = [WIDE / 255 * _draw(images.shape, seed, "aside", number).to(images) for number in range(WIDE_DRAWS)]
    others = _search_aside(problem, images, [*changes, *far], seed)
    levels = None if others is None else pictures_on_lines(images, others)
    if levels is not None and not _are_features_met(problem, levels):
        return 0
    return _count_moved(images, others, MAX_MOVED_AT_LEVELS / 255)


def _count_moved(images: Tensor, others: Tensor | None, most: float) -> int:
    """Return how many numbers others (n, B, C, H, W) have elsewhere; all where they are None: nothing was checked."""
    return images.numel() if others is None else int(((others - images).abs() > most).any(0).sum())


def _search_aside(problem: FeatureProblem, images: Tensor, changes: Sequence[Tensor], seed: int) -> Tensor | None:
    """Return where searches end that begin beside images, (n, B, C, H, W); None where one does not meet its features.

    All of them together may take as long as the search for the pictures.

    Args:
        problem: the features.
        images: (B, C, H, W).
        changes: shaped like them, to where each search begins.
        seed: of the searches.
    """
    shape, ends = images.shape, []
    settings = InversionSettings(seed=seed, restarts=0, roughness=0.0, below_noise=False)
    last = time.process_time() + search_seconds(shape)

    def search(change: Tensor) -> InvertedImages:
        start, single = images + change, problem.single_forward
        timed = replace(settings, seconds=max(0.0, last - time.process_time()))
        return invert_features(
            problem.forward, problem.targets, shape, settings=timed, single_forward=single, start=start
        )

    for change in changes:
        tries = (search(change / NEARER**number) for number in range(TRIES))
        end = next((again.images for again in tries if bool(again.converged.all())), None)
        if end is None:
            return None
        ends.append(end)
    return torch.stack(ends)


def _are_features_met(problem: FeatureProblem, pictures: Sequence[Tensor]) -> bool:
    """Return whether any of the pictures has the features up to their noise."""
    return any(bool((problem.relative_residual(p) <= AT_NOISE * problem.noise).all()) for p in pictures)


def _draw(shape: Sequence[int], seed: int, *names: str | int) -> Tensor:
    """Return standard normal numbers in double precision."""
    return torch.randn(tuple(shape), generator=stream(seed, *names), dtype=torch.float64)


def _are_contrasts_told(around: _Surroundings) -> bool:
    """Return whether features tell the brightness and contrast of images, as a whole and of each channel.

    Normalizations take these off, and what is open in one direction alone hardly shows in a move at random.
    """
    for pattern in _contrast_patterns(around.images):
        open_part = around.null_space_part(NUDGE * pattern)
        if open_part is None or bool((open_part.abs() > MAX_MOVED / 255).any()):
            return False
    return True


def _draw_contrasts(images: Tensor, seed: int) -> Tensor:
    """Return a sum of all patterns of brightness and contrast, each up or down by between a half and three halves."""
    patterns = _contrast_patterns(images)
    size = 0.5 + torch.rand(len(patterns), generator=stream(seed, "contrasts"), dtype=torch.float64)
    signs = _draw((len(patterns),), seed, "up or down").sign()
    return torch.einsum("k,k...->...", (size * signs).to(images), torch.stack(patterns))


def _contrast_patterns(images: Tensor) -> list[Tensor]:
    """Return what makes images brighter, and what raises their contrast, as a whole and of each channel."""
    channels = images.shape[1]
    parts = [slice(None), *(slice(c, c + 1) for c in range(channels) if channels > 1)]
    patterns = []
    for part in parts:
        contrast = images[:, part] - images[:, part].mean((1, 2, 3), keepdim=True)
        size = contrast.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-30)
        for pattern in (torch.ones_like(contrast), contrast / size):
            patterns.append(torch.zeros_like(images))
            patterns[-1][:, part] = pattern
    return patterns


def _count_equations(target: FeatureTarget) -> int:
    """Return how many features are compared.

    Of a part of features, so many numbers of each channel are compared as the part has dimensions.
    """
    if not target.counts:
        return 0
    if target.projection is not None:
        return target.value.shape[1] * round(float(target.projection.diagonal(dim1=1, dim2=2).sum()))
    counts = torch.ones_like(target.value, dtype=torch.bool) if target.known is None else target.known
    return int(counts.expand_as(target.value).sum())


def _are_told_to_half_a_level(problem: FeatureProblem, images: Tensor) -> bool:
    """Return whether no number of images at whole levels is at another level by the errors of the features.

    How large these are is told by the residuals and by how far numbers are from whole levels: errors of features that
    are not independent show there.
    """
    for place in range(len(images)):
        one = problem.select(torch.arange(len(images), device=images.device) == place)
        solution = solve_densely(one, images[place : place + 1])
        if solution is None or not bool(solution.errors.isfinite().all()):
            return False
        levels = 255 * solution.images
        off = (levels - levels.round()).abs() / 255
        larger = float((off / solution.errors.clamp_min(1e-30)).max().clamp_min(1))
        moved = (solution.images - images[place]).abs() > MAX_MOVED_AT_LEVELS / 255
        if bool(moved.any()) or float(solution.errors.max()) * larger * SURE > MAX_MOVED_AT_LEVELS / 255:
            return False
    return True


def _count_unsure(around: _Surroundings, move: Tensor, open_part: Tensor, seed: int) -> int:
    """Return how many numbers may be at another level by errors of the features, as drawn ones put them off.

    Args:
        around: the images.
        move: shaped like them, by which they are moved.
        open_part: what is left of it without errors.
        seed: of the errors.
    """
    squares = torch.zeros_like(around.images)
    for number in range(ERROR_DRAWS):
        left = around.null_space_part(move, _draw_errors(around.problem, around.images, seed, number))
        if left is None:
            return around.images.numel()
        off = (left - open_part).abs()
        if CLEAR * float(off.max()) <= MAX_MOVED_AT_LEVELS / 255:  # a number's first error is seldom so small by chance
            return 0
        squares += off.square() / ERROR_DRAWS
    return int((SURE * squares.sqrt() > MAX_MOVED_AT_LEVELS / 255).sum())


def _draw_errors(problem: FeatureProblem, images: Tensor, seed: int, number: int) -> list[Tensor]:
    """Return random errors of each target's residuals, as large as is stated or, where that is more, as these are."""
    drawn, missed = [], problem.evaluate(images)
    for place, (target, own) in enumerate(zip(problem.targets, missed, strict=True)):
        error = _draw(own.shape, seed, "errors", number, place).to(own)
        error = error if target.known is None else error * target.known
        size = own.reshape(len(own), -1).norm(dim=1).clamp_min(target.share * target.noise)
        long = error.reshape(len(own), -1).norm(dim=1).clamp_min(1e-37)
        drawn.append(per_image(size / long, error) * error)
    return drawn


@dataclass(frozen=True)
class _Surroundings:
    """What features say of pictures beside found ones, to first order.

    Attributes:
        problem: the features.
        images: the found pictures (B, C, H, W).
        jacobian: of the residuals there.
        curvature: the preconditioner of its normal equations.
    """

    problem: FeatureProblem
    images: Tensor
    jacobian: ResidualJacobian
    curvature: PixelCurvature

    @classmethod
    def of(cls, problem: FeatureProblem, images: Tensor, seed: int) -> _Surroundings:
        """Return those of images; the seed is that of the preconditioner's probes."""
        single = problem.to(problem.work_type)
        jacobian = ResidualJacobian(single, single.linearize(images.to(problem.work_type)))
        return cls(problem, images, jacobian, draw_curvature(jacobian, single, seed))

    def null_space_part(self, move: Tensor, errors: Sequence[Tensor] = ()) -> Tensor | None:
        """Return what is left of a move of the images without what the features say of it.

        None where iterations do not end.

        Args:
            move: shaped like the images.
            errors: that are added to the residuals.
        """
        problem, jacobian, curvature = self.problem, self.jacobian, self.curvature
        wanted, count = move.to(problem.work_type), len(self.images)

        def dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
            return torch.stack([(a * b).reshape(count, -1).sum(1) for a, b in zip(one, other, strict=True)]).sum(0)

        missed = [values.to(problem.work_type) for values in problem.evaluate(self.images)]
        if errors:
            missed = [values + error.to(values) for values, error in zip(missed, errors, strict=True)]
        rest = tuple(m + p for m, p in zip(missed, jacobian.push(wanted), strict=True))
        gradient = jacobian.pull(rest)
        direction = preconditioned = curvature.divide(gradient)
        told, gamma = torch.zeros_like(wanted), dot([gradient], [preconditioned])
        noise, before = problem.noise * problem.size, dot(rest, rest).sqrt()
        for k in range(1, MAX_ITERATIONS + 1):
            pushed = jacobian.push(direction)
            length = (gamma / dot(pushed, pushed)).nan_to_num(0.0, 0.0)  # where nothing is left to gain
            told = told + per_image(length, direction) * direction
            rest = tuple(r - per_image(length, p) * p for r, p in zip(rest, pushed, strict=True))
            if k % LOOK_BACK == 0:
                now = dot(rest, rest).sqrt()
                ended = (now <= BELOW_NOISE * noise) | ((now <= ABOVE_NOISE * noise) & (now > LEAST_FALL * before))
                if bool(ended.all()):
                    return move - told.to(move)
                before = now
            gradient = jacobian.pull(rest)
            preconditioned = curvature.divide(gradient)
            following = dot([gradient], [preconditioned])
            direction = preconditioned + per_image(following / gamma.clamp_min(1e-37), direction) * direction
            gamma = following
        return None


def count_unseen_numbers(forward: Forward, targets: Sequence[FeatureTarget], images: Tensor) -> int:
    """Return how many numbers of the images move none of the known features.

    Whatever these are, the images meet their targets: a pixel between the strides of a kernel, or below activations
    that are all closed.

    Args:
        forward: from images (B, C, H, W) to one tensor for each target, as in `invert_features`.
        targets: the known features.
        images: near which numbers are moved.
    """
    at = images.detach().to(targets[0].value.dtype).requires_grad_()
    with torch.enable_grad():
        missed = tuple(residual(f, t) for f, t in zip(forward(at), targets, strict=True))
        generator = stream(0, "unseen numbers")
        weights = [torch.randn(r.shape, generator=generator).to(r) for r in missed]
        (moved,) = torch.autograd.grad(missed, at, weights)
    return int((moved.abs() <= UNSEEN * moved.abs().max()).sum())
