"""What a client adds to its gradient hides it; once that is subtracted, as refusals say, the picture comes back."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional

import hyperleak
from fl.seeds import stream

LR = 0.1


def model() -> nn.Module:
    return initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 10))).float()


def gradient(network: nn.Module) -> dict[str, Tensor]:
    picture = torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))
    loss = functional.cross_entropy(network(picture), torch.tensor([1]))
    names, values = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def added(network: nn.Module) -> dict[str, Tensor]:
    draw = stream(0, "added")
    return {name: 0.01 * torch.randn(value.shape, generator=draw) for name, value in network.named_parameters()}


def verified(network: nn.Module, update: dict[str, Tensor], method: str) -> bool | None:
    found = hyperleak.audit(
        network,
        update=update,
        input_shape=(3, 8, 8),
        method={"name": method, "lr": LR, "steps": 1},
        attacks=["analytic"],
    )
    return found.findings[0].verified


@pytest.mark.parametrize("share", [1.0, 0.9], ids=["control variates", "momentum"])
def test_a_picture_comes_back_once_what_is_added_is_subtracted(share: float) -> None:
    network = model()
    part = {name: LR * share * value for name, value in added(network).items()}
    update = {name: LR * value + part[name] for name, value in gradient(network).items()}
    assert not verified(network, update, "fedavg")
    assert verified(network, {name: update[name] - part[name] for name in update}, "fedavg")


def test_a_refusal_names_the_tensors_that_would_be_needed() -> None:
    network = model()
    report = hyperleak.audit(
        network,
        update=gradient(network),
        input_shape=(3, 8, 8),
        method={"name": "scaffold", "lr": LR, "steps": 1},
        attacks=["analytic"],
    )
    assert "subtract lr * (c - c_i) for each step" in report.findings[0].refused
