"""A captured update as it is given: in files of all the kinds that frameworks write, or as Python's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from eval.audit.checkpoint_folders import describe_part
from eval.audit.coarse_numbers import coarse_note, coarse_type, rounding_bounds
from eval.audit.recorded_update import FACTS, TrainingFacts, read_facts, subtract
from eval.audit.scaled_tensors import find_lost_scale, write_out_scaled
from eval.audit.tensor_files import MAX_DEPTH, is_vector, packed_hint, read_tensor_file, with_plain_tensors

BEFORE_WORDS = {"before", "start", "initial", "old", "global", "received", "sent", "pre"}
AFTER_WORDS = {"after", "end", "final", "new", "local", "returned", "trained", "post"}
"""Words by which people call the weights before and after local training."""
PASSED_ON_WORDS = {"received", "returned", "sent"}
"""Those among them that alone may be of an update as well."""
CHANGE_WORDS = {
    *("update", "updates", "delta", "deltas", "diff", "difference", "change", "changes"),
    *("gradient", "gradients", "grad", "grads"),
}
"""Words of a name that is of no weights, whatever else is in it: a local update, say."""
STATE_WORDS = ("state_dict", "model_state_dict", "model", "net", "weights", "parameters", "update", "delta")
"""What checkpoints of trainers (Lightning, say) call the tensors of the model, the likeliest first."""
PARAMETER_WORDS = {
    *("weight", "bias", "kernel", "scale", "embedding", "embeddings", "gamma", "beta", "w", "b", "offset"),
    *("running_mean", "running_var", "num_batches_tracked", "mean", "var"),
}
"""What layers call their tensors, inside a dictionary for each layer."""
OPTIMIZER_KEYS = {"state", "param_groups"}
"""What the state of an optimizer of torch holds."""
PAIR_HINT = (
    "save the update, weights before - after, by itself, or both as {'before': ..., 'after': ...}, or give two files "
    "by --before and --after"
)
HALF_HINTS = {
    "before": "weights before training are no update; give those after beside them, as {'before': ..., 'after': ...}",
    "after": (
        "weights after training are no update; give those before beside them, as {'before': ..., 'after': ...}, or "
        "this alone as --after FILE where they were your model's own"
    ),
}
"""What to give where weights before, or after, are there alone."""
Part = str | Path | nn.Module | Mapping[str, object] | Sequence[object] | Tensor | np.ndarray
"""What a caller in Python may give as weights: a file, a model, a state dictionary, arrays without names, a vector."""


@dataclass(frozen=True)
class Unpaired:
    """Weights before and after whose tensors are called otherwise, which a model's names will tell.

    Attributes:
        states: both, by "before" and "after".
        words: what each is called, likewise.
        file: that both come from; empty where they come from two.
        said: whether a note says so.
    """

    states: Mapping[str, CapturedUpdate]
    words: Mapping[str, str]
    file: str
    said: bool

    def difference(self, named: Mapping[str, CapturedUpdate]) -> CapturedUpdate:
        """Return the update of both under the same names."""
        return _difference(named, self.words, self.file, said=self.said)


@dataclass(frozen=True)
class CapturedUpdate:
    """What a file holds.

    Attributes:
        update: weights before - after by parameter name.
        buffers: the same of buffers.
        notes: how it was read, where that is not plain.
        before: the weights and buffers before, where the file has them.
        nameless: whether the names are numbers alone ("0", "1", ...), in the order of a model's `state_dict()`.
        weights: whether `update` holds weights after training, whose difference to the model's is still to be taken.
        kind: "gradient" for one that was sent before a step of plain SGD was made of it (`fl.capture`).
        clients: whose mean the update is, each with as many images.
        training: what a file recorded in a federation says of how the client trained; None for other files.
        scale_unknown: whether it is known up to a positive factor alone, since nobody stated the size of its one step.
        rounding: how far each number may be off for having been rounded to two bytes or one
            (`eval.audit.coarse_numbers`), or to integers with a scale, by name; only of tensors that were. Of anything
            but a difference of two states here it is of the latter alone, until names are the model's.
        sent_as: in what numbers those of the latter were sent, in words.
        unpaired: weights before and after whose difference is still to be taken, since their names differ.
    """

    update: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    before: dict[str, Tensor] = field(default_factory=dict)
    nameless: bool = False
    weights: bool = False
    kind: Literal["update", "gradient"] = "update"
    clients: int = 1
    training: TrainingFacts | None = None
    scale_unknown: bool = False
    rounding: dict[str, Tensor] = field(default_factory=dict)
    sent_as: str = ""
    unpaired: Unpaired | None = None


def load_update(path: Path) -> CapturedUpdate:
    """Read tensors from an `.npz`, a `.pt` or a `.safetensors` file; nothing in it is executed.

    They come by name, or as a list in the order of a model's `state_dict()`. One dictionary of tensors inside another
    that has none of its own is taken for the update; two that are called before and after, for the weights whose
    difference it is.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    wanted = f"expected tensors by parameter name in {path}"
    found, written_out = with_plain_tensors(read_tensor_file(path, wanted), wanted)
    facts = found.pop(FACTS, None) if isinstance(found, dict) else None
    if isinstance(facts, Tensor):
        training, origin = read_facts(facts.numpy().tobytes(), path)
        where = "; ".join(f"{name}: {value}" for name, value in sorted(origin.items()))
        note = f"recorded: {where or 'nobody says where'}; training: {training.in_words()}"
        plain = _load_update(found, path, wanted)
        return replace(plain, training=training, notes=(*plain.notes, *written_out, note))
    plain = _load_update(found, path, wanted)
    return replace(plain, notes=(*describe_part(path), *written_out, *plain.notes))


