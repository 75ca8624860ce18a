from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from reference.plain_training import per_sample_gradients
from support import worlds
from support.compare import assert_near
from support.probes import DPSGD, PROBES
from torch import Tensor

from fl.client import Client, Gradient, autograd_derivative
from fl.method import Method, Step
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models import build
from fl.privacy import STABILISER, opacus_gradient, private_gradient
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, norm
from fl.types import Batch, Group, Phase, Task

BATCH = worlds.images(5)
EXACT: dict[str, Any] = {"noise_multiplier": 0.0, "generator": None}


def prepared(method: Method, task: Task | None = None, prefix: str = "") -> tuple[Gradient, Tensors]:
    client = Client(task or worlds.task(), method)
    params = method.parametrisation.lift(method.initial(client.task, stream(0, "init")))
    live = tuple(name for name in params if name.startswith(prefix))
    step = Step(client.task, params, {}, {}, {}, 0)
    buffers = client.task.buffers
    return Gradient(client, step, live, buffers, client.predictor, None, autograd_derivative), params


def by_hand(model: torch.nn.Module, batch: Batch, clip: float, prefix: str = "") -> dict[str, Tensor]:
    """A loop over the images: clip each one's gradient, take the mean."""
    found = [
        {k: g for k, g in grads.items() if k.startswith(prefix)}
        for grads in per_sample_gradients(model, batch.inputs, batch.labels)
    ]
    factors = [min(1.0, clip / (float(norm(g)) + STABILISER)) for g in found]  # type: ignore[arg-type]
    return {k: sum(f * g[k] for f, g in zip(factors, found, strict=True)) / len(found) for k in found[0]}  # type: ignore


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1.5, 1e3])
@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
@pytest.mark.parametrize("prefix", ["", "head."])
def test_both_ways_equal_a_loop_over_the_images(clip: float, way: Any, prefix: str) -> None:
    grad, params = prepared(FedAvg(), prefix=prefix)
    found = way(grad, params, BATCH, clip=clip, **EXACT)
    assert_near(found, by_hand(worlds.task().model, BATCH, clip, prefix), 1e-12)


@pytest.mark.parametrize("name", ["hyperfl-grey", "lenet-zhu"])
def test_both_ways_agree_on_published_networks(name: str) -> None:
    task = build(name, num_classes=3, seed=0).to(dtype=torch.float64)
    grad, params = prepared(FedAvg(), task)
    batch = worlds.images(3, shape=task.input_shape)
    norms = [float(norm(g)) for g in per_sample_gradients(task.model, batch.inputs, batch.labels)]  # type: ignore
    clip = sorted(norms)[1]
    one, other = (way(grad, params, batch, clip=clip, **EXACT) for way in (private_gradient, opacus_gradient))
    assert_near(one, other, 1e-12)


def test_without_binding_clip_it_is_the_gradient() -> None:
    grad, params = prepared(FedAvg())
    assert_near(private_gradient(grad, params, BATCH, clip=1e9, **EXACT), grad(params, BATCH), 1e-12)


def test_generated_updates_stay_outer_products() -> None:
    method = HyperFL.example()
    grad, params = prepared(method, prefix="hypernet.")
    clip = 0.05
    found = private_gradient(grad, params, BATCH, clip=clip, **EXACT)
    alone = [grad(params, BATCH.take(torch.tensor([i]))) for i in range(len(BATCH))]
    norms = [float(norm(g).detach()) for g in alone]
    assert min(norms) < max(norms)
    factors = [min(1.0, clip / (n + STABILISER)) for n in norms]
    expected = {
        name: sum(f * dense(g[name]) for f, g in zip(factors, alone, strict=True)) / len(alone) for name in alone[0]
    }
    assert_near(found, expected, 1e-12)  # type: ignore[arg-type]
    heads = [v for k, v in found.items() if k.startswith("hypernet.heads.") and len(v.shape) == 2]
    assert {type(v) for v in heads} == {LowRank}
    assert all(isinstance(v, LowRank) and v.base is None and v.terms[0].left.shape[0] == len(BATCH) for v in heads)


def test_the_published_hypernetwork_needs_no_dense_gradients() -> None:
    task = build("hyperfl-grey", num_classes=3, seed=0)
    grad, params = prepared(HyperFL(), task, prefix="hypernet.")
    inputs = worlds.images(4, shape=(1, 28, 28)).inputs.float()
    found = private_gradient(grad, params, Batch(inputs, torch.arange(4) % 3), clip=1.0, **EXACT)
    held = sum(v.terms[0].left.numel() if isinstance(v, LowRank) else v.numel() for v in found.values())
    assert held < 10 * 115_776


