from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from reference.plain_training import per_sample_gradients
from support import worlds
from support.compare import assert_near
from support.probes import DPSGD
from torch import Tensor, nn
from torch.func import vmap

from fl.client import Client, LossGradient
from fl.gradient import Gradient, autograd_derivative, func_derivative
from fl.method import Method, Step
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfedzero import HyperFedZero
from fl.methods.hyperfl import HyperFL
from fl.models import build
from fl.privacy import ghost_clipping
from fl.privacy.dp_sgd import NORM_STABILIZER, Privatization, fastest_gradient, opacus_gradient, private_gradient
from fl.privacy.gaussian_noise import Noise
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, norm
from fl.types import Batch, Group, Phase, Task

BATCH = worlds.images(5)


def exact(clip: float = 1.0, **settings: Any) -> Privatization:
    """Clipping without noise."""
    return Privatization(clip=clip, noise_multiplier=0.0, **settings)


def prepared(method: Method, task: Task | None = None, prefix: str = "") -> tuple[Gradient, Tensors]:
    client = Client(task or worlds.task(), method)
    params = method.parametrization.lift(method.initial_parameters(client.task, stream(0, "init")))
    live = tuple(name for name in params if name.startswith(prefix))
    step = Step(client.task, params, {}, {}, {}, 0)
    buffers = client.task.buffers
    return LossGradient(client, step, live, buffers, client.fixed_statistics_model, None, autograd_derivative), params


def by_hand(model: torch.nn.Module, batch: Batch, clip: float, prefix: str = "") -> dict[str, Tensor]:
    """A loop over the images: clip each one's gradient, take the mean."""
    found = [
        {k: g for k, g in grads.items() if k.startswith(prefix)}
        for grads in per_sample_gradients(model, batch.inputs, batch.labels)
    ]
    factors = [min(1.0, clip / (float(norm(g)) + NORM_STABILIZER)) for g in found]  # type: ignore[arg-type]
    return {k: sum(f * g[k] for f, g in zip(factors, found, strict=True)) / len(found) for k in found[0]}  # type: ignore


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1.5, 1e3])
@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
@pytest.mark.parametrize("prefix", ["", "head."])
def test_both_ways_equal_a_loop_over_the_images(clip: float, way: Any, prefix: str) -> None:
    grad, params = prepared(FedAvg(), prefix=prefix)
    found = way(grad, params, BATCH, exact(clip), None)
    assert_near(found, by_hand(worlds.task().model, BATCH, clip, prefix), 1e-12)


@pytest.mark.parametrize("name", ["hyperfl-grey", "lenet-zhu"])
def test_both_ways_agree_on_published_networks(name: str) -> None:
    task = build(name, num_classes=3, seed=0).to(dtype=torch.float64)
    grad, params = prepared(FedAvg(), task)
    batch = worlds.images(3, shape=task.input_shape)
    norms = [float(norm(g)) for g in per_sample_gradients(task.model, batch.inputs, batch.labels)]  # type: ignore
    clip = sorted(norms)[1]
    one, other = (way(grad, params, batch, exact(clip), None) for way in (private_gradient, opacus_gradient))
    assert_near(one, other, 1e-12)


def test_without_binding_clip_it_is_the_gradient() -> None:
    grad, params = prepared(FedAvg())
    assert_near(private_gradient(grad, params, BATCH, exact(clip=1e9), None), grad(params, BATCH), 1e-12)


def test_generated_updates_stay_outer_products() -> None:
    method = HyperFL.example()
    grad, params = prepared(method, prefix="hypernet.")
    clip = 0.05
    found = private_gradient(grad, params, BATCH, exact(clip), None)
    alone = [grad(params, BATCH.take(torch.tensor([i]))) for i in range(len(BATCH))]
    norms = [float(norm(g).detach()) for g in alone]
    assert min(norms) < max(norms)
    factors = [min(1.0, clip / (n + NORM_STABILIZER)) for n in norms]
    expected = {
        name: sum(f * dense(g[name]) for f, g in zip(factors, alone, strict=True)) / len(alone) for name in alone[0]
    }
    assert_near(found, expected, 1e-12)  # type: ignore[arg-type]
    heads = [v for k, v in found.items() if k.startswith("hypernet.heads.") and len(v.shape) == 2]
    assert {type(v) for v in heads} == {LowRank}
    assert all(isinstance(v, LowRank) and v.base is None and v.terms[0].left.shape[0] == 1 for v in heads)


