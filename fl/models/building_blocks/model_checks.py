"""What a network of a user's own is checked for: that it takes the images and returns logits, and where its head is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

MAX_LISTED = 5
"""So many names stand in an error; of a large network nobody reads them all."""
ONE_CLASS = "the loss is cross entropy, which is 0 with one output; give a yes or no two of them"
"""Why a classifier of one output is refused."""
FORWARD_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError, TypeError)
"""What a network raises that is given images of a shape or type that it does not take, or too few inputs."""


def preserve_global_rng(device: torch.device) -> AbstractContextManager[None]:
    """Leaves the global generator as it was, whatever a user's model draws from it."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def count_logits(model: nn.Module, inputs: Tensor, num_classes: int | None) -> int:
    """Return how many logits `model` returns; runs a copy, so that no running statistic changes."""
    probe = copy.deepcopy(model).eval()
    with torch.no_grad(), preserve_global_rng(inputs.device):
        try:
            logits = probe(inputs[:1])
        except FORWARD_ERRORS as error:
            raise ValueError(
                f"expected inputs that fit the model, got {inputs.dtype} {tuple(inputs.shape)}: {error}"
            ) from error
    check_logits(logits)
    if logits.shape[1] < 2:
        raise ValueError(f"expected a model of 2 outputs or more, got {logits.shape[1]}: {ONE_CLASS}")
    if num_classes not in {None, logits.shape[1]}:
        raise ValueError(f"expected num_classes {logits.shape[1]}, as the model has, got {num_classes}")
    return int(logits.shape[1])


def check_logits(logits: object) -> None:
    """Refuse what a network returned that is no logits (B, K).

    Raises:
        ValueError: says what it is, and how a network is wrapped whose logits are a part of it.
    """
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return
    if isinstance(logits, Tensor):
        raise ValueError(f"expected a model that returns logits (B, K), got {tuple(logits.shape)}")
    part = "output['logits']" if isinstance(logits, Mapping) else "output[0]" if isinstance(logits, tuple) else ""
    hint = f"; give a module whose forward returns the logits alone ({part}, say)" if part else ""
    raise ValueError(f"expected a model that returns logits (B, K), got {type(logits).__name__}{hint}")


def find_head(model: nn.Module, head: str | None, num_classes: int) -> str:
    """Return the prefix of the classifier's parameters, checked or guessed."""
    names = [name for part in (model.named_parameters(), model.named_buffers()) for name, _ in part]
    if head is not None:
        if not any(name.startswith(head) for name in names):
            raise ValueError(
                f"expected head as a prefix of parameter names, got {head!r}; names: {abbreviate_list(names)}"
            )
        return head
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("expected a model with an nn.Linear as its classifier, found none; give head='its.prefix.'")
    name, last = linear[-1]
    if last.out_features != num_classes:
        raise ValueError(
            f"expected the last nn.Linear, {name!r}, to have {num_classes} outputs, got {last.out_features}; "
            "give head='the.classifier.'"
        )
    return f"{name}." if name else ""


def abbreviate_list(words: Sequence[str]) -> str:
    """Return the first few of a list, and how many more there are."""
    more = len(words) - MAX_LISTED
    return ", ".join(words[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
