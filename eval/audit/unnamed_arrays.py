"""Arrays without names, as Flower sends them: in which order a model's names go with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from eval.audit.captured_files import CapturedUpdate
from eval.audit.tensor_files import is_vector, packed_hint
from fl.simulation.capture_checks import layout_hint

CLEARLY_NEARER = 0.5
"""Share of the distance to what arrays are compared with, in the next order, below which one order is the right one."""
OPEN = "their shapes allow another order as well, that of sorted names: give them by name where it is that"

TRAINED = "the model's trained parameters"
"""What is called so among the kinds of arrays that a list may be of."""
BY_NAME = "save them by name: dict(zip(names, arrays))"
"""What does away with all doubt about their order."""


def split_vector(captured: CapturedUpdate, model: nn.Module) -> CapturedUpdate:
    """Return arrays without names in place of one vector of all their numbers; anything else as it is.

    It is of the trained parameters one after the other, row by row, as `torch.nn.utils.parameters_to_vector` has them,
    or else of the whole `state_dict()`, with or without its counts or batch normalization.

    Raises:
        ValueError: it has another number of numbers; says how many there are.
    """
    state = {name: value.shape for name, value in model.state_dict().items()}
    trained = {name: value.shape for name, value in model.named_parameters() if value.requires_grad}
    vector = next(iter(captured.update.values()), None)
    alone = captured.nameless and len(captured.update) == 1 and len(trained) > 1
    if not alone or vector is None or not is_vector(vector):
        return captured
    numbers = vector.numel()
    smaller = _parts(model)
    layouts = {TRAINED: trained, "model.state_dict()": state, **smaller}
    sizes = {what: sum(shape.numel() for shape in shapes.values()) for what, shapes in layouts.items()}
    whole = next((what for what, size in sizes.items() if size == numbers), None)
    if whole is None:
        if any(shape == vector.shape for shape in trained.values()):
            return captured  # it may be that one alone
        counts = " or ".join(dict.fromkeys(f"{size}" for what, size in sizes.items() if what not in smaller))
        raise ValueError(
            f"expected a vector of all numbers to have {counts}, as the model's trained parameters or all of its "
            f"state_dict() have, got {numbers}: the model may be another than the client's; or save tensors by name"
        )
    shapes = list(layouts[whole].values())

    def split(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = (
            part for value in values.values() for part in value.flatten().split([shape.numel() for shape in shapes])
        )
        return {str(place): part.view(shape) for place, (part, shape) in enumerate(zip(parts, shapes, strict=False))}

    order = "the last first, as buckets of DistributedDataParallel hold them, has to be taken apart by its sender"
    note = f"a vector of {numbers} numbers: those of {whole} one after the other, row by row; one of {order}"
    notes = (*captured.notes, note)
    parts: dict[str, Any] = {what: split(getattr(captured, what)) for what in ("update", "before", "rounding")}
    return replace(captured, **parts, notes=notes)


def match_places(
    captured: CapturedUpdate,
    model: nn.Module,
    compared: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Return the model's names by places in a list of arrays, and what to say of it.

    The list is of the whole `state_dict()`, with or without its counts or batch normalization, of the trained
    parameters, or, where only one place fits, of a row of these. Where shapes do not fit in the model's order, they may
    in that of sorted names, safetensors' own.

    Args:
        captured: with the list.
        model: whose names are wanted.
        compared: arrays by the same places, and tensors by the model's names that they are near to, such as weights
            before training; where several orders fit, the nearest is taken.

    Raises:
        ValueError: shapes do not fit, or fit at several places; says which.
    """
    state = {name: value.shape for name, value in model.state_dict().items()}
    trained = {name: value.shape for name, value in model.named_parameters() if value.requires_grad}
    arrays = list(captured.update.values())
    whole = {"model.state_dict()": state, TRAINED: trained}
    kinds = whole | _parts(model)
    usual = {what: list(shapes) for what, shapes in kinds.items() if _fits(arrays, shapes)}
    by_name = {
        f"the names of {what}, sorted{how}": order
        for what, shapes in kinds.items()
        for how, order in _sorted(shapes, model).items()
    }
    fits = {**dict(list(usual.items())[:1]), **{w: o for w, o in by_name.items() if _fits(arrays, _shapes(o, state))}}
    if fits:
        what, doubt = _nearest(fits, captured, compared)
        said = f"{len(arrays)} arrays without names: taken in the order of {what}, whose shapes they have"
        return _by_place(captured, fits[what]), [f"{said}{doubt}"]
    rows = _rows_that_fit(arrays, trained)
    if len(rows) == 1:
        (row,) = rows
        return _by_place(captured, row), [
            f"{len(arrays)} arrays without names: only {', '.join(row)} have their shapes, in this order"
        ]
    raise ValueError(_misfit_words(arrays, whole, rows))