def _load_update(found: object, path: Path, wanted: str) -> CapturedUpdate:
    """Return the update from what a file holds."""
    pair = None if _is_by_layer(found) and not _are_alike(found) else _as_pair(found)
    if pair is not None:
        first, second = pair
        states = {name: _from_state(part, wanted) for name, part in pair.items()}
        halves = {_before_or_after(name): state for name, state in states.items()}
        if set(halves) != {"before", "after"}:
            raise ValueError(f"{wanted}, or two called 'before' and 'after', got {first!r} and {second!r}: {PAIR_HINT}")
        words = {_before_or_after(name): repr(name) for name in states}
        return _difference(halves, words, path.name)
    return _from_state(found, wanted, path.name)


def load_pair(before: Part | None, after: Part, *, said: bool = True) -> CapturedUpdate:
    """Return the update from weights before and after local training.

    Args:
        before: as the server sent them; None takes those of the model.
        after: as they came back.
        said: whether a note says which is taken from which, as of files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: one holds something else, or they do not belong together.
    """
    last = as_state(after, "after")
    if before is None:
        note = f"the update is the model's own weights - {_word(after, 'those given')}"
        return CapturedUpdate(last.update, notes=(*last.notes, note), nameless=last.nameless, weights=True)
    first = as_state(before, "before")
    words = {"before": _word(before, "'before'"), "after": _word(after, "'after'")}
    return _difference({"before": first, "after": last}, words, "", said=said)


def pair_by_words(given: Mapping[str, object]) -> tuple[Part | None, Part] | None:
    """Return the values of a mapping of two as weights before and after, by what they are called; None for another."""
    halves = {_before_or_after(str(name)): value for name, value in given.items()}
    one_each = len(given) == 2 and halves.keys() == {"before", "after"}
    arrays = {name: value for name, value in given.items() if isinstance(value, Tensor | np.ndarray)}
    vectors = all(is_vector(value) and re.fullmatch(r"[A-Za-z]+", str(name)) for name, value in arrays.items())
    if not one_each or not vectors or len({value.shape for value in arrays.values()}) > 1:
        return None
    return halves["before"], halves["after"]  # type: ignore[return-value]


def as_state(given: Part, what: str) -> CapturedUpdate:
    """Return tensors as a caller in Python has them: a file's name, a model, a state dictionary, or a list of arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is something else.
    """
    wanted = f"{what}: expected a file, tensors by parameter name, or arrays in the order of model.state_dict()"
    file, part = "", list[str]()
    found: object = given
    if isinstance(given, str | Path):
        file, part = Path(given).name, describe_part(Path(given))
        wanted = f"expected tensors by parameter name in {given}"
        found = read_tensor_file(Path(given), wanted)
    elif isinstance(given, nn.Module):
        found = dict(given.state_dict())
    elif isinstance(given, Mapping):
        found = dict(given)
    plain, written_out = with_plain_tensors(found, wanted)
    state = _from_state(plain, wanted, file)
    return replace(state, notes=(*part, *written_out, *state.notes))


def described(captured: CapturedUpdate, kind: str, clients: int) -> CapturedUpdate:
    """Return the update as what its sender says it is.

    Args:
        captured: what was read.
        kind: "update" or "gradient".
        clients: whose mean it is.

    Raises:
        ValueError: neither kind, no client, or a gradient of weights before and after.
    """
    if kind not in {"update", "gradient"}:
        raise ValueError(f"expected kind 'update' or 'gradient', got {kind!r}")
    if clients < 1:
        raise ValueError(f"expected clients as a number >= 1, got {clients}")
    if kind == "gradient" and (captured.before or captured.weights or captured.unpaired):
        raise ValueError("expected kind 'update' of weights before and after, got 'gradient'")
    notes = (f"the mean of {clients} clients, each of as many images",) if clients > 1 else ()
    return replace(captured, kind=kind, clients=clients, notes=(*captured.notes, *notes))  # type: ignore[arg-type]


