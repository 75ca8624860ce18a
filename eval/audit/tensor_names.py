"""Brings a captured update into a model's own names: prefixes, adapters, lists without names, larger states."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor, nn

from eval.audit.captured_files import CapturedUpdate, Unpaired, half_hint
from eval.audit.coarse_numbers import coarse_note, grid_bounds, grid_note, rounding_bounds, share_note
from eval.audit.framework_layouts import with_torch_layout
from eval.audit.recorded_update import subtract
from eval.audit.scaled_tensors import REMEDY, find_lost_scale
from eval.audit.tensor_files import packed_hint
from eval.audit.unnamed_arrays import match_places, split_vector
from eval.audit.wrapper_names import WRAPPERS, bare
from fl.inputs.form import Inputs
from fl.runtime.module_copies import copy_model
from fl.simulation.capture_checks import untie_parameters, unwrap_model
from fl.types import frozen

T = TypeVar("T")
UNSENT_KNOWN = "numbers that your function gives them"
"""Where weights come from that are not in an update."""
FLAT = re.compile(r"(?:^|\.)_?flat_param")
"""What FSDP calls the parameters of a part of the model, one after the other in a vector, spread over processes."""
ADAPTER_NAME = re.compile(r"\b(?:(?P<kind>lora_\w+|ia3_l|vera_\w+|hada_\w+)\.[^.]+(?=\.|$)|modules_to_save\.[^.]+\.)")
"""An adapter's name in names of PEFT's models, which its `get_peft_model_state_dict` leaves out."""
DORA_PART = ("lora_magnitude_vector.weight", "lora_magnitude_vector")
"""What the magnitudes of DoRA are called in a model, and in a file of PEFT."""
ADAPTER_PART = re.compile(r"\.(?:lora_|ia3_|vera_|hada_)")
"""What is in the names of an adapter's tensors alone."""


def without_wrappers(state: Mapping[str, T]) -> dict[str, T]:
    """Return a state by names without what wrapping a model puts in front of all of them (`DataParallel`, say)."""
    first = {name.partition(".")[0] for name in state}
    if len(first) != 1 or not first <= WRAPPERS or not all("." in name for name in state):
        return dict(state)
    return without_wrappers({name.partition(".")[2]: value for name, value in state.items()})


def with_model_names(
    captured: CapturedUpdate, model: nn.Module, input_shape: Sequence[int] | Inputs | None = None
) -> CapturedUpdate:
    """Return the update in the model's own names, without what of a state is no part of an update.

    Names lose what wrapping a model adds, what stands before all of them where all fit then, and gain the name of
    PEFT's adapter. Arrays without names get those of `model.state_dict()`, in its order; a vector of all numbers is
    taken apart first. Buffers stand by themselves;
    frozen parameters that have not moved are left out, and so are further names of one parameter. Those of other
    frameworks are brought over (`eval.audit.framework_layouts`).

    Args:
        captured: with the names of a file.
        model: whose names are wanted.
        input_shape: (C, H, W) of pictures, where it is known.

    Raises:
        ValueError: two names of one parameter (tied weights) with different numbers, or arrays without names that do
            not have the shapes of the model's, or an adapter's tensors for a model without one.
    """
    model = unwrap_model(model)
    if captured.unpaired is not None:
        captured = _pair_up(captured, captured.unpaired, model, input_shape)
    captured = with_torch_layout(split_vector(captured, model), model, input_shape)
    renamed = _renamed(captured, model)
    rounded = _with_rounding(renamed, model)
    return replace(_without_idle_parts(rounded, model), nameless=False, weights=False)


def _renamed(captured: CapturedUpdate, model: nn.Module) -> CapturedUpdate:
    """Return an update, or weights, by the model's own names; what the model does not have is gone."""
    own, said = _own_names(captured, model)
    if (captured.weights or captured.before) and (masked := _masked_weights(own)):
        raise ValueError(
            f"expected {own[masked]!r} as the pruned model has it, got {masked!r}, which is multiplied with its mask: "
            "save model.state_dict() before torch.nn.utils.prune.remove, or the difference of the masked weights alone"
        )
    update, before, rounding = (
        {own[name]: value for name, value in values.items() if name in own}
        for values in (captured.update, captured.before, captured.rounding)
    )
    _refuse_other_names(update, model)
    return replace(captured, update=update, before=before, rounding=rounding, notes=(*captured.notes, *said))


