r"""The images whose features these are: nonlinear least squares from gray.

Sought is the minimum over images x of sum_k |r_k(x)|^2, with the residuals r_k of `feature_residuals`.

**Steps** are Gauss and Newton's: min over d of |r + J d|^2 by conjugate gradients (CGLS), then a line search. A
network of linear maps and ReLUs is piecewise linear, so once the pieces are right a step is exact. Three things make
them cheap:

- J v and J^T w come from a record of the derivative (`linearization`), in float32 where the caller has the network in
  float32, too; the last residuals are taken in float64 (iterative refinement).
- A preconditioner that is diagonal over pixels and over their frequencies (`pixel_curvature`).
- The iterations of a step end where the model falls by little more (Nash and Sofer, 1990): far from the solution the
  pieces are wrong, and an exact step is wasted.

**Smooth first.** Max pooling makes kinks in which a search gets stuck. A prior on the differences of neighboring
pixels, |grad x|^2 s^2 / tau^2, with s^2 the mean square of the present residuals and tau the differences that images
have (`roughness`), makes the first steps smooth. It weighs as much as data of that error would, so nothing of it is
left once the residual has gone.

**Several starts.** A flat gray picture stands on kinks: of poolings, and of a network that normalizes pixels and has no
biases, where all activations change at once. So the start is noise around gray. An image whose search got stuck is
searched for again: from where it is and a little noise if that is near, or from a new start by annealing and descent
(`gradient_descent`), which jump over the kinks of deep networks. The first search has a quarter of the time, and ends
early where its steps are slow: through a hundred layers the kinks are so near that a step's direction is soon wrong.
Descent then goes on from there. The best is kept. A near image that comes back to the same residual is at the minimum
that its features have, and is left alone.

**Trained networks.** They hardly respond to fine patterns, and see a picture through many kinks. So the second
annealing is a smooth one, of the features nearest to the picture alone, as many as give three equations a pixel;
further ones are of the kind that went better. From where it is near enough steps go on with ReLUs whose kinks are
rounded off, less and less (`softened_rectifiers`), and with as many products a step as directions need that features
hardly tell.

The images of a batch do not interact: each has its own inner products, step lengths and end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget, ResidualJacobian, differences
from attacks.analytic.graph.gradient_descent import SMOOTH, WIDE, AnnealingCourse, anneal, descend
from attacks.analytic.graph.linearization import Forward, Linearization
from attacks.analytic.graph.pixel_curvature import PixelCurvature, estimate_curvature
from attacks.analytic.graph.softened_rectifiers import rectifier_sizes, soften_rectifiers
from attacks.search_control import check_time_limit
from fl.seeds import stream

GRAY = 0.5
"""Around what a search starts: the middle of the pixels' range."""
NEAR, NUDGE = 30.0, 0.02
"""Multiple of the noise below which an image that got stuck is near, and the standard deviation of what moves it."""
SETTLED = 0.01
"""Share by which a near image's residual changes, at most, where it has come back to the same minimum."""
FIRST_SHARE = 0.25
"""Share of the time that the first search may take: where it is slow, others follow."""
SLOW_STEPS, SLOW_FALL = 8, 0.25
"""Steps after which at least such a share of the residual is left where a search is slow."""
ANNEALING_STEPS, MAX_DESCENT_STEPS = 800, 2000
"""Steps of the first annealing, and of a descent at most."""
SMOOTH_STEPS = 1600
"""Steps of the first smooth annealing."""
SMOOTH_EQUATIONS = 3.0
"""Equations for each number of an image from which on it is used."""
SMOOTH_NOISE = 0.1
"""Standard deviation of its start around gray."""
PROMISING = 0.05
"""Relative residual up to which an image that annealing led to is searched for with softened ReLUs."""
SOFT_WIDTHS = (0.1, 0.02, 0.005, 0.001)
"""Widths of softened ReLUs, as shares of what a ReLU gets."""
SOFT_STEPS = 8
"""Steps with each width."""
SOFT_INNER = 400
"""Matrix-vector products in a step, at most."""
WIDTH_OF_RESIDUAL = 100.0
"""Largest width to begin with, as a multiple of the relative residual: a wider one leads away from near images."""
PROBES = 16
"""Random sign vectors from which the diagonal of J^T J is estimated."""
SINGLE_FLOOR = 2e-5
"""Relative residual below which residuals are taken in float64: float32 rounds features to about 1e-7."""
MIN_INNER = 5
"""Conjugate gradient iterations a step takes at least."""
SHORTEST = 2.0**-6
"""The shortest share of a step that the line search tries."""
MAX_SLOW_STEPS, MAX_STEPS_AT_NOISE = 5, 10
"""Steps in a row that hardly lower the residual, and that are at the level of noise, after which a search ends."""
AT_NOISE = 3.0
"""Multiple of the noise up to which a residual is at its level."""
LEVEL_DISTANCE = 0.1
"""Levels of 8 bits by which a pixel that is at a whole one may miss it."""


