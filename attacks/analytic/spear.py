"""SPEAR inverts small batches behind a linear layer with ReLU exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from attacks.analytic.analytic import Analytic
from attacks.analytic.repeated_images import attack_repeated_image, repeat_images
from attacks.base import Attack, NotApplicable, Reconstruction, attacks
from attacks.search_control import check_time_limit
from attacks.update.first_linear_layer import LinearLayer, first_linear
from attacks.update.observed_update import ObservedUpdate
from attacks.update.update_rule import RuleKind, kind_of_update_rule
from fl.ranges import OpenShare, Range
from fl.seeds import stream
from fl.view import ServerView

SAMPLES_AT_ONCE = 4096
LOOSE_DEVIATIONS, TIGHT_DEVIATIONS = 100.0, 8.0
"""Standard deviations of its noise up to which an entry counts as zero: solving from few rows amplifies noise."""
SPARE_ROWS = 2
"""Zeros a direction must have beyond those it was solved for: chance gives it none, a column gives it many."""
DIRECTIONS_AT_ONCE = 256
"""New directions looked at per draw, the sparsest first, and choices scored together."""
MAX_REPLACEMENTS = 300
"""Directions, the sparsest first, that are tried in place of a chosen one."""
MAX_VERIFIED_ERROR = 5e-3
"""Error that noise may put on an input, root mean square and relative to it, if it is to count as recovered."""

CENTERED = (
    "the update looks like one of centralized gradients: each row of the weights' sums to zero, so that its equations "
    "are solved by pictures less their means, which are none; no attack here takes those of several examples: audit a "
    "step without that, or of one example, of which analytic reads what is left"
)


@attacks.register("spear")
@dataclass(frozen=True, kw_only=True)
class Spear(Attack):
    """SPEAR (Dimitrov et al., NeurIPS 2024, Algorithm 1): all images of a batch from one gradient of a ReLU layer.

    With inputs X (n, b) and signals D (m, b), gW = D X^T has rank b, so its singular vectors give gW = L R, D = L Q and
    X^T = Q^-1 R for an unknown Q (b, b). A ReLU zeroes about half of each column of D: b - 1 rows of L that are
    zero in column i have q_i as their kernel. Rows are drawn at random; a kernel q whose L q has more zeros than the
    b - 1 solved for is kept, and solved for again from all of them. Of these, the b sparsest that are independent are
    chosen, the bias gradient D 1 fixes their scales, and columns are replaced as long as that raises the sparsity
    score: the share of neurons and images with D = 0 exactly where W x + b <= 0. At 1, the attack knows that it is
    right. Rounding of the weights can hide small signals and keep the score below 1; then it knows where the network,
    given X and some labels, sends back D. Only that counts where the defense is unknown, which may have shortened
    weight and bias apart. The draws needed double with every image. What counts as zero follows from the noise in the
    gradient, estimated from its singular values beyond the batch size. It also says how far the inputs can be off:
    where that is more than half a percent of one, or images have drowned in it, the result is not `verified`.

    Where the layer is given the image, X are the images, with the labels for which the network sends back D, where the
    server has all of it; else they are handed out under `features`, one row per image. One image is left to `analytic`.

    Threat model: an honest server with the layer's weights and its update after one step.

    Attributes:
        samples: submatrices drawn at most.
        fits: largest distance between the directions of a signal found and of the network's own that counts as none.
    """

    takes_plain_weights: ClassVar[bool] = True
    plain: ClassVar[str] = "untangles a small batch exactly: finds which neurons each picture left silent."

    samples: Annotated[int, Range(1, 10**9)] = 2_000_000
    fits: OpenShare = 1e-2

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"expected samples >= 1, got {self.samples}")
        if not 0 < self.fits < 1:
            raise ValueError(f"expected fits in (0, 1), got {self.fits}")

    @classmethod
    def example(cls) -> Spear:
        """Return a few hundred draws."""
        return cls(samples=500)

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the images of the batch, in no particular order."""
        layer = first_linear(view)
        if isinstance(layer, NotApplicable):
            return layer
        if view.batch_size == 1:  # rank one: nothing is to be untangled
            return Analytic().attack_view(view, seed)
        if layer.steps != 1:
            return NotApplicable("it takes one local step: later ones see other weights")
        if not layer.is_rectified():
            if (copies := attack_repeated_image(view, Analytic().attack_view, seed)) is not None:
                return copies
            zeros = f"no ReLU follows {layer.name!r}, so no signal is exactly zero (LeakyReLU's never is)"
            return NotApplicable(zeros, limit=True)
        if (reason := ObservedUpdate(view).altered(*layer.parameter_names)) is not None:
            return NotApplicable(reason)
        if kind_of_update_rule(view) == RuleKind.CENTRALIZED:
            return NotApplicable(CENTERED, limit=True)
        whole = ObservedUpdate(view).is_complete(*layer.parameter_names)
        gaps = "" if whole else f"the defense {view.client.defense.name} left out numbers of {layer.name!r}: "
        factors = GradientFactors.of(layer, view.batch_size)
        if isinstance(factors, NotApplicable):
            return replace(factors, reason=f"{gaps}{factors.reason}")
        found = self._search(factors, stream(seed, "spear"))
        if found is None:
            few = f"{gaps}fewer than {factors.rank} directions with zeros in {self.samples} draws"
            return NotApplicable(few, limit=True)
        return _result(layer, found)

    def _search(self, factors: GradientFactors, draw: torch.Generator) -> DirectionChoice | None:
        pool, best = DirectionPool(factors), None
        drawn = due = 0
        while drawn < self.samples and not (best is not None and best.is_confirmed):
            check_time_limit()
            count = min(self.samples - drawn, SAMPLES_AT_ONCE)
            pool.add(factors.draw_directions(count, draw))
            drawn += count
            if drawn >= due or drawn == self.samples:  # choosing costs more than drawing: each time a fifth later
                due = drawn * 6 // 5
                found = pool.choose_best()
                if found is not None and (best is None or found.score > best.score):
                    labels = factors.layer.labels(found.inputs, found.signals, self.fits)
                    best = replace(found, labels=labels)
        return best