def _word(given: Part, otherwise: str) -> str:
    return Path(given).name if isinstance(given, str | Path) else otherwise


def _as_pair(found: object) -> dict[str, object] | None:
    """Return two states inside one file, by what they are called; None where there is something else."""
    if isinstance(found, list | tuple):
        return {"first": found[0], "second": found[1]} if len(found) == 2 and all(map(_is_state, found)) else None
    if not isinstance(found, dict):
        return None
    if all(isinstance(value, dict | list | tuple | Tensor) for value in found.values()) and pair_by_words(found):
        return {str(name): value for name, value in found.items()}
    inner = {str(name): value for name, value in found.items() if _is_state(value)}
    if len(inner) >= 2 and not any(isinstance(value, Tensor) for value in found.values()):
        halves = {name: value for name, value in inner.items() if _before_or_after(name) in {"before", "after"}}
        if len(halves) == 2 or (len(inner) == 2 and not _state_word(inner)):
            return halves if len(halves) == 2 else inner
    return _by_prefix(found)


def _by_prefix(found: dict[object, object]) -> dict[str, object] | None:
    """Return two states whose names begin with one of two words, such as `before/fc.weight`; None for others.

    Numbers and texts may stand beside, and tensors of one number, such as a step size.
    """
    inner: dict[str, dict[str, object]] = {}
    for name, value in found.items():
        word, joint, rest = re.sub(r"([/.:]|_(?=.*[/.:]))", "\0", str(name), count=1).partition("\0")
        if _before_or_after(word) in {"before", "after"} and joint:
            inner.setdefault(word, {})[rest] = value
        elif not isinstance(value, int | float | str | None) and not (isinstance(value, Tensor) and value.numel() == 1):
            return None
    if len(inner) != 2 or {_before_or_after(word) for word in inner} != {"before", "after"}:
        return None
    first, last = inner.values()
    if not first.keys() & last.keys():  # a model's own parts may be called so
        return None
    return {word: part for word, part in inner.items()} if _tensors(first) and _tensors(last) else None


def _from_state(found: object, wanted: str, file: str = "") -> CapturedUpdate:
    """Return the tensors of one state, out of what a trainer puts around them."""
    if isinstance(found, Tensor):
        if not is_vector(found):
            raise ValueError(
                f"{wanted}, or one vector of all numbers, got one array {tuple(found.shape)}: a list of one is [array]"
            )
        found = [found]
    if isinstance(found, list | tuple):
        return _from_answer(found, wanted) or _from_list(found, wanted)
    if not isinstance(found, dict):
        raise ValueError(f"{wanted}, a dictionary, got {type(found).__name__}")
    if not found:
        raise ValueError(f"{wanted}, got none")
    if _is_by_layer(found):
        return _from_state(_joined(found), wanted, file)
    named = {str(name): value for name, value in found.items()}
    _refuse_optimizer(named, wanted)
    _refuse_packed(named, wanted)
    if all(re.fullmatch(r"arr_\d+|\d+", name) for name in named):
        ordered = sorted(named, key=lambda name: int(name.removeprefix("arr_")))
        return _from_list([named[name] for name in ordered], wanted)
    _refuse_half(named, wanted)
    return _from_inner_state(named, wanted, file) or _from_tensors(named, wanted)


def _refuse_optimizer(named: Mapping[str, object], wanted: str) -> None:
    """Refuse the state of an optimizer."""
    if named.keys() >= OPTIMIZER_KEYS:
        raise ValueError(
            f"{wanted}, got the state of an optimizer, whose averages of gradients are no update: give the model's "
            "weights before and after"
        )


def _refuse_packed(named: Mapping[str, object], wanted: str) -> None:
    """Refuse a tensor that was packed, such as the places and values of a sparse one, in place of a state."""
    if len(named) <= 3 and "values" in named and (hint := packed_hint(list(named))):
        raise ValueError(f"{wanted}, got {', '.join(named)}: {hint}")


