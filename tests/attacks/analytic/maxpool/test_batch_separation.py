"""Batches: images are told apart behind a linear layer, and come back one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.brief import brief_picture_searches
from support.elsewhere import ELSEWHERE, elsewhere
from support.pictures import LEAKY, POOLED, STEP, network, photograph
from torch import Tensor, nn

from attacks import NotApplicable, Reconstruction
from attacks.analytic.cascade import Cascade
from attacks.analytic.maxpool.batch_separation import (
    MixingProblem,
    SeparatedBatch,
    SummedGradient,
    max_separable_images,
    separate_batch,
)
from attacks.base import build
from defenses.secagg import SecAgg
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.hyperfl import HyperFL
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView


def randn(*shape: int, key: object) -> Tensor:
    return torch.randn(shape, generator=stream(0, "separate", str(key)), dtype=torch.float64)


def mixed(
    count: int, *, low: float = 0.01, gentle: float = 0.01, channels: int = 32
) -> tuple[SummedGradient, Tensor, Tensor]:
    """What the gradients of random layers say of `count` images, their inputs and their signals."""
    units, outputs = channels * 12, 64
    before = randn(count, units, key="z") + 0.5
    offset, slope, share = randn(units, key="offset") * 0.1, randn(units, key="slope").exp(), randn(channels, key="s")
    inputs = torch.where(before > 0, before, gentle * before) * slope + offset
    weight, bias = randn(outputs, units, key="w") / units**0.5, randn(outputs, key="b") * 0.1
    slopes = torch.where(inputs @ weight.mT + bias > 0, 1.0, low)
    signals = slopes * (randn(count, 10, key="p") @ randn(10, outputs, key="head"))
    back = (signals @ weight) * slope * torch.where(before > 0, 1.0, gentle)
    summed = SummedGradient(
        weight=weight,
        bias=bias,
        slope_above=low,
        gradient=signals.mT @ inputs,
        bias_gradient=signals.sum(0),
        offset=offset,
        scale=slope,
        slope_below=gentle,
        lower_bias_gradient=back.sum(0).view(channels, -1).sum(1) * share,
        lower_scale=share,
    )
    return summed, inputs, signals


@pytest.mark.parametrize("gentle", [0.01, 0.0])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_images_are_told_apart_behind_a_linear_layer(count: int, gentle: float) -> None:
    summed, inputs, signals = mixed(count, gentle=gentle)
    found = separate_batch(summed, count)
    assert found is not None
    which = torch.cdist(found.inputs, inputs).argmin(1)
    assert sorted(which.tolist()) == list(range(count))
    assert torch.allclose(found.inputs, inputs[which], atol=1e-6)
    assert torch.allclose(found.signals, signals[which], atol=1e-6)
    assert found.unexplained < 1e-6
    assert found.relative_error < 1e-6


def test_two_images_that_are_one_are_not_told_apart() -> None:
    summed, *_ = mixed(1)
    assert separate_batch(summed, 2) is None
    assert MixingProblem.of(summed, 2) is None


def test_biases_that_contradict_are_not_believed() -> None:
    summed, *_ = mixed(2)
    altered = summed.lower_bias_gradient.clone()
    altered[:3] *= 2
    assert separate_batch(replace(summed, lower_bias_gradient=altered), 2) is None


def test_an_answer_that_is_known_to_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    summed, inputs, signals = mixed(2)
    for off, there in ((1e-3, True), (2.0, False)):
        monkeypatch.setattr(MixingProblem, "refine", lambda *_, off=off: SeparatedBatch(signals, inputs, off, 0.0))
        assert (separate_batch(summed, 2) is not None) == there


def test_images_that_can_be_told_apart_grow_with_the_biases() -> None:
    assert [max_separable_images(channels) for channels in (4, 9, 10, 19, 20, 32, 64)] == [1, 1, 2, 3, 4, 5, 8]


WIDE = (nn.Conv2d(1, 32, 3, padding=1), nn.MaxPool2d(2), LEAKY)
TWO = torch.cat([photograph(14), 1 - photograph(14).transpose(2, 3)])


def seen(task: Task, images: Tensor, labels: Tensor | None = None) -> ServerView:
    labels = torch.arange(len(images)) % 3 if labels is None else labels
    batch = Batch(images.to(next(iter(task.parameters.values())).dtype), labels)
    return Federation(Client(task, replace(STEP, batch_size=None)), [ClientData(batch, batch)]).observe(0)[0]


def test_a_batch_comes_back_to_rounding_in_no_order() -> None:
    task = network(*WIDE)
    labeled = replace(seen(task, TWO), labels=torch.tensor([0, 1]))
    result, other = Cascade()(labeled), Cascade()(seen(task, TWO.flip(0), torch.tensor([1, 0])))
    for found in (result, other):
        assert isinstance(found, Reconstruction)
        assert found.inputs is not None
        assert found.verified
        assert found.fixed is not None
        assert found.fixed.shape == TWO.shape
        which = torch.cdist(found.inputs.flatten(1), TWO.flatten(1)).argmin(1)
        assert sorted(which.tolist()) == [0, 1]
        assert torch.allclose(found.inputs, TWO[which], atol=1e-5)
        assert found.labels is not None
        assert torch.equal(found.labels, which)  # image i is of class i


def test_a_batch_on_another_device_is_told_apart_on_the_cpu_and_comes_back_there() -> None:
    task = network(*WIDE)
    here = Cascade()(seen(task, TWO))
    assert isinstance(here, Reconstruction)
    with elsewhere():
        there = Cascade()(seen(task.to(device=ELSEWHERE), TWO.to(ELSEWHERE), torch.arange(2).to(ELSEWHERE)))
        assert isinstance(there, Reconstruction)
        assert there.inputs is not None
        assert there.inputs.is_meta
        assert there.verified
        assert here.inputs is not None
        assert torch.allclose(there.inputs.cpu(), here.inputs, atol=1e-6)


def test_pooling_may_come_behind_the_activation() -> None:
    result = Cascade()(seen(network(nn.Conv2d(1, 32, 3, padding=1), LEAKY, nn.MaxPool2d(2)), TWO))
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.inputs is not None
    assert torch.allclose(result.inputs.sum(0), TWO.sum(0), atol=1e-5)


def test_a_batch_behind_two_convolutions() -> None:
    chain = (nn.Conv2d(1, 16, 3), nn.MaxPool2d(2), LEAKY, nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), LEAKY)
    result = Cascade()(seen(network(*chain), TWO))
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    which = torch.cdist(result.inputs.flatten(1), TWO.flatten(1)).argmin(1)
    assert sorted(which.tolist()) == [0, 1]
    assert (result.inputs - TWO[which]).square().mean().sqrt() < 1e-2


def test_a_group_of_clients_is_a_batch() -> None:
    task = network(*WIDE)
    alone = [Batch(image[None], torch.tensor([i])) for i, image in enumerate(TWO.double())]
    run = Federation(Client(task, STEP, SecAgg(group_size=2)), [ClientData(batch, batch) for batch in alone])
    result = Cascade()(run.observe(0)[0])
    assert isinstance(result, Reconstruction)
    assert result.verified


def test_a_batch_comes_back_behind_the_peel() -> None:
    method = HyperFL(
        steps=1, head_epochs=0, batch_size=None, parametrization=Hypernetwork(embedding=8, hidden=16, init="scaled")
    )
    batch = Batch(TWO.double(), torch.tensor([0, 1]))
    view, _ = Federation(Client(network(*WIDE), method), [ClientData(batch, batch)]).observe(0)
    result = build("peel+cascade")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    which = torch.cdist(result.inputs.flatten(1), TWO.flatten(1)).argmin(1)
    assert sorted(which.tolist()) == [0, 1]
    assert torch.allclose(result.inputs, TWO[which], atol=1e-4)


def test_of_a_batch_of_another_size_the_rank_speaks() -> None:
    view = seen(network(*WIDE), torch.cat([TWO, TWO.flip(3)]))
    fewer = replace(view, batch_size=2, schedule=(((2,),),))
    result = Cascade()(fewer)
    assert isinstance(result, NotApplicable)
    assert "rank 2" in result.reason


def test_an_altered_batch_is_never_verified() -> None:
    task = network(*WIDE)
    view, other = seen(task, TWO), seen(task, 1 - TWO)
    mixed_up = {n: other.update[n] if n == "body.0.weight" else v for n, v in view.update.items()}
    with brief_picture_searches():
        result = Cascade()(replace(view, update=mixed_up))
    assert isinstance(result, Reconstruction)
    assert result.verified is False


@pytest.mark.parametrize(
    ("chain", "count", "reason"),
    [
        ((nn.Flatten(),), 2, "nothing below"),
        ((nn.Conv2d(1, 32, 3), nn.Tanh()), 2, "bend of a (leaky) ReLU"),
        ((nn.Conv2d(1, 32, 3, bias=False), LEAKY), 2, "says nothing of the bias"),
        (POOLED, 3, "12 biases of body.0 tell at most 2 images apart, not 3"),
        (WIDE, 1, ""),
        ((*WIDE, nn.Conv2d(32, 64, 3, padding=1), LEAKY), 8, "8 inputs of body.3 are 12544 numbers"),
    ],
)
def test_batches_it_cannot_tell_apart_are_refused(chain: tuple[nn.Module, ...], count: int, reason: str) -> None:
    images = torch.cat([TWO, TWO.flip(2), TWO.flip(3), TWO.flip(2, 3)])[:count]
    result = Cascade()(seen(network(*chain), images))
    assert isinstance(result, NotApplicable) == bool(reason)
    assert not isinstance(result, NotApplicable) or reason in result.reason


def test_a_step_on_some_of_the_images_is_refused() -> None:
    result = Cascade()(replace(seen(network(*WIDE), TWO), batch_size=4))
    assert isinstance(result, NotApplicable)
    assert "as many images as the step's batch has" in result.reason