def _with_rounding(captured: CapturedUpdate, model: nn.Module) -> CapturedUpdate:
    """Return an update with how far its numbers may be off; where weights came back, as their change."""
    update, before, rounding = captured.update, captured.before, captured.rounding
    notes = [*captured.notes]
    if captured.weights:
        notes += coarse_note(update, "weights")
        after, update = update, _from_own_weights(update, model)
        rounding = rounding_bounds(update, after, known=[rounding])
    elif not before:
        notes += [*coarse_note(update, "update"), *grid_note(update, model.state_dict(), rounding)]
        rounding = rounding_bounds(update, update, known=[rounding])
    if captured.weights or before:
        start = before or dict(model.state_dict())
        notes += grid_note(update, start, rounding)
        rounding |= grid_bounds(update, start, rounding)
    return replace(captured, update=update, rounding=rounding, notes=tuple(notes))


def _without_idle_parts(captured: CapturedUpdate, model: nn.Module) -> CapturedUpdate:
    """Return an update without what is no part of one: further names, buffers, frozen parameters that lie still."""
    notes = [*captured.notes]
    update = untie_parameters(model, captured.update)
    if tied := sorted(set(captured.update) - set(update)):
        notes.append(f"{', '.join(tied)}: further names of parameters that have another (tied weights)")
    kept = {name for name, _ in model.named_buffers(remove_duplicate=False)} & set(model.state_dict())
    buffers = {name: value for name, value in update.items() if name in kept}
    still = {name for name in frozen(model) if name in update and not update[name].any()}
    if buffers:
        notes.append(
            f"{len(buffers)} buffer(s) of the file (running statistics, say) are no part of the update; attacks are "
            "told how they moved"
        )
    if still:
        notes.append(f"{len(still)} frozen parameter(s) of the file that have not moved are left out")
    before = untie_parameters(model, captured.before)  # the one that was sent may have its further name
    update = {name: value for name, value in update.items() if name not in kept | still}
    rounding = {name: value for name, value in captured.rounding.items() if name in update}
    notes += share_note(update, rounding)
    return replace(captured, update=update, before=before, buffers=buffers, rounding=rounding, notes=tuple(notes))