def test_the_published_hypernetwork_needs_no_dense_gradients() -> None:
    task = build("hyperfl-grey", num_classes=3, seed=0)
    grad, params = prepared(HyperFL(), task, prefix="hypernet.")
    inputs = worlds.images(4, shape=(1, 28, 28)).inputs.float()
    found = private_gradient(grad, params, Batch(inputs, torch.arange(4) % 3), exact(clip=1.0), None)
    held = sum(v.terms[0].left.numel() if isinstance(v, LowRank) else v.numel() for v in found.values())
    assert held < 10 * 115_776


def test_no_image_moves_the_sum_by_more_than_the_clip() -> None:
    grad, params = prepared(FedAvg())
    settings = exact(0.3, denominator=1.0)
    whole = private_gradient(grad, params, BATCH, settings, None)
    for i in range(len(BATCH)):
        rest = BATCH.take(torch.tensor([j for j in range(len(BATCH)) if j != i]))
        without = private_gradient(grad, params, rest, settings, None)
        change = norm({k: dense(v) - dense(without[k]) for k, v in whole.items()})
        assert 0.29 < float(change) <= 0.3


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_noise_has_the_stated_size_and_a_seed(way: Any) -> None:
    grad, params = prepared(FedAvg())
    quiet = way(grad, params, BATCH, exact(clip=0.5, denominator=2.0), None)
    settings = Privatization(clip=0.5, noise_multiplier=3.0, denominator=2.0)
    noisy, same, other = (way(grad, params, BATCH, settings, stream(s)) for s in (0, 0, 1))
    draws = torch.cat([(dense(noisy[k]) - dense(quiet[k])).flatten() for k in quiet])
    assert float(draws.std()) == pytest.approx(0.5 * 3.0 / 2.0, rel=0.06)
    assert abs(float(draws.mean())) < 0.1
    assert all(torch.equal(dense(noisy[k]), dense(same[k])) for k in noisy)
    assert not torch.equal(dense(noisy["head.bias"]), dense(other["head.bias"]))
    assert torch.equal(dense(way(grad, params, BATCH, settings, None)["head.bias"]), dense(quiet["head.bias"]))


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_an_empty_batch_gives_noise_alone(way: Any) -> None:
    grad, params = prepared(FedAvg())
    nobody = BATCH.take(torch.empty(0, dtype=torch.int64))
    settings = Privatization(clip=1.0, noise_multiplier=2.0, denominator=4.0)
    silent = way(grad, params, nobody, settings, None)
    assert set(silent) == set(grad.live)
    assert not any(dense(v).any() for v in silent.values())
    draws = torch.cat([dense(v).flatten() for v in way(grad, params, nobody, settings, stream(0)).values()])
    assert float(draws.std()) == pytest.approx(0.5, rel=0.06)
    with pytest.raises(ValueError, match="public denominator"):
        way(grad, params, nobody, replace(settings, denominator=None), None)


def test_an_empty_batch_of_a_hypernetwork() -> None:
    grad, params = prepared(HyperFL.example(), prefix="hypernet.")
    nobody = BATCH.take(torch.empty(0, dtype=torch.int64))
    found = private_gradient(grad, params, nobody, exact(clip=1.0, denominator=2.0), None)
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
        way(grad, params, BATCH, Privatization(**{"clip": 1.0, "noise_multiplier": 0.0, **settings}), None)


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
def test_losses_and_models_that_couple_samples_are_refused(way: Any) -> None:
    grad, params = prepared(HyperFedZero.example())
    with pytest.raises(ValueError, match="couples the samples"):
        way(grad, params, BATCH, exact(clip=1.0), None)
    grad, params = prepared(FedAvg(), worlds.task(batch_norm=True))
    with pytest.raises(ValueError, match="batch norm in train mode"):
        way(grad, params, BATCH, exact(clip=1.0), None)


def test_batch_norm_in_evaluation_mode_is_fine() -> None:
    task = worlds.task(batch_norm=True)
    grad, params = prepared(FedAvg(train_mode=False), task)
    found = private_gradient(grad, params, BATCH, exact(clip=0.7), None)
    assert_near(found, by_hand(task.model.eval(), BATCH, 0.7), 1e-12)
    with pytest.raises(ValueError, match=r"'body\.norm1' \(BatchNorm2d\): use private_gradient"):
        opacus_gradient(grad, params, BATCH, exact(clip=0.7), None)


@pytest.mark.parametrize("at", ["parameters", "weights"])
@pytest.mark.parametrize("clip", [0.05, 1e3])
def test_both_ways_agree_on_generated_weights(at: Any, clip: float) -> None:
    grad, params = prepared(HyperFL.example(), prefix="hypernet.")
    one, other = (
        way(grad, params, BATCH, exact(clip, clip_target=at), None) for way in (private_gradient, opacus_gradient)
    )
    assert_near(one, other, 1e-12)


