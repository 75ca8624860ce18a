"""Guesses the rule that made an update by signs and sizes alone: whether it looks like a step of SGD at all.

The gradient of a layer has entries of all sizes, and its layers are as long as they come. Rules that treat numbers or
tensors one by one leave marks of their own: one size for all entries (signs, the first step of Adam and its like), many
entries at one bound (clipping by value), tensors of one length (clipping or normalizing by tensor), lengths in
proportion to the weights (LARS, LAMB), sums of zero in every row (centralized gradients), few levels (bits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from attacks.network.operation_trace import MODEL_ERRORS
from attacks.network.reading_cache import cached_reading
from attacks.update.float_rounding import coarse_form
from attacks.update.training_phases import adaptive_optimizer_obstacle, training_phases
from fl.defense import Defense, UnknownDefense
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, dense
from fl.types import Candidate
from fl.view import ServerView

MIN_ENTRIES = 8
"""Entries that are not zero, below which sizes say nothing: a scale of one number is always of one size."""
MIN_SPACINGS = 8.0
"""Steps of the weights' grid that an entry must be away from zero: below, it is as large as rounding made it."""
LOOSE_SIZE_TOLERANCE, SIZE_TOLERANCE = 5e-2, 1e-3
"""How far sizes may differ that count as about one (decay, and gradients as small as an optimizer's epsilon, move them
a little), and that count as one."""
NEGLIGIBLE_SIZE = 0.1
"""Share of the largest size below which entries do not count."""
MIN_SHARE_OF_LARGE = 0.9
"""Share of the other entries that must have the largest size."""
MIN_SHARE_OF_ALL = 0.1
"""Share of all entries that must have it."""
MOST_COMPARED_ROWS = 64
"""Rows of the largest size that are compared for being the same, at most."""
BOUND_TOLERANCE = 1e-4
"""Relative difference of rows' or tensors' sizes that were clipped to the same one."""
MIN_BOUNDED_ROWS = 4
"""Rows of one size that are no chance."""
MIN_EQUAL_TENSORS = 3
"""Tensors of one size that are no chance."""
PAIR_TOLERANCE = 1e-6
"""How near the norms of two tensors alone are, beside the rounding of a difference of weights."""
MIN_ENTRIES_OF_VECTOR = 32
"""Entries of a bias or a scale that are not all of one size by chance."""
MOST_TARGETS = 64
"""Targets that one example may have, of a layer that signs are told from by size."""
MAX_LEVELS, MIN_ENTRIES_FOR_LEVELS = 24, 64
"""Sizes that a tensor of so many entries has where it was sent in few bits."""
SAMPLED = 4096
"""Entries that are asked first, at least."""
LEVEL_TOLERANCE = 0.05
"""How far they may be from whole multiples of one step."""


class RuleKind(StrEnum):
    """Rules that made an update and that other code asks for."""

    ADAPTIVE_FIRST_STEP = "adaptive first step"
    """Nearly all numbers are of one size."""
    CLIPPED_BY_VALUE = "clipped by value"
    """Every number of a gradient was cut at one bound."""
    CENTRALIZED = "centralized"
    """The mean of each row was taken off the gradients of weights."""
    OTHER = "other"


SIGNS_ONLY = (
    "only signs are sent, or as good as (the first step of Adam, say): they look like a rank-one gradient whatever its "
    "factors are"
)
"""Why equations of gradients do not hold then."""


def clipping_bound(view: ServerView) -> float | None:
    """Return the size that no number of an update is above, where its gradient looks as if it was clipped by value."""
    if kind_of_update_rule(view) != RuleKind.CLIPPED_BY_VALUE:
        return None
    return max(float(tensor.sizes.max()) for tensor in _readable_tensors(view))


def is_sign_compressed(view: ServerView) -> bool:
    """Return whether every tensor whose sizes say anything holds one size and its negative, zeros aside.

    Each of them looks like a rank-one gradient then, whatever the factors are. Tensors of fewer than `MIN_ENTRIES`
    numbers, or of numbers that are no more than the rounding of a difference of weights, say nothing.
    """
    empty = True
    for tensor in _each_readable(view):
        empty = False
        if not bool((tensor.sizes >= (1 - SIZE_TOLERANCE) * tensor.sizes.max()).all()):
            return False
    return not empty


def hides_behind_signs(view: ServerView) -> bool:
    """Return whether an update holds signs, for all that is known: a gradient's factors do not follow from it.

    A black and white picture, or a row of zeros and ones, leaves numbers of one size in a single linear layer of two
    classes or one output as well. Where a step of SGD and its size were stated, the size says which it is, unless
    some target explains any (numbers that are searched for), or some brightness does (of a layer without bias).
    """
    if not is_sign_compressed(view):
        return False
    loss, stated = view.task.loss, view.threat.knows_optimizer and not view.scale_unknown
    told = view.labels is not None or loss.every_target(view.task.output_shape, MOST_TARGETS) is not None
    sized = view.defense.name == "none" and not coarse_form(view)
    return not (stated and told and sized and len(view.update) == len(("weight", "bias")))


