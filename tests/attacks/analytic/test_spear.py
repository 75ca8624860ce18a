"""SPEAR: whole batches, exact and known to be so."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import worlds

from attacks import NotApplicable, Reconstruction
from attacks.analytic.spear import GradientFactors, Spear, _result
from attacks.update.first_linear_layer import LinearLayer, first_linear
from defenses.noise import Noise
from defenses.prune import Prune
from fl.capture import from_batch
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.models import build
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Batch, Truth
from fl.view import ServerView, ThreatModel

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def victim(
    n: int, method: Method = STEP, defense: Defense | None = None, threat: ThreatModel | None = None, **settings: object
) -> tuple[ServerView, Truth]:
    given = {"input_shape": (1, 8, 8), "widths": (48,), "normalize": True, **settings}
    dtype = given.pop("dtype", torch.float64)
    assert isinstance(dtype, torch.dtype)
    task = build("mlp", num_classes=worlds.CLASSES, **given).to(dtype=dtype)  # type: ignore[arg-type]
    data = worlds.images(n, "spear")
    data = Batch(data.inputs.to(dtype), data.labels)
    run = Federation(Client(task, method, defense or Defense()), [ClientData(data, data)])
    return run.observe(0, threat=threat)


def product_operands(view: ServerView, count: int) -> GradientFactors:
    layer = first_linear(view)
    assert isinstance(layer, LinearLayer)
    found = GradientFactors.of(layer, count)
    assert isinstance(found, GradientFactors)
    return found


def nearest(result: object, truth: Truth) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest error of each true image's best reconstruction, and which that is."""
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    distances = (truth.inputs[:, None] - result.inputs[None]).flatten(2).abs().amax(2)
    return distances.min(1)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_a_batch_comes_out_exactly(n: int) -> None:
    view, truth = victim(n)
    result = Spear()(view, seed=1)
    errors, index = nearest(result, truth)
    assert errors.max() < 1e-7
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.labels is not None
    assert torch.equal(result.labels[index], truth.labels)


@pytest.mark.parametrize("lr", [1.0, 0.01])
def test_single_precision_and_rounded_weights_are_borne(lr: float) -> None:
    view, truth = victim(4, FedAvg(lr=lr, steps=1, batch_size=None), dtype=torch.float32, widths=(64, 32))
    result = Spear()(view)
    assert nearest(result, truth)[0].max() < 1e-2
    assert isinstance(result, Reconstruction)
    assert result.verified or (lr < 1 and result.approximate)  # rounding puts pictures off by more than it explains


def test_neither_head_nor_batch_size_need_be_known() -> None:
    view, truth = victim(4, FedPer(lr=0.1, steps=1, batch_size=None), threat=ThreatModel(knows_batch_size=False))
    result = Spear()(view)
    assert nearest(result, truth)[0].max() < 1e-7
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.labels is None


def test_a_kernel_of_silent_rows_is_a_column() -> None:
    view, truth = victim(4)
    known = product_operands(view, 4)
    mean, std = view.task.normalization(truth.inputs)
    outputs = ((truth.inputs - mean) / std).flatten(1) @ known.layer.weight.mT + known.layer.bias
    silent = (outputs <= 0) | ~known.active_rows
    for column in silent:
        kernel = torch.linalg.svd(known.left[column & known.active_rows])[2][-1]
        assert torch.equal(known.zeros(kernel[None], 8)[0], column)


def test_draws_follow_the_seed_and_the_budget() -> None:
    known = product_operands(victim(5)[0], 5)
    first, again, other = (known.draw_directions(300, stream(seed, "spear")) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    poor = Spear(samples=1)(victim(7)[0])
    assert isinstance(poor, NotApplicable)
    assert "1 draws" in poor.reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"slope": 0.01}, "LeakyReLU"),
        ({"method": FedAvg(lr=0.1, steps=2)}, "one local step"),
        ({"widths": (4,)}, "as many as"),
    ],
)
def test_other_views_are_refused(settings: dict[str, object], reason: str) -> None:
    result = Spear()(victim(4, **settings)[0])  # type: ignore[arg-type]
    assert isinstance(result, NotApplicable)
    assert reason in result.reason


@pytest.mark.parametrize("defense", [Noise(std=0.1), Prune(ratio=0.9)])
def test_a_defended_update_is_never_taken_for_an_exact_one(defense: Defense) -> None:
    result = Spear(samples=20_000)(victim(4, defense=defense)[0])
    assert isinstance(result, NotApplicable) or not result.verified


@pytest.mark.parametrize("std", [1e-3, 2e-2])
def test_images_that_noise_blurs_are_not_verified(std: float) -> None:
    """Every zero is explained, yet with more noise the images are off by more than a level of 8 bits."""
    view, truth = victim(2, defense=Noise(std=std))
    layer = first_linear(view)
    assert isinstance(layer, LinearLayer)
    found = Spear(samples=5000)._search(product_operands(view, 2), stream(0, "spear"))
    assert found is not None
    assert found.is_confirmed
    mean, std_of = view.task.normalization(truth.inputs)
    true = ((truth.inputs - mean) / std_of).flatten(1)
    apart = (true[:, None] - found.inputs).square().mean(2).min(1).values.sqrt() / true.square().mean(1).sqrt()
    assert 0.5 < found.relative_error / float(apart.max()) < 2
    assert _result(layer, found).verified is (std == 1e-3)
    assert (apart.max() < 5e-3) == (std == 1e-3)