@dataclass(frozen=True)
class InversionSettings:
    """How long and how exactly to search.

    Attributes:
        max_steps: Gauss-Newton steps.
        max_inner_iterations: conjugate gradient iterations a step, each one product with J and one with J^T.
        roughness: typical difference of neighboring pixels, for the smooth prior of the first steps; 0 for none.
        start_noise: standard deviation of a start around gray.
        restarts: how often an image that got stuck is searched for again, at most. That descent goes on where a first
            search was slow does not count.
        seconds: seconds of CPU time of all searches together, after which no further step begins.
        seed: of the start and the probes.
        below_noise: whether to go on at the level of noise until all pixels are at whole levels, for some steps.
    """

    max_steps: int = 100
    max_inner_iterations: int = 60
    roughness: float = 0.1
    start_noise: float = 0.3
    restarts: int = 4
    seconds: float | None = None
    seed: int = 0
    below_noise: bool = True


@dataclass(frozen=True)
class InvertedImages:
    """What a search over pixels found.

    Attributes:
        images: (B, C, H, W), in the units of `forward`'s input, not clipped.
        residual: (B,), the root mean square of the targets' relative residuals, weighted.
        converged: (B,), whether the residual is at the level of the targets' noise. It proves the image where the
            features determine it.
        steps: (B,), Gauss-Newton steps that each image took, restarts included.
        iterations: products with J of the whole batch.
    """

    images: Tensor
    residual: Tensor
    converged: Tensor
    steps: Tensor
    iterations: int


def invert_features(
    forward: Forward,
    targets: Sequence[FeatureTarget],
    shape: Sequence[int],
    *,
    settings: InversionSettings = InversionSettings(),
    single_forward: Forward | None = None,
    start: Tensor | None = None,
) -> InvertedImages:
    """Find the images whose features these are.

    Args:
        forward: from images (b, C, H, W), any b of the batch, to one tensor (b, ...) for each target. The images of a
            batch must not interact in it. It computes in the targets' type, float64 as a rule.
        targets: the known features.
        shape: (B, C, H, W) of the images.
        settings: bounds of the search.
        single_forward: the same network in float32, for all products with its Jacobian: three to six times as fast.
            Records of its derivative are kept for the next search where it is a `RecordedFunction`.
        start: (B, C, H, W), where the first search starts; otherwise around gray.

    Returns:
        Images with their residuals.

    Raises:
        ValueError: where a target has another number of images than `shape`.
    """
    for target in targets:
        if len(target.value) != shape[0]:
            raise ValueError(f"A target of {len(target.value)} images for {shape[0]} images to find.")
    problem = FeatureProblem.of(forward, single_forward, targets)
    value = targets[0].value
    generator = stream(settings.seed, "feature inversion")

    def draw_noise() -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(value)

    time_limit = _TimeLimit(settings.seconds)
    around_gray = GRAY + settings.start_noise * draw_noise()
    first = around_gray if start is None else start.to(value)
    if settings.restarts:
        search = _Search(problem, settings, first, time_limit.first_is_over, ends_if_slow=True)
    else:
        search = _Search(problem, settings, first, time_limit.is_over)
    best = search.run()
    settled, cut_short = torch.zeros_like(best.converged), search.was_slow or time_limit.first_is_over()
    plan = _RestartPlan(cut_short)
    for _ in range(settings.restarts + search.was_slow):
        waiting = ~best.converged & ~settled
        if time_limit.is_over() or not bool(waiting.any()):
            break
        how = plan.next(draw_noise())
        again = _search_again(problem, settings, best, waiting, how, time_limit.is_over)
        if how.course is SMOOTH:
            again = _follow_softened(problem.select(waiting), settings, again, time_limit.is_over)
        plan.note(how, again)
        settled[waiting] = _came_back(best, again, waiting, problem.noise)
        best = _better(best, again, waiting)
    return best


