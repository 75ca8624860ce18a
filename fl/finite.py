"""What clients send, looked at before the server takes it in: one that diverged would spoil all others' models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.utils import _pytree as pytree

from fl.tensors import Value
from fl.types import Upload


def check_finite(uploads: Iterable[Upload], round: int) -> None:
    """Refuse a round in which a client sends numbers that are none.

    Leaving the client out would be another method than the one asked for, so the round fails as a whole.

    Args:
        uploads: of the round.
        round: its number, from 0.

    Raises:
        ValueError: NaN or infinity in an update, a further payload or a change of buffers; says whose and where.
    """
    for upload in uploads:
        for name, part in _named(upload):
            bad = int((~part.isfinite()).sum())
            if bad:
                raise ValueError(
                    f"client {upload.client}: its update is not finite in round {round} ({bad:,} of {part.numel():,} "
                    f"numbers of {name!r} are NaN or infinite): its training diverged; lower the method's step size "
                    "(lr) or clip its gradients (max_norm)"
                )


def _named(upload: Upload) -> Iterator[tuple[str, Tensor]]:
    """All tensors sent; of a structured one its factors, without making it dense."""
    sets: list[Mapping[str, Value]] = [upload.update, *upload.extra.values(), upload.buffers]
    for name, value in (item for values in sets for item in values.items()):
        yield from ((name, part) for part in pytree.tree_leaves(value) if isinstance(part, Tensor))
