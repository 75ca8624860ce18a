"""Exact attacks behind the filters of NVFlare and Flower: what they call verified is right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, Result, build
from defenses import defenses
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Truth
from fl.view import ServerView, ThreatModel

UPDATES = 24
HALF_A_LEVEL = 0.5 / 255
FILTERS: dict[str, dict[str, Any]] = {
    "percentile": {"name": "nvflare-percentile"},
    "percentile, half": {"name": "nvflare-percentile", "percentile": 50.0, "gamma": 1.0},
    "percentile, cut to signs": {"name": "nvflare-percentile", "percentile": 0.0, "gamma": 1e-3},
    "svt": {"name": "nvflare-svt"},
    "svt, little noise": {"name": "nvflare-svt", "fraction": 0.5, "epsilon": 1e6, "noise_var": 1e6, "gamma": 1.0},
    "local dp": {"name": "flower-local-dp"},
    "local dp, little noise": {"name": "flower-local-dp", "sensitivity": 1e-5, "epsilon": 10.0},
    "fixed clipping": {"name": "flower-fixed-clipping", "clipping_norm": 0.01},
    "adaptive clipping": {"name": "flower-adaptive-clipping"},
    "no biases": {"name": "nvflare-exclude-vars", "pattern": "bias$"},
}


def network(number: int) -> nn.Module:
    """In turn a perceptron, one layer of two outputs, whose gradient has rank one whatever it is, and a convolution."""
    layers = (
        [nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 10)],
        [nn.Flatten(), nn.Linear(48, 2)],
        [
            nn.Conv2d(3, 12, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            nn.Linear(192, 8),
            nn.ReLU(),
            nn.Linear(8, 4),
        ],
    )[number % 3]
    draw = stream(number, "network")
    for layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            for value in (layer.weight, layer.bias):
                assert value is not None
                nn.init.uniform_(value, -(layer.weight[0].numel() ** -0.5), layer.weight[0].numel() ** -0.5, draw)
    return nn.Sequential(*layers)


def victim(number: int, filter_: str, *, known: bool = True) -> tuple[ServerView, Truth]:
    """One step on one picture of 8-bit pixels."""
    pixels = torch.randint(256, (1, 3, 4, 4), generator=stream(number, "pixels")) / 255
    return from_batch(
        network(number),
        pixels,
        torch.tensor([number % 2]),
        seed=number,
        method=FedAvg(lr=0.1, steps=1),
        defense=defenses.build(FILTERS[filter_]),
        threat=ThreatModel(knows_defense=known),
    )


def results(filter_: str, attack: str, *, known: bool = True) -> Iterator[tuple[Result, Truth, int]]:
    for number in range(UPDATES):
        view, truth = victim(number, filter_, known=known)
        yield build(attack)(view), truth, number


def claimed_errors(result: Result, truth: Truth) -> Tensor:
    """How far the pixels are off that a result says are right; none of those that claim none."""
    if not isinstance(result, Reconstruction) or result.inputs is None:
        return torch.zeros(1)
    off = (result.inputs - truth.inputs).abs()
    if result.verified:
        return off
    return off[result.fixed] if result.fixed is not None else torch.zeros(1)


OFTEN = {("analytic", "percentile", True), ("analytic", "percentile, half", False)}
CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
    for case in itertools.product(("analytic", "cascade", "rconv"), FILTERS, (True, False))
]


@pytest.mark.parametrize(("attack", "filter_", "known"), CASES)
def test_what_is_verified_is_right(attack: str, filter_: str, known: bool) -> None:
    for result, truth, number in results(filter_, attack, known=known):
        assert float(claimed_errors(result, truth).max()) < HALF_A_LEVEL, number


@pytest.mark.slow
@pytest.mark.parametrize("filter_", FILTERS)
def test_verified_features_are_right(filter_: str) -> None:
    for number in range(2, UPDATES, 3):
        view, truth = victim(number, filter_)
        result = build("analytic")(view)
        if isinstance(result, Reconstruction) and result.verified:
            with torch.no_grad():
                right = network(number)[:3](truth.inputs)
            off = float((dense(result.private["features"]) - right).norm() / right.norm())
            assert off < 2e-3, number


def test_clipping_hides_nothing_and_a_percentile_little() -> None:
    for filter_ in ("fixed clipping", "adaptive clipping", "percentile"):
        found = [build("analytic")(victim(number, filter_)[0]) for number in range(0, UPDATES, 3)]
        assert all(isinstance(result, Reconstruction) for result in found)
        solved = [
            bool(result.verified) or _most_fixed(result) for result in found if isinstance(result, Reconstruction)
        ]
        assert sum(solved) >= 7, filter_


def _most_fixed(result: Reconstruction) -> bool:
    return result.fixed is not None and float(result.fixed.double().mean()) > 0.9


def test_part_of_the_pixels_is_said_to_follow() -> None:
    parts = 0
    for result, _, number in results("percentile, half", "analytic"):
        if number % 3 or not isinstance(result, Reconstruction) or result.fixed is None:
            continue
        parts += 1
        assert 0 < float(result.fixed.double().mean()) < 1
        assert f"{int(result.fixed.sum())} of 48 numbers" in result.note
    assert parts


def test_features_that_are_zero_follow_from_a_narrow_gap() -> None:
    """Behind a ReLU half of them are: no number of theirs is sent, and next to nothing is what they can have been."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 4))
    for value in net.parameters():
        nn.init.uniform_(value, -0.1, 0.1, stream(2, str(tuple(value.shape))))
    pixels = torch.rand(1, 192, 1, 1, generator=stream(2, "features"))
    pixels[:, ::2] = 0
    for percentile, verified in ((10.0, True), (80.0, False)):
        defense = defenses.build({"name": "nvflare-percentile", "percentile": percentile, "gamma": 10.0})
        view, truth = from_batch(net, pixels, torch.tensor([1]), method=FedAvg(lr=0.1, steps=1), defense=defense)
        result = build("analytic")(view)
        assert isinstance(result, Reconstruction)
        assert bool(result.verified) is verified
        assert float(claimed_errors(result, truth).max()) < HALF_A_LEVEL