def kind_of_update_rule(view: ServerView) -> RuleKind | None:
    """Return the kind of the rule that made the update, where that is no step of SGD (see `guess_update_rule`)."""
    return _guess(view)[0]


def guess_update_rule(view: ServerView) -> str:
    """Say what made the update, where that is no step of SGD, and what to state; empty where it may be one.

    Where the view's own settings say as much (an adaptive optimizer, a defense), nothing is said.

    Args:
        view: of an update; whether its optimizer was stated does not matter.
    """
    return _guess(view)[1]


def _guess(view: ServerView) -> tuple[RuleKind | None, str]:
    if (
        adaptive_optimizer_obstacle(training_phases(view)[0]) is not None
        or type(view.client.defense) not in {Defense, UnknownDefense}
        or view.parts
    ):
        return None, ""
    sent = tuple(view.update.values())
    # with what was sent, so that nothing else has its identity as long as that is kept
    found = cached_reading(view, ("rule", view.rounded, *map(id, sent)), lambda: (_read_rule(view), sent), lambda _: 0)
    return found[0]


def _read_rule(view: ServerView) -> tuple[RuleKind | None, str]:
    tensors = _readable_tensors(view)
    if not tensors:
        return None, ""
    tests = {
        _sees_signs: RuleKind.ADAPTIVE_FIRST_STEP,
        _sees_scaled_signs: RuleKind.OTHER,
        _sees_signs_of_vectors: RuleKind.OTHER,
        _sees_clipping_by_value: RuleKind.CLIPPED_BY_VALUE,
        _sees_clipping_by_tensor: RuleKind.OTHER,
        _sees_layerwise_steps: RuleKind.OTHER,
        _sees_centralized_gradients: RuleKind.CENTRALIZED,
        _sees_quantization: RuleKind.OTHER,
    }
    found = ((kind, test(tensors)) for test, kind in tests.items())
    kind, words = next(((kind, words) for kind, words in found if words), (None, ""))
    if kind == RuleKind.CENTRALIZED and _centers_inputs(view):
        return None, ""
    return kind, words


def _centers_inputs(view: ServerView) -> bool:
    """Return whether the rows of a network's own gradients sum to zero, as where layers are given normalized inputs."""
    if getattr(view.task.model, "takes_centered", False):
        return True
    if view.private or not view.method.uses_labels or not view.task.loss.takes_classes:
        return False
    image = torch.rand(1, *view.task.input_shape, generator=stream(0, "centered inputs"), dtype=torch.float64)
    guess = Candidate(image.to(view.device, view.dtype), torch.zeros(1, dtype=torch.int64, device=view.device))
    try:
        with torch.no_grad():
            made = predict(replace(view, batch_size=1, schedule=(((1,),),)), guess)
    except MODEL_ERRORS:
        return False
    rows = [dense(made[name]) for name in view.update if name in made and dense(made[name]).ndim > 1]
    rows = [value.double().flatten(1) for value in rows if value[0].numel() > MIN_ENTRIES and bool(value.any())]
    sums = [float(value.sum(1).norm() / value.abs().sum(1).norm()) for value in rows]
    return bool(sums) and max(sums) <= SIZE_TOLERANCE


@dataclass(frozen=True)
class _TensorUpdate:
    """A tensor of an update whose sizes say something.

    Attributes:
        name: of the parameter.
        start: its weights.
        update: how it moved, in double precision.
        sizes: of the entries that are above rounding and not zero (N,).
        grain: how far an entry may be off for being a difference of two weights.
    """

    name: str
    start: Tensor
    update: Tensor
    sizes: Tensor
    grain: float

    @property
    def length(self) -> float:
        """The norm of the update, without squares of tiny or huge numbers."""
        top = float(self.sizes.max())
        return top * float((self.update / top).norm())


def _readable_tensors(view: ServerView) -> list[_TensorUpdate]:
    """Return the dense tensors of an update with at least `MIN_ENTRIES` entries that rounding did not make."""
    return list(_each_readable(view))


