"""What clients send, looked at before the server takes it in: one that diverged would spoil all others' models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fl.tensors import LowRank, Value
from fl.types import Upload

MAX_WEIGHT = 1e18
"""What a client counts in the mean at most: the weights' sum stays a number."""
MAX_MAGNITUDE_SHARE = 2.0**-16
"""Share of the largest number of its type that a number sent can be: sums over tens of thousands of clients hold."""


def check_finite(uploads: Iterable[Upload], round: int, known: dict[int, Tensor] | None = None) -> None:
    """Refuse a round in which a client sends numbers that are none.

    Leaving the client out would be another method than the one asked for, so the round fails as a whole.

    Args:
        uploads: of the round.
        round: its number, from 0.
        known: what several updates refer to (the server's own matrices), by address: what is found finite is added,
            and not looked at again.

    Raises:
        ValueError: NaN or infinity in an update, a further payload or a change of buffers; says whose and where.
    """
    known = {} if known is None else known
    for upload in uploads:
        for name, part, common in _named_tensors(upload):
            if id(part) in known:
                continue
            if _is_finite(part):
                _check_size(upload.client, round, name, part)
                known.update({id(part): part} if common else {})
            else:
                bad = int((~part.isfinite()).sum())
                raise ValueError(
                    f"client {upload.client}: its update is not finite in round {round} ({bad:,} of {part.numel():,} "
                    f"numbers of {name!r} are NaN or infinite): its training diverged, and the method's step size (lr) "
                    "is to be lowered or its gradients clipped (max_norm), or a hook of the method or of the defense "
                    "makes such numbers"
                )


def check_form(number: int, weight: float, sent: Mapping[str, Value], like: Mapping[str, Value]) -> None:
    """Refuse an upload that the server could not take the mean of, or that would spoil it unseen.

    Args:
        number: of the client.
        weight: what it counts in the mean.
        sent: what it sends, by name.
        like: tensors of the names, shapes, types and devices that it has to have.

    Raises:
        ValueError: a weight that is no number from 0; a tensor that is missing, that nobody asked for, or that has
            another form than what the server sent. Says whose and which.
    """
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(
            f"client {number}: expected a weight in the mean from 0 to {MAX_WEIGHT:g}, got {weight!r}: see the "
            "method's `weight`"
        )
    if not isinstance(sent, Mapping):
        found = type(sent).__name__
        raise TypeError(f"client {number}: expected tensors by name as what it sends, got {found}: return the update")
    for name, tensor in like.items():
        if name not in sent:
            raise ValueError(f"client {number}: {name!r} is missing in what it sends: send every tensor it received")
        if reason := _shape_mismatch(sent[name], tensor):
            raise ValueError(f"client {number}: expected {name!r} {reason} in what it sends")
    if more := [name for name in sent if name not in like]:
        raise ValueError(
            f"client {number}: it sends {more[0]!r}, which the server did not send: further tensors go into payloads "
            "that the method's `finish` returns"
        )


def _shape_mismatch(value: object, like: Value) -> str:
    """Return what form `value` should have, and what it has; empty where it is that of `like`."""
    if not isinstance(value, LowRank) and not isinstance(value, Tensor):
        return f"as a tensor, got {type(value).__name__}"
    if tuple(value.shape) != tuple(like.shape):
        return f"of shape {tuple(like.shape)}, got {tuple(value.shape)}"
    if isinstance(value, LowRank) or isinstance(like, LowRank):
        return ""
    for what in ("layout", "dtype", "device"):
        if (got := getattr(value, what)) != (wanted := getattr(like, what)):
            return f"with {what} {wanted}, got {got}"
    return ""


def all_finite(values: Mapping[str, Value]) -> bool:
    """Return whether no number is NaN or infinite, factors and bases of structured values among them."""
    return all(_is_finite(part) for part in pytree.tree_leaves(dict(values)) if isinstance(part, Tensor))


def form_mismatch(value: object) -> str:
    """Return the form that `value` needs to be computed with, and the one it has; empty where nothing is wrong."""
    if isinstance(value, LowRank):
        return ""
    if not isinstance(value, Tensor):
        return f"as a tensor, got {type(value).__name__}"
    if value.is_meta and type(value) in (Tensor, nn.Parameter):  # a class of its own may hold numbers elsewhere
        return "as numbers, got a tensor on the device meta, which has a shape and none; give it as training left it"
    if value.layout is not torch.strided:
        return f"as a dense tensor, got {value.layout}; call .to_dense()"
    if value.is_quantized:
        return f"in a floating-point type, got {value.dtype}; call .dequantize()"
    if not value.is_floating_point():
        return f"in a floating-point type, got {value.dtype}; {_number_hint(value)}"
    return ""


def _number_hint(value: Tensor) -> str:
    """Return how complex numbers, truth values or integers become an update."""
    if value.is_complex():
        return "an update has no imaginary part: .real takes it off, if it is 0"
    return (
        "integers stand for an update's numbers by a scale: take (values - zero_point) * scale, by tensor or channel; "
        "of secure aggregation give the mean without masks"
    )


def _is_finite(part: Tensor) -> bool:
    """Return whether there is no NaN or infinity: told by the smallest and largest number, which NaN passes through."""
    return not part.numel() or all(bool(extreme.isfinite()) for extreme in part.aminmax())


def _check_size(client: int, round: int, name: str, part: Tensor) -> None:
    """Refuse numbers so large that the sum of a few is not finite."""
    if not part.numel() or not part.is_floating_point():
        return
    most = torch.finfo(part.dtype).max * MAX_MAGNITUDE_SHARE
    largest = max(abs(float(extreme)) for extreme in part.aminmax())
    if largest > most:
        raise ValueError(
            f"client {client}: its update has numbers of up to {largest:.3g} in {name!r} in round {round}, of which "
            f"{part.dtype} can't hold a sum: its training diverged; lower the method's step size (lr) or clip its "
            "gradients (max_norm)"
        )


def _named_tensors(upload: Upload) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield all tensors sent, of a structured one its factors, without making it dense; and which are bases."""
    sets: list[Mapping[str, Value]] = [upload.update, *upload.extra.values(), upload.buffers]
    for name, value in (item for values in sets for item in values.items()):
        base = value.base if isinstance(value, LowRank) else None
        yield from ((name, part, part is base) for part in pytree.tree_leaves(value) if isinstance(part, Tensor))