@pytest.mark.parametrize(
    ("filter_", "reason"),
    [("percentile", "has cut or altered"), ("svt", "leaves no ratio"), ("no biases", "with a bias")],
)
def test_refusals_name_the_filters_doing(filter_: str, reason: str) -> None:
    result = build("cascade")(victim(0, filter_)[0])
    assert isinstance(result, NotApplicable)
    assert reason in result.reason


def test_noise_that_a_layer_of_two_outputs_can_not_show_is_reckoned_with() -> None:
    """Its gradient is d x^T and -d x^T but for noise, which a fit of rank one takes up in part."""
    for number in range(1, UPDATES, 3):
        plain, noisy = (victim(number, filter_)[0] for filter_ in ("fixed clipping", "local dp, little noise"))
        analytic = build("analytic")
        assert isinstance(sure := analytic(plain), Reconstruction)
        assert sure.verified
        assert isinstance(unsure := analytic(noisy), Reconstruction)
        size = float(dense(noisy.update["1.bias"]).norm())
        if defenses.build(FILTERS["local dp, little noise"]).noise_std(noisy.update)["1.bias"] / size > 1e-3:
            assert not unsure.verified


@pytest.mark.parametrize(
    ("attack", "settings", "reason"),
    [
        ("analytic", {"fraction": 0.5}, "the defense left out numbers of '1': of several images the attack asks"),
        ("spear", {"fraction": 0.7, "replace": False}, "the defense nvflare-svt left out numbers of '1': "),
        ("rconv", {"fraction": 0.5}, "by no 4 images, of which the defense nvflare-svt left out numbers"),
        ("analytic", {"fraction": 1.0, "replace": False}, "as the defense nvflare-svt changes the update, so no image"),
    ],
)
def test_refusals_of_several_images_name_the_filter_and_not_the_network(
    attack: str, settings: dict[str, Any], reason: str
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (net[1], net[3]):
        for value in layer.parameters():
            nn.init.uniform_(value, -(layer.in_features**-0.5), layer.in_features**-0.5, stream(0, f"{value.shape}"))
    pixels, labels = torch.rand(4, 1, 8, 8, generator=stream(0, "four")), torch.arange(4)
    if attack == "spear":  # which reads all four where nothing is left out
        assert isinstance(whole := build(attack)(from_batch(net, pixels, labels)[0]), Reconstruction)
        assert whole.verified
    defense = defenses.build({"name": "nvflare-svt", "epsilon": 1e6, "noise_var": 1e6, "gamma": 1.0, **settings})
    few: Any = {"name": "spear", "samples": 20_000} if attack == "spear" else attack
    result = build(few)(from_batch(net, pixels, labels, defense=defense)[0])
    assert isinstance(result, NotApplicable)
    assert reason in result.reason
