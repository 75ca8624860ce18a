"""A gradient that was sent by itself is as exact however small: only a difference of weights drowns in their rounding.

For `cascade` see test_rounding.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds

from attacks.base import NotApplicable, Reconstruction, build
from fl.federation import Federation
from fl.method import Method
from fl.methods.hyperfednet import HyperFedNet
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.filter_hypernetwork import Filters
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView

SMALL = 1e-20
ONE = {"lr": 0.1, "steps": 1, "epochs": None, "batch_size": None, "weight_decay": 0.0}
FILTERS = HyperFedNet(parametrization=Filters(embedding=6, block=(4, 4)), **ONE)  # type: ignore[arg-type]
GENERATED = HyperFL(parametrization=Hypernetwork(embedding=8, hidden=16, init="scaled"), head_epochs=0, **ONE)  # type: ignore[arg-type]


def victim(method: Method) -> tuple[ServerView, Truth]:
    """A tiny gradient as plain tensors, taken for exact."""
    task = worlds.deeper() if method is FILTERS else worlds.task()
    run: Federation = worlds.federation(method, task_=task, rounds=0)
    view, truth = run.observe(0, data=worlds.images(1, "victim"))
    return replace(view, update={n: SMALL * dense(v) for n, v in view.update.items()}, rounded=False), truth


@pytest.mark.parametrize(("attack", "method"), [("filters", FILTERS), ("peel", GENERATED)])
def test_a_small_gradient_is_peeled_and_a_small_difference_is_not(attack: str, method: Method) -> None:
    view, truth = victim(method)
    found = build(attack)(view)
    assert isinstance(found, Reconstruction), found
    assert found.verified
    name = next(n for n in view.private if n.startswith(("embeddings.", EMBEDDING)))
    assert torch.allclose(dense(found.private[name]), dense(truth.private[name]), rtol=1e-8)
    lost = build(attack)(replace(view, rounded=True))
    assert isinstance(lost, NotApplicable)
    assert "no gradient reached the hypernetwork" in lost.reason
