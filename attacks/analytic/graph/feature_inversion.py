r"""The images whose features these are: nonlinear least squares without a prior, from grey.

Known are feature tensors t_k of each image, exact up to a relative error; f_k is the network up to there. Sought is

    min over x of  sum_k |r_k(x)|^2,    r_k = w_k known_k (f_k(x) - t_k) / |t_k|.

- **Rectified targets.** Where t_k is the output of a ReLU, f_k may return what goes into it. Then r = f - t where
  t > 0, and max(f, 0) where t = 0: no equation is lost where the activation is still closed.
- **Unknown scale.** A target known up to a positive factor of each image is compared with a f, where the best
  a = <f, t> / <f, f> is put in (variable projection; Golub and Pereyra, 1973).

**Steps** are Gauss and Newton's: min over d of |r + J d|^2 by conjugate gradients (CGLS), then a line search. A
network of linear maps and ReLUs is piecewise linear, so once the pieces are right a step is exact. Three things make
them cheap:

- J v and J^T w come from a record of the derivative (`linearization`), in float32 where the caller has the network in
  float32, too; the last residuals are taken in float64 (iterative refinement).
- A diagonal preconditioner. In front of strides and poolings pixels differ by tens in how much they say, most of all by
  their position modulo the stride. The diagonal of J^T J is estimated by random signs (Hutchinson) and averaged over
  images: it belongs to the network.
- Directions of earlier steps. The directions p of conjugate gradients are conjugate, so (p, J^T J p) make a block BFGS
  update of the preconditioner (Morales and Nocedal, 2000), which carries over from one step to the next.

The images of a batch do not interact: each has its own inner products, step lengths and end. Only residuals that the
caller adds for all images together (`coupled_residual`) make them one problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.analytic.graph.linearization import Forward, Linearization, RecordedDerivative
from fl.seeds import stream

GREY = 0.5
"""Where the search starts: the middle of the pixels' range."""
START_NOISE = 0.02
"""Standard deviation of the start around grey; a flat start has ties in every max pooling."""
PROBES = 16
"""Random signs of which the diagonal of J^T J is estimated."""
SINGLE_FLOOR = 2e-5
"""Relative residual below which residuals are taken in float64: float32 rounds features to about 1e-7."""
MIN_INNER = 5
"""Conjugate gradient iterations a step takes at least."""
SHORTEST = 2.0**-6
"""The shortest share of a step that the line search tries."""


@dataclass(frozen=True)
class FeatureTarget:
    """Features of every image that are known.

    Attributes:
        value: (B, ...), as `forward` returns them.
        known: which entries count, boolean, broadcastable to `value`; all where none is given.
        weight: of the whole tensor in the sum, relative to other targets. Each is divided by its norm first.
        noise: relative error of `value` (in norm). Where the residual is there, an image is done.
        rectified: `value` is the output of a ReLU, and `forward` returns the input of it.
        unknown_scale: `value` is known up to a positive factor of each image.
    """

    value: Tensor
    known: Tensor | None = None
    weight: float = 1.0
    noise: float = 1e-6
    rectified: bool = False
    unknown_scale: bool = False


@dataclass(frozen=True)
class InversionSettings:
    """How long and how exactly to search.

    Attributes:
        max_steps: Gauss-Newton steps.
        max_inner_iterations: conjugate gradient iterations a step, each one product with J and one with J^T.
        memory: earlier steps whose directions precondition the next.
        seconds: seconds of CPU time after which no further step begins.
        seed: of the start and the probes.
    """

    max_steps: int = 60
    max_inner_iterations: int = 60
    memory: int = 0
    seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class InvertedImages:
    """What a search over pixels found.

    Attributes:
        images: (B, C, H, W), in the units of `forward`'s input, not clipped.
        residual: (B,), the root mean square of the targets' relative residuals, weighted.
        converged: (B,), whether the residual is at the level of the targets' noise. It proves the image where the
            features determine it.
        steps: (B,), Gauss-Newton steps that each image took.
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
    coupled_residual: Callable[[Tensor], Tensor] | None = None,
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
        coupled_residual: from all images (B, C, H, W) to further residuals of any shape, of the size of relative
            errors, that are to be small as well, such as the mismatch of weight gradients. It must compute in the
            type of its input.
        start: (B, C, H, W), where to start; grey otherwise.

    Returns:
        Images with their residuals.

    Raises:
        ValueError: where a target has another number of images than `shape`.
    """
    for target in targets:
        if len(target.value) != shape[0]:
            raise ValueError(f"A target of {len(target.value)} images for {shape[0]} images to find.")
    problem = _Problem(forward, single_forward or forward, tuple(targets), coupled_residual)
    value = targets[0].value
    images = start
    if images is None:
        generator = stream(settings.seed, "feature inversion")
        noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        images = (GREY + START_NOISE * noise).to(value)
    return _Search(problem, settings, images.to(value)).run()