def test_noise_on_the_extractor_is_pulled_back() -> None:
    grad, params = prepared(HyperFL.example(), prefix="hypernet.")
    settings = Privatization(clip=0.3, noise_multiplier=2.0, denominator=4.0, clip_target="weights")
    quiet, noisy = (
        {k: dense(v) for k, v in opacus_gradient(grad, params, BATCH, settings, g).items()}  # type: ignore
        for g in (None, Noise(torch.tensor([1, 2])))
    )
    made = grad.client.method.parametrization.sources(grad.client.task, grad.live)
    shapes = {name: grad.client.task.parameters[name] for name in made}
    added = {name: z * 2.0 * 0.3 / 4.0 for name, z in Noise(torch.tensor([1, 2])).like(shapes).items()}
    expected = {k: dense(v) for k, v in grad.pull(params, added).items()}
    assert_near({k: noisy[k] - quiet[k] for k in quiet}, expected, 1e-9)  # type: ignore[arg-type]


def test_opacus_changes_no_module() -> None:
    grad, params = prepared(FedAvg())
    before = {name: p.clone() for name, p in grad.model.named_parameters()}
    opacus_gradient(grad, params, BATCH, exact(clip=1.0), None)
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
        how = Privatization(clip=0.5, noise_multiplier=1.0, denominator=1.0)
        return private_gradient(grad, params, batch, how, generator)


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


