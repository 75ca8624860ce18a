"""A picture whose direction alone stands in the update: of first linear layers without a bias that moved.

Of one picture and one step of SGD the gradient of a linear layer's weight is delta x^T. So x is known up to a factor,
which the bias's gradient, delta itself, would tell. Without it the rest of the network does: with x = a v, v known, the
network sends back delta(a, y) of its own for each factor a and label y, and

    a delta(a, y) = gW v                                                                          (1)

are as many equations as the layer has outputs, for one number. Pixels outside [0, 1] rule factors out. Where the step
size is unknown (1) holds up to a factor, which a network may leave open: one without biases is homogeneous but for its
loss. Several layers may be given a part of the picture each; then there is a factor for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attacks.base import NotApplicable, Reconstruction, Remark, Result
from attacks.labels.recovery import single_label
from attacks.network.layer_chain import trace_view
from attacks.network.operation_trace import MODEL_ERRORS
from attacks.network.pixel_layers import PixelLayer, PixelNetwork, pixel_layers
from attacks.search_control import StoppedError, check_time_limit, in_overtime
from attacks.update.float_rounding import relative_rounding
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.observed_update import ObservedUpdate
from attacks.update.training_phases import deviation_from_loss_gradient, training_phases
from attacks.update.unmoved_tensors import without_unmoved
from attacks.verification.comparison import can_replay
from attacks.verification.error_bounds import ERROR_FACTOR, MAX_PIXEL_ERROR
from attacks.verification.explanation import explains_update
from attacks.verification.update_comparison import UNLIKE_DISTANCE, UpdateComparison
from attacks.verification.words import KNOWN_TARGETS, LOADER
from fl.defense import Defense
from fl.inputs.form import InputForm
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense
from fl.view import ServerView

FACTORS, FACTORS_OF_TWO, MOST_PARTS = 96, 20, 2
"""Factors that are tried, of one part of the picture and of each of two, and the most parts that are."""
DIM_FACTORS = 6
"""Smaller factors that are tried beside, each half of the one before: of dim pictures."""
STARTS_PER_LABEL, STARTS = 2, 16
"""Of these, the best that are refined, of each label and of all."""
TARGETS_AT_ONCE = 8
"""Targets that are tried before the time is asked for."""
REFINEMENTS, DIFFERENCE = 40, 1e-6
"""Steps of Gauss and Newton, and the relative change of a factor that tells how what is left changes with it."""
POWER_STEPS = 4
"""Steps that bring a layer's direction from its longest row to the leading one."""
PIXEL_SLACK = 0.02
"""How far outside [0, 1] a pixel may come out, for rounding."""
WIDEST_INPUT, WIDE_FACTORS, DECADES = 10.0, 64, 4.0
"""Root mean square of an input that is no picture, at most, and the factors that are tried of it over so many powers of
ten, with either sign."""
NEARLY_ONE = 1e-2
"""Share of the layers' update and equations that a picture may leave to be handed out, unverified."""
SAME_PICTURE = 1e-5
"""Relative difference of two factors that are one."""
ROUNDING_MARGIN, MAX_ROUNDING = 1.5, 0.02
"""What may be left of a layer's update, relative to the rounding of its weights, and as a share of all."""
MOST_CONFIRMED = 4
"""Pictures that explain their layers, of which it is asked whether they make the whole update."""
LEAST_SURPLUS, CLEAR_SURPLUS = 1, 2
"""How many more equations than unknowns there must be for a picture to be verified, and to be one at all where it is
found at another step size than the stated one."""
MOST_PAIRED = 10
"""Targets, at most, with which it is asked whether two inputs stated as one would be told apart."""
ASKED_SHARES, LEAST_SHARE = (1.0, 0.25), 1e-7
"""Shares of the largest factor at which this is asked, and the least that they leave, for rounding in double."""

