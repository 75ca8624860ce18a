"""Distances, priors and label rules in closed form."""

import math
from dataclasses import replace

import pytest
import torch
from support import worlds
from torch.func import grad, vmap

from attacks.gradient_matching.engine import objectives
from attacks.gradient_matching.engine.objectives import OBJECTIVES, cosine, l1, l2, layerwise_cosine, normalize
from attacks.gradient_matching.engine.regularizers import total_variation
from attacks.labels.recovery import idlg_label
from attacks.update.observed_update import ObservedUpdate
from fl.capture import from_batch
from fl.client import Client
from fl.method import Download
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.simulation.client_round import ClientState, observe, prepare
from fl.tensors import LowRank


def updates() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    draw = stream(0, "updates")
    x = {"a": torch.randn(4, 3, generator=draw).double(), "b": torch.randn(5, generator=draw).double()}
    y = {"a": torch.randn(4, 3, generator=draw).double(), "b": torch.randn(5, generator=draw).double()}
    return x, y


def test_cosine_is_that_of_the_joined_vectors() -> None:
    x, y = updates()
    p, q = (torch.cat([v.flatten() for v in s.values()]) for s in (x, y))
    assert cosine(x, *normalize(y)).item() == pytest.approx(1 - torch.cosine_similarity(p, q, dim=0).item())
    assert cosine(x, *normalize({k: 3 * v for k, v in x.items()})).item() == pytest.approx(0, abs=1e-12)


def test_a_tiny_angle_is_not_lost_to_rounding() -> None:
    x, y = updates()
    near = {k: (v + 1e-5 * y[k]).float() for k, v in x.items()}
    exact = cosine({k: v.double() for k, v in near.items()}, *normalize({k: v.float().double() for k, v in x.items()}))
    found = cosine(near, *normalize({k: v.float() for k, v in x.items()}))
    assert exact.item() < 1e-9
    assert found.item() == pytest.approx(exact.item(), rel=0.1)


def test_squared_distance_is_relative_to_the_observed() -> None:
    x, y = updates()
    p, q = (torch.cat([v.flatten() for v in s.values()]) for s in (x, y))
    assert l2(x, *normalize(y)).item() == pytest.approx(((p - q).norm() / q.norm()).item() ** 2)


def test_absolute_distance_is_relative_to_the_observed() -> None:
    x, y = updates()
    p, q = (torch.cat([v.flatten() for v in s.values()]) for s in (x, y))
    assert l1(x, *normalize(y)).item() == pytest.approx(((p - q).abs().sum() / q.abs().sum()).item())