@dataclass
class _TimeLimit:
    """The CPU seconds that all searches may take together; they count from when it is made.

    Attributes:
        seconds: None for no limit.
        began: process time.
    """

    seconds: float | None
    began: float = field(default_factory=time.process_time)

    def is_over(self) -> bool:
        """Return whether no further step may begin."""
        return self.seconds is not None and time.process_time() - self.began > self.seconds

    def first_is_over(self) -> bool:
        """Return whether no further step of the first search may begin, where others are to follow."""
        return self.seconds is not None and time.process_time() - self.began > FIRST_SHARE * self.seconds


@dataclass(frozen=True)
class _Restart:
    """How images that got stuck are searched for again.

    Attributes:
        noise: (B, C, H, W), added to near images and used as a new start.
        annealing_steps: from a new start of images that are not near; 0 where these go on from where they are.
        course: of the annealing.
    """

    noise: Tensor
    annealing_steps: int
    course: AnnealingCourse = WIDE


class _RestartPlan:
    """Says how images are searched for again: by a wide annealing, a smooth one, and then as went better.

    Each annealing is twice as long as the one before of its kind.
    """

    def __init__(self, cut_short: bool) -> None:
        """Begin, where an image whose search was cut short first goes on from where it is."""
        self._goes_on = cut_short
        self._steps = {WIDE: ANNEALING_STEPS, SMOOTH: SMOOTH_STEPS}
        self._reached: dict[AnnealingCourse, float] = {}

    def next(self, noise: Tensor) -> _Restart:
        """Return the next restart, with noise for it."""
        if self._goes_on:
            self._goes_on = False
            return _Restart(noise, 0)
        untried = [course for course in self._steps if course not in self._reached]
        course = untried[0] if untried else min(self._reached, key=lambda tried: self._reached[tried])
        steps = self._steps[course]
        self._steps[course] = 2 * steps
        return _Restart(noise, steps, course)

    def note(self, restart: _Restart, found: InvertedImages) -> None:
        """Note what a restart led to."""
        if restart.annealing_steps:
            self._reached[restart.course] = float(found.residual.median())


def _search_again(
    problem: FeatureProblem,
    settings: InversionSettings,
    best: InvertedImages,
    waiting: Tensor,
    restart: _Restart,
    late: Callable[[], bool],
) -> InvertedImages:
    """Return what a new search finds of the waiting images: near ones from beside where they are, others from afar."""
    start_noise = SMOOTH_NOISE if restart.course is SMOOTH else settings.start_noise
    nudged, new_start = best.images + NUDGE * restart.noise, GRAY + start_noise * restart.noise
    search = _Search(problem.select(waiting), settings, nudged[waiting], late)
    begin = new_start if restart.annealing_steps else best.images
    near = are_near(best, problem.noise)[waiting]
    search.begin_elsewhere(near, begin[waiting], restart.annealing_steps, restart.course)
    return search.run()