def _own_names(
    captured: CapturedUpdate, model: nn.Module, beside: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return the model's names by those of an update or weights, or by places in a list, and what to say of it.

    Args:
        captured: the update, or weights before or after.
        model: whose names are wanted.
        beside: weights by the model's names that those without names came from, or became.
    """
    if not captured.nameless:
        return _match_names(list(captured.update), model)
    near = captured.before or (captured.update if captured.weights or beside is not None else None)
    goal = dict(model.state_dict()) if beside is None else beside
    return match_places(captured, model, None if near is None else (near, goal))


def _pair_up(
    captured: CapturedUpdate, halves: Unpaired, model: nn.Module, input_shape: Sequence[int] | Inputs | None
) -> CapturedUpdate:
    """Return the update from weights before and after that call their tensors otherwise, by the model's names.

    Raises:
        ValueError: one of them does not fit the model, or has tensors of its own alone.
    """
    named, notes, beside = dict[str, CapturedUpdate](), list[str](), None
    for half in sorted(halves.states, key=lambda half: halves.states[half].nameless):
        state = with_torch_layout(split_vector(halves.states[half], model), model, input_shape)
        own, said = _own_names(state, model, beside)
        beside = {own[name]: value for name, value in state.update.items() if name in own}
        bounds = {own[name]: value for name, value in state.rounding.items() if name in own}
        named[half] = replace(state, update=beside, rounding=bounds, nameless=False)
        said = [*state.notes[len(halves.states[half].notes) :], *said]
        notes += [f"{halves.words[half]}: {note}" for note in said]
    both = named["before"].update.keys() & named["after"].update.keys()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    odd = [name for name in named["after"].update if name not in both and (name in trained or not both)]
    if odd:
        raise ValueError(
            f"expected the same names under {halves.words['before']} and {halves.words['after']}, got {odd[0]!r} in "
            f"{halves.words['after']} alone: the model may be another, or give it under both"
        )
    for half, other in (("before", "after"), ("after", "before")):
        alone = sorted(named[half].update.keys() - both)
        if alone:
            notes.append(
                f"{halves.words[half]}: {', '.join(alone[:3])} left out, since {halves.words[other]} lacks them"
            )
        named[half] = replace(named[half], update={n: v for n, v in named[half].update.items() if n in both})
    found = halves.difference(named)
    notes = list(dict.fromkeys((*captured.notes, *found.notes, *notes)))
    kept = {"kind": captured.kind, "clients": captured.clients, "training": captured.training}
    return replace(found, notes=tuple(notes), **kept)  # type: ignore[arg-type]


def _masked_weights(own: Mapping[str, str]) -> str:
    """Return the first name that is of a weight under its mask, where the model has the weight without."""
    return next((name for name, mine in own.items() if mine == f"{name}_orig"), "")


def _from_own_weights(after: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own weights minus those after training; what the model has not is left to who checks names."""
    sent = model.state_dict()
    found = {}
    for name, value in after.items():
        start = sent.get(name)
        fits = start is not None and start.shape == value.shape
        found[name] = subtract(start.detach().cpu(), value) if fits and start is not None else value
    return found


def with_alike_names(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights before and after, whose names differ, by the model's names; what it does not have is gone.

    Args:
        before: as they were sent, all of them or an adapter's.
        after: as they came back, likewise.
        model: whose names are wanted.
    """
    first, last = (_match_names(list(half), model)[0] for half in (before, after))
    return (
        {first[name]: value for name, value in before.items() if name in first},
        {last[name]: value for name, value in after.items() if name in last},
    )


def freeze_unsent(model: nn.Module, update: Collection[str], shared: Collection[str]) -> tuple[nn.Module, str]:
    """Return the model with parameters frozen that the update does not have, and what to say of it.

    Args:
        model: the user's; it is not changed.
        update: names of the tensors that were sent.
        shared: names of the parameters that the method has its clients send.
    """
    absent = [name for name in shared if name not in update]
    if not absent or not set(update) <= set(shared):
        return model, ""
    model = copy_model(unwrap_model(model))
    for name, value in model.named_parameters():
        value.requires_grad_(value.requires_grad and name not in absent)
    some = f"{', '.join(absent[:3])}{f' and {len(absent) - 3} more' if len(absent) > 3 else ''}"
    return model, (
        f"{len(update)} of {len(shared)} trained parameters are in the file; the others ({some}) count as frozen, with "
        "the numbers that your function gives them"
    )


# ---- names -----------------------------------------------------------------------------------------------------------
def _match_names(names: Sequence[str], model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return the model's own names by those of a file, and what was done to them; as they are where nothing fits.

    Names that are left out are of tensors that are none of the model's.
    """
    known = set(model.state_dict())
    same = {name: name for name in names}
    if known.issuperset(names):
        return same, []
    short = {name: bare(name) for name in names}
    if known.issuperset(short.values()) and len({*short.values()}) == len(names):
        added = sorted({part for name in names for part in name.split(".")} & WRAPPERS)
        return short, [f"names lose {' and '.join(f'{part}.' for part in added)}, which wrapping a model adds"]
    if flat := next(filter(FLAT.search, names), None):
        raise ValueError(
            f"expected tensors as the model has them, got {flat!r}, the parameters of a part of it in one vector, as "
            "FSDP keeps them: save with StateDictType.FULL_STATE_DICT, or torch.distributed.checkpoint.state_dict's "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
    if joined := _match_separators(names, known):
        return joined
    parts = names[0].split(".") if names else []
    for cut in range(1, len(parts)):
        prefix = f"{'.'.join(parts[:cut])}."
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in names):
            return {n: n.removeprefix(prefix) for n in names}, [f"names lose {prefix}, which stands before all of them"]
    if prefix := _missing_prefix(names, known):
        return {name: prefix + name for name in names}, [f"names gain {prefix}, as the model has them"]
    if any(ADAPTER_PART.search(name) for name in names) and not any(map(ADAPTER_NAME.search, known)):
        raise ValueError(
            f"expected a model with the adapter whose tensors the file has ({names[0]!r}), got one without: let your "
            "function return PEFT's own model, peft.get_peft_model(model, config), with the adapter as it was sent"
        )
    _refuse_merged(names, known)
    _refuse_packed(names, known)
    if pruned := _match_pruned(names, known):
        return pruned
    return _match_adapters(names, known) or _match_among_others(names, model) or (same, [])


def _refuse_other_names(update: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse tensors of none of the model's names that have its shapes in its order, with how to give them."""
    state = {name: value.shape for name, value in model.state_dict().items()}
    trained = {name: value.shape for name, value in model.named_parameters() if value.requires_grad}
    shapes = [value.shape for value in update.values()]
    if (
        len(update) > 1
        and not state.keys() & update.keys()
        and shapes in (list(state.values()), list(trained.values()))
    ):
        first = ", ".join(list(trained)[:2])
        raise ValueError(
            f"expected the model's names ({first}, ...), got others ({', '.join(list(update)[:2])}, ...) of tensors "
            "that have its shapes in its order: if they are the same, give them without names, as "
            "list(update.values()), or by the model's, dict(zip(names, update.values()))"
        )


def _refuse_merged(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse the names that a model has without its adapter, as of weights into which that was merged."""
    base = {
        re.sub(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)", "", name) for name in known
    }
    adapted = any(map(ADAPTER_NAME.search, known)) and any(".base_layer." in name for name in known)
    if adapted and set(names) <= base:
        raise ValueError(
            f"expected the adapter's tensors, since the model has one, got those of the model without ({names[0]!r}): "
            "of weights into which it was merged (merge_and_unload) its own change can't be told; give the adapter's "
            "tensors before and after, peft.get_peft_model_state_dict(model)"
        )


def _refuse_packed(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of parts that make up a tensor of the model, such as the places and values of a sparse one."""
    packed: dict[str, list[str]] = {}
    for name in names:
        whole, _, part = name.rpartition(".")
        if whole in known:
            packed.setdefault(whole, []).append(part)
    for whole, words in packed.items():
        if hint := packed_hint(words):
            raise ValueError(f"expected {whole!r} as the model has it, got {', '.join(words)}: {hint}")


def _match_pruned(names: Sequence[str], known: Collection[str]) -> tuple[dict[str, str], list[str]] | None:
    """Return a pruned model's names by those that its tensors have without masks; None where that is not what they are.

    Raises:
        ValueError: a tensor is computed from others in the model (a parametrization), whose changes it does not tell.
    """
    own = {name: name if name in known else f"{name}_orig" for name in names}
    if set(own.values()) <= set(known):
        mine = ", ".join(name for name in names if own[name] != name)
        return own, [f"{mine}: taken as the change of what the model multiplies with its mask"]
    for name in names:
        module, _, last = name.rpartition(".")
        made = f"{module}.parametrizations.{last}.".lstrip(".")
        parts = sorted(one for one in known if one.startswith(made) or one in {f"{name}_g", f"{name}_v"})
        if name not in known and parts:
            raise ValueError(
                f"expected the tensors that the model computes {name!r} from ({', '.join(parts)}), got their result: "
                "send the difference of model.state_dict(), or let your function return a model without parametrization"
            )
    return None


def _match_separators(names: Sequence[str], known: Collection[str]) -> tuple[dict[str, str], list[str]] | None:
    """Return the model's names by those that have other characters for its dots (`fc/weight`); None for others."""
    short: dict[str, list[str]] = {}
    for name in known:
        short.setdefault(re.sub(r"[./:_]+", "_", name), []).append(name)
    found = {name: short.get(re.sub(r"[./:_]+", "_", name), []) for name in names}
    own = {name: mine[0] for name, mine in found.items() if len(mine) == 1}
    if len(own) < len(names) or len({*own.values()}) < len(names):
        return None
    example = next(name for name in names if own[name] != name)
    return own, [f"names have dots in place of other characters: {example!r} is {own[example]!r}"]


def _missing_prefix(names: Sequence[str], known: Collection[str]) -> str:
    """Return what all names lack in front to be known ones; "" for nothing that would do.

    Raises:
        ValueError: several would, as in a network with twin branches.
    """
    first = names[0] if names else ""
    fitting = sorted(name[: -len(first)] for name in known if first and name.endswith(f".{first}"))
    fitting = [prefix for prefix in fitting if all(prefix + name in known for name in names)]
    if len(fitting) > 1:
        raise ValueError(
            f"expected the model's own names, got {first!r}, which may be of any of several of its parts "
            f"({', '.join(fitting[:3])}): put the right one's prefix in front"
        )
    return fitting[0] if fitting else ""


def _match_adapters(names: Sequence[str], known: Collection[str]) -> tuple[dict[str, str], list[str]] | None:
    """Return the names of PEFT's model by those of its adapter file; None where that is not what they are.

    What wrapping a model adds may stand in them, and what stands before all of PEFT's names may lack.
    """
    short: dict[str, list[str]] = {}
    for name in known:
        if ADAPTER_NAME.search(name):
            plain = ADAPTER_NAME.sub(lambda found: found["kind"] or "", name)
            short.setdefault(plain.replace(*DORA_PART), []).append(name)
    if not short:
        return None
    unwrapped = {name: bare(name).replace(*DORA_PART) if name not in known else name for name in names}
    targets = {name: [name] for name in known} | short
    prefix = "" if targets.keys() >= {*unwrapped.values()} else _missing_prefix([*unwrapped.values()], targets)
    found = {name: targets.get(prefix + plain, []) for name, plain in unwrapped.items()}
    if all(found.values()) and (several := next((name for name in names if len(found[name]) > 1), None)):
        adapters = ", ".join(sorted({_adapter(name) for name in found[several]}))
        raise ValueError(
            f"expected the names of tensors with their adapter's, since the model has several ({adapters}), got "
            f"{several!r}: save them by model.named_parameters(), or let your function return a model with that one "
            "alone, model.delete_adapter(other)"
        )
    own = {name: mine[0] for name, mine in found.items() if mine}
    if len(own) < len(names) or len({*own.values()}) < len(names) or own == {name: name for name in names}:
        return None
    added = sorted({_adapter(own[name]) for name in names if ADAPTER_NAME.search(own[name]) and own[name] not in name})
    lost = sorted({part for name in names for part in name.split(".")} & WRAPPERS)
    said = [f"names lose {' and '.join(f'{part}.' for part in lost)}, which wrapping a model adds"] if lost else []
    said += [f"names gain {prefix}, as the model has them"] if prefix else []
    said += [f"names gain the adapter's, {', '.join(added)}, which PEFT leaves out of its files"] if added else []
    return own, said


def _adapter(name: str) -> str:
    found = ADAPTER_NAME.search(name)
    assert found is not None
    return repr(found[0].strip(".").split(".")[-1])


def _match_among_others(names: Sequence[str], model: nn.Module) -> tuple[dict[str, str], list[str]] | None:
    """Return a model's names by those with one prefix, which stand beside others of a larger one (Lightning's)."""
    wanted = {name for name, value in model.named_parameters() if value.requires_grad}
    known = set(model.state_dict())
    found: dict[str, dict[str, str]] = {}
    for prefix in dict.fromkeys(
        name[: -len(last)] for last in list(wanted)[:1] for name in names if name.endswith(last)
    ):
        own = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        own = {name: mine for name, mine in own.items() if mine in known}
        if wanted <= set(own.values()):
            found[prefix] = own
    if len(found) > 1 and "" not in found:
        raise ValueError(
            f"expected the model's tensors once, got them under {' and under '.join(map(repr, found))}: give those "
            "alone that were trained"
        )
    for prefix, own in found.items():
        if not prefix or len(found) == 1:
            left = sorted(set(names) - own.keys())
            if lost := find_lost_scale(left, own.keys()):
                raise ValueError(
                    f"expected {lost[0]!r} in plain numbers, got {lost[1]!r} beside it, without which its numbers are "
                    f"no update: {REMEDY}"
                )
            if not left and not prefix.endswith(".") and (hint := half_hint(prefix)):  # a dot may be a model's own
                raise ValueError(f"expected an update, got tensors under {prefix!r} alone: {hint}")
            said = [f"names lose {prefix}"] if prefix else []
            said += [f"{', '.join(left)} of the file: not the model's, left out"] if left else []
            return own, ["; ".join(said)] if said else []
    return None
