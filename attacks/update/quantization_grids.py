"""Numbers that lie on an even grid, as those of an update that was sent in few bits (integers and a scale)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.network.reading_cache import cached_tensor_reading
from attacks.search_control import check_time_limit

MIN_ENTRIES = 64
"""Numbers of a tensor, below which a grid through all of them says little, unless each value is there several times."""
MIN_LEVELS, ENTRIES_PER_LEVEL = 8, 4
"""Values of a grid, below which it takes several numbers other than 0 of each: few are evenly spaced by chance."""
MIN_STEPS, MAX_STEPS = 3, 4096
"""Steps between the least and the largest number: fewer may be signs and their like (`attacks.update.update_rule`), and
of more float32 tells no grid."""
FEW_STEPS = 256
"""Steps of eight bits."""
OFF_GRID = 0.1
"""How far numbers may be from whole steps: those of eight bits that were sent in float16 are, by a sixteenth."""
OFF_ROW = 0.02
"""How far, in steps, rows may be from multiples of one, and few numbers from a grid."""
OWN_SPACINGS = 4.0
"""Last places of the largest weight, up to which a step is one of the weights' own."""
SAMPLE = 4 * MAX_STEPS
"""Numbers that are looked at first: those of a grid repeat among them."""
LEAST_APART, MOST_APART = 1e-3, 0.25
"""Steps that two sizes are apart at least which are no one level: of numbers right on a grid, and of any."""
MIN_EVIDENCE, MOST_OF_A_LEVEL = 20.0, 12.0
"""Bits of chance that levels have to be on a grid against, to tell one, and those that count of one level."""
MOST_FEW = 512
"""Numbers of a tensor up to which steps of eight bits are tried one by one: of more, some are next to each other."""
MIN_FEW = 8
"""Numbers of a small tensor, or a row, from which on a grid through all of them is no chance, whatever its step."""
TRIED_FIRST, TRIED_AT_ONCE = 4, 16
"""Numbers that steps are tried on first, and steps left by these that are tried on all at once."""


@dataclass(frozen=True)
class _Grids:
    """The even grids that a tensor lies on.

    Attributes:
        whole: the step of one grid for all of it; 0 where it lies on none.
        of_rows: where it lies on none, those of its rows, 0 of rows that are all 0; empty where rows lie on none.
        of_one_row: whether its rows are multiples of one, to within such a step.
        evidence: of rows that are short, the bits of each (`_evidence_of_tried`); empty where they are long.
    """

    whole: float
    of_rows: tuple[float, ...] = ()
    of_one_row: bool = False
    evidence: tuple[float, ...] = ()


def grid_step(values: Tensor, least: int = MIN_STEPS) -> float:
    """Return how far apart numbers of a tensor are that all lie on an even grid; 0 where they lie on none.

    Rows that are multiples of one count as on none: pixels lie on a grid as well.

    Args:
        values: floating-point numbers, finite.
        least: steps that there have to be between the least and the largest; fewer than `MIN_STEPS` asks no more of
            levels than that they are evenly spaced.
    """
    flat = values.detach().flatten()
    if len(flat) < ENTRIES_PER_LEVEL * least:
        return 0.0
    low, high = (float(extreme) for extreme in flat.aminmax())
    known = torch.unique(flat[:SAMPLE].double())
    for widest in (4 * FEW_STEPS, 2 * MAX_STEPS):  # what is nearer is one value, and rounding
        gaps = known.diff()
        gaps = gaps[gaps > (high - low) / widest]
        if not len(gaps) or not _are_enough(flat, len(gaps) + 1):
            continue
        unit = float(gaps[gaps < 1.5 * gaps.min()].mean())
        steps = round((high - low) / float(known[-1] - known[0]) * float((gaps / unit).round().sum()))
        step = (high - low) / max(1, steps)
        if not least <= steps <= MAX_STEPS or not _are_on_grid(known - low, step):
            continue
        on_grid = _are_on_grid(flat.double() - low, step)
        told = on_grid and (least < MIN_STEPS or _evidence(flat.double(), low, step) >= MIN_EVIDENCE)
        return step if told and not is_of_one_row(values.detach(), step) else 0.0
    step = _step_of_few_levels(flat.double()) if least >= MIN_STEPS and len(flat) <= MOST_FEW else 0.0
    return step if step and not is_of_one_row(values.detach(), step) else 0.0


def _step_of_few_levels(flat: Tensor) -> float:
    """Return the step of a grid of eight bits at most, of numbers so few that no two of them are next to each other."""
    step = _first_fit(flat, _steps_of_eight_bits(flat))
    return step if step and _evidence_of_tried(flat, step) >= MIN_EVIDENCE else 0.0


def _are_on_grid(values: Tensor, step: float) -> bool:
    places = values / step
    return bool(((places - places.round()).abs() < OFF_GRID).all())


