"""Names of tensors without what wrapping a model puts into them."""

from __future__ import annotations

WRAPPERS = {"module", "_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What wrapping a model (`DistributedDataParallel`, `torch.compile`, Opacus, FSDP, checkpointing) puts into names."""


def bare(name: str) -> str:
    """Return a name without what wrapping a model puts into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