def _from_inner_state(named: Mapping[str, object], wanted: str, file: str) -> CapturedUpdate | None:
    """Return the one state inside a checkpoint, by the words of trainers or for being alone; None where is none."""
    inner = {name: value for name, value in named.items() if _is_state(value)}
    chosen = _state_word(inner) or (next(iter(inner)) if len(inner) == 1 else "")
    if not chosen:
        return None
    if chosen not in STATE_WORDS and any(isinstance(value, Tensor) for value in named.values()):
        return None
    note = f"the update is what {file or 'it'} holds under {chosen!r}"
    state = _from_state(inner[chosen], wanted)
    return replace(state, notes=(note, *state.notes))


def _from_tensors(named: Mapping[str, object], wanted: str) -> CapturedUpdate:
    """Return the tensors of a dictionary, those with a scale written out, without numbers and words beside them."""
    written, scaled = write_out_scaled(named, wanted)
    plain = sorted(
        name for name, value in written.items() if value is None or isinstance(value, bool | int | float | str)
    )
    others = {name: value for name, value in written.items() if name not in plain}
    tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
    for name, value in others.items():
        if name not in tensors:
            raise ValueError(f"{wanted}, got a {type(value).__name__} under {name!r}: {_remedy_of(value, others)}")
    if not tensors:
        raise ValueError(f"{wanted}, got none")
    return CapturedUpdate(
        tensors,
        notes=(*([f"no tensors, so left out: {', '.join(plain)}"] if plain else []), *scaled.notes),
        rounding=scaled.rounding,
        sent_as=scaled.sent_as or coarse_type(tensors),
    )


def _remedy_of(value: object, beside: Mapping[str, object]) -> str:
    """Say what to give in place of something that is no tensor."""
    if not isinstance(value, dict):
        return _list_hint(value)
    return packed_hint([str(part) for part in value]) or _odd_inside(value) or _states_hint(beside) or PAIR_HINT


def _states_hint(found: Mapping[str, object]) -> str:
    """Say which one of several states is to be given, of clients or rounds; nothing where there are others."""
    if len(found) < 2 or not all(_is_state(value) for value in found.values()):
        return ""
    names = ", ".join(list(found)[:3])
    return f"of several updates ({names}) give one, or their mean with --clients {len(found)}; else {PAIR_HINT}"


def _list_hint(value: object) -> str:
    """Say what to give in place of something that is no tensor, where that holds numbers."""
    if not isinstance(value, list | tuple):
        return "leave it out"
    return PAIR_HINT if _is_state(value) else "of numbers in Python's lists make tensors, torch.tensor(value)"


def _odd_inside(value: object) -> str:
    """Say what stands among the tensors of a dictionary that is none; nothing where it has none, or that alone."""
    if not isinstance(value, dict) or not any(isinstance(part, Tensor) for part in value.values()):
        return ""
    odd = next(
        (f"a {type(part).__name__} under {name!r}" for name, part in value.items() if not isinstance(part, Tensor)), ""
    )
    return f"in it is {odd}; leave that out" if odd else ""


def _is_by_layer(found: object, depth: int = MAX_DEPTH) -> bool:
    """Return whether tensors are in dictionaries by layer inside each other, under words such as "weight"."""
    if not isinstance(found, dict) or not found or not depth:
        return False
    if not all(isinstance(value, dict) for value in found.values()):
        return False
    return all(
        _is_by_layer(part, depth - 1) or (_is_state(part) and {str(name) for name in part} <= PARAMETER_WORDS)
        for part in found.values()
    )


def _are_alike(found: object) -> bool:
    """Return whether two dictionaries that are called before and after hold tensors of the same names and shapes."""
    if not isinstance(found, dict) or not pair_by_words(found):
        return False
    first, second = (_joined(part) for part in found.values())
    same = first.keys() == second.keys()
    return same and all(getattr(v, "shape", None) == getattr(second[n], "shape", None) for n, v in first.items())


def _joined(found: Mapping[object, object], prefix: str = "") -> dict[object, object]:
    """Return tensors of dictionaries inside each other by all their names in a row, with dots between."""
    joined: dict[object, object] = {}
    for name, value in found.items():
        own = f"{prefix}{name}"
        joined |= _joined(value, f"{own}.") if isinstance(value, dict) else {own: value}
    return joined


def _from_answer(found: Sequence[object], wanted: str) -> CapturedUpdate | None:
    """Return the tensors of what a client's training returns with numbers and words beside; None for anything else.

    Flower's `fit` returns (arrays, number of examples, metrics).
    """
    states = [one for one in found if _is_state(one)]
    beside = [one for one in found if not any(one is state for state in states)]
    if len(states) != 1 or not beside or any(isinstance(one, Tensor) and one.numel() > 1 for one in beside):
        return None
    state = _from_state(states[0], wanted)
    note = f"taken out of a list of {len(found)}, as a client's training returns it; the rest is left out"
    return replace(state, notes=(note, *state.notes))