def _parts(model: nn.Module) -> dict[str, dict[str, torch.Size]]:
    """Return the shapes of parts of a state that are sent for the whole: without counts, or without batch norm."""
    state, norms = model.state_dict(), set[str]()
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            norms |= {f"{name}.{own}".lstrip(".") for own in module.state_dict()}
    kept = {
        "model.state_dict() without its counts": {n for n, value in state.items() if value.is_floating_point()},
        "model.state_dict() without batch normalization": set(state) - norms,
    }
    return {
        what: {name: value.shape for name, value in state.items() if name in names}
        for what, names in kept.items()
        if 0 < len(names) < len(state)
    }


def _fits(arrays: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> bool:
    return len(shapes) == len(arrays) and _first_misfit(arrays, shapes) is None


def _fits_twice(arrays: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> bool:
    half = len(shapes)
    return len(arrays) == 2 * half and all(_fits(part, shapes) for part in (arrays[:half], arrays[half:]))


def _shapes(names: Collection[str], known: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    return {name: known[name] for name in names}


def _sorted(shapes: Mapping[str, torch.Size], model: nn.Module) -> dict[str, list[str]]:
    """Return names sorted by letters, and as safetensors sorts them, by how to say that."""
    sizes = {name: value.element_size() for name, value in model.state_dict().items()}
    by_size = sorted(shapes, key=lambda name: (-sizes[name], name))
    return {"": sorted(shapes), " as safetensors sorts them": by_size}


def _nearest(
    fits: Mapping[str, Sequence[str]],
    captured: CapturedUpdate,
    compared: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None,
) -> tuple[str, str]:
    """Return which of the orders that fit by shapes is taken, and what to say where that is open."""
    first, *others = fits
    if all(list(fits[other]) == list(fits[first]) for other in others):
        return first, ""
    if compared is None:
        return first, f"; {OPEN}"
    near, goal = compared
    off = {
        what: sum(
            float((near[place].double() - goal[name].cpu().double()).square().sum())
            for place, name in _by_place(captured, order).items()
            if place in near and name in goal and near[place].shape == goal[name].shape
        )
        ** 0.5
        for what, order in fits.items()
    }
    best = min(off, key=lambda what: off[what])
    rest = [off[what] for what in fits if list(fits[what]) != list(fits[best])]
    return (best, "") if off[best] < CLEARLY_NEARER * min(rest) else (first, f"; {OPEN}")


def _by_place(captured: CapturedUpdate, names: Collection[str]) -> dict[str, str]:
    return dict(zip(captured.update, names, strict=True))


def _first_misfit(arrays: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> int | None:
    """Return the first place at which an array has not the shape of the name there."""
    pairs = zip(arrays, shapes.values(), strict=False)
    return next((place for place, (array, shape) in enumerate(pairs) if array.shape != shape), None)


def _rows_that_fit(arrays: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """Return rows of neighboring names, fewer than all, whose shapes are those of the arrays."""
    names = list(shapes)
    rows = [names[start : start + len(arrays)] for start in range(len(names) - len(arrays) + 1)]
    fits = [row for row in rows if _first_misfit(arrays, {name: shapes[name] for name in row}) is None]
    return fits if len(arrays) < len(names) else []


def _are_buckets(arrays: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether vectors have as many numbers together as tensors of these shapes."""
    if len(arrays) < 2 or not all(array.ndim == 1 for array in arrays):
        return False
    return sum(array.numel() for array in arrays) == sum(shape.numel() for shape in shapes.values())


def _misfit_words(
    arrays: Sequence[Tensor], kinds: Mapping[str, Mapping[str, torch.Size]], rows: Sequence[Sequence[str]]
) -> str:
    """Say why arrays without names can't be matched: the likeliest mistake that they look like.

    Args:
        arrays: as they were given.
        kinds: shapes by name, by what of the model has them.
        rows: places of the model where they fit, by names.
    """
    if len(arrays) == 2 and arrays[0].shape == arrays[1].shape:
        return _pair_words(arrays)
    if rows:
        begins = " or ".join(row[0] for row in rows[:3])
        return f"{len(arrays)} arrays without names fit the model at {len(rows)} places, from {begins} on: {BY_NAME}"
    if twice := next((what for what, shapes in kinds.items() if _fits_twice(arrays, shapes)), ""):
        return (
            f"expected the arrays of {twice}, got twice as many: weights beside others of the same shapes, "
            "such as SCAFFOLD's control variates, or those before beside those after; give one half alone, or both as "
            "{'before': ..., 'after': ...}"
        )
    return _bucket_words(arrays, kinds) or _first_misfit_words(arrays, kinds)


def _pair_words(arrays: Sequence[Tensor]) -> str:
    """Say what two arrays of one shape may be."""
    if any(not array.is_floating_point() for array in arrays):
        return f"expected the arrays of one update, got two, one of integers: {packed_hint(['indices', 'values'])}"
    return (
        f"expected the arrays of one update, got two of one shape, {tuple(arrays[0].shape)}: if they are weights "
        "before and after, give them as {'before': ..., 'after': ...}, which says so"
    )


def _bucket_words(arrays: Sequence[Tensor], kinds: Mapping[str, Mapping[str, torch.Size]]) -> str:
    """Say that arrays are buckets of DistributedDataParallel, in vectors or from the last to the first; or nothing."""
    trained = kinds[TRAINED]
    if len(arrays) != len(trained) and _are_buckets(arrays, trained):
        return (
            f"got {len(arrays)} vectors that have as many numbers together as the model's trained parameters: buckets "
            "of DistributedDataParallel, say, hold parameters in an order of their own, about the last first. Have the "
            "client save each parameter's gradient by name, "
            "{name: parameter.grad for name, parameter in model.named_parameters()}, or take the vectors apart "
            "(GradBucket.parameters() and gradients() go together)"
        )
    if turned := next((what for what, shapes in kinds.items() if _fits(arrays[::-1], shapes)), ""):
        return (
            f"the arrays without names have the shapes of {turned} from the last to the first, as buckets of "
            "DistributedDataParallel hold them: give them turned round (arrays[::-1]) if that is their order; or "
            f"{BY_NAME}"
        )
    return ""


def _first_misfit_words(arrays: Sequence[Tensor], kinds: Mapping[str, Mapping[str, torch.Size]]) -> str:
    """Say at which place arrays first differ from the model's, or that they are not as many."""
    same = {what: shapes for what, shapes in kinds.items() if len(shapes) == len(arrays)}
    if not same:
        counts = " or ".join(f"{len(shapes)} of {what}" for what, shapes in kinds.items())
        return (
            f"expected arrays without names for {counts}, got {len(arrays)}: the model may be another than the "
            f"client's; or {BY_NAME}"
        )
    what, shapes = next(iter(same.items()))
    place = _first_misfit(arrays, shapes)
    assert place is not None
    name, array = list(shapes)[place], arrays[place]
    shape = tuple(shapes[name])
    turned = layout_hint(shape, array.shape)
    return (
        f"expected arrays without names in the order of {what}, got {tuple(array.shape)} at place {place}, where "
        f"{name!r} is {shape}: {turned or f'the model may be another than the client has; or {BY_NAME}'}"
    )