def test_by_tensor_every_tensor_has_its_own_cosine_and_those_of_nothing_none() -> None:
    x, y = updates()
    each = [1 - torch.cosine_similarity(x[k].flatten(), y[k].flatten(), dim=0).item() for k in x]
    assert layerwise_cosine(x, *normalize(y)).item() == pytest.approx(sum(each) / 2)
    small = {"a": 1e-6 * y["a"], "b": y["b"]}
    assert layerwise_cosine(x, *normalize(small)).item() == pytest.approx(sum(each) / 2)
    for rounding in (0.0, 1e-17):
        there = {"a": rounding * y["a"], "b": y["b"]}
        assert layerwise_cosine(x, *normalize(there)).item() == pytest.approx(each[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seen", [0.0, 1.0])
@pytest.mark.parametrize("guessed", [0.0, 1e-15, 1e-8])
@pytest.mark.parametrize("distance", OBJECTIVES.values())
def test_a_tensor_of_next_to_nothing_leaves_a_finite_slope(distance, dtype, seen, guessed) -> None:
    x, y = ({name: value.to(dtype) for name, value in side.items()} for side in updates())
    unit, size = normalize({"a": seen * y["a"], "b": y["b"]})
    slopes = grad(lambda given: distance(given, unit, size))({"a": guessed * x["a"], "b": x["b"]})
    assert all(slope.isfinite().all() for slope in slopes.values())
    assert slopes["b"].any()


def test_an_update_whose_squares_run_under_has_its_direction() -> None:
    y = updates()[1]
    usual, tiny = ({k: size * v.float() for k, v in y.items()} for size in (1.0, 1e-30))
    (unit, size), (same, small) = normalize(usual), normalize(tiny)
    for name, value in unit.items():
        torch.testing.assert_close(same[name], value)
    assert small.item() == pytest.approx(1e-30 * size.item(), rel=1e-5)


@pytest.mark.parametrize("large", [4, 10**6])
def test_the_squared_distance_has_the_derivatives_of_its_formula(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second order as well, in a stack, and whether or not a tensor is compared by itself."""
    monkeypatch.setattr(objectives, "LARGE", large)
    x, y = updates()
    unit, size = normalize(y)

    def found(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return l2({"a": a, "b": b}, unit, size)

    def formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - y["a"]).square().sum() + (b - y["b"]).square().sum()) / size**2

    leaves = tuple(v.clone().requires_grad_() for v in x.values())
    assert torch.autograd.gradcheck(found, leaves)
    assert torch.autograd.gradgradcheck(found, leaves)
    several = tuple(torch.stack([v.detach(), 2 * v.detach(), -v.detach()]) for v in leaves)
    for mine, theirs in zip(*(vmap(grad(f, (0, 1)))(*several) for f in (found, formula)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_structured_values_give_the_dense_figures() -> None:
    draw = stream(1, "outer")
    p, q = ([torch.randn(n, generator=draw).double() for n in (6, 4)] for _ in range(2))
    base = torch.randn(6, 4, generator=draw).double()
    for extra in (None, LowRank.of(base) * 0.1):
        x = {"a": LowRank.outer(p[0], p[1])}
        y = {"a": LowRank.outer(q[0], q[1]) if extra is None else LowRank.outer(q[0], q[1]) + extra}
        for distance in OBJECTIVES.values():
            dense = distance({"a": x["a"].dense()}, *normalize({"a": y["a"].dense()}))
            assert distance(x, *normalize(y)).item() == pytest.approx(dense.item())  # type: ignore[arg-type]


def test_total_variation_of_a_ramp() -> None:
    ramp = torch.arange(5.0).expand(1, 1, 4, 5) / 10  # 0.1 a pixel across, nothing down
    assert total_variation(ramp, torch.ones(1)).item() == pytest.approx(0.1)
    assert total_variation(ramp, torch.tensor([0.5])).item() == pytest.approx(0.2)
    assert total_variation(torch.full((2, 3, 4, 4), 0.7), torch.ones(3)).item() == 0


@pytest.mark.parametrize("label", range(worlds.CLASSES))
def test_the_label_rule_reads_every_class(label: int) -> None:
    task = worlds.task()
    images = worlds.images(1, "rule")
    images = type(images)(images.inputs, torch.tensor([label]))
    download = Download(dict(task.parameters), dict(task.buffers))
    view, _, _ = observe(prepare(Client(task, FedAvg(lr=0.1, steps=1)), ClientState(), download, images))
    found = idlg_label(ObservedUpdate(view))
    assert found is not None
    assert found.item() == label
    weight_only = {k: v for k, v in view.update.items() if k != "head.bias"}
    assert idlg_label(ObservedUpdate(replace(view, update=weight_only))) is not None
    without_head = {k: v for k, v in view.update.items() if not k.startswith("head.")}
    assert idlg_label(ObservedUpdate(replace(view, update=without_head))) is None
    assert math.isfinite(view.update["head.bias"].abs().sum().item())  # type: ignore[union-attr]


@pytest.mark.parametrize("label", range(4))
def test_the_label_rule_needs_no_bias_and_no_sign_of_the_features(label: int) -> None:
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4, bias=False)
    ).double()
    for seed in range(10):
        draw = stream(seed, "tanh")
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3, generator=draw)
        image = torch.rand(1, 1, 8, 8, generator=draw, dtype=torch.float64)
        view, _ = from_batch(model, image, torch.tensor([label]))
        found = idlg_label(ObservedUpdate(view))
        assert found is not None
        assert found.item() == label