def test_no_image_moves_the_sum_by_more_than_the_clip() -> None:
    grad, params = prepared(FedAvg())
    settings = {**EXACT, "clip": 0.3, "denominator": 1.0}
    whole = private_gradient(grad, params, BATCH, **settings)
    for i in range(len(BATCH)):
        rest = BATCH.take(torch.tensor([j for j in range(len(BATCH)) if j != i]))
        without = private_gradient(grad, params, rest, **settings)
        change = norm({k: dense(v) - dense(without[k]) for k, v in whole.items()})
        assert 0.29 < float(change) <= 0.3


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_noise_has_the_stated_size_and_a_seed(way: Any) -> None:
    grad, params = prepared(FedAvg())
    quiet = way(grad, params, BATCH, clip=0.5, denominator=2.0, **EXACT)
    settings = {"clip": 0.5, "noise_multiplier": 3.0, "denominator": 2.0}
    noisy, same, other = (way(grad, params, BATCH, generator=stream(s), **settings) for s in (0, 0, 1))
    draws = torch.cat([(dense(noisy[k]) - dense(quiet[k])).flatten() for k in quiet])
    assert float(draws.std()) == pytest.approx(0.5 * 3.0 / 2.0, rel=0.06)
    assert abs(float(draws.mean())) < 0.1
    assert all(torch.equal(dense(noisy[k]), dense(same[k])) for k in noisy)
    assert not torch.equal(dense(noisy["head.bias"]), dense(other["head.bias"]))
    assert torch.equal(
        dense(way(grad, params, BATCH, generator=None, **settings)["head.bias"]), dense(quiet["head.bias"])
    )


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_an_empty_batch_gives_noise_alone(way: Any) -> None:
    grad, params = prepared(FedAvg())
    nobody = BATCH.take(torch.empty(0, dtype=torch.int64))
    settings = {"clip": 1.0, "noise_multiplier": 2.0, "denominator": 4.0}
    silent = way(grad, params, nobody, generator=None, **settings)
    assert set(silent) == set(grad.live)
    assert not any(dense(v).any() for v in silent.values())
    draws = torch.cat([dense(v).flatten() for v in way(grad, params, nobody, generator=stream(0), **settings).values()])
    assert float(draws.std()) == pytest.approx(0.5, rel=0.06)
    with pytest.raises(ValueError, match="public denominator"):
        way(grad, params, nobody, generator=None, clip=1.0, noise_multiplier=2.0)


def test_an_empty_batch_of_a_hypernetwork() -> None:
    grad, params = prepared(HyperFL.example(), prefix="hypernet.")
    nobody = BATCH.take(torch.empty(0, dtype=torch.int64))
    found = private_gradient(grad, params, nobody, clip=1.0, denominator=2.0, **EXACT)
    assert {k: v.shape for k, v in found.items()} == {k: params[k].shape for k in grad.live}
    assert not any(dense(v).any() for v in found.values())


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "expected clip > 0"),
        ({"noise_multiplier": -1.0}, "expected noise_multiplier >= 0"),
        ({"denominator": 0.0}, "public denominator"),
    ],
)
def test_settings_are_checked(way: Any, settings: dict[str, float], message: str) -> None:
    grad, params = prepared(FedAvg())
    with pytest.raises(ValueError, match=message):
        way(grad, params, BATCH, **{"clip": 1.0, **EXACT, **settings})


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_losses_and_models_that_couple_samples_are_refused(way: Any) -> None:
    grad, params = prepared(PROBES["hyperfedzero"].method)
    with pytest.raises(ValueError, match="couples the samples"):
        way(grad, params, BATCH, clip=1.0, **EXACT)
    grad, params = prepared(FedAvg(), worlds.task(batch_norm=True))
    with pytest.raises(ValueError, match="batch norm in train mode"):
        way(grad, params, BATCH, clip=1.0, **EXACT)


def test_batch_norm_in_evaluation_mode_is_fine() -> None:
    task = worlds.task(batch_norm=True)
    grad, params = prepared(FedAvg(train_mode=False), task)
    found = private_gradient(grad, params, BATCH, clip=0.7, **EXACT)
    assert_near(found, by_hand(task.model.eval(), BATCH, 0.7), 1e-12)
    with pytest.raises(ValueError, match=r"'body\.norm1': use private_gradient"):
        opacus_gradient(grad, params, BATCH, clip=0.7, **EXACT)


def test_opacus_refuses_generated_weights() -> None:
    grad, params = prepared(HyperFL.example(), prefix="hypernet.")
    with pytest.raises(ValueError, match="private_gradient"):
        opacus_gradient(grad, params, BATCH, clip=1.0, **EXACT)


def test_opacus_changes_no_module() -> None:
    grad, params = prepared(FedAvg())
    before = {name: p.clone() for name, p in grad.model.named_parameters()}
    opacus_gradient(grad, params, BATCH, clip=1.0, **EXACT)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in grad.model.named_parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in grad.model.modules())


@dataclass(frozen=True, kw_only=True)
class Poisson(FedAvg):
    name: ClassVar[str] = "poisson"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        return (Phase(groups=(Group(lr=0.1),), steps=12, batch_size=1, sampler="poisson"),)


@dataclass(frozen=True, kw_only=True)
class Amortised(DPSGD):
    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: Any) -> Tensors:
        return private_gradient(
            grad, params, batch, clip=0.5, noise_multiplier=1.0, generator=generator, denominator=1.0
        )


@pytest.mark.parametrize("method", [Poisson(), replace(HyperFL.example(), train_mode=False)], ids=["fedavg", "hyperfl"])
def test_training_draws_noise_and_predictions_leave_it_out(method: Method) -> None:
    defense = Amortised()
    run = worlds.federation(method, defense, rounds=1)
    done = run.train(0)
    sizes: Sequence[int] = [len(index) for steps in done.trace.order for (index,) in steps]
    assert method.name != "poisson" or 0 in sizes
    assert all(dense(v).isfinite().all() for v in done.upload.update.values())
    again, other = run.train(0), worlds.federation(method, defense, rounds=1, seed=1).train(0)
    name = next(iter(done.upload.update))
    assert torch.equal(dense(again.upload.update[name]), dense(done.upload.update[name]))
    assert not torch.equal(dense(other.upload.update[name]), dense(done.upload.update[name]))


def test_poisson_sampling_without_privacy_survives_empty_batches() -> None:
    done = worlds.federation(Poisson()).train(0)
    assert 0 in [len(index) for steps in done.trace.order for (index,) in steps]
    assert all(dense(v).isfinite().all() for v in done.upload.update.values())
