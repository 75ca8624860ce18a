from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same
from torch import Tensor

from attacks.base import Reconstruction, build
from attacks.gradient_matching.engine.problem import INPUTS, MatchingProblem
from attacks.labels.recovery import fixed_labels
from defenses.compose import Chain
from defenses.instahide import InstaHide
from defenses.mixup import Mixup
from defenses.noise import Noise
from eval.metrics.score import score
from fl.data.partitions.label_skew import dirichlet
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.types import Batch
from fl.view import ThreatModel

TASK = worlds.task()
BATCH = worlds.images(6)
STEP = FedAvg(lr=1.0, steps=1, batch_size=None)


def naive(batch: Batch, members: list[list[int]], shares: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Blends, image by image."""
    inputs, labels = torch.zeros_like(batch.inputs), torch.zeros(len(batch), worlds.CLASSES, dtype=torch.float64)
    for i, (row, part) in enumerate(zip(members, shares, strict=True)):
        for j, share in zip(row, part, strict=True):
            inputs[i] += share * batch.inputs[j]
            labels[i, batch.labels[j]] += share
    return inputs, labels


@pytest.mark.parametrize("alpha", [0.1, 1.0, 8.0])
def test_a_batch_is_blended_with_a_random_order_of_itself(alpha: float) -> None:
    mixed = Mixup(alpha=alpha).transform_batch(BATCH, TASK, stream(3))
    draw = stream(3)
    share = float(dirichlet(np.full(2, alpha), 1, draw)[0, 0])
    partner = torch.randperm(6, generator=draw).tolist()
    inputs, labels = naive(BATCH, [[i, j] for i, j in enumerate(partner)], [[share, 1 - share]] * 6)
    assert_near({"x": mixed.inputs, "y": mixed.labels}, {"x": inputs, "y": labels}, 1e-12)
    assert 0 < share < 1


def test_instahide_blends_several_and_turns_pixels_over() -> None:
    defense = InstaHide(k=3, upper=0.5)
    mixed = defense.transform_batch(BATCH, TASK, stream(3))
    draw = stream(3)
    others = [torch.randperm(6, generator=draw).tolist() for _ in range(2)]
    shares = []
    for _ in range(6):
        part = [1.0]
        while max(part) > 0.5:
            sizes = torch.randn(3, generator=draw, dtype=torch.float64).abs().tolist()
            part = [size / sum(sizes) for size in sizes]
        shares.append(part)
    inputs, labels = naive(BATCH, [[i, *(order[i] for order in others)] for i in range(6)], shares)
    assert_near({"y": mixed.labels}, {"y": labels}, 1e-12)
    assert_near({"x": (2 * mixed.inputs - 1).abs()}, {"x": (2 * inputs - 1).abs()}, 1e-12)  # all that signs hide
    turned = (mixed.inputs - inputs).abs() > 1e-9
    assert 0.4 < float(turned.double().mean()) < 0.6
    assert torch.allclose(mixed.inputs[turned], 1 - inputs[turned])


@pytest.mark.parametrize("defense", [Mixup(), InstaHide()], ids=lambda d: d.name)
def test_labels_are_probabilities_and_pixels_stay_in_their_box(defense: Defense) -> None:
    mixed = defense.transform_batch(BATCH, TASK, stream(0))
    assert torch.allclose(mixed.labels.sum(1), torch.ones(6, dtype=torch.float64))
    assert 0 <= float(mixed.inputs.min()) <= float(mixed.inputs.max()) <= 1
    twice = defense.transform_batch(mixed, TASK, stream(1))  # of blends, as in a chain
    assert torch.allclose(twice.labels.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Chain(parts=(d, Noise(std=0.0)))], ids=["alone", "chain"])
@pytest.mark.parametrize("defense", [Mixup(), InstaHide()], ids=lambda d: d.name)
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_is_what_was_fed(method: Any, defense: Defense, wrap: Any) -> None:
    view, truth = worlds.federation(method, wrap(defense)).observe(1)
    assert truth.labels.shape == (len(truth.inputs), worlds.CLASSES)
    assert_same(predict(view, truth.candidate()), view.update)


def test_a_batch_of_one_is_not_defended_by_mixup() -> None:
    one = BATCH.take(torch.tensor([2]))
    mixed = Mixup().transform_batch(one, TASK, stream(0))
    assert torch.allclose(mixed.inputs, one.inputs)
    assert Mixup(alpha=0.0).transform_batch(BATCH, TASK, stream(0)) is BATCH


@pytest.mark.parametrize("defense", [Mixup(), InstaHide()], ids=lambda d: d.name)
def test_no_label_is_taken_as_certain_by_an_attacker_who_knows(defense: Defense) -> None:
    run = worlds.federation(STEP, defense)
    view, truth = run.observe(1)
    assert fixed_labels(view, "auto") is None
    result = build({"name": "ig", "iterations": 5})(view)
    assert isinstance(result, Reconstruction)
    assert result.labels is not None
    rows = score(result, truth)
    assert [row["label"] for row in rows] == truth.labels.argmax(1).tolist()
    unaware, _ = run.observe(1, threat=ThreatModel(knows_defense=False))
    found = fixed_labels(unaware, "auto")
    assert found is not None
    assert found.dtype == torch.int64
    told, truth = run.observe(1, threat=ThreatModel(knows_labels=True))
    assert told.labels is not None
    assert torch.equal(told.labels, truth.labels)
    assert isinstance(build({"name": "ig", "iterations": 5})(told), Reconstruction)


def test_whole_labels_do_not_explain_an_update_of_blends() -> None:
    """Why the attacker searches for probabilities: even the true images miss the update without them."""
    view, truth = worlds.federation(STEP, Mixup(alpha=8.0)).observe(1)
    index = truth.trace.order[0][0][0]
    left = []
    for labels in (truth.labels, truth.labels.argmax(1)):
        problem = MatchingProblem(view, labels[index], "l2")
        with torch.no_grad():
            value = problem.value({INPUTS: truth.inputs[index]}, problem.constants, view.client, vmapped=False)
        left.append(float(value))
    assert left[0] < 1e-20
    assert left[1] > 1e-2


def test_settings_are_checked() -> None:
    for build_, words in (
        (lambda: Mixup(alpha=-1.0), "alpha: expected a (whole )?number >= 0, got -1"),
        (lambda: InstaHide(k=1), "k: expected a (whole )?number >= 2, got 1"),
        (lambda: InstaHide(upper=0.2), r"expected upper in \(1 / 4, 1\], got 0.2"),
    ):
        with pytest.raises(ValueError, match=words):
            build_()