def _follow_softened(
    problem: FeatureProblem, settings: InversionSettings, found: InvertedImages, late: Callable[[], bool]
) -> InvertedImages:
    """Return what follows from promising images where ReLUs are softened, less and less."""
    which = ~found.converged & (found.residual < PROMISING)
    if late() or not bool(which.any()):
        return found
    problem, images = problem.select(which), found.images[which]
    sizes = rectifier_sizes(problem.forward, images)
    if not any(sizes):
        return found
    first = problem.of_first_targets(SMOOTH_EQUATIONS * images[0].numel())
    settings = replace(settings, max_inner_iterations=SOFT_INNER, roughness=0.0)
    largest = max(WIDTH_OF_RESIDUAL * float(found.residual[which].max()), SOFT_WIDTHS[-1])
    for width in (w for w in SOFT_WIDTHS if w <= largest):
        if late():
            return found
        widths = [width * size for size in sizes]
        forward, single = (soften_rectifiers(f, widths) for f in (first.forward, first.single_forward))
        soft = FeatureProblem.of(forward, None if first.single_forward is first.forward else single, first.targets)
        images = _Search(soft, replace(settings, max_steps=SOFT_STEPS), images, late).run().images
    return _better(found, _Search(problem, settings, images, late).run(), which)


def are_near(found: InvertedImages, noise: float) -> Tensor:
    """Return which images (B,) miss their features by not much more than noise."""
    return found.residual < NEAR * noise


def are_at_levels(images: Tensor) -> Tensor:
    """Return the images (B,) whose pixels are all at whole levels of 8 bits."""
    levels = 255 * images
    return ((levels - levels.round()).abs() < LEVEL_DISTANCE).reshape(len(levels), -1).all(1)


def _came_back(before: InvertedImages, again: InvertedImages, which: Tensor, noise: float) -> Tensor:
    """Return which images were near and have ended at the same residual again: at the minimum of their features."""
    same = again.residual > (1 - SETTLED) * before.residual[which]
    return are_near(before, noise)[which] & same


def _better(before: InvertedImages, again: InvertedImages, which: Tensor) -> InvertedImages:
    """Return the better of two searches for each image; the second one was for some images only."""
    images, residual, converged, steps = (
        t.clone() for t in (before.images, before.residual, before.converged, before.steps)
    )
    places = torch.nonzero(which)[:, 0]
    steps[places] += again.steps
    better = again.residual < before.residual[places]
    places = places[better]
    images[places], residual[places] = again.images[better], again.residual[better]
    converged[places] = again.converged[better]
    return InvertedImages(images, residual, converged, steps, before.iterations + again.iterations)