UP_TO_BRIGHTNESS = "the update tells the picture up to its brightness"
"""What notes say where only the direction of the first layer's input is told."""
NOWHERE = NotApplicable("no linear layers of weights that moved are given all pixels as they are", limit=True)
TARGET_UNKNOWN = f"its size takes the target, which may be one of too many: {KNOWN_TARGETS}"
SEVERAL_FACTORS = f"not confirmed: {UP_TO_BRIGHTNESS}, and {{}} of different brightness make all of it"
OTHER_STEP_SIZE = (
    f"not confirmed: {UP_TO_BRIGHTNESS}; at the stated step size no picture makes the update, and this one does at "
    "another: check the step size, and the loss, which is taken as stated"
)
NO_SIZE = (
    "at no brightness do the layers above send back what it got, so that the loss or the step size may be another than "
    "stated, or what moved the weight no gradient of it (a merged adapter)"
)
NOT_SIZED = "its size was not found before {}"
TOO_FEW_OUTPUTS = f"not confirmed: {UP_TO_BRIGHTNESS}, and {{}} outputs are too few to tell that, too"
OTHER_RANGE = f"what the first layer takes are no pixels in [0, 1], so that it is handed out as it is: {LOADER}"
STATED_RANGE = (
    "what the first layer takes lies beyond the range of inputs as stated, [0, 1] where none was, so that it is handed "
    "out as it is: state that range (input_range, --input-range)"
)
"""Likewise of other inputs than pictures."""
NEARLY = "not confirmed: {:.1e} of the update of the first layer is not that of this picture"
FACTOR_UNTOLD = f"not confirmed: {UP_TO_BRIGHTNESS}, and that not to a quarter of a level, whatever the step size was"


@dataclass(frozen=True)
class Part:
    """What some layers that have the same input tell of it.

    Attributes:
        layers: numbers of these layers.
        layer: one of them.
        direction: v, of norm 1 (n,).
        observed: gW v of all of them (m,), in one unit.
        low: the smallest factor at which the pixels are in range.
        high: the largest.
        left: the share of gW that no single input explains.
    """

    layers: tuple[int, ...]
    layer: PixelLayer
    direction: Tensor
    observed: Tensor
    low: float
    high: float
    left: float

    @property
    def is_pictured(self) -> bool:
        """Whether all pixels are in range at some factor."""
        return self.low < self.high

    @property
    def brightest(self) -> float:
        """The largest factor at which pixels are in range, or one of inputs of size 1 where they never are."""
        ends = (self.low, self.high) if self.is_pictured else (0.0, math.sqrt(len(self.direction)))
        return max(ends, key=abs)

    def without_range(self) -> Part:
        """Return the part where its pixels may have any range."""
        limit = WIDEST_INPUT * math.sqrt(len(self.direction))
        return replace(self, low=-limit, high=limit)

    def factors(self, count: int) -> Tensor:
        """Return factors to try, in order: as many even ones, and smaller ones of either sign."""
        even = torch.linspace(self.low, self.high, count + 1, dtype=torch.float64)
        dim = max(abs(self.low), abs(self.high)) / count * 0.5 ** torch.arange(1, DIM_FACTORS, dtype=torch.float64)
        every = torch.cat([even, dim, -dim])
        every = every[(every != 0) & (every >= self.low) & (every <= self.high)]
        return every.unique().to(self.direction.device)

    def wide_factors(self) -> Tensor:
        """Return factors to try of a part without a range, in order."""
        sizes = self.high * torch.logspace(-DECADES, 0, WIDE_FACTORS, dtype=torch.float64)
        return torch.cat([-sizes.flip(0), sizes]).to(self.direction.device)


