"""Says how far rounding goes in a gradient that was sent as the difference of two models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attacks.update.quantization_grids import MIN_ENTRIES, bits_of_grid, grid_steps, were_rows_rounded
from fl.tensors import LowRank, dense
from fl.view import ServerView

RMS_ROUNDING = 0.25
"""Rounding to the nearest number, root mean square, relative to the spacing after 1."""
LEAST_SPACING = torch.finfo(torch.float32).eps
"""The spacing after 1 that counts of double precision, too: clients may have computed in single precision, and attacks
do not solve to the last digit."""
MIN_SHARE_ON_GRID = 0.95
"""Share of a parameter whose update leads from one number of its type to another. Differences of models miss by a
thousandth, where a weight is far smaller than its update and the difference is rounded once more; computed updates
are there by chance, one in hundreds."""
EXPONENT_BITS = 0x7FF << 52
"""Of a positive number in double precision: what is left with these alone is the power of two below it."""
COARSE_SPACINGS, MAX_SHARE_OF_ZEROS = 8, 0.01
"""Spacings that half of all updates are a whole number of only where they were rounded more coarsely than the weights
are; and share of zeros, of units that moved at all, above which numbers were left out."""


def relative_rounding(view: ServerView, name: str) -> float:
    """Return the share of a parameter's gradient that is rounding of the difference of weights."""
    step = RMS_ROUNDING * torch.finfo(view.dtype).eps
    if not view.rounded:
        return step
    moved, start = dense(view.update[name]).norm(), dense(view.shared[name]).norm()
    return float(step * (1 + start / moved)) if bool(moved > 0) else step


def is_below_rounding(view: ServerView) -> bool:
    """Return whether an update of at least four bytes a number is no longer than the rounding of weights it is made of.

    Then one step in that type on any picture moves next to nothing, and no picture can be asked for the update.
    """
    if not view.rounded or view.dtype.itemsize < 4:
        return False
    step = RMS_ROUNDING * torch.finfo(view.dtype).eps
    moved = {name: dense(value).double() for name, value in view.update.items() if name in view.shared}
    rounding = [step * float(dense(view.shared[name]).double().norm()) for name in moved]
    size = math.hypot(*(float(value.norm()) for value in moved.values()))
    return 0 < size <= math.hypot(*rounding)


def coarse_form(view: ServerView) -> str:
    """Return what all numbers of an update, or of the weights after it, were sent in that is coarse; or nothing.

    That is a type of two bytes, few bits on an even grid, or what is known of how it was sent (`view.sent_as`). What
    attacks on `view.dtype` take for a miss may then be no more than rounding.
    """
    if view.sent_as:
        return view.sent_as
    if view.dtype.itemsize < 4:
        return str(view.dtype).removeprefix("torch.")
    of_update, of_weights = sent_types(view)
    kind = next((kind for kind in (of_update, of_weights) if kind.itemsize < view.dtype.itemsize), None)
    if kind is not None:
        return str(kind).removeprefix("torch.")
    large = _large(view)
    by_rows = were_rows_rounded(value for value, _ in large)
    bits = []
    for value, start in large:
        bits.append(bits_of_grid(value, start, of_one_row=by_rows))
        if not bits[-1]:
            return ""
    return f"{max(bits)} bits a number" if bits else ""


def is_sent_in_float8(view: ServerView) -> bool:
    """Return whether an update's numbers were sent in a floating-point type of one byte, as a file says.

    What its rounding leaves looks like few bits, clipping by value, and numbers left out.
    """
    return view.sent_as.startswith("float8")


def _large(view: ServerView) -> list[tuple[Tensor, Tensor | None]]:
    """Return the tensors of an update that are large enough to tell a grid, and the weights that they are off from."""
    pairs = [(value, view.shared.get(name) if view.rounded else None) for name, value in view.update.items()]
    if any(isinstance(part, LowRank) for pair in pairs for part in pair):
        return []
    dense_pairs = [(dense(value), None if start is None else dense(start)) for value, start in pairs]
    return [pair for pair in dense_pairs if pair[0].numel() >= MIN_ENTRIES]


def sent_types(view: ServerView) -> tuple[torch.dtype, torch.dtype]:
    """Return the types that all numbers of an update, and of the weights after it, lie on: of two bytes, or the view's.

    Args:
        view: what the server saw.
    """
    pairs = [(view.shared.get(name), value) for name, value in view.update.items()]
    if view.dtype.itemsize < 4 or any(isinstance(part, LowRank) for pair in pairs for part in pair):
        return view.dtype, view.dtype
    unit = 1.0 if view.rounded else _step_size(view)  # of a gradient that was sent as such
    both = [(dense(start), dense(value)) for start, value in pairs if start is not None] if view.rounded else []

    def sent() -> Iterator[tuple[Tensor, Tensor]]:
        return ((dense(value) / unit, (dense(value) / unit).abs()) for _, value in pairs)

    def after() -> Iterator[tuple[Tensor, Tensor]]:
        return ((start - value, start.abs() + value.abs()) for start, value in both)

    return _coarsest_type(sent, view.dtype), _coarsest_type(after, view.dtype)


def spacing_of_weights(view: ServerView, name: str) -> float:
    """Return how far numbers after 1 are apart in what a parameter was sent in, which may be coarser than the rest.

    Args:
        view: what the server saw.
        name: of a tensor of its update.
    """
    found, start, moved = torch.finfo(view.dtype).eps, view.shared.get(name), view.update[name]
    if not view.rounded or view.dtype.itemsize < 4 or start is None:
        return found
    if isinstance(start, LowRank) or isinstance(moved, LowRank) or not bool(moved.any()):
        return found
    after, sizes = start - moved, start.abs() + moved.abs()
    kinds = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
    return next((torch.finfo(kind).eps for kind in kinds if _lie_on(kind, after, sizes)), found)