def _from_list(found: Sequence[object], wanted: str) -> CapturedUpdate:
    """Return arrays without names, called by their places."""
    for place, value in enumerate(found):
        if not isinstance(value, Tensor):
            remedy = "give arrays alone"
            if all(map(_is_state, found)):
                remedy = PAIR_HINT if len(found) == 2 else "of several updates give one, or their mean with --clients"
            elif isinstance(value, bytes):
                remedy = "of Flower's Parameters give flwr.common.parameters_to_ndarrays(parameters)"
            raise ValueError(f"{wanted}, got a list with a {type(value).__name__} at place {place}: {remedy}")
    if not found:
        raise ValueError(f"{wanted}, got none")
    places = {str(i): value for i, value in enumerate(found) if isinstance(value, Tensor)}
    return CapturedUpdate(places, nameless=True, sent_as=coarse_type(places))


def _difference(
    halves: Mapping[str, CapturedUpdate], words: Mapping[str, str], file: str, *, said: bool = True
) -> CapturedUpdate:
    """Return the update from weights before and after.

    Args:
        halves: both, by "before" and "after".
        words: what each is called, likewise.
        file: that both come from; empty where they come from two.
        said: whether a note says so.

    Raises:
        ValueError: they don't belong together.
    """
    before, after = halves["before"].update, halves["after"].update
    called, where = f"{words['before']} and {words['after']}", f" in {file}" if file else ""
    places = halves["before"].nameless, halves["after"].nameless
    alike = before.keys() == after.keys() and places[0] == places[1]
    if not alike or (all(places) and any(value.shape != after[name].shape for name, value in before.items())):
        return CapturedUpdate({}, unpaired=Unpaired(halves, words, file, said))
    for name, value in before.items():
        if value.shape != after[name].shape:
            shapes = f"{tuple(value.shape)} and {tuple(after[name].shape)}"
            raise ValueError(f"expected {name!r} in one shape under {called}{where}, got {shapes}")
    note = [f"the update is {words['before']} - {words['after']}{f' of {file}' if file else ''}"] if said else []
    notes = dict.fromkeys((*halves["before"].notes, *halves["after"].notes, *note))
    update = {name: subtract(value, after[name]) for name, value in before.items()}
    coarse = coarse_note({**before, **{f"after {name}": value for name, value in after.items()}}, "weights")
    known = [half.rounding for half in (halves["before"], halves["after"])]
    rounding = rounding_bounds(update, before, after, known=known)
    sent_as = halves["before"].sent_as or halves["after"].sent_as
    found = CapturedUpdate(update, notes=(*notes, *coarse), before=before, nameless=all(places))
    return replace(found, rounding=rounding, sent_as=sent_as)


def half_hint(name: str) -> str:
    """Return what to give where there is nothing but weights that are called by `name`; empty of another name."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return "" if words & PASSED_ON_WORDS else HALF_HINTS.get(_before_or_after(name), "")


def _refuse_half(named: Mapping[str, object], wanted: str) -> None:
    """Refuse weights before or after training where the others are not there.

    Args:
        named: what stands in a dictionary, by name.
        wanted: the beginning of an error.
    """
    states = {name: value for name, value in named.items() if _is_state(value)}
    if len(states) != 1 or any(isinstance(value, Tensor) and value.numel() > 1 for value in named.values()):
        return
    (name,) = states
    if hint := half_hint(name):
        raise ValueError(f"{wanted}, got {name!r} alone: {hint}")


def _state_word(inner: Mapping[str, object]) -> str:
    return next((word for word in STATE_WORDS if word in inner), "")


def _is_state(value: object) -> bool:
    """Return whether it is a dictionary or a list of tensors, with their scales, and nothing else; no optimizer's."""
    if isinstance(value, dict):
        own = {str(name) for name, part in value.items() if isinstance(part, Tensor)}
        rest = [str(name) for name, part in value.items() if type(part) in {int, float}]
        return bool(own) and len(own) + len(rest) == len(value) and all(find_lost_scale([n], own) for n in rest)
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Tensor) for one in value)


def _before_or_after(name: str) -> str:
    """Return whether a dictionary is called the weights before or after training, in whatever words."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & CHANGE_WORDS:
        return name
    for half, known in (("before", BEFORE_WORDS), ("after", AFTER_WORDS)):
        if words & known:
            return half
    return name


def _tensors(found: Mapping[Any, object]) -> bool:
    return all(isinstance(value, Tensor) for value in found.values())