@dataclass(frozen=True)
class DirectionChoice:
    """A choice of directions.

    Attributes:
        score: share of neurons and images with a signal exactly where the neuron is active.
        inputs: of the layer (b, n).
        signals: flowing back (b, m).
        relative_error: largest root mean square error that the gradient's noise puts on an input, relative to the
            input's own.
        labels: for which the network sends back just these (b,), or None.
    """

    score: float
    inputs: Tensor
    signals: Tensor
    relative_error: float
    labels: Tensor | None = None

    @property
    def is_confirmed(self) -> bool:
        """Whether the layer's zeros are explained, or all that the network sends back is."""
        return self.score == 1 or (self.labels is not None and self.score > 0.9)


@dataclass(frozen=True)
class GradientFactors:
    """A layer's gradient L R of rank b, and its noise.

    Attributes:
        layer: it belongs to.
        left: L (m, b), orthonormal columns.
        right: R (b, n).
        active_rows: the rows of L that are not zero: neurons some image activates (m,) bool.
        inverse_singular_values: (b,): L q = gW v for a vector v of norm |q * inverse_singular_values|.
        noise: standard deviation of the gradient's entries.
        rounding: what rounding may add to a row's product with a unit vector (m,). The entries' errors need not be
            independent: equal pixels are rounded alike.
        weight_products: R W^T (b, m).
        bias_products: L^T gb (b,).
    """

    layer: LinearLayer
    left: Tensor
    right: Tensor
    active_rows: Tensor
    inverse_singular_values: Tensor
    noise: Tensor
    rounding: Tensor
    weight_products: Tensor
    bias_products: Tensor

    @classmethod
    def of(cls, layer: LinearLayer, count: int | None) -> GradientFactors | NotApplicable:
        """Return the factor the gradient of a layer, by the number of images if it is known, or say why it can't be."""
        moved = layer.update
        m, n = moved.shape
        left, singular, right = torch.linalg.svd(moved, full_matrices=False)
        if count is None:  # the widest gap between neighbors
            count = int((singular[:-1] / singular[1:].clamp_min(1e-15 * singular[0])).argmax()) + 1
        if count >= min(m, n):
            return NotApplicable(f"{count} images are as many as the layer's {m} neurons or {n} inputs")
        rest = singular[count:].square().sum() / ((m - count) * (n - count))
        noise = torch.maximum(rest.sqrt(), 1e-16 * singular[0])
        rank = min(count, int((singular > _largest_of_noise(layer, singular, count)).sum()))
        if rank == 0:
            return NotApplicable("the gradient is no larger than its noise")
        left, right = left[:, :rank], singular[:rank, None] * right[:rank]
        heard = moved.norm(dim=1) > 3 * noise * n**0.5
        if int(heard.sum()) <= rank + SPARE_ROWS:
            return NotApplicable(f"{int(heard.sum())} active neurons are too few for {rank} images")
        reach, bias = right @ layer.weight.mT, left.mT @ layer.bias_update
        rounding = torch.finfo(layer.view.dtype).eps * moved.norm(dim=1)
        return cls(layer, left, right, heard, 1 / singular[:rank], noise, rounding, reach, bias)

    @property
    def rank(self) -> int:
        """Number of images that leave a trace."""
        return self.left.shape[1]

    def draw_directions(self, count: int, draw: torch.Generator) -> Tensor:
        """Draw `count` random submatrices of b - 1 active rows; return their unit kernels (N, b).

        Kernels are kept that are orthogonal to some further rows, too.
        """
        rows = self.left[self.active_rows]
        rank, device = self.rank, rows.device
        if rank == 1:
            return torch.ones(1, 1, dtype=rows.dtype, device=device)
        picked = torch.rand(count, len(rows), generator=draw).topk(rank - 1, dim=1).indices.to(device)
        closing = torch.randn(count, 1, rank, generator=draw, dtype=torch.float64).to(rows)
        target = torch.zeros(rank, 1, dtype=rows.dtype, device=device)
        target[-1] = 1
        solved, failed = torch.linalg.solve_ex(torch.cat([rows[picked], closing], 1), target.expand(count, -1, -1))
        solved = solved.squeeze(-1)[failed == 0]
        solved = torch.nn.functional.normalize(solved[solved.isfinite().all(1)])
        zeros = self.zeros(solved, LOOSE_DEVIATIONS)[:, self.active_rows].sum(1)
        return solved[zeros >= rank - 1 + SPARE_ROWS]

    def zeros(self, directions: Tensor, slack: float) -> Tensor:
        """Return where L q is zero up to its rounding and `slack` standard deviations of its noise (N, m) bool."""
        size = (directions * self.inverse_singular_values).norm(dim=1, keepdim=True)
        return (directions @ self.left.mT).abs() <= size * (
            slack * self.noise + slack / TIGHT_DEVIATIONS * self.rounding
        )

    def refine(self, direction: Tensor) -> Tensor | None:
        """Return the direction (b,) solved for from all zeros it has, or None where they do not hold."""
        for slack in (LOOSE_DEVIATIONS, 20.0, TIGHT_DEVIATIONS):
            zeros = self.zeros(direction[None], slack)[0] & self.active_rows
            if int(zeros.sum()) < self.rank - 1 + SPARE_ROWS:
                return None
            direction = torch.linalg.svd(self.left[zeros])[2][-1]
        return direction


