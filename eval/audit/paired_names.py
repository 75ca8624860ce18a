"""Names of weights before and after training, where two files call the same tensors otherwise or one has no names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

WRAPPERS = {"module", "_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What wrapping a model (`DistributedDataParallel`, `torch.compile`, Opacus, FSDP, checkpointing) puts into names."""

Tensors = Mapping[str, Tensor]


def bare(name: str) -> str:
    """Return a name without what wrapping a model puts into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def common_names(before: Tensors, after: Tensors, nameless: tuple[bool, bool]) -> tuple[Tensors, Tensors, str] | None:
    """Return both under the same names, and what was done for it; None where nothing does.

    Args:
        before: weights by name.
        after: likewise.
        nameless: of which of them the names are places in a list alone.
    """
    if nameless[0] != nameless[1]:
        named, listed = (after, before) if nameless[0] else (before, after)
        if [value.shape for value in named.values()] != [value.shape for value in listed.values()]:
            return None
        renamed = dict(zip(named, listed.values(), strict=True))
        note = "arrays without names are taken in the order of the other's tensors, whose shapes they have"
        return (renamed, after, note) if nameless[0] else (before, renamed, note)
    short = [{bare(name): value for name, value in half.items()} for half in (before, after)]
    if before.keys() == after.keys() or short[0].keys() != short[1].keys():
        return None
    if len(short[0]) < len(before) or len(short[1]) < len(after):
        return None
    return short[0], short[1], "names lose what wrapping a model adds, which only one of both has"