def _evidence(values: Tensor, origin: float, step: float) -> float:
    """Return how many bits of chance it took numbers to lie as near to a grid as they do.

    The distance of two levels is the step by choice. Each further one is on the grid by a chance of twice the largest
    distance from it. Levels of both signs count once: an optimizer's first step moves all numbers by nearly one size.

    Args:
        values: flat, in double precision.
        origin: a level.
        step: of the grid.
    """
    places, off = (values - origin) / step, _off_grid(values, origin, step)
    sizes, apart = (values.abs() / step).sort().values, min(max(4 * off, LEAST_APART), MOST_APART)
    different = int((sizes.diff() > apart).sum()) + int(sizes[0] > apart)
    free = min(len(torch.unique(places.round())) - 2, different - 1)
    return max(0, free) * -math.log2(max(2 * off, 2**-MOST_OF_A_LEVEL))


def _are_enough(flat: Tensor, levels: int) -> bool:
    """Return whether numbers of so many values are enough for their even spacing to be no chance."""
    repeated = int((flat != 0).sum()) >= ENTRIES_PER_LEVEL * levels
    return repeated or (len(flat) >= MIN_ENTRIES and levels >= MIN_LEVELS)


def grid_steps(values: Tensor, *, of_one_row: bool = False, spacing: float = 0.0) -> Tensor | None:
    """Return the step of the grid that a tensor lies on, or one for each row (m, 1, ...); None if it lies on none.

    Of rows that are all 0 it is 0.

    Args:
        values: as of `grid_step`.
        of_one_row: whether rows that are multiples of one count, too (`were_rows_rounded`).
        spacing: a step that numbers have anyway, and that tells no grid.
    """
    grids = cached_tensor_reading(values, "grids", lambda: _read_grids(values.detach()))
    if grids.whole:
        return torch.tensor(grids.whole, dtype=torch.float64) if grids.whole > spacing else None
    if not grids.of_rows or (not of_one_row and grids.of_one_row):
        return None
    known = zip(grids.evidence, grids.of_rows, strict=False)
    if grids.evidence and sum(bits for bits, step in known if step > spacing) < MIN_EVIDENCE:
        return None  # short rows have too few levels for their even spacing to be no chance
    return torch.tensor(grids.of_rows, dtype=torch.float64).view(-1, *[1] * (values.ndim - 1))


def _read_grids(values: Tensor) -> _Grids:
    """Return the grids that a tensor lies on, or its rows.

    Raises:
        StoppedError: the time is up: rows are many.
    """
    if step := grid_step(values):
        return _Grids(step)
    if values.ndim < 2 or values.shape[0] < 2 or values[0].numel() < MIN_FEW or values.numel() < MIN_ENTRIES:
        return _Grids(0.0)
    rows, steps = values.flatten(1).double(), list[float]()
    longest = rows[int(rows.abs().amax(1).argmax())]
    if not (step := _row_step(longest)):
        return _Grids(0.0)
    for row in rows:
        check_time_limit()
        steps.append(_row_step(row) if bool(row.any()) else 0.0)
        if not steps[-1] and bool(row.any()):
            return _Grids(0.0)
    short = rows.shape[1] < MIN_ENTRIES
    bits = [_evidence_of_tried(row, step) if step else 0.0 for row, step in zip(rows, steps, strict=True) if short]
    return _Grids(0.0, tuple(steps), is_of_one_row(values, step), tuple(bits))


def _evidence_of_tried(row: Tensor, step: float) -> float:
    """Return bits of evidence as `_evidence` does, for grids that begin at 0 or at the least number."""
    origins = [origin for origin in (0.0, float(row.min())) if _off_grid(row, origin, step) < OFF_ROW]
    found = max((_evidence(row, origin, step) for origin in origins), default=0.0)
    return max(0.0, found - math.log2(2 * FEW_STEPS))


def _off_grid(values: Tensor, origin: float, step: float) -> float:
    """Return how far numbers are from a grid at most, in steps."""
    places = (values - origin) / step
    return float((places - places.round()).abs().max())


def were_rows_rounded(tensors: Iterable[Tensor]) -> bool:
    """Return whether matrices of an update that are multiples of one row are so for having been rounded row by row.

    The gradient of a layer is of one row where it was given one example, and pixels lie on a grid by themselves. Those
    of other layers do not: so it takes a tensor on another grid, or layers with two numbers of inputs.

    Args:
        tensors: of the update; those of fewer than `MIN_ENTRIES` numbers do not count.
    """
    widths = set[int]()
    for value in tensors:
        if value.ndim < 2 or value.numel() < MIN_ENTRIES or not value.is_floating_point():
            continue
        if grid_steps(value) is not None:
            return True
        rows = value.detach().flatten(1)
        longest = rows[int(rows.abs().amax(1).argmax())]
        there = longest[longest != 0]
        several = len(there) >= MIN_FEW and len(torch.unique(there)) > MIN_STEPS
        if several and grid_steps(value, of_one_row=True) is not None:
            widths.add(rows.shape[1])
    return len(widths) > 1


