"""By which rule numbers of an update were left out, and whether the others are as they were."""

from __future__ import annotations

import pytest
import torch
from support import worlds
from torch import Tensor

from attacks.update.sparsification import are_smallest_left_out, least_products, only_leaves_out
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.noise import Noise
from defenses.nvflare_percentile import NVFlarePercentile
from defenses.prune import Prune
from defenses.qsgd import QSGD
from defenses.quantize import Quantize
from defenses.signsgd import SignSGD
from fl.defense import Defense
from fl.methods.fedavg import FedAvg
from fl.seeds import stream


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(sum(shape), "unsent"), dtype=torch.float64)


def mask(share: float, *shape: int) -> Tensor:
    return torch.rand(shape, generator=stream(sum(shape), "mask")) < share


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_small_numbers_that_are_missing_are_told_from_random_ones(share: float) -> None:
    numbers, few = noise(20_000), noise(40)
    assert not are_smallest_left_out([numbers[mask(share, 20_000)], few])
    assert are_smallest_left_out([numbers[numbers.abs() > numbers.abs().quantile(share)], few])
    assert not are_smallest_left_out([few])


ALTERING = [
    QSGD(),
    Quantize(bits=8),
    Quantize(format="float16"),
    SignSGD(),
    Noise(std=1e-3),
    Clip(max_norm=1.0),
    NVFlarePercentile(),
    Chain(parts=(Prune(), Clip(max_norm=1.0))),
]


@pytest.mark.parametrize("defense", [Prune(), Prune(keep="random"), Prune(scope="global", ratio=0.5)], ids=str)
def test_masks_leave_what_they_send_as_it_was(defense: Defense) -> None:
    view = worlds.federation(FedAvg(lr=1.0, steps=1, batch_size=None), defense).observe(1)[0]
    assert only_leaves_out(view, ["head.weight", "head.bias"])
    assert not only_leaves_out(view, ["head.weight", "none.bias"])


@pytest.mark.parametrize("defense", ALTERING, ids=str)
def test_other_defenses_change_what_they_send(defense: Defense) -> None:
    view = worlds.federation(FedAvg(lr=1.0, steps=1, batch_size=None), defense).observe(1)[0]
    assert not only_leaves_out(view, ["head.weight", "head.bias"])


@pytest.mark.parametrize("examples", [1, 3, 6])
def test_no_more_products_are_told_than_there_are(examples: int) -> None:
    draw = stream(examples, "products")
    left, right = (torch.rand(side, examples, generator=draw) * (torch.rand(side, examples, generator=draw) < 0.6)
                   for side in (40, 90))  # fmt: skip
    moved = left @ right.mT != 0
    assert 1 <= least_products(moved, 1000) <= examples
    random = torch.rand(40, 90, generator=draw) < 0.2
    assert least_products(random & moved, 1000) > 2 * examples
    assert least_products(random, 4) == 5