class _Search:
    """Gauss-Newton steps for all images that are not done yet.

    Attributes:
        ends_if_slow: whether to end once no image that is not near comes nearer fast.
        was_slow: whether it ended so.
    """

    def __init__(
        self,
        problem: FeatureProblem,
        settings: InversionSettings,
        images: Tensor,
        late: Callable[[], bool],
        ends_if_slow: bool = False,
    ) -> None:
        self.settings = settings
        self.ends_if_slow = ends_if_slow
        self.was_slow = False
        self.problem = problem
        self.images = images
        self.count = len(images)
        self.late = late
        self.iterations = 0
        self.work_type = problem.work_type
        self.single_problem = problem.to(self.work_type)

    def run(self) -> InvertedImages:
        """Return the images once all are done or time is up."""
        device, number = self.images.device, len(self.images)
        found = self.images.clone()
        residual = torch.full((number,), float("inf"), dtype=self.images.dtype, device=device)
        steps = torch.zeros(number, dtype=torch.long, device=device)
        places = torch.arange(number, device=device)  # in the batch, of the images that steps are taken with
        waiting = torch.ones(number, dtype=torch.bool, device=device)
        curvature = self._curvature()
        state = _State(self, self.images)
        course: list[Tensor] = []  # the relative residuals (B,) after each step
        for _ in range(self.settings.max_steps):
            check_time_limit()
            self.was_slow = self.ends_if_slow and self._is_slow(course)
            if self.was_slow or self.late():
                break
            state.step(curvature)
            now = places[waiting]
            steps[now] += 1
            found[now], residual[now] = state.images[waiting], state.relative[waiting]
            course.append(residual.clone())
            waiting = waiting & ~state.done()
            if not bool(waiting.any()):
                break
            if 2 * int(waiting.sum()) <= self.count:  # a record for fewer images costs as much as some steps
                places = places[waiting]
                self.count = len(places)
                state.select(waiting)
                waiting = torch.ones_like(places, dtype=torch.bool)
        return InvertedImages(found, residual, residual <= AT_NOISE * self.problem.noise, steps, self.iterations)

    def _is_slow(self, course: Sequence[Tensor]) -> bool:
        """Return whether the last steps led no image that is not near much nearer.

        Args:
            course: the relative residuals (B,) after each step.
        """
        if len(course) <= SLOW_STEPS:
            return False
        before, now = course[-1 - SLOW_STEPS], course[-1]
        far = now >= NEAR * self.problem.noise
        return bool(far.any()) and bool((now[far] > SLOW_FALL * before[far]).all())

    def begin_elsewhere(
        self, near: Tensor, begin: Tensor, annealing_steps: int, course: AnnealingCourse = WIDE
    ) -> None:
        """Choose where images that are not near begin: by annealing and descent from elsewhere, or by descent alone.

        Args:
            near: which images begin where they are now.
            begin: (B, C, H, W), where the others are led from.
            annealing_steps: of these; none where their search was still on its way.
            course: of the annealing; a smooth one goes by the first targets alone.
        """
        if bool(near.all()):
            return
        far = ~near
        problem = self.single_problem.select(far)
        if course.total_variation:
            problem = problem.of_first_targets(SMOOTH_EQUATIONS * begin[0].numel())

        def misfit(images: Tensor) -> Tensor:
            residuals = problem.residuals(tuple(problem.single_forward(images)))
            total = sum(r.reshape(len(images), -1).square().sum(1) for r in residuals)
            assert isinstance(total, Tensor)
            return total / problem.size**2

        start = begin[far].to(self.work_type)
        if annealing_steps:
            start = anneal(misfit, start, annealing_steps, self.late, course)
        found = descend(misfit, start, self._curvature(), MAX_DESCENT_STEPS, SINGLE_FLOOR**2, self.late)
        self.images = self.images.clone()
        self.images[far] = found.to(self.images.dtype)

    def _curvature(self) -> PixelCurvature:
        """Return a model of J^T J, averaged over images."""
        features = self.single_problem.linearize(self.images.to(self.work_type))
        jacobian = ResidualJacobian(self.single_problem, features)
        return draw_curvature(jacobian, self.single_problem, self.settings.seed)


def draw_curvature(jacobian: ResidualJacobian, problem: FeatureProblem, seed: int) -> PixelCurvature:
    """Return a model of J^T J, averaged over images.

    Args:
        jacobian: J.
        problem: whose residuals' Jacobian it is.
        seed: of the random signs that are pulled back.
    """
    generator, pulled = stream(seed, "probes of the diagonal"), []
    for _ in range(PROBES):
        values = [target.value for target in problem.targets]
        signs = [(2 * torch.randint(0, 2, v.shape, generator=generator) - 1).to(v) for v in values]
        pulled.append(jacobian.pull(signs))
    return estimate_curvature(pulled)