def _row_step(row: Tensor) -> float:
    """Return the step of the grid that a row of numbers lies on, of eight bits where they are few."""
    if len(row) >= MIN_ENTRIES:
        return grid_step(row)
    return _first_fit(row, _steps_of_eight_bits(row))


def _steps_of_eight_bits(flat: Tensor) -> list[float]:
    """Return the steps of numbers of eight bits or less, whose largest size, or span, is a whole number of them."""
    size, span = float(flat.abs().max()), float(flat.max() - flat.min())
    counts = range(MIN_STEPS, FEW_STEPS)
    return [*(size / n for n in counts if n < FEW_STEPS / 2), *(span / n for n in counts)]


def _first_fit(flat: Tensor, known: Sequence[float]) -> float:
    """Return the first step on whose grid, from 0 or from their least on, numbers (double precision) lie; or 0."""
    steps = torch.tensor([step for step in known if step > 0], dtype=torch.float64, device=flat.device)
    from_both = torch.stack([flat, flat - flat.min()])
    places = from_both[:, None, :TRIED_FIRST] / steps[:, None]
    steps = steps[((places - places.round()).abs() < OFF_ROW).all(2).any(0)]  # few, where there are none
    for some in steps.split(TRIED_AT_ONCE):
        places = from_both[:, None] / some[:, None]
        fits = (((places - places.round()).abs() < OFF_ROW).all(2) & (places.round() != 0).any(2)).any(0)
        if bool(fits.any()):
            return float(some[fits][0])
    return 0.0


def step_beside(values: Tensor, larger: Mapping[Tensor, float]) -> float:
    """Return the step of the grid that a small tensor lies on as larger ones beside it do; 0 where it lies on none.

    Its step is theirs, or its largest number has as many steps as theirs have; of enough numbers it may be any.

    Args:
        values: floating-point numbers, finite.
        larger: tensors of the same update, each with the step of its grid.
    """
    flat = values.detach().flatten().double()
    if not len(flat) or not larger:
        return 0.0
    low, high, size = float(flat.min()), float(flat.max()), float(flat.abs().max())
    least, most = min(larger.values()), max(larger.values())
    if not size:
        return least if most < (1 + OFF_GRID) * least else 0.0
    counts = [max(1, round(float(other.abs().max()) / step)) for other, step in larger.items()]
    spans = [max(1, round(float(other.max() - other.min()) / step)) for other, step in larger.items()]
    known = [*larger.values(), *(size / count for count in counts), *((high - low) / count for count in spans)]
    if len(flat) >= MIN_FEW:
        known += [size / count for count in range(MIN_STEPS, min(max(counts), MAX_STEPS) + 1)]
    return _first_fit(flat, known)


def is_of_one_row(values: Tensor, step: float) -> bool:
    """Return whether all rows of a matrix are multiples of one, as no rounding leaves them.

    The gradient of a layer with one output, or two classes, is that: pixels of 8 bits times one number. Zeros count for
    nothing, as of numbers that were not sent.
    """
    if values.ndim < 2:
        return False
    rows = values.flatten(1).double()
    longest = rows[int(rows.square().sum(1).argmax())]
    there = (rows != 0) & (longest != 0)
    along = (rows @ longest) / (there * longest.square()).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    # a row and the longest may both be off their grids, whose steps are as far apart as the rows are long
    most = step * (2 * OFF_GRID * along.abs()).clamp_min(OFF_ROW)
    return bool((((rows - along[:, None] * longest).abs() < most[:, None]) | ~there).all())


def bits_of_grid(values: Tensor, start: Tensor | None = None, *, of_one_row: bool = False) -> int:
    """Return in how many bits numbers on an even grid can be sent; 0 where they lie on none.

    Args:
        values: of an update.
        start: the weights before: a difference of them lies on the grid of their last places, which counts as none.
        of_one_row: as of `grid_steps`.
    """
    spacing = 0.0
    if start is not None and start.is_floating_point():  # a count of batches has no last places
        spacing = OWN_SPACINGS * torch.finfo(start.dtype).eps * float(start.abs().max())
    steps = grid_steps(values, of_one_row=of_one_row, spacing=spacing)
    if steps is None or float(steps.max()) <= spacing:
        return 0
    flat = values.flatten(1).double() if steps.ndim else values.flatten()[None].double()
    most = ((flat.amax(1) - flat.amin(1)) / steps.flatten().clamp(min=torch.finfo(torch.float64).tiny)).max()
    return math.ceil(math.log2(round(float(most)) + 1))