def _largest_of_noise(layer: LinearLayer, singular: Tensor, count: int) -> float:
    """Return a singular value that noise and rounding hardly exceed: images below it leave no trace, nor do copies.

    Numbers that are zero have no rounding, so what is left of the others counts on their rows and columns alone.
    """
    moved = layer.update != 0
    m, n = int(moved.any(1).sum()), int(moved.any(0).sum())
    rest = singular[count:].square().sum() / max((m - count) * (n - count), 1)
    rounding = torch.finfo(layer.view.dtype).eps / 2 * layer.update.norm()  # at most half a spacing of each
    return max(2 * float(rest.sqrt()) * (m**0.5 + n**0.5), float(rounding))


class DirectionPool:
    """Directions found so far, each once, and the best choice among them."""

    def __init__(self, factors: GradientFactors) -> None:
        self.factors = factors
        self.rows: list[Tensor] = []
        self.silent: dict[bytes, Tensor] = {}
        self.seen: set[bytes] = set()

    def add(self, directions: Tensor) -> None:
        """Take the sparsest new ones in."""
        loose = self.factors.zeros(directions, LOOSE_DEVIATIONS)
        fresh = 0
        for i in loose.sum(1).argsort(descending=True, stable=True).tolist():
            if (raw := _zero_pattern(loose[i])) in self.seen:
                continue
            if fresh == DIRECTIONS_AT_ONCE:
                break
            fresh += 1
            self.seen.add(raw)
            direction = directions[i]
            refined = self.factors.refine(direction) if self.factors.rank > 1 else direction
            if refined is None:
                continue
            zeros = self.factors.zeros(refined[None], TIGHT_DEVIATIONS)[0]
            if (key := _zero_pattern(zeros)) not in self.silent:
                self.silent[key] = zeros
                self.rows.append(refined)

    def choose_best(self) -> DirectionChoice | None:
        """Choose the sparsest independent directions, and replace them one by one while the score rises.

        Returns None if they do not span the space.
        """
        if len(self.rows) < self.factors.rank:
            return None
        silent = torch.stack(list(self.silent.values()))
        order = silent.sum(1).argsort(descending=True, stable=True)
        rows, silent = torch.stack(self.rows)[order], silent[order]
        chosen = torch.tensor(list(islice(_independent_rows(rows), self.factors.rank)), device=rows.device)
        if len(chosen) < self.factors.rank:
            return None
        rows, silent = (
            torch.cat([rows[chosen], rows[:MAX_REPLACEMENTS]]),
            torch.cat([silent[chosen], silent[:MAX_REPLACEMENTS]]),
        )
        rank = self.factors.rank
        chosen = torch.arange(rank, device=rows.device)
        swaps = torch.cartesian_prod(torch.arange(rank), torch.arange(rank, len(rows))).to(rows.device)
        best = float(self._score_choices(rows[chosen][None], silent[chosen][None])[0])
        while best < 1 and len(swaps):
            check_time_limit()
            trials = chosen.repeat(len(swaps), 1)
            trials[torch.arange(len(swaps)), swaps[:, 0]] = swaps[:, 1]
            scores = torch.cat([self._score_choices(rows[t], silent[t]) for t in trials.split(DIRECTIONS_AT_ONCE)])
            if float(scores.max()) <= best:
                break
            best, chosen = float(scores.max()), trials[int(scores.argmax())]
        return self._evaluate_choice(best, rows[chosen])

    def _score_choices(self, directions: Tensor, silent: Tensor) -> Tensor:
        """Return how well choices of directions (N, b, b) agree with their own zeros (N, b, m): in [0, 1] (N,)."""
        f = self.factors
        known = torch.cat([f.bias_products[:, None], f.weight_products], 1).expand(len(directions), -1, -1)
        solved, failed = torch.linalg.solve_ex(directions.mT, known)
        active = solved[..., 1:] / solved[..., :1] + f.layer.bias > 0
        scores = (active != silent).double().mean((1, 2))
        return torch.where(failed == 0, scores, torch.zeros_like(scores))

    def _evaluate_choice(self, score: float, directions: Tensor) -> DirectionChoice:
        """Return the inputs that the directions (b, b) stand for."""
        f = self.factors
        scales = torch.linalg.solve(directions.mT, f.bias_products)
        inputs = torch.linalg.solve(directions.mT, f.right) / scales[:, None]
        error = self._first_order_error(directions, scales, inputs)
        return DirectionChoice(score, inputs, scales[:, None] * (directions @ f.left.mT), error)

    def _first_order_error(self, directions: Tensor, scales: Tensor, inputs: Tensor) -> float:
        """Compute `relative_error` to first order: noise moves X^T = Q^-1 R by way of R, scales and directions."""
        f = self.factors
        back = torch.linalg.inv(directions.mT) / scales[:, None]  # Q^-1
        size = inputs.square().mean(1).sqrt()
        variance = (f.noise * back.norm(dim=1)).square() * (1 + size.square())
        for q, zeros, part in zip(directions, f.zeros(directions, TIGHT_DEVIATIONS), scales.abs() * size, strict=True):
            _, singular, v = torch.linalg.svd(f.left[zeros & f.active_rows], full_matrices=False)
            fixed = slice(f.rank - 1)  # the last one is q itself
            turned = (back @ v[fixed].mT / singular[fixed]).norm(dim=1)  # by noise of size 1 in the rows
            variance = variance + (turned * f.noise * (q * f.inverse_singular_values).norm() * part).square()
        error = float((variance.sqrt() / size).max())
        return error if math.isfinite(error) else math.inf