class _State:
    """Where the search of the active images stands."""

    def __init__(self, search: _Search, images: Tensor) -> None:
        self.search = search
        self.problem, self.single = search.problem, search.single_problem
        self.images = images
        self.damping = torch.zeros(search.count, dtype=search.work_type, device=images.device)
        self.stalled = torch.zeros(search.count, dtype=torch.long, device=images.device)
        self.at_noise = torch.zeros_like(self.stalled)
        self.precise = torch.full_like(self.stalled, search.work_type == images.dtype, dtype=torch.bool)
        self.residuals, self.relative, self.features = self._evaluate(images)
        self.before = self.relative
        self.smoothness: Tensor | None = None

    def select(self, keep: Tensor) -> None:
        """Keep some problems."""
        self.problem, self.single = self.problem.select(keep), self.single.select(keep)
        self.images, self.damping = self.images[keep], self.damping[keep]
        self.stalled, self.at_noise, self.precise = self.stalled[keep], self.at_noise[keep], self.precise[keep]
        self.residuals = tuple(r[keep] for r in self.residuals)
        self.features = self.single.linearize(self.images.to(self.search.work_type))
        self.relative, self.before = self.relative[keep], self.before[keep]

    def done(self) -> Tensor:
        """Return which problems need no further step: at the level of noise, or no longer falling.

        At that level pixels may still be off that features hardly tell: a search that goes on below it ends when they
        are at whole levels, or some steps later.
        """
        gain, noise = self.relative / self.before.clamp_min(1e-300), self.problem.noise
        self.stalled = torch.where(gain > 0.98, self.stalled + 1, torch.zeros_like(self.stalled))
        ended = (self.stalled >= MAX_SLOW_STEPS) | (self.relative == 0)
        met = (self.relative <= 0.3 * noise) | ((self.relative <= AT_NOISE * noise) & (gain > 0.8))
        if not self.search.settings.below_noise:
            return met | ended
        self.at_noise = torch.where(
            self.relative <= AT_NOISE * noise, self.at_noise + 1, torch.zeros_like(self.at_noise)
        )
        return (met & are_at_levels(self.images)) | ended | (self.at_noise >= MAX_STEPS_AT_NOISE)

    def step(self, curvature: PixelCurvature) -> None:
        """Take one Gauss-Newton step."""
        near = self.relative < SINGLE_FLOOR
        if bool((near & ~self.precise).any()):
            self.precise = self.precise | near
            self.residuals, self.relative = self._residuals(self.images, self.features)
        self.before = self.relative
        self._set_smoothness()
        jacobian = ResidualJacobian(self.single, self.features, self.smoothness)
        direction = self._solve(jacobian, curvature).nan_to_num(0.0, 0.0, 0.0)  # a step that is no number is none
        self._move(direction.to(self.images.dtype))

    def _set_smoothness(self) -> None:
        """Weigh the smooth prior as the present residuals say."""
        roughness = self.search.settings.roughness
        if roughness:
            number = sum(r.numel() for r in self.residuals) / self.search.count
            error = self.relative.to(self.search.work_type) * (self.problem.size / number**0.5)
            self.smoothness = (error / roughness).reshape(-1, *[1] * (self.images.ndim - 1))

    def _objective(self, images: Tensor, relative: Tensor) -> Tensor:
        """Return what a step is to lower: the squared residual and the prior."""
        value = (relative * self.problem.size) ** 2
        if self.smoothness is not None:
            for difference in differences(images, self.smoothness.to(images.dtype)):
                value = value + difference.square().reshape(self.search.count, -1).sum(1)
        return value

    def _evaluate(self, images: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Linearization]:
        """Return what `_residuals` does, and the features with their Jacobian, by which the next step is taken."""
        features = self.single.linearize(images.to(self.search.work_type))
        return *self._residuals(images, features), features

    def _residuals(self, images: Tensor, features: Linearization) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the residuals in the working type, and their norm for each problem, relative.

        Those of images that are `precise` are computed in the images' own type.
        """
        count, work_type = self.search.count, self.search.work_type
        residuals = self.single.residuals(features.values)
        relative = self._norm(residuals, count).to(images.dtype)
        if work_type != images.dtype and bool(self.precise.any()):
            exact = self.problem.select(self.precise).evaluate(images[self.precise])
            for all_values, own in zip(residuals, exact, strict=True):
                all_values[self.precise] = own.to(work_type)
            relative[self.precise] = self._norm(exact, len(exact[0]))
        return residuals, relative / self.problem.size

    @staticmethod
    def _norm(residuals: Sequence[Tensor], count: int) -> Tensor:
        """Return the length of each image's residuals (count,)."""
        squares = sum(r.reshape(count, -1).square().sum(1) for r in residuals)
        assert isinstance(squares, Tensor)
        return squares.sqrt()

    def _solve(self, jacobian: ResidualJacobian, curvature: PixelCurvature) -> Tensor:
        """Return d that makes |r + J d|^2 + damping |d|^2 small, by preconditioned conjugate gradients."""
        count = self.search.count

        def spread(scalars: Tensor, like: Tensor) -> Tensor:
            return scalars.reshape(count, *[1] * (like.ndim - 1))

        def dot(u: Tensor, v: Tensor) -> Tensor:
            return (u * v).reshape(count, -1).sum(1)

        residuals = self.residuals
        if self.smoothness is not None:
            residuals = (*residuals, *differences(self.images.to(self.search.work_type), self.smoothness))
        size = sum(dot(r, r) for r in residuals)
        assert isinstance(size, Tensor)
        scale = size.sqrt().clamp_min(1e-30)
        rest = [-r / spread(scale, r) for r in residuals]
        gradient = jacobian.pull(rest)
        found = torch.zeros_like(gradient)
        preconditioned = curvature.divide(gradient)
        direction = preconditioned
        gamma = dot(gradient, preconditioned)
        damping = spread(self.damping, gradient)
        fall = torch.zeros_like(gamma)
        for k in range(self.search.settings.max_inner_iterations):
            pushed = jacobian.push(direction)
            square = dot(direction, damping * curvature.multiply(direction))
            for p in pushed:
                square = square + dot(p, p)
            length = torch.where(square > 0, gamma / square, torch.zeros_like(gamma))
            found = found + spread(length, found) * direction
            rest = [r - spread(length, r) * p for r, p in zip(rest, pushed, strict=True)]
            gradient = jacobian.pull(rest) - damping * curvature.multiply(found)
            preconditioned = curvature.divide(gradient)
            following = dot(gradient, preconditioned)
            gain = length * gamma
            fall = fall + gain
            direction = preconditioned + spread(following / gamma.clamp_min(1e-37), direction) * direction
            gamma = following
            self.search.iterations += 1
            ends = float(((k + 1) * gain < 0.5 * fall).double().mean()) >= 0.5
            if k + 1 >= MIN_INNER and (ends or self.search.late()):  # of a large picture a product takes long
                break
        return found * spread(scale, found)

    def _move(self, direction: Tensor) -> None:
        """Go along a direction as far as the residual falls, each problem for itself."""
        count = self.search.count
        like = (count, *[1] * (direction.ndim - 1))
        objective = self._objective(self.images, self.relative)
        share = torch.ones(count, dtype=direction.dtype, device=direction.device)
        while True:
            trial = self.images + share.reshape(like) * direction
            residuals, relative, features = self._evaluate(trial)
            worse = ~(self._objective(trial, relative) < objective) & (share > 0)
            if not bool(worse.any()):
                break
            share = torch.where(worse, share / 2, share)
            share = torch.where(share < SHORTEST, torch.zeros_like(share), share)
        shortened = (share < 0.3).to(self.damping.dtype)
        self.damping = shortened * (4 * self.damping).clamp_min(1e-3) + (1 - shortened) * self.damping / 4
        self.damping = torch.where(self.damping < 1e-5, torch.zeros_like(self.damping), self.damping)
        self.images, self.features = self.images + share.reshape(like) * direction, features
        self.residuals, self.relative = residuals, torch.where(share > 0, relative, self.relative)