@dataclass(frozen=True)
class ScaleSearch:
    """The search for the factors at which a picture makes what its layers were seen to get.

    Attributes:
        view: the server's, of one picture and one step.
        network: with its layers.
        parts: of the picture, which cover it.
        targets: that the picture may have (K, ...).
        sized: whether the size of what flows back is known, not its direction alone.
        wide: whether what is given to the layers may have any range.
    """

    view: ServerView
    network: PixelNetwork
    parts: Sequence[Part]
    targets: Tensor
    sized: bool
    wide: bool = False

    @property
    def surplus(self) -> int:
        """How many more numbers flow back, that do not follow from each other, than are unknown.

        Unknown are the factor, the step size if it is, and the target if there are several. Further parts bring one
        number each, their own factor: what flows back into all of them is made of one gradient of the outputs, whose
        numbers sum to zero under cross entropy, and count as doing so under any loss of classes. A bias that moved
        tells these without the factor.
        """
        task = self.view.task
        outputs = math.prod(task.output_shape) - int(task.loss.takes_classes)
        flowing = min(outputs, *(len(part.observed) for part in self.parts))
        flowing *= 2 if _has_moved_bias(without_unmoved(self.view)) else 1
        return flowing - 1 - int(not self.sized) - int(len(self.targets) > 1)

    def tells_pairs_apart(self) -> bool:
        """Return whether two inputs of one target, unlike each other, leave more of a layer's update than was seen.

        The one part's input is their middle. What flows back from both may be all but the same, as of a classifier of
        small weights; then their update is that of one input. So it is where it has one direction for both, as where
        two classes alone are likely: this is asked of brighter and darker inputs, for which others may be. A target of
        which nothing flows back, as of a class that a loss ignores, is none that the picture has.
        """
        (part,) = self.parts
        middle = part.brightest * part.direction
        drawn = torch.randn(middle.shape, generator=stream(0, "pairs"), dtype=torch.float64).to(middle)
        away = UNLIKE_DISTANCE * middle.norm() / drawn.norm() * drawn
        return all(self._tells_apart(share * torch.stack([middle + away, middle - away])) for share in ASKED_SHARES)

    def _tells_apart(self, inputs: Tensor) -> bool:
        """Return whether two inputs (2, n) of the one part leave more than was seen with any of the first targets."""
        (part,) = self.parts
        images = [replace(self, parts=[replace(part, direction=one)]).pictures(one.new_ones(1, 1)) for one in inputs]
        try:
            flows = self.network.signals(torch.cat(images), self.targets[:MOST_PAIRED], self.view.task.loss)
        except MODEL_ERRORS:
            return False
        flowing = torch.cat([flows[number] for number in part.layers], -1)  # (K, 2, m)
        flowing = flowing[flowing.isfinite().all(-1).all(-1) & flowing.any(-1).all(-1)]
        if not len(flowing):
            return False
        squares = torch.linalg.eigvals((flowing @ flowing.mT) @ (inputs @ inputs.mT)).real.clamp(min=0)
        shares = (squares.amin(1) / squares.sum(1)).sqrt()
        return bool((shares > max(ERROR_FACTOR * part.left, LEAST_SHARE)).all())

    @cached_property
    def _observed(self) -> Tensor:
        return torch.cat([part.observed / part.observed.norm() for part in self.parts])

    def pictures(self, factors: Tensor) -> Tensor:
        """Return the pictures (N, C, H, W) at factors (N, parts); the mean where several numbers are of one pixel."""
        shape = self.view.task.input_shape
        total = factors.new_zeros(len(factors), math.prod(shape))
        count = torch.zeros_like(total[0])
        for part, factor in zip(self.parts, factors.T, strict=True):
            layer = part.layer
            moving = layer.slope != 0
            values = (factor[:, None] * part.direction - layer.offset)[:, moving] / layer.slope[moving]
            total.index_add_(1, layer.index[moving], values)
            count.index_add_(0, layer.index[moving], torch.ones_like(layer.slope[moving]))
        return (total / count).view(len(factors), *shape)

    def _made(self, signals: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Return what signals (..., N, m) of each layer at factors (N, parts) come to, as `_observed` (..., N, M)."""
        made = []
        for part, factor in zip(self.parts, factors.T, strict=True):
            flows = torch.cat([signals[number] for number in part.layers], -1)
            made.append(flows * factor[:, None] / part.observed.norm())
        return torch.cat(made, -1)

    def _left(self, made: Tensor) -> Tensor:
        """Return what is left of the observed (..., M)."""
        if self.sized:
            return self._observed - made
        size = made.square().sum(-1, keepdim=True)
        factor = (made @ self._observed)[..., None] / size.where(size > 0, torch.ones_like(size))
        return self._observed - factor.clamp(min=0) * made

    def starts(self) -> tuple[Tensor, Tensor]:
        """Return factors (N, parts) to begin at, and numbers of their targets (N,), the best first."""
        count = FACTORS if len(self.parts) == 1 else FACTORS_OF_TWO
        grids = [part.wide_factors() if self.wide else part.factors(count) for part in self.parts]
        factors = torch.cartesian_prod(*grids).view(-1, len(grids))
        pictures, costs = self.pictures(factors), []
        for targets in self.targets.split(TARGETS_AT_ONCE):
            check_time_limit()
            signals = self.network.signals(pictures, targets, self.view.task.loss)
            costs.append(self._left(self._made(signals, factors)).square().sum(-1))
        cost = torch.cat(costs)  # (K, N)
        cost = cost.where(cost.isfinite(), torch.full_like(cost, math.inf))
        grid = cost.view(len(cost), *map(len, grids))
        lowest = torch.ones_like(grid, dtype=torch.bool)
        for axis in range(1, grid.ndim):
            ahead, behind = grid.narrow(axis, 1, grid.shape[axis] - 1), grid.narrow(axis, 0, grid.shape[axis] - 1)
            lowest.narrow(axis, 0, grid.shape[axis] - 1).logical_and_(behind <= ahead)
            lowest.narrow(axis, 1, grid.shape[axis] - 1).logical_and_(ahead <= behind)
        cost = cost.where(lowest.view_as(cost), torch.full_like(cost, math.inf))
        best = cost.topk(min(STARTS_PER_LABEL, cost.shape[1]), largest=False)
        order = best.values.flatten().argsort()[:STARTS]
        order = order[best.values.flatten()[order].isfinite()]
        return factors[best.indices.flatten()[order]], order // best.values.shape[1]

    def refine(self, factors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors (N, parts) after some steps of Levenberg and Marquardt, and what each leaves (N,)."""
        damping = factors.new_full((len(factors),), 1e-3)
        left, slopes = self._linearize(factors, labels)
        cost = left.square().sum(-1)
        for _ in range(REFINEMENTS):
            check_time_limit()
            square = slopes @ slopes.mT
            ridge = damping[:, None] * square.diagonal(dim1=1, dim2=2) + 1e-300
            step = torch.linalg.solve(square + ridge.diag_embed(), -(slopes @ left[..., None])[..., 0])
            trial = factors + step
            new_left, new_slopes = self._linearize(trial, labels)
            new_cost = new_left.square().sum(-1)
            better = new_cost < cost
            factors = torch.where(better[:, None], trial, factors)
            left = torch.where(better[:, None], new_left, left)
            slopes = torch.where(better[:, None, None], new_slopes, slopes)
            settled = bool(((step.abs() <= 1e-12 * factors.abs()).all(1) | (damping > 1e9)).all())
            cost, damping = torch.where(better, new_cost, cost), torch.where(better, damping / 10, damping * 10)
            if settled:
                break
        return factors, cost.sqrt() / math.sqrt(len(self.parts))

    def _linearize(self, factors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is left (N, M) at factors (N, parts), and how it changes with each (N, parts, M)."""
        count = factors.shape[1]
        steps = (
            DIFFERENCE * torch.eye(count).to(factors) * factors.abs().clamp(min=1e-300)[:, None]
        )  # (N, parts, parts)
        points = torch.cat([factors[:, None], factors[:, None] + steps, factors[:, None] - steps], 1)
        targets = self.targets[labels].repeat_interleave(2 * count + 1, 0)
        flat = points.reshape(-1, count)
        signals = self.network.paired_signals(self.pictures(flat), targets, self.view.task.loss)
        left = self._left(self._made(signals, flat)).view(len(factors), 2 * count + 1, -1)
        size = steps.diagonal(dim1=1, dim2=2)[..., None]
        return left[:, 0], (left[:, 1 : count + 1] - left[:, count + 1 :]) / (2 * size)


@dataclass(frozen=True)
class _Found:
    """A picture that explains its layers.

    Attributes:
        factors: of its parts (parts,).
        target: number of its target.
        left: the share of its layers' equations (1) that it leaves.
    """

    factors: Tensor
    target: int
    left: float


def invert_direction(view: ServerView, tolerance: float) -> Result:
    """Return the picture of an update whose first linear layers tell it up to a factor, or why there is none.

    Args:
        view: the server's, of one picture.
        tolerance: share of the layers' update that one picture may leave, if its rounding is not more.

    Returns:
        `verified` if no other picture found makes the update, and one of which the brightness differs by a quarter of
        a level leaves more than rounding; whether the update bears it out is left to the caller.
    """
    weights = _moved_weights(view)
    if isinstance(weights, NotApplicable):
        return weights
    if (reason := _obstacle(view)) is not None:
        return NotApplicable(reason)
    read = _read_network(view, weights)
    if isinstance(read, NotApplicable):
        return read
    network, parts = read
    limit = max(tolerance, *(_rounding_limit(view, part.layer.weight) for part in parts))
    targets, untaken = _possible_targets(view), _replay_obstacle(view)
    if targets is None or untaken:
        if len(parts) == 1 and parts[0].left <= limit and _tells_inputs_apart(view):
            return _up_to_a_factor(view, parts[0], untaken or TARGET_UNKNOWN)
        return NotApplicable(f"{UP_TO_BRIGHTNESS} alone: {untaken or TARGET_UNKNOWN}")
    stated = all(ObservedUpdate(view).scale(layer.weight) is not None for layer in network.layers)
    return _search(ScaleSearch(view, network, parts, targets, stated), limit)


def _search(search: ScaleSearch, limit: float) -> Result:
    """Return what the layers above say of the size of a picture, or that they say nothing.

    Args:
        search: for it.
        limit: share of the layers' update and equations that rounding may be.
    """
    part, nearly, stopped = search.parts[0], None, ""
    try:
        for targets in _target_groups(search):
            judged = _judge_targets(replace(search, targets=targets), limit)
            if judged is not None and judged.objective <= limit:
                return judged
            nearly = nearly or judged
    except StoppedError as error:
        stopped = str(error)
    reason = NOT_SIZED.format(stopped) if stopped else NO_SIZE
    if nearly is not None:
        return replace(nearly, cut_short="; ".join(filter(None, (nearly.cut_short, stopped))))
    try:
        with in_overtime():
            told = _is_alone(search) and part.left <= limit and search.tells_pairs_apart()
    except StoppedError as error:
        told, stopped = False, str(error)
        reason = NOT_SIZED.format(stopped)
    if told:
        return replace(_up_to_a_factor(search.view, part, reason), cut_short=stopped)
    return NotApplicable(
        f"{part.layer.weight} tells the picture up to its brightness, and {reason}",
        limit=bool(stopped),
        cut_short=stopped and f"not done before {stopped}",
    )


def _is_alone(search: ScaleSearch) -> bool:
    """Return whether layers of one input tell the picture, as far as its direction is told from that of several."""
    return len(search.parts) == 1 and _tells_inputs_apart(search.view)


def _target_groups(search: ScaleSearch) -> Iterator[Tensor]:
    """Return the targets to try, the likeliest first: a label that the update tells by itself, then all."""
    view = search.view
    label = single_label(view)[0] if view.task.loss.is_cross_entropy and len(search.targets) > 1 else None
    if label is not None:
        yield label.to(search.targets)
    yield search.targets


def _judge_targets(search: ScaleSearch, limit: float) -> Reconstruction | None:
    """Return what the layers above say of the size of a picture that has one of the search's targets; None of none."""
    searches = [search] if all(part.is_pictured for part in search.parts) else []
    if _is_alone(search):
        searches.append(replace(search, parts=[search.parts[0].without_range()], wide=True))
    for each in searches:
        judged = _judge(each, _solutions(each), limit)
        if judged is not None:
            return judged
    pictured = bool(searches) and not searches[0].wide
    return _judge_resized(replace(search, sized=False), limit) if search.sized and pictured else None


def _judge_resized(search: ScaleSearch, limit: float) -> Reconstruction | None:
    """Return the picture that makes the update at another step size than stated, never verified; None of none.

    Under another loss than stated, some picture may make what few outputs send back: there must be clearly more
    equations than unknowns, and the whole update must say the same.
    """
    if search.surplus < CLEAR_SURPLUS:
        return None
    found = _solutions(search)
    left = max(part.left for part in search.parts)
    view = without_unmoved(search.view)
    for one in found:
        check_time_limit()
        result = _as_result(search, one)
        if max(left, one.left) <= limit and _is_made_to_rounding(search, view, result):
            result = replace(result.with_note(OTHER_STEP_SIZE, Remark.DIRECTION_ONLY), verified=None)
            try:
                single = _is_alone(search) and search.tells_pairs_apart()
            except StoppedError as stopped:
                return replace(result, cut_short=str(stopped))
            return replace(result, private=_features(search, one)) if single else result
    return None


def _obstacle(view: ServerView) -> str | None:
    """Return why the layers of an update are not sums of outer products of one picture, or None."""
    if view.batch_size != 1 or view.parts or type(view.client.defense) is not Defense:
        return "a picture up to its brightness takes one picture, and no defense"
    if (reason := deviation_from_loss_gradient(view)) is not None:
        return reason
    return "it takes pixels, and the model is given ids" if view.task.inputs.has_ids else None


def _replay_obstacle(view: ServerView) -> str:
    """Return why one step on a picture can't be taken again; "" where it can."""
    steps = [step for steps in training_phases(view)[1] or () for step in steps]
    if len(steps) != 1:
        return "the size follows from one local step, and these are several or of unknown number"
    if view.private or not view.method.uses_labels or not can_replay(view):
        return "what flows back can't be computed, since some of the network or of the rule is private"
    return ""


def _moved_weights(view: ServerView) -> dict[str, Tensor] | NotApplicable:
    """Return the gradients of matrices that moved, or why they can't be those of layers that see a whole picture."""
    gradient = ObservedUpdate(view).gradient
    if isinstance(gradient, NotApplicable):
        return gradient
    weights: dict[str, Tensor] = {
        n: v for n, v in gradient.items() if not isinstance(v, LowRank) and v.ndim == 2 and bool(v.any())
    }
    enough = sum(max(value.shape) for value in weights.values()) >= math.prod(view.task.input_shape)
    return weights if enough else NOWHERE


def _read_network(view: ServerView, weights: Mapping[str, Tensor]) -> tuple[PixelNetwork, list[Part]] | NotApplicable:
    """Return the layers that see all of the picture, and what they tell of it, or why there are none."""
    traced = trace_view(view, view.device)
    if isinstance(traced, NotApplicable):
        return traced
    layers = pixel_layers(traced[1], weights)
    groups: list[list[int]] = []
    for number, layer in enumerate(layers):
        group = next((g for g in groups if layers[g[0]].is_given_the_same(layer)), None)
        groups.append([number]) if group is None else group.append(number)
    chosen = _covering(layers, groups, math.prod(view.task.input_shape))
    if chosen is None:
        return NOWHERE
    used = [number for group in chosen for number in group]
    network = PixelNetwork(traced[1], [layers[number] for number in used])
    parts = []
    for group in chosen:
        part = _read_part([layers[i] for i in group], tuple(used.index(i) for i in group), weights)
        if not part.left <= NEARLY_ONE:
            return NotApplicable(f"the update of {part.layer.weight} is not that of one input: {part.left:.1e} is left")
        parts.append(part)
    return network, parts


def _up_to_a_factor(view: ServerView, part: Part, reason: str) -> Reconstruction:
    """Return what a layer is given, as bright as pixels in [0, 1] can be, where no more than its direction is told."""
    labels, note = single_label(view)
    words = f"{UP_TO_BRIGHTNESS}: {reason}"
    return Reconstruction(
        inputs=None,
        labels=labels,
        objective=part.left,
        private={f"features/{part.layer.weight}": (part.brightest * part.direction).to(view.dtype)},
        knowledge=() if view.labels is None else ("labels",),
        note="; ".join(filter(None, (words, note))),
        remarks=frozenset({Remark.DIRECTION_ONLY}),
    )


def _covering(layers: Sequence[PixelLayer], groups: Sequence[list[int]], count: int) -> list[list[int]] | None:
    """Return at most `MOST_PARTS` groups of layers of one input that see all pixels together, or None."""
    seen = [set(layers[group[0]].index[layers[group[0]].slope != 0].tolist()) for group in groups]
    chosen: list[int] = []
    covered: set[int] = set()
    while len(covered) < count and len(chosen) < MOST_PARTS and len(chosen) < len(groups):
        best = max(range(len(groups)), key=lambda i: len(seen[i] - covered))
        chosen, covered = [*chosen, best], covered | seen[best]
    return [groups[i] for i in chosen] if len(covered) == count else None


def _read_part(layers: Sequence[PixelLayer], numbers: tuple[int, ...], weights: Mapping[str, Tensor]) -> Part:
    """Return what layers of one input tell of it."""
    gradient = torch.cat([layer.arrange(dense(weights[layer.weight]).double()) for layer in layers])
    direction = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(POWER_STEPS):
        direction = direction / direction.norm()
        direction = gradient.mT @ (gradient @ direction)
    direction = direction / direction.norm()
    observed = gradient @ direction
    left = float((gradient - torch.outer(observed, direction)).norm() / gradient.norm())
    offset, slope = layers[0].offset, layers[0].slope
    heard = (direction != 0) & (slope != 0)
    ends = torch.stack([offset - PIXEL_SLACK * slope, offset + (1 + PIXEL_SLACK) * slope])[:, heard] / direction[heard]
    low, high = float(ends.amin(0).max()), float(ends.amax(0).min())
    return Part(numbers, layers[0], direction, observed, low, high, left)


def _possible_targets(view: ServerView) -> Tensor | None:
    """Return the targets that the picture may have (K, ...), or None where there are too many, or any number may be."""
    if view.labels is not None:
        return view.labels
    task = view.task
    classes = task.num_classes if task.loss.takes_classes else 0
    return task.loss.every_target(task.output_shape, max(classes, MAX_TRIED_LABELS))


def _rounding_limit(view: ServerView, weight: str) -> float:
    rounding = ROUNDING_MARGIN * relative_rounding(view, weight) if view.dtype.itemsize > 2 else 0.0
    return min(rounding, MAX_ROUNDING)


def _solutions(search: ScaleSearch) -> list[_Found]:
    """Return the pictures that leave next to nothing of their layers' equations, the best first."""
    try:
        factors, labels = search.starts()
        if not len(factors):
            return []
        factors, left = search.refine(factors, labels)
    except MODEL_ERRORS:
        return []  # an operation that takes no batch of this kind
    lows, highs = (torch.tensor([getattr(p, end) for p in search.parts]).to(factors) for end in ("low", "high"))
    inside = ((factors >= lows) & (factors <= highs)).all(1) & (left <= NEARLY_ONE)
    kept: list[_Found] = []
    for i in left.argsort().tolist():
        same = (
            other.target == int(labels[i])
            and bool(((other.factors - factors[i]).abs() <= SAME_PICTURE * factors[i].abs()).all())
            for other in kept
        )
        if bool(inside[i]) and not any(same):
            kept.append(_Found(factors[i], int(labels[i]), float(left[i])))
    return kept[:MOST_CONFIRMED]


def other_range(form: InputForm) -> str:
    """Return what is to be noted of inputs that are beyond the range of those that a network was said to take."""
    return OTHER_RANGE if form.is_image else STATED_RANGE


def _judge(search: ScaleSearch, found: Sequence[_Found], limit: float) -> Reconstruction | None:
    """Return the picture that makes the update, verified where no other does and its brightness is told; None of none.

    Where the time limit comes before that is decided, the picture is kept and named not decided.

    Args:
        search: for it.
        found: what explains its layers.
        limit: share of the layers' update and equations that rounding may be.
    """
    judgment = _Judgment(search, found, limit, [_as_result(search, one) for one in found])
    try:
        check_time_limit()
        return judgment.of_any_range() if search.wide else judgment.of_pictures()
    except StoppedError as stopped:
        if search.wide or not found:
            raise
        return judgment.undecided(str(stopped))


@dataclass(frozen=True)
class _Judgment:
    """What is said of the pictures that explain their layers.

    Attributes:
        search: for them.
        found: the best first.
        limit: share of the layers' update and equations that rounding may be.
        results: of each.
    """

    search: ScaleSearch
    found: Sequence[_Found]
    limit: float
    results: Sequence[Reconstruction]

    @cached_property
    def view(self) -> ServerView:
        """The server's, without what did not move."""
        return without_unmoved(self.search.view)

    @property
    def left(self) -> float:
        """The share of its layers' update that no single input explains, of the part of which that is most."""
        return max(part.left for part in self.search.parts)

    @property
    def exact(self) -> list[int]:
        """Numbers of those that leave no more than rounding."""
        return [i for i, one in enumerate(self.found) if max(self.left, one.left) <= self.limit]

    @property
    def is_told(self) -> bool:
        """Whether there are more equations than unknowns."""
        return self.search.surplus >= LEAST_SURPLUS

    def tells_factors(self, number: int) -> bool:
        """Return whether one of them a little brighter or darker leaves more than rounding."""
        return _tells_factors(self.search, self.view, self.found[number], self.results[number])

    def undecided(self, stopped: str) -> Reconstruction:
        """Return the best one, where something came before it was decided whether the update bears it out."""
        kept = self.results[self.exact[0]] if self.exact else self._nearly()
        return kept.left_unchecked(stopped)

    def of_any_range(self) -> Reconstruction | None:
        """Return what the layers are given, where the whole update says so, or None."""
        search = self.search
        borne_out = [i for i in self.exact if _is_made_to_rounding(search, self.view, self.results[i])]
        if not borne_out or not self.is_told or not search.tells_pairs_apart():
            return None
        result = self.results[borne_out[0]]
        if not self.tells_factors(borne_out[0]):
            result = result.with_note(FACTOR_UNTOLD, Remark.DIRECTION_ONLY)
        result = result.with_note(other_range(self.view.task.inputs), Remark.BEYOND_RANGE)
        return replace(result, inputs=None, private=_features(search, self.found[borne_out[0]]), verified=None)

    def of_pictures(self) -> Reconstruction | None:
        """Return the picture; None of none."""
        exact, search = self.exact, self.search
        if self.is_told and len(exact) == 1 and self.tells_factors(exact[0]):
            return self.results[exact[0]]  # whether the update bears it out is asked of every result
        if not self.found:
            return None
        if not exact:
            told = self.left <= self.limit and _is_alone(search) and search.tells_pairs_apart()
            nearly = self._nearly()
            if not told:
                return nearly
            nearly = replace(nearly, private=_features(search, self.found[0]))
            return nearly.with_note(UP_TO_BRIGHTNESS, Remark.DIRECTION_ONLY)
        borne_out = [i for i in exact if explains_update(self.view, self.results[i]) is not False]
        best = (borne_out or exact)[0]
        others = [i for i in borne_out if _are_apart(self.results[best], self.results[i])]
        if self.is_told and len(exact) > 1 and not others and self.tells_factors(best):
            return self.results[best]
        if not self.is_told and not search.sized and _is_alone(search):
            return None  # some picture makes whatever flows back, so that its direction is all that is told
        return self._of_untold_brightness(best, len(others) + 1, single=bool(borne_out))

    def _nearly(self) -> Reconstruction:
        """Return the best one, which leaves more than rounding."""
        most = max(self.left, self.found[0].left)
        return replace(self.results[0], verified=None, objective=most).with_note(NEARLY.format(most))

    def _of_untold_brightness(self, best: int, count: int, *, single: bool) -> Reconstruction:
        """Return a picture of which the direction alone is told.

        Args:
            best: its number.
            count: of pictures of different brightness that make the update.
            single: whether it may be said that the update is of this one, but for its brightness.
        """
        search = self.search
        reason = SEVERAL_FACTORS.format(f"{count} pictures") if count > 1 else FACTOR_UNTOLD
        if not self.is_told:
            reason = TOO_FEW_OUTPUTS.format(math.prod(self.view.task.output_shape))
        told = single and _is_alone(search) and search.tells_pairs_apart()
        private = _features(search, self.found[best]) if told else {}
        result = replace(self.results[best], verified=None, private=private)
        return result.with_note(reason, Remark.DIRECTION_ONLY)


def _has_moved_bias(view: ServerView) -> bool:
    """Return whether a bias of a linear layer is among the tensors of an update."""
    sizes = {name: dense(value).shape for name, value in view.update.items()}
    pairs = ((size, sizes.get(name.removesuffix("bias") + "weight", ())) for name, size in sizes.items())
    return any(len(size) == 1 and len(weight) == 2 and weight[0] == size[0] for size, weight in pairs)


def _is_made_to_rounding(search: ScaleSearch, view: ServerView, result: Reconstruction) -> bool:
    """Return whether a step on a picture makes all of the update to its rounding, of its size if that is known."""
    assert result.inputs is not None
    assert result.labels is not None
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    explained = check.is_explained_to_rounding(result.inputs, result.labels)
    return explained and (not search.sized or check.has_stated_size(result.inputs, result.labels))


def _tells_inputs_apart(view: ServerView) -> bool:
    """Return whether several pictures leave more than one direction: of two outputs all that flows back has one."""
    shape = view.task.output_shape
    return math.prod(shape) > 2 and not view.task.loss.sends_back_one_direction(shape)


def _features(search: ScaleSearch, one: _Found) -> Tensors:
    """Return what the one layer is given, under its name."""
    (part,) = search.parts
    return {f"features/{part.layer.weight}": (one.factors * part.direction).to(search.view.dtype)}


def _as_result(search: ScaleSearch, one: _Found) -> Reconstruction:
    view = search.view
    pixels = search.pictures(one.factors[None])
    return Reconstruction(
        inputs=(pixels if search.wide else pixels.clamp(0, 1)).to(view.dtype),
        labels=search.targets[one.target][None].to(view.device),
        objective=one.left,
        knowledge=() if view.labels is None else ("labels",),
        verified=True,
    )


def _are_apart(one: Reconstruction, other: Reconstruction) -> bool:
    assert one.inputs is not None
    assert other.inputs is not None
    return float((one.inputs - other.inputs).double().square().mean().sqrt()) > MAX_PIXEL_ERROR


def _tells_factors(search: ScaleSearch, view: ServerView, one: _Found, result: Reconstruction) -> bool:
    """Return whether pictures with a part brighter or darker by a quarter of a level leave more than rounding."""
    assert result.inputs is not None
    assert result.labels is not None
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    step = []
    for part in search.parts:
        heard = part.layer.slope != 0
        step.append(MAX_PIXEL_ERROR / float((part.direction[heard] / part.layer.slope[heard]).square().mean().sqrt()))
    signs = [s for s in itertools.product((-1.0, 0.0, 1.0), repeat=len(step)) if any(s)]
    moved = one.factors + torch.tensor(signs).to(one.factors) * torch.tensor(step).to(one.factors)
    return check.tells_apart(result.inputs, search.pictures(moved), result.labels)
