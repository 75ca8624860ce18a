"""Features that are fewer than a picture's numbers lead to a smooth picture that meets them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacks.analytic.graph import smooth_search
from attacks.analytic.graph.feature_inversion import InversionSettings, invert_features
from attacks.analytic.graph.feature_residuals import FeatureProblem, FeatureTarget
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.smooth_search import (
    STEPS,
    are_too_few,
    count_missing_numbers,
    count_moving_numbers,
    nearest_features,
    search_smooth_pictures,
)
from attacks.analytic.graph.solver import SolvedTensor
from attacks.network.operation_trace import Ref
from fl.seeds import stream
from tests.attacks.analytic.graph.test_output_equations import World


def picture() -> Tensor:
    """A smooth picture (1, 3, 16, 16) with an edge."""
    across = torch.linspace(0.2, 0.8, 16, dtype=torch.float64)
    gray = across[None, :] * across[:, None] + 0.3 * (across > 0.5)[None, :]
    return gray.clamp(0, 1).expand(1, 3, 16, 16).contiguous()


def test_few_features_of_a_smooth_picture_lead_near_it() -> None:
    weight = torch.randn(24, 3, 4, 4, generator=stream(0, "filters"), dtype=torch.float64)

    def forward(images: Tensor) -> list[Tensor]:
        return [functional.conv2d(images, weight.to(images), stride=4)]  # half as many features as numbers

    given = picture()
    targets = [FeatureTarget(forward(given)[0])]
    assert count_missing_numbers(targets, 768) == 384
    found = search_smooth_pictures(forward, forward, targets, given.shape, 0)
    assert not bool(found.converged.any())
    plain = invert_features(
        forward, targets, given.shape, settings=InversionSettings(restarts=0, roughness=0.0), single_forward=forward
    )
    off, plain_off = (float((images - given).square().mean()) for images in (found.images, plain.images))
    assert off < 1e-3  # 30 dB
    assert off < plain_off / 10


def test_all_features_count_alike() -> None:
    """What guides other searches, and counts for nothing at their end, goes along here."""
    values = picture()

    def forward(images: Tensor) -> list[Tensor]:
        return [images[..., ::2], images[..., 1::2]]

    first, second = forward(values)
    targets = [FeatureTarget(first), FeatureTarget(second, use="guide")]
    assert count_missing_numbers(targets, 768) == 384
    assert count_missing_numbers([replace(target, use="equations") for target in targets], 768) == 0
    found = search_smooth_pictures(forward, forward, targets, values.shape, 0)
    assert float((found.images - values).abs().max()) < 0.02
    assert found.steps.tolist() == [STEPS]


def test_a_search_whose_time_is_up_says_how_many_steps_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth_search, "search_seconds", lambda _shape: 0.0)
    values = picture()
    found = search_smooth_pictures(lambda x: [x], lambda x: [x], [FeatureTarget(values)], values.shape, 0)
    assert int(found.steps.max()) < STEPS / 100


def test_what_has_no_part_goes_along_nowhere() -> None:
    values = picture()
    problem = FeatureProblem.of(lambda x: [x], None, [FeatureTarget(values, use="none"), FeatureTarget(values)])
    assert [target.share for target in problem.of_first_targets(1e9).targets] == [0.0, 1.0]
    guided = [FeatureTarget(values, use="guide"), FeatureTarget(values)]
    assert FeatureProblem.of(lambda x: [x], None, guided).size == 1.0
    assert [target.share for target in FeatureProblem.of(lambda x: [x], None, guided).of_first_targets(1).targets] == [
        1,
        0,
    ]


def test_features_are_too_few_where_they_leave_more_than_a_tenth_open() -> None:
    """Zeros of a ReLU count as none, however many bounds they are."""
    for count, too_few in ((680, True), (700, False), (768, False)):
        value = torch.zeros(1, 2000)
        value[0, :count] = 1.0
        missing = count_missing_numbers([FeatureTarget(value, rectified=True)], 768)
        assert are_too_few(missing, 768) == too_few


def test_pixels_that_a_stride_passes_over_move_no_features() -> None:
    weight = torch.randn(8, 3, 1, 1, generator=stream(0, "filters"))

    def forward(images: Tensor) -> list[Tensor]:
        return [functional.conv2d(images, weight, stride=2)]

    assert count_moving_numbers(forward, (3, 16, 16), torch.device("cpu"), 0) == 3 * 8 * 8


def solved(network: NetworkGraph, number: int) -> SolvedTensor:
    return SolvedTensor(Ref(number), network.graph.value(Ref(number)), 0.0, True, ())


def test_features_that_follow_from_others_are_left_out() -> None:
    network = World(1).network
    stem, inner, top = (solved(network, number) for number in sorted(network.activations))
    assert nearest_features(network, [inner, top]) == [inner, top]  # a shortcut leads past the first
    assert nearest_features(network, [stem, inner, top]) == [stem]
    assert nearest_features(network, [top]) == [top]
