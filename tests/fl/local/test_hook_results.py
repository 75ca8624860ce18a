"""Hooks of one's own that return what they must not: refused by the hook's name."""

import pytest
import torch
from torch import nn

from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch, Task


class OwnMethod(FedAvg):
    def __init__(self, **hooks):
        super().__init__(steps=1, lr=0.1)
        for name, hook in hooks.items():
            object.__setattr__(self, name, hook)


class OwnDefense(Defense):
    name = "own"

    def __init__(self, **hooks):
        for name, hook in hooks.items():
            object.__setattr__(self, name, hook)


def step(method=None, defense=None):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    batch = Batch(torch.rand(2, 1, 2, 2, generator=stream(0, "hooks")), torch.tensor([0, 2]))
    client = Client(Task(model, (1, 2, 2), 3, "1."), method or OwnMethod(), defense or Defense())
    return Federation(client, [ClientData(batch, batch)]).run_round()


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"gradient": lambda grad, params, batches, step: None}, r"gradient\(\) to return tensors by name.*NoneType"),
        ({"gradient": lambda grad, params, batches, step: {"more": torch.zeros(1)}}, "'more', which is no parameter"),
        (
            {"gradient": lambda grad, params, batches, step: {"1.bias": torch.zeros(1)}},
            r"'1.bias' of shape \(3,\), got \(1,\)",
        ),
        (
            {"gradient": lambda grad, params, batches, step: {"1.bias": torch.zeros(3).double()}},
            "in torch.float32, got torch.float64",
        ),
        ({"gradient": lambda grad, params, batches, step: {"1.bias": 0.0}}, "return tensors, got float for '1.bias'"),
        ({"aggregate": lambda server, uploads, task: None}, r"aggregate\(\) to return a ServerState, got NoneType"),
        ({"broadcast": lambda server, client, task: {}}, r"broadcast\(\) to return a Download, got dict"),
    ],
)
def test_what_a_method_must_not_return_is_named(hooks, said):
    with pytest.raises((TypeError, ValueError), match=said):
        step(OwnMethod(**hooks))


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"transform_batch": lambda batch, task, generator: None}, r"own: expected transform_batch\(\).*NoneType"),
        ({"transform_batch": lambda batch, task, generator: batch.take(torch.arange(0))}, "0 images and 0 labels"),
        ({"wrap_model": lambda model: None}, r"own: expected wrap_model\(\) to return a network, got NoneType"),
        ({"gradient": lambda grad, params, batch, generator: []}, r"fedavg with own: expected gradient\(\).*got list"),
    ],
)
def test_what_a_defense_must_not_return_is_named(hooks, said, monkeypatch):
    for name, hook in hooks.items():
        monkeypatch.setattr(OwnDefense, name, staticmethod(hook), raising=False)
    with pytest.raises((TypeError, ValueError), match=said):
        step(defense=OwnDefense())


def test_whole_steps_are_taken():
    (taken,) = step()
    assert taken.upload.update.keys() == {"1.weight", "1.bias"}
    assert all(bool(value.any()) for value in taken.upload.update.values())