# ---- per-sample gradients, three ways --------------------------------------------------------------------------------
def layered(seed: int, size: int) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network of random layers for images of 1 to 3 channels."""
    draw = stream(seed, "layers")

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=draw))]

    channels, width, kernel = pick(1, 2, 3), pick(2, 4), pick(1, 3)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, kernel, stride=pick(1, 2), padding=pick(0, 1), bias=bool(pick(0, 1))),
        nn.LeakyReLU(0.1),
    ]
    if pick(0, 1):
        layers += [nn.GroupNorm(2, width)]
    layers += [nn.Conv2d(width, 2 * width, 3, padding=1, groups=pick(1, 2)), nn.Tanh(), nn.Flatten()]
    with torch.no_grad():
        features = nn.Sequential(*layers)(torch.zeros(1, channels, size, size)).shape[1]
    layers += [nn.Linear(features, 5, bias=bool(pick(0, 1))), nn.LayerNorm(5), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).double()
    for value in model.parameters():
        nn.init.normal_(value, std=0.5, generator=draw)
    return model, (channels, size, size)


def hooked(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Every image's gradient by Opacus' hooks, which want channels outermost in memory."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    images = torch.empty(batch.inputs.shape, dtype=torch.float64).copy_(batch.inputs)
    nn.functional.cross_entropy(wrapped(images), batch.labels, reduction="sum").backward()
    return {name.removeprefix("_module."): p.grad_sample for name, p in wrapped.named_parameters()}


@pytest.mark.parametrize("part", range(4))
def test_every_way_to_per_sample_gradients_is_the_loop(part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        model, shape = layered(seed, size=6)
        task = Task(model, shape, 3, head="7.")
        grad, params = prepared(FedAvg(), task)
        count = seed % 17
        batch = worlds.images(count, seed, shape=shape)
        if seed % 2:
            batch = Batch(batch.inputs.to(memory_format=torch.channels_last), batch.labels)
        if not count:
            found = opacus_gradient(grad, params, batch, exact(clip=1.0, denominator=1.0), None)
            assert not any(dense(v).any() for v in found.values())
            continue
        loop = per_sample_gradients(model, batch.inputs, batch.labels)
        stacked: Tensors = {name: torch.stack([one[name] for one in loop]) for name in loop[0]}
        near(hooked(model, batch), stacked)  # type: ignore[arg-type]
        near(ghost_clipping.per_sample_gradients(grad, grad.weights(params), batch), stacked)  # type: ignore[arg-type]
        clip = sorted(float(norm(one)) for one in loop)[count // 2]  # type: ignore[arg-type]
        near(opacus_gradient(grad, params, batch, exact(clip), None), by_hand(model, batch, clip))  # type: ignore


def near(x: Tensors, y: Tensors) -> None:
    """Equal to 1e-12 of all tensors together: a saturated unit's own may be next to nothing."""
    assert x.keys() == y.keys()
    error = float(norm({name: dense(x[name]) - dense(y[name]) for name in x}))
    assert error <= 1e-12 * float(norm(y))


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_the_hypernetwork_s_closed_form_is_the_loop(count: int) -> None:
    grad, params = prepared(HyperFL.example())
    live = tuple(n for n in grad.live if not n.startswith("head."))  # hypernetwork and embedding, clipped together
    grad, batch = replace(grad, live=live), worlds.images(count)
    alone = [grad(params, batch.take(torch.tensor([i]))) for i in range(count)]
    norms = [float(norm({k: dense(v).detach() for k, v in one.items()})) for one in alone]
    clip = sorted(norms)[count // 2]
    factors = [min(1.0, clip / (n + NORM_STABILIZER)) for n in norms]
    expected = {k: sum(f * dense(g[k]) for f, g in zip(factors, alone, strict=True)) / count for k in alone[0]}
    for way in (private_gradient, opacus_gradient):
        assert_near(way(grad, params, batch, exact(clip), None), expected, 1e-12)  # type: ignore[arg-type]


def test_opacus_module_is_wrong_with_channels_innermost() -> None:
    """Why `ghost_clipping` hands contiguous tensors to Opacus' rules: should this fail, Opacus has mended it."""
    from opacus.grad_sample.conv import compute_conv_grad_sample

    layer, inputs = nn.Conv2d(4, 4, 3, padding=1), worlds.images(3, shape=(4, 6, 6)).inputs.float()
    back = torch.ones(3, 4, 6, 6)
    right, wrong = (
        compute_conv_grad_sample(layer, [x], back)[layer.weight]
        for x in (inputs, inputs.to(memory_format=torch.channels_last))
    )
    assert float((right - wrong).norm()) > 0.1 * float(right.norm())


@pytest.mark.parametrize("way", [private_gradient, opacus_gradient])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_samples_without_a_finite_gradient_count_as_nothing(way: Any, bad: float) -> None:
    grad, params = prepared(FedAvg())
    for count in (1, 3, len(BATCH)):
        inputs = BATCH.inputs.clone()
        inputs[:count, 0, 2, 2] = bad
        found = way(grad, params, Batch(inputs, BATCH.labels), exact(clip=0.3, denominator=1.0), None)
        rest = BATCH.take(torch.arange(count, len(BATCH)))
        expected = way(grad, params, rest, exact(clip=0.3, denominator=1.0), None)
        assert all(dense(v).isfinite().all() for v in found.values())
        assert float(norm(found)) <= 0.3 * (len(BATCH) - (count if bad != 1e300 else 0)) + 1e-9
        if bad != 1e300:
            assert_near(found, expected, 1e-12)


def test_networks_whose_layers_do_not_say_all_are_told_apart() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[1](self[1](self[0](x))))

    class Inside(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[3](self[2](self[1](self[0](x))).mul_(2.0))

    wide = nn.Linear(64, 64)
    for model, message in (
        (Twice(nn.Flatten(), wide, nn.Linear(64, 3)), "run once"),
        (Inside(nn.Flatten(), wide, nn.Linear(64, 8), nn.Linear(8, 3)), "in place"),
    ):
        grad, params = prepared(FedAvg(), Task(copy.deepcopy(model).double(), (1, 8, 8), 3, head="2."))
        with pytest.raises(ValueError, match=message):
            opacus_gradient(grad, params, BATCH, exact(clip=1.0), None)
        private_gradient(grad, params, BATCH, exact(clip=1.0), None)
    for model in (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(64, 3)),
    ):
        grad, params = prepared(FedAvg(), Task(model.double(), (1, 8, 8), 3, head="2."))
        assert ghost_clipping.obstacle(grad)
        assert fastest_gradient(grad, params, BATCH) is private_gradient


def test_the_fastest_way_keeps_a_graph_where_one_is_asked_for() -> None:
    grad, params = prepared(FedAvg())
    moving = Batch(BATCH.inputs.clone().requires_grad_(), BATCH.labels)
    assert fastest_gradient(grad, params, BATCH) is opacus_gradient
    assert fastest_gradient(grad, params, moving) is private_gradient
    apart = replace(grad, derivative=func_derivative)
    assert fastest_gradient(apart, params, BATCH) is private_gradient
    with torch.no_grad():
        assert fastest_gradient(grad, params, moving) is opacus_gradient
        stacked = vmap(lambda x: private_gradient(apart, params, Batch(x, BATCH.labels), exact(clip=0.3), None))
    found = {k: dense(v)[0] for k, v in stacked(BATCH.inputs[None]).items()}
    assert_near(found, private_gradient(grad, params, BATCH, exact(clip=0.3), None), 1e-12)
