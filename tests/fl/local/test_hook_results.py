"""Hooks of one's own that return what they must not: refused by the hook's name."""

import pytest
import torch
from torch import nn

from attacks.base import attacks
from fl.client import Client
from fl.defense import Defense, ask_numbers, ask_surrogate
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
        ({"loss": lambda network, batch, step: network(batch.inputs).mean(1)}, r"loss\(\).*reduction='mean'"),
        ({"loss": lambda network, batch, step: network(batch.inputs).mean() * 1j}, r"loss\(\).*value.real"),
        ({"loss": lambda network, batch, step: network(batch.inputs).mean().item()}, r"got float; return the tensor"),
        ({"loss": lambda network, batch, step: None}, r"fedavg: loss\(\).*got NoneType; is its return missing"),
        ({"loss": lambda network, batch, step: network(batch.inputs).mean().detach()}, "without a gradient: is it det"),
        ({"scope": lambda name, task: "shared"}, r"scope\(\) to return Scope.SHARED, .*got 'shared' for '1.weight'"),
        ({"scope": lambda name, task: None}, "Scope.SERVER .*got NoneType"),
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


@pytest.mark.parametrize(
    ("hook", "made", "said"),
    [
        ("surrogate", lambda predicted, observed: None, r"own: expected surrogate\(\) to return tensors by name.*None"),
        ("surrogate", lambda predicted, observed: {"more": torch.zeros(1)}, "'more', which it was not given"),
        ("surrogate", lambda predicted, observed: {"1.bias": torch.zeros(1)}, r"'1.bias' of shape \(3,\), got \(1,\)"),
        ("surrogate", lambda predicted, observed: {"1.bias": 0.0}, "to return tensors, got float for '1.bias'"),
        ("tensor_trust", lambda observed: None, r"own: expected tensor_trust\(\) to return a number.*NoneType"),
        ("tensor_trust", lambda observed: {"1.bias": 1.0}, "'1.weight' is missing"),
        ("noise_std", lambda observed: {"1.bias": None}, r"noise_std\(\) to return a number by name.*NoneType"),
    ],
)
def test_what_attackers_are_told_of_a_defense_is_named_if_it_is_no_such_thing(hook, made, said, monkeypatch):
    monkeypatch.setattr(OwnDefense, hook, staticmethod(made), raising=False)
    given = {"1.weight": torch.zeros(3, 4), "1.bias": torch.zeros(3)}
    with pytest.raises((TypeError, ValueError), match=said):
        ask_surrogate(OwnDefense(), given, given) if hook == "surrogate" else ask_numbers(OwnDefense(), hook, given)


def test_searches_name_the_surrogate_that_is_none(monkeypatch):
    monkeypatch.setattr(OwnDefense, "surrogate", staticmethod(lambda predicted, observed: None), raising=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    batch = Batch(torch.rand(1, 1, 2, 2, generator=stream(0, "hooks")), torch.tensor([2]))
    client = Client(Task(model, (1, 2, 2), 3, "1."), OwnMethod(), OwnDefense())
    view, _ = Federation(client, [ClientData(batch, batch)]).observe(0)
    with pytest.raises(TypeError, match="own: expected surrogate"):
        attacks.build({"name": "ig", "iterations": 1})(view)


def test_whole_steps_are_taken():
    (taken,) = step()
    assert taken.upload.update.keys() == {"1.weight", "1.bias"}
    assert all(bool(value.any()) for value in taken.upload.update.values())
