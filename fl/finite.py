"""What clients send, looked at before the server takes it in: one that diverged would spoil all others' models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl.tensors import LowRank, Value
from fl.types import Upload


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
        for name, part, common in _named(upload):
            if id(part) in known:
                continue
            if _is_finite(part):
                known.update({id(part): part} if common else {})
            else:
                bad = int((~part.isfinite()).sum())
                raise ValueError(
                    f"client {upload.client}: its update is not finite in round {round} ({bad:,} of {part.numel():,} "
                    f"numbers of {name!r} are NaN or infinite): its training diverged; lower the method's step size "
                    "(lr) or clip its gradients (max_norm)"
                )


def finite(values: Mapping[str, Value]) -> bool:
    """Whether no number is NaN or infinite, factors and bases of structured values among them."""
    return all(_is_finite(part) for part in pytree.tree_leaves(dict(values)) if isinstance(part, Tensor))


def unfit(value: object) -> str:
    """In what form `value` should be to be computed with, and in what it is; empty where nothing is wrong with it."""
    if isinstance(value, LowRank):
        return ""
    if not isinstance(value, Tensor):
        return f"as a tensor, got {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"as a dense tensor, got {value.layout}; call .to_dense()"
    if not value.is_floating_point():
        return f"in a floating-point type, got {value.dtype}; call .{'real' if value.is_complex() else 'float()'}"
    return ""


def _is_finite(part: Tensor) -> bool:
    """Whether there is no NaN or infinity: told by the smallest and largest number, which NaN passes through."""
    return not part.numel() or all(bool(extreme.isfinite()) for extreme in part.aminmax())


def _named(upload: Upload) -> Iterator[tuple[str, Tensor, bool]]:
    """All tensors sent, of a structured one its factors, without making it dense; and which are bases."""
    sets: list[Mapping[str, Value]] = [upload.update, *upload.extra.values(), upload.buffers]
    for name, value in (item for values in sets for item in values.items()):
        base = value.base if isinstance(value, LowRank) else None
        yield from ((name, part, part is base) for part in pytree.tree_leaves(value) if isinstance(part, Tensor))
