"""A view whose update does not fit what the server sent: an error that names the tensor, not one from inside torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import worlds
from torch import Tensor

from attacks.base import Reconstruction, build
from fl.methods.fedavg import FedAvg
from fl.tensors import dense
from fl.types import ServerView


def view_with(changed: Callable[[Tensor], Tensor]) -> tuple[ServerView, str]:
    """A view with the last tensor of its update changed, and that tensor's name."""
    view = worlds.federation(FedAvg(lr=0.1, steps=1, batch_size=None)).observe(0)[0]
    name = list(view.update)[-1]
    return replace(view, update=view.update | {name: changed(dense(view.update[name]))}), name


@pytest.mark.parametrize("attack", ["ig", "dlg", "cascade", "analytic", "surrogate+ig"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda value: value[:-1], "in the shape of what the server sent"),
        (lambda value: value.half(), "in the type of what the server sent, torch.float64, got torch.float16"),
    ],
    ids=["shape", "type"],
)
def test_an_update_that_does_not_fit_is_refused_by_name(
    attack: str, changed: Callable[[Tensor], Tensor], said: str
) -> None:
    view, name = view_with(changed)
    with pytest.raises(ValueError, match=f"'{name}' {said}"):
        build(attack)(view)


def test_one_that_fits_is_not() -> None:
    view, _ = view_with(torch.clone)
    assert isinstance(build({"name": "ig", "iterations": 1})(view), Reconstruction)
