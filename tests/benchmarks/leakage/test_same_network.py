"""`same_network`: both clients have the same weights, so what is left of their updates is the same."""

from __future__ import annotations

import pytest
import torch
from support import worlds

import attacks
import fl.models
from attacks.base import ViewRewriter
from benchmarks.leakage import same_network
from fl.tensors import add_scaled, dense, dot, norm, scale_tensors
from fl.types import Batch
from fl.view import ServerView


def opened(view: ServerView, *names: str) -> ServerView:
    """The view that attacks leave of it."""
    for name in names:
        attack = attacks.build(name)
        assert isinstance(attack, ViewRewriter)
        easier = attack.rewrite(view)
        assert isinstance(easier, ServerView), easier
        view = easier
    return view


@pytest.mark.parametrize(
    ("network", "init"), [("hyperfl-grey", "scaled"), ("hyperfl-grey", "published"), ("hyperfl-colour", "scaled")]
)
def test_both_clients_compute_the_same_gradient(network: str, init: str) -> None:
    own = fl.models.build(network, num_classes=10, seed=0)
    images = worlds.images(1, "same", shape=own.input_shape)
    hidden, plain = same_network.observe_both(network, init, Batch(images.inputs.float(), images.labels), 0)
    peeled, cut = opened(hidden[0][0], "peel", "headless"), opened(plain[0][0], "headless")
    assert set(peeled.shared) == set(cut.shared)
    for name, value in cut.shared.items():
        assert torch.allclose(dense(peeled.shared[name]), dense(value), rtol=1e-5, atol=1e-6)
    size = dot(peeled.update, cut.update) / dot(peeled.update, peeled.update)
    assert norm(add_scaled(cut.update, scale_tensors(peeled.update, size), -1.0)) < 1e-3 * norm(cut.update)
    assert not torch.equal(dense(plain[0][0].shared["body.conv1.weight"]), own.parameters["body.conv1.weight"])