@dataclass(frozen=True)
class _Problem:
    """The residuals of all images, and of some of them."""

    forward: Forward
    single_forward: Forward
    targets: tuple[FeatureTarget, ...]
    coupled: Callable[[Tensor], Tensor] | None = None

    @property
    def size(self) -> float:
        """Norm of the residuals where every target is missed by its own norm."""
        return sum(t.weight**2 for t in self.targets) ** 0.5

    @property
    def noise(self) -> float:
        """Relative residual at the true images."""
        return sum((t.weight * t.noise) ** 2 for t in self.targets) ** 0.5 / self.size

    def select(self, keep: Tensor) -> _Problem:
        """Return the problem of some images."""
        targets = tuple(
            FeatureTarget(
                t.value[keep],
                t.known if t.known is None or len(t.known) != len(t.value) else t.known[keep],
                t.weight,
                t.noise,
                t.rectified,
                t.unknown_scale,
            )
            for t in self.targets
        )
        return _Problem(self.forward, self.single_forward, targets, self.coupled)

    def to(self, dtype: torch.dtype) -> _Problem:
        """Return the problem with targets of another type."""
        targets = tuple(
            FeatureTarget(
                t.value.to(dtype),
                t.known if t.known is None or t.known.dtype == torch.bool else t.known.to(dtype),
                t.weight,
                t.noise,
                t.rectified,
                t.unknown_scale,
            )
            for t in self.targets
        )
        return _Problem(self.forward, self.single_forward, targets, self.coupled)

    def residuals(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one residual (b, ...) for each target."""
        return tuple(_residual(f, t) for f, t in zip(features, self.targets, strict=True))

    def evaluate(self, images: Tensor, *, single: bool) -> tuple[Tensor, ...]:
        """Return all residuals at the images, without a graph."""
        forward = self.single_forward if single else self.forward
        with torch.no_grad():
            found = self.residuals(tuple(forward(images)))
            return found if self.coupled is None else (*found, self.coupled(images))


def _residual(feature: Tensor, target: FeatureTarget) -> Tensor:
    value = target.value
    dims = tuple(range(1, value.ndim))
    if target.rectified:
        feature = torch.where(value > 0, feature, feature.relu())
    known = 1.0 if target.known is None else target.known.to(value.dtype)
    if target.unknown_scale:
        f, t = feature * known, value * known
        best = (f * t).sum(dims, keepdim=True) / (f * f).sum(dims, keepdim=True).clamp_min(1e-30)
        feature = feature * best.clamp_min(0)
    norm = (value * known).square().sum(dims, keepdim=True).sqrt().clamp_min(1e-30)
    return (feature - value) * known * (target.weight / norm)


class _Jacobian:
    """Products with the Jacobian of the residuals at one point, for each problem on its own."""

    def __init__(self, problem: _Problem, images: Tensor, record: RecordedDerivative | None) -> None:
        self._features = Linearization(problem.single_forward, images, record)
        self._residuals = [
            Linearization(lambda f, t=t: (_residual(f, t),), f)  # type: ignore[misc]
            for f, t in zip(self._features.values, problem.targets, strict=True)
        ]
        self._coupled = None
        if problem.coupled is not None:
            coupled = problem.coupled
            self._coupled = Linearization(lambda z: (coupled(z),), images)

    def push(self, direction: Tensor) -> tuple[Tensor, ...]:
        """Return J v."""
        features = self._features.push(direction)
        pushed = tuple(r.push(f)[0] for r, f in zip(self._residuals, features, strict=True))
        return pushed if self._coupled is None else (*pushed, *self._coupled.push(direction))

    def pull(self, weights: Sequence[Tensor]) -> Tensor:
        """Return J^T w."""
        pulled = self._features.pull([r.pull([w]) for r, w in zip(self._residuals, weights, strict=False)])
        return pulled if self._coupled is None else pulled + self._coupled.pull([weights[-1]])


@dataclass
class _Preconditioner:
    """An approximate inverse of J^T J: a diagonal, and blocks of conjugate directions of earlier steps."""

    diagonal: Tensor
    problems: int
    blocks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return the preconditioned gradient."""
        q = gradient.reshape(self.problems, -1, 1)
        shares = []
        for s, y, inverse in reversed(self.blocks):
            share = inverse * (s @ q)
            q = q - y.mT @ share
            shares.append(share)
        q = (q.reshape(gradient.shape) / self.diagonal).reshape(q.shape)
        for (s, y, inverse), share in zip(self.blocks, reversed(shares), strict=True):
            q = q + s.mT @ (share - inverse * (y @ q))
        return q.reshape(gradient.shape)

    def remember(self, directions: list[Tensor], images: list[Tensor], memory: int) -> None:
        """Add the directions p of one step and their J^T J p."""
        s = torch.stack([d.reshape(self.problems, -1) for d in directions], 1)
        y = torch.stack([d.reshape(self.problems, -1) for d in images], 1)
        curvature = (s * y).sum(2, keepdim=True)
        usable = curvature > 1e-7 * s.norm(dim=2, keepdim=True) * y.norm(dim=2, keepdim=True)
        inverse = torch.where(usable, 1 / curvature, torch.zeros_like(curvature))
        self.blocks = [*self.blocks, (s, y, inverse)][-memory:] if memory else []

    def select(self, keep: Tensor) -> None:
        """Keep some problems."""
        self.problems = int(keep.sum())
        self.blocks = [(s[keep], y[keep], i[keep]) for s, y, i in self.blocks]


class _Search:
    """Gauss-Newton steps for all images that are not done yet."""

    def __init__(self, problem: _Problem, settings: InversionSettings, images: Tensor) -> None:
        self.settings = settings
        self.problem = problem
        self.images = images
        self.count = 1 if problem.coupled is not None else len(images)
        self.began = time.process_time()
        self.iterations = 0
        self.records: dict[tuple[int, ...], RecordedDerivative | None] = {}
        self.work_type = torch.float32 if problem.single_forward is not problem.forward else images.dtype
        self.single_problem = problem.to(self.work_type)

    def run(self) -> InvertedImages:
        """Return the images once all are done or time is up."""
        device, number = self.images.device, len(self.images)
        found = self.images.clone()
        residual = torch.full((number,), float("inf"), dtype=self.images.dtype, device=device)
        steps = torch.zeros(number, dtype=torch.long, device=device)
        active = torch.arange(number, device=device)
        preconditioner = _Preconditioner(self._diagonal(), self.count)
        state = _State(self, self.images)
        for _ in range(self.settings.max_steps):
            if self.settings.seconds is not None and time.process_time() - self.began > self.settings.seconds:
                break
            state.step(preconditioner)
            steps[active] += 1
            found[active], residual[active] = state.images, self._each(state.relative)
            done = state.done()
            if bool(done.all()):
                break
            if bool(done.any()) and self.count > 1:
                keep = ~done
                active = active[keep]
                self.count = int(keep.sum())
                preconditioner.select(keep)
                state.select(keep)
        return InvertedImages(found, residual, residual <= 3 * self.problem.noise, steps, self.iterations)

    def _each(self, values: Tensor) -> Tensor:
        return values if self.problem.coupled is None else values.expand(len(self.images))

    def record(self, images: Tensor) -> RecordedDerivative | None:
        """Return the record for this number of images, made when it is first asked for."""
        shape = tuple(images.shape)
        if shape not in self.records:
            try:
                self.records[shape] = RecordedDerivative(self.problem.single_forward, images)
            except Exception:  # noqa: BLE001  what cannot be recorded is differentiated twice instead
                self.records[shape] = None
        return self.records[shape]

    def _diagonal(self) -> Tensor:
        """Return the diagonal of J^T J, (1, C, H, W), as a product of channel and position, averaged over images."""
        images = self.images.to(self.work_type)
        jacobian = _Jacobian(self.single_problem, images, self.record(images))
        generator = stream(self.settings.seed, "probes of the diagonal")
        residuals = self.single_problem.evaluate(images, single=True)
        total = torch.zeros_like(images)
        for _ in range(PROBES):
            signs = [(2 * torch.randint(0, 2, r.shape, generator=generator) - 1).to(r) for r in residuals]
            total += jacobian.pull(signs).square()
        mean = total.mean(0, keepdim=True)
        position, channel = mean.mean(1, keepdim=True), mean.mean((2, 3), keepdim=True)
        product = position * channel / mean.mean().clamp_min(1e-30)
        return product.clamp_min(1e-4 * float(product.max()))


class _State:
    """Where the search of the active images stands."""

    def __init__(self, search: _Search, images: Tensor) -> None:
        self.search = search
        self.problem, self.single = search.problem, search.single_problem
        self.images = images
        self.damping = torch.zeros(search.count, dtype=search.work_type, device=images.device)
        self.stalled = torch.zeros(search.count, dtype=torch.long, device=images.device)
        self.precise = search.work_type == images.dtype
        self.residuals, self.relative = self._evaluate(images)
        self.before = self.relative

    def select(self, keep: Tensor) -> None:
        """Keep some problems."""
        self.problem, self.single = self.problem.select(keep), self.single.select(keep)
        self.images, self.damping, self.stalled = self.images[keep], self.damping[keep], self.stalled[keep]
        self.residuals = tuple(r[keep] for r in self.residuals)
        self.relative, self.before = self.relative[keep], self.before[keep]

    def done(self) -> Tensor:
        """Return which problems need no further step: at the level of noise, or no longer falling."""
        gain = self.relative / self.before
        noise = self.problem.noise
        self.stalled = torch.where(gain > 0.98, self.stalled + 1, torch.zeros_like(self.stalled))
        at_noise = (self.relative <= 0.3 * noise) | ((self.relative <= 3 * noise) & (gain > 0.8))
        return at_noise | (self.stalled >= 5)

    def step(self, preconditioner: _Preconditioner) -> None:
        """Take one Gauss-Newton step."""
        if not self.precise and float(self.relative.min()) < SINGLE_FLOOR:
            self.precise = True
            self.residuals, self.relative = self._evaluate(self.images)
        self.before = self.relative
        work = self.images.to(self.search.work_type)
        jacobian = _Jacobian(self.single, work, self.search.record(work))
        direction = self._solve(jacobian, preconditioner)
        self._move(direction.to(self.images.dtype))

    def _evaluate(self, images: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the residuals in the working type, and their norm for each problem, relative."""
        if self.precise:
            residuals = self.problem.evaluate(images, single=self.search.work_type == images.dtype)
        else:
            residuals = self.single.evaluate(images.to(self.search.work_type), single=True)
        norm = sum(r.reshape(self.search.count, -1).square().sum(1) for r in residuals)
        assert isinstance(norm, Tensor)
        return tuple(r.to(self.search.work_type) for r in residuals), norm.sqrt().to(images.dtype) / self.problem.size

    def _solve(self, jacobian: _Jacobian, preconditioner: _Preconditioner) -> Tensor:
        """Return d that makes |r + J d|^2 + damping |d|^2 small, by preconditioned conjugate gradients."""
        count = self.search.count

        def spread(scalars: Tensor, like: Tensor) -> Tensor:
            return scalars.reshape(count, *[1] * (like.ndim - 1)) if len(like) == count else scalars

        def dot(u: Tensor, v: Tensor) -> Tensor:
            return (u * v).reshape(count, -1).sum(1)

        size = sum(dot(r, r) for r in self.residuals)
        assert isinstance(size, Tensor)
        scale = size.sqrt().clamp_min(1e-30)
        rest = [-r / spread(scale, r) for r in self.residuals]
        gradient = jacobian.pull(rest)
        found = torch.zeros_like(gradient)
        preconditioned = preconditioner.apply(gradient)
        direction = preconditioned
        gamma = dot(gradient, preconditioned)
        damping = spread(self.damping, gradient) * preconditioner.diagonal
        directions, products = [], []
        fall = torch.zeros_like(gamma)
        for k in range(self.search.settings.max_inner_iterations):
            pushed = jacobian.push(direction)
            curvature = dot(direction, damping * direction)
            for p in pushed:
                curvature = curvature + dot(p, p)
            length = torch.where(curvature > 0, gamma / curvature, torch.zeros_like(gamma))
            found = found + spread(length, found) * direction
            rest = [r - spread(length, r) * p for r, p in zip(rest, pushed, strict=True)]
            new = jacobian.pull(rest) - damping * found
            directions.append(direction)
            products.append((gradient - new) / spread(torch.where(length > 0, length, torch.ones_like(length)), new))
            gradient = new
            preconditioned = preconditioner.apply(gradient)
            following = dot(gradient, preconditioned)
            gain = length * gamma
            fall = fall + gain
            direction = preconditioned + spread(following / gamma.clamp_min(1e-37), direction) * direction
            gamma = following
            self.search.iterations += 1
            if k + 1 >= MIN_INNER and float(((k + 1) * gain < 0.5 * fall).double().mean()) >= 0.5:
                break
        preconditioner.remember(directions, products, self.search.settings.memory)
        return found * spread(scale, found)

    def _move(self, direction: Tensor) -> None:
        """Go along a direction as far as the residual falls, each problem for itself."""
        count = self.search.count
        like = (count, *[1] * (direction.ndim - 1)) if len(direction) == count else (1,) * direction.ndim
        share = torch.ones(count, dtype=direction.dtype, device=direction.device)
        while True:
            residuals, relative = self._evaluate(self.images + share.reshape(like) * direction)
            worse = ~(relative < self.relative) & (share > 0)
            if not bool(worse.any()):
                break
            share = torch.where(worse, share / 2, share)
            share = torch.where(share < SHORTEST, torch.zeros_like(share), share)
        shortened = (share < 0.3).to(self.damping.dtype)
        self.damping = shortened * (4 * self.damping).clamp_min(1e-3) + (1 - shortened) * self.damping / 4
        self.damping = torch.where(self.damping < 1e-5, torch.zeros_like(self.damping), self.damping)
        self.images = self.images + share.reshape(like) * direction
        self.residuals, self.relative = residuals, torch.where(share > 0, relative, self.relative)