def _each_readable(view: ServerView) -> Iterator[_TensorUpdate]:
    """Yield them one by one: the first may be enough."""
    for name, value in view.update.items():
        start = view.shared.get(name)
        if isinstance(value, LowRank) or not isinstance(start, Tensor) or not bool(value.isfinite().all()):
            continue
        spacing = _spacing(start) if view.rounded else start.new_zeros(1)
        moved = value != 0
        heard = moved & (value.abs() > MIN_SPACINGS * spacing) if view.rounded else moved
        count = int(heard.sum())
        # the larger half has to be heard, or what is left of the rest is a choice of the grid's
        if count >= max(MIN_ENTRIES, int(moved.sum()) // 2):
            sizes = (value.flatten() if count == value.numel() else value[heard]).abs().double()
            yield _TensorUpdate(name, start.double(), value.double(), sizes, float(spacing.max()))


def _spacing(start: Tensor) -> Tensor:
    """Return the distance of each weight to the next number of its type."""
    sizes = start.abs()
    return sizes.nextafter(sizes.new_tensor(torch.inf)) - sizes


def _sizes_of_signs(tensors: Sequence[_TensorUpdate]) -> tuple[float, float] | None:
    """Return the smallest and the largest size of a tensor's entries where these are of one size each, or None."""
    largest = [float(t.sizes.max()) for t in tensors]
    # what is far below moved by decay alone, or by a gradient no larger than an optimizer's epsilon
    heard = [t.sizes[t.sizes > NEGLIGIBLE_SIZE * top] for t, top in zip(tensors, largest, strict=True)]
    near = sum(int((size >= (1 - LOOSE_SIZE_TOLERANCE) * top).sum()) for size, top in zip(heard, largest, strict=True))
    if near < MIN_SHARE_OF_LARGE * sum(map(len, heard)) or near < MIN_SHARE_OF_ALL * sum(len(t.sizes) for t in tensors):
        return None
    return min(largest), max(largest)


def _sees_signs(tensors: Sequence[_TensorUpdate]) -> str:
    sizes = _sizes_of_signs(tensors)
    if sizes is None or sizes[1] > (1 + LOOSE_SIZE_TOLERANCE) * sizes[0]:
        return ""
    return (
        "signs, or the first step of an adaptive optimizer (Adam, AdamW, RMSprop, Adagrad): nearly all entries are of "
        f"one size, {sizes[1]:.2g}; state that optimizer (method fedavg, optimizer: adam, lr: {sizes[1]:.2g}; "
        "of several steps that is their sum) or the defense signsgd"
    )


def _sees_scaled_signs(tensors: Sequence[_TensorUpdate]) -> str:
    sizes = _sizes_of_signs(tensors)
    if sizes is None or sizes[1] <= (1 + LOOSE_SIZE_TOLERANCE) * sizes[0]:
        return ""
    return (
        "signs with a size of each tensor's own (scaled signs, LAMB): entries of a tensor are of one size; for scaled "
        "signs state the defense signsgd"
    )


def _sees_signs_of_vectors(tensors: Sequence[_TensorUpdate]) -> str:
    """Notice rules that treat matrices otherwise: Muon beside signs, Adafactor."""
    vectors = [t for t in tensors if t.update.squeeze().ndim == 1 and len(t.sizes) >= MIN_ENTRIES_OF_VECTOR]
    alike = [t for t in vectors if bool((t.sizes >= (1 - SIZE_TOLERANCE) * t.sizes.max()).all())]
    if not alike:
        return ""
    return (
        f"signs in part (an adaptive optimizer for some tensors): all {len(alike[0].sizes)} entries of {alike[0].name} "
        f"are of one size; no method here moves so"
    )


def _sees_clipping_by_value(tensors: Sequence[_TensorUpdate]) -> str:
    rows = [_count_rows_at_bound(t) if t.update.ndim > 1 else 0 for t in tensors]
    if max(rows) < MIN_BOUNDED_ROWS:
        return ""
    where = tensors[rows.index(max(rows))].name
    return (
        f"clipping by value: {max(rows)} rows of {where} have entries of the same largest size, which several steps "
        "of an adaptive optimizer (Adam, say) leave as well; no method here clips so, and only rows that stay below it "
        "are a gradient's"
    )


def _count_rows_at_bound(tensor: _TensorUpdate) -> int:
    """Count the rows of a matrix in which the largest size of all is reached.

    A gradient may reach it at several pixels of one row, which see the same; rows are of sizes of their own. Rows that
    are the same count as one: what mixes tokens whose mean is taken gets one signal for all of them. Those of which
    every entry is that size are the same by clipping.
    """
    rows = tensor.update.abs().flatten(1)
    sizes = rows.amax(1)
    off = tensor.grain / float(sizes.max())
    if off > SIZE_TOLERANCE:
        return 0
    near = max(BOUND_TOLERANCE, off)
    bounded = rows[sizes >= (1 - near) * sizes.max()]
    first = bounded[:MOST_COMPARED_ROWS]
    cut = (first >= (1 - near) * sizes.max()).all(1) & (first.shape[1] > 1)
    alike = (torch.cdist(first, first, p=math.inf) <= 2 * near * sizes.max()) & ~cut
    again = int(alike.tril(-1).any(1).sum())
    return len(bounded) - again if again < len(first) - 1 else 1


def _sees_clipping_by_tensor(tensors: Sequence[_TensorUpdate]) -> str:
    tensors = _drop_equal(tensors)
    lengths = sorted((t.length for t in tensors), reverse=True)
    same = [length for length in lengths if length >= (1 - BOUND_TOLERANCE) * lengths[0]]
    grain = max(t.grain * t.update.numel() ** 0.5 for t in tensors) / lengths[0]
    pair = len(lengths) > 1 and grain < SIZE_TOLERANCE and lengths[1] >= (1 - PAIR_TOLERANCE - grain) * lengths[0]
    if len(same) < MIN_EQUAL_TENSORS and not pair:
        return ""
    same = same if len(same) > 1 else lengths[:2]
    return (
        f"clipping or normalizing by tensor: {len(same)} of {len(lengths)} tensors have the same norm, {same[0]:.3g}; "
        f"state the defense clip with scope: tensor and max_norm: {same[0]:.3g}"
    )


def _drop_equal(tensors: Sequence[_TensorUpdate]) -> list[_TensorUpdate]:
    """Return the tensors, once where several moved alike: biases whose outputs are added get the same gradient."""
    kept: list[_TensorUpdate] = []
    for tensor in tensors:
        grain = tensor.grain * tensor.update.numel() ** 0.5
        if not any(
            other.update.shape == tensor.update.shape
            and float((other.update - tensor.update).norm()) <= PAIR_TOLERANCE * tensor.length + 2 * grain
            for other in kept
        ):
            kept.append(tensor)
    return kept


def _sees_layerwise_steps(tensors: Sequence[_TensorUpdate]) -> str:
    if any(float((t.update - t.start).norm()) < 0.5 * t.length for t in tensors):
        return ""  # weights, and no difference of them
    ratios = [t.length / float(t.start.norm()) for t in tensors if bool(t.start.any())]
    if len(ratios) < MIN_EQUAL_TENSORS or max(ratios) > (1 + SIZE_TOLERANCE) * min(ratios):
        return ""
    return (
        f"step sizes by layer (LARS, LAMB): every tensor moved by {ratios[0]:.2g} of its norm; no method here moves so"
    )


def _sees_centralized_gradients(tensors: Sequence[_TensorUpdate]) -> str:
    rows = [t for t in tensors if t.update.ndim > 1 and t.update[0].numel() > MIN_ENTRIES]
    matrices = [(t.update / t.sizes.max()).flatten(1) for t in rows]  # squares of tiny or huge numbers are none
    sums = [matrix.sum(1).norm() / matrix.abs().sum(1).norm() for matrix in matrices]
    if not sums or max(map(float, sums)) > SIZE_TOLERANCE:
        return ""
    return (
        "centralized gradients: each row of the weights' updates sums to zero, so that they tell what a linear layer "
        "takes but for its mean; no method here centralizes them"
    )


def _sees_quantization(tensors: Sequence[_TensorUpdate]) -> str:
    large = [t for t in tensors if len(t.sizes) >= MIN_ENTRIES_FOR_LEVELS]
    if not large or not all(_count_levels(t.sizes) for t in large):
        return ""
    steps = [float(_levels(t.sizes)[0]) for t in large]
    signs = ", if they are no several steps of one size (signSGD, Lion)" if max(steps) < 1.02 * min(steps) else ""
    return (
        f"numbers sent in few bits: {large[0].name} has {_count_levels(large[0].sizes)} sizes, a step apart, in "
        f"{len(large[0].sizes)} entries; state the defense (quantize, qsgd){signs}"
    )


def _count_levels(sizes: Tensor) -> int:
    """Return how many sizes there are, if they are few and multiples of a step; else 0."""
    if len(_levels(sizes[:: max(1, len(sizes) // SAMPLED)])) > MAX_LEVELS:
        return 0  # without sorting all of them
    levels = _levels(sizes)
    if len(levels) > MAX_LEVELS:
        return 0
    counts = levels / torch.cat([levels[:1], levels.diff()]).min()
    return len(levels) if bool(((counts - counts.round()).abs() < LEVEL_TOLERANCE).all()) else 0


def _levels(sizes: Tensor) -> Tensor:
    """Return the sizes that there are, least first."""
    ordered = sizes.sort().values
    apart = ordered.diff() > SIZE_TOLERANCE * ordered[1:]
    return torch.cat([ordered[:1], ordered[1:][apart]])
