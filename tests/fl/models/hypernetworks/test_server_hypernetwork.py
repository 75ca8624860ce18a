"""The server's hypernetwork: its values against a plain module, its `pull_back` against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fl.models import build
from fl.models.hypernetworks.server_hypernetwork import ServerHypernetwork
from fl.seeds import stream
from fl.tensors import Tensors, dense

SHAPES = {"a.weight": torch.Size((3, 2)), "a.bias": torch.Size((3,)), "scale": torch.Size(())}
LIKE = torch.zeros((), dtype=torch.float64)


def made(**settings: Any) -> tuple[ServerHypernetwork, Tensors, torch.Tensor]:
    hyper = ServerHypernetwork(shapes=SHAPES, embedding=4, hidden=(6, 5), **settings)
    embedding = torch.randn(4, generator=stream(0, "v"), dtype=torch.float64)
    return hyper, hyper.initial_parameters(stream(0, "h"), LIKE), embedding


@pytest.mark.parametrize("activation", ["relu", "leaky-relu"])
@pytest.mark.parametrize("last", [False, True])
def test_it_is_the_plain_network(activation: Any, last: bool) -> None:
    hyper, params, v = made(activation=activation, last_activation=last)
    act = nn.ReLU() if activation == "relu" else nn.LeakyReLU(0.01)
    x = act(dense(params["mlp.0.weight"]) @ v + dense(params["mlp.0.bias"]))
    x = dense(params["mlp.1.weight"]) @ x + dense(params["mlp.1.bias"])
    x = act(x) if last else x
    found = hyper.generate(params, v)
    assert list(found) == list(SHAPES)
    for name, shape in SHAPES.items():
        flat = dense(params[f"heads.{name}.weight"]) @ x + dense(params[f"heads.{name}.bias"])
        torch.testing.assert_close(found[name], flat.view(shape), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("activation", ["relu", "leaky-relu"])
def test_pull_back_equals_finite_differences(activation: Any) -> None:
    hyper, params, v = made(activation=activation)
    grads: Tensors = {n: torch.randn(s, generator=stream(1, n), dtype=torch.float64) for n, s in SHAPES.items()}
    before = [dense(p).clone() for p in params.values()]
    with torch.no_grad():  # the federation aggregates without gradients
        found, back = hyper.pull_back(params, v, grads)
    assert found.keys() == params.keys()

    def along(params: Tensors, v: torch.Tensor) -> float:
        return float(sum((hyper.generate(params, v)[n] * dense(g)).sum() for n, g in grads.items()))

    h = 1e-6
    for name, gradient in {**found, "v": back}.items():
        start = v if name == "v" else dense(params[name])
        for i in range(0, start.numel(), 3):
            shift = torch.zeros(start.numel(), dtype=torch.float64)
            shift[i] = h
            ends = [start + sign * shift.view_as(start) for sign in (1, -1)]
            up, down = (along(params, end) if name == "v" else along({**params, name: end}, v) for end in ends)
            assert (up - down) / (2 * h) == pytest.approx(float(gradient.flatten()[i]), rel=1e-6, abs=1e-8)
    assert all(torch.equal(b, dense(p)) for b, p in zip(before, params.values(), strict=True))


def test_it_starts_as_linear_layers_do() -> None:
    hyper = ServerHypernetwork(shapes={"w": torch.Size((40, 50))}, embedding=9, hidden=(100,))
    params = hyper.initial_parameters(stream(0, "h"))
    for name, fan_in in {"mlp.0.weight": 9, "mlp.0.bias": 9, "heads.w.weight": 100, "heads.w.bias": 100}.items():
        drawn = dense(params[name])
        assert drawn.dtype == torch.float32
        assert float(drawn.abs().max()) <= 1 / math.sqrt(fan_in)
        assert float(drawn.std()) == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.15)


def test_the_authors_hypernetwork_of_pfedhn_has_its_size() -> None:
    task = build("simple-cnn", num_classes=10, channels=(16, 32))
    shapes = {name: value.shape for name, value in task.parameters.items()}
    numbers = sum(shape.numel() for shape in shapes.values())
    assert numbers == 121_182
    hyper = ServerHypernetwork(shapes=shapes, embedding=13, hidden=(100,) * 4)
    layers = (13 + 1) * 100 + 3 * (100 + 1) * 100
    assert sum(v.numel() for v in hyper.initial_parameters(stream(0, "h")).values()) == layers + (100 + 1) * numbers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shapes": {}}, "at least one tensor"),
        ({"embedding": 0}, "expected embedding >= 1, got 0"),
        ({"hidden": ()}, "hidden layer"),
        ({"hidden": (5, 0)}, "hidden layer"),
    ],
)
def test_sizes_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerHypernetwork(**{"shapes": SHAPES, "embedding": 2, "hidden": (3,), **settings})