def _zero_pattern(zeros: Tensor) -> bytes:
    return zeros.cpu().numpy().tobytes()


def _independent_rows(rows: Tensor) -> Iterator[int]:
    """Return indices of rows, in order, each with a part outside the span of those before."""
    left = rows.clone()
    for i in range(len(rows)):
        size = float(left[i].norm())
        if size > 1e-3:
            unit = left[i] / size
            left = left - torch.outer(left @ unit, unit)
            yield i


def _result(layer: LinearLayer, found: DirectionChoice) -> Reconstruction:
    complete = layer.view.batch_size in {None, len(found.inputs)}  # noise may have drowned an image
    features = {} if layer.is_given_images else {"features": found.inputs.to(layer.view.dtype)}
    images, labels = layer.pixels(found.inputs) if layer.is_given_images else None, found.labels
    if images is not None and not complete and (repeated := repeat_images(layer.view, images)) is not None:
        images, labels, complete = *repeated, True  # which the whole update is asked for
    return Reconstruction(
        inputs=images,
        labels=labels,
        objective=1 - found.score,
        private=features,  # type: ignore[arg-type]
        verified=found.is_confirmed
        and found.relative_error <= MAX_VERIFIED_ERROR
        and complete
        and layer.has_true_size(found.inputs, found.signals),
    )