def _step_size(view: ServerView) -> float:
    """Return what a gradient that was sent was multiplied with to make an update of it; 1 if that is not one number."""
    phases = view.method.phases(view.client.task, view.round)
    sizes = {group.lr for phase in phases for group in phase.groups}
    return sizes.pop() if len(sizes) == 1 else 1.0


def _coarsest_type(numbers: Callable[[], Iterator[tuple[Tensor, Tensor]]], own: torch.dtype) -> torch.dtype:
    """Return the type of two bytes that all numbers lie on, or else their own.

    Args:
        numbers: returns them tensor by tensor, with sizes as of `_lie_on`; the first tensors mostly are enough.
        own: their type.
    """
    for kind in (torch.bfloat16, torch.float16):
        if all(_lie_on(kind, *value) for value in numbers()) and any(bool(value.any()) for value, _ in numbers()):
            return kind
    return own


def rounding_of_numbers(view: ServerView) -> dict[str, Tensor]:
    """Return the standard deviation of each number of an update for having been rounded, in double precision.

    A number lies half a spacing of its type away at most, as often here as there. Of a difference of weights those
    after it were rounded, and the difference once more.

    Args:
        view: what the server saw, of an update without tensors of low rank.
    """
    of_update, of_weights = sent_types(view)
    found = {}
    for name, value in view.update.items():
        change, start = dense(value).double(), view.shared.get(name)
        apart = _spacing(change, of_update)
        if view.rounded and start is not None:
            apart = torch.hypot(apart, _spacing(dense(start).double() - change, of_weights))
        found[name] = apart / math.sqrt(12)
    return found


def rounding_and_grid(view: ServerView) -> dict[str, Tensor]:
    """Return the same as `rounding_of_numbers`, with what an even grid that numbers lie on adds to it.

    Args:
        view: what the server saw, of an update without tensors of low rank.
    """
    found, by_rows = {}, were_rows_rounded(map(dense, view.update.values()))
    for name, rounding in rounding_of_numbers(view).items():
        steps = grid_steps(dense(view.update[name]), of_one_row=by_rows)
        found[name] = rounding if steps is None else torch.hypot(rounding, steps.to(rounding) / math.sqrt(12))
    return found


def largest_rounding(view: ServerView) -> float:
    """Return the largest share of a tensor's update, by their root mean squares, that its having been rounded may be.

    It is 1 where nothing but a word tells how the update was sent (`view.sent_as`), or tensors are of low rank.

    Args:
        view: what the server saw.
    """
    if view.sent_as or any(isinstance(value, LowRank) for value in (*view.update.values(), *view.shared.values())):
        return 1.0
    shares = [0.0]
    for name, rounding in rounding_and_grid(view).items():
        size = float(dense(view.update[name]).double().square().mean().sqrt())
        shares += [float(rounding.square().mean().sqrt()) / size] if size > 0 else []
    return max(shares)


def _spacing(values: Tensor, kind: torch.dtype) -> Tensor:
    """Return how far numbers of a type are apart around these, given in double precision."""
    form = torch.finfo(kind)
    powers = values.abs().clamp(min=form.tiny).view(torch.int64) & EXPONENT_BITS  # frexp takes several times as long
    return form.eps * powers.view(torch.float64)


def _lie_on(kind: torch.dtype, values: Tensor, sizes: Tensor) -> bool:
    """Return whether numbers are those of a coarser type, up to the rounding of what they were computed from.

    Args:
        kind: the type.
        values: numbers.
        sizes: of what they were computed from.
    """
    apart = (values.to(kind).to(values) - values).abs()
    return bool((apart <= 2 * torch.finfo(values.dtype).eps * sizes).all())


def relative_entry_rounding(view: ServerView, name: str) -> Tensor | None:
    """Return how far rounding may put each number of a parameter's update off, relative to the root mean square of all.

    A small weight lies on a finer grid than a large one, so that its gradient is known better. None where the update is
    not the plain difference of two models on the grid of `view.dtype`: what was noised or averaged leaves that grid,
    what was sent in fewer bits lies on a coarser one, of what was pruned numbers are missing here and there. Numbers of
    double precision are not told from computed ones.
    """
    if view.dtype == torch.float64 or not view.rounded:
        return None
    start, moved = (dense(part[name]).detach().to("cpu", torch.float64) for part in (view.shared, view.update))
    after = (start - moved).to(view.dtype)
    if not (after.double() == start - moved).double().mean() > MIN_SHARE_ON_GRID:
        return None
    largest = torch.maximum(after.abs(), moved.abs().to(view.dtype))
    spacing = (largest.nextafter(largest.new_tensor(torch.inf)) - largest).double()
    alive = moved.flatten(1).any(1) if moved.ndim > 1 else moved != 0  # nothing reaches a unit at rest
    there, steps = moved[alive] != 0, moved[alive] / spacing[alive]
    coarse = (steps / COARSE_SPACINGS).frac() == 0
    if not there.double().mean() > 1 - MAX_SHARE_OF_ZEROS or not coarse[there].double().mean() < 0.5:
        return None
    return spacing / 12**0.5 / moved.square().mean().sqrt()