def test_some_images_of_a_batch_are_not_all() -> None:
    view, _ = victim(2)
    layer, found = first_linear(view), Spear()._search(product_operands(view, 2), stream(0, "spear"))
    assert isinstance(layer, LinearLayer)
    assert found is not None
    for count, verified in ((2, True), (None, True), (3, False)):  # of three, noise has drowned one
        assert _result(replace(layer, view=replace(view, batch_size=count)), found).verified is verified


@pytest.mark.parametrize(("size", "known", "verified"), [(1.0, False, True), (0.95, False, False), (0.95, True, False)])
def test_an_unknown_defense_may_have_changed_the_size(size: float, known: bool, verified: bool) -> None:
    """Zeros do not show it; the rest of the update does, also to a server that takes it that there is no defense."""
    view, truth = victim(2, threat=ThreatModel(knows_defense=known))
    weight = next(name for name in view.update if name.endswith("weight"))
    result = Spear()(replace(view, update={**view.update, weight: dense(view.update[weight]) * size}))
    assert isinstance(result, Reconstruction)
    assert result.objective == 0
    assert result.verified is verified
    assert bool(nearest(result, truth)[0].max() < 1e-7) is (size == 1)


@pytest.mark.skipif("HYPERLEAK_DATA" not in os.environ, reason="HYPERLEAK_DATA names no folder of data sets")
def test_real_pictures_come_out() -> None:
    data = np.load(Path(os.environ["HYPERLEAK_DATA"]) / "fashion_mnist_test.npz")
    images = torch.tensor(data["images"][:8]).permute(0, 3, 1, 2) / 255
    labels = torch.tensor(data["labels"][:8])
    task = build("mlp", num_classes=10, input_shape=(1, 28, 28))
    view, truth = from_batch(task.model, images, labels, head="head.", mean=task.mean, std=task.std)
    result = Spear()(view)
    errors, index = nearest(result, truth)
    assert -20 * math.log10(float(errors.max())) > 60
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert torch.equal(result.labels[index], labels)  # type: ignore[index]


def sparse_pictures(which: list[int]) -> torch.Tensor:
    """Pictures most of whose pixels are black, as of handwriting: these have no rounding."""
    shown = worlds.images(max(which) + 1, "sparse").inputs.float()
    return (shown * (shown > 0.7))[which]


@pytest.mark.parametrize("which", [[0, 0], [0, 0, 1], [0, 0, 1, 1]])
def test_rounding_is_no_further_picture_beside_copies(which: list[int]) -> None:
    task = build("mlp", num_classes=worlds.CLASSES, input_shape=(1, 8, 8), widths=(48,))
    view, truth = from_batch(task.model, sparse_pictures(which), torch.tensor(which), method=STEP)
    result = Spear(samples=10_000)(view)
    assert isinstance(result, Reconstruction)
    assert result.verified is True, result.note
    assert nearest(result, truth)[0].max() < 1e-3


@pytest.mark.parametrize("lr", [0.1, 0.05])
def test_copies_are_confirmed_where_the_size_of_the_update_bears_out_their_number(lr: float) -> None:
    """Half of a picture's update is that of it and one of which the network is certain."""
    task = build("mlp", num_classes=worlds.CLASSES, input_shape=(1, 8, 8), widths=(48,)).to(dtype=torch.float64)
    pictures = worlds.images(1, "spear").inputs.double()[[0, 0]]
    view, _ = from_batch(task.model, pictures, torch.tensor([1, 1]), method=FedAvg(lr=lr, steps=1, batch_size=None))
    result = Spear()(replace(view, method=STEP))
    assert isinstance(result, Reconstruction)
    assert result.verified is (True if lr == STEP.lr else None)
    assert ("how many there are" in result.note) is (lr != STEP.lr)


@pytest.mark.parametrize("labels", [[1, 1, 0], [1, 2, 0]])
def test_a_picture_that_is_there_twice_is_found_as_often(labels: list[int]) -> None:
    task = build("mlp", num_classes=worlds.CLASSES, input_shape=(1, 8, 8), widths=(48,)).to(dtype=torch.float64)
    pictures = worlds.images(2, "spear").inputs.double()[[0, 0, 1]]
    view, truth = from_batch(task.model, pictures, torch.tensor(labels))
    result = Spear()(view)
    assert isinstance(result, Reconstruction)
    assert result.verified is True, result.note
    assert result.inputs is not None
    assert result.labels is not None
    far = (truth.inputs[:, None] - result.inputs[None]).flatten(2).abs().amax(2)
    assert torch.equal((far < 1e-6).sum(1), torch.tensor([2, 2, 1]))
    assert sorted(result.labels.tolist()) == sorted(labels)
