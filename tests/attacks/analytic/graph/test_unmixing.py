"""A batch's mixed signals are told apart by their zeros, and nothing is confirmed that is no image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.analytic.graph.sparse_unmixing import SparseUnmixing
from attacks.analytic.graph.unmixing import unmix_sparse, unmix_two_valued
from fl.seeds import stream


def randn(*shape: int, key: object) -> Tensor:
    return torch.randn(shape, generator=stream(0, "unmixing", str(key)), dtype=torch.float64)


def two_valued(
    labels: list[int], *, channels: int = 256, positions: int = 16, slope: float = 0.0, key: object = 0
) -> Tensor:
    """Signals (C, P, B) below global average pooling: images with one label send almost the same numbers."""
    count = len(labels)
    gradients = torch.nn.functional.one_hot(torch.tensor(labels), 10).double() - 0.1
    gradients = gradients + 0.01 * randn(count, 10, key=(key, "softmax"))
    gains = randn(channels, 10, key=(key, "head")) @ gradients.mT
    common = randn(channels, 1, 1, key=(key, "channel")) + 0.5 * randn(channels, positions, 1, key=(key, "place")) + 0.5
    open_ = common + randn(channels, positions, count, key=(key, "image")) > 0
    return gains[:, None] * torch.where(open_, 1.0, slope)


def sparse(rows: int, images: int, *, kind: str, key: object = 0) -> Tensor:
    """Signals or features (N, B) of a ReLU layer: about half of them zero."""
    values = randn(rows, images, key=(key, "values"))
    if kind == "features":
        return (values + 0.5 * randn(rows, 1, key=(key, "common"))).clamp_min(0)
    return values * (randn(rows, images, key=(key, "open")) > 0)


def mixed(signals: Tensor, *, noise: float = 0.0, key: object = 0) -> Tensor:
    """The signals (..., B) after an unknown mixing, with noise relative to the largest row."""
    images = signals.shape[-1]
    columns = signals @ randn(images, images, key=(key, "mixing"))
    return columns + noise * columns.norm(dim=-1).max() * randn(*columns.shape, key=(key, "noise")) / images**0.5


def relative_errors(found: Tensor, signals: Tensor) -> tuple[list[int], list[float]]:
    """For each column of what was found (..., k), the image (of (..., B)) it is nearest to and how far off it is."""
    found, signals = found.reshape(-1, found.shape[-1]), signals.reshape(-1, signals.shape[-1])
    factors = (found.mT @ signals) / found.pow(2).sum(0)[:, None]  # (k, B)
    off = (found[:, :, None] * factors - signals[:, None]).norm(dim=0) / signals.norm(dim=0)
    return off.argmin(1).tolist(), off.min(1).values.tolist()


@pytest.mark.parametrize("labels", [[3], [3, 8], [1, 1], [4, 4, 4, 9], [0, 1, 2, 3, 4, 5, 6, 6], [*range(10), 0, 0]])
def test_two_valued_signals_are_unmixed_whatever_the_labels(labels: list[int]) -> None:
    signals = two_valued(labels)
    columns = mixed(signals)
    found = unmix_two_valued(columns)
    assert found.complete
    which, off = relative_errors(columns @ found.unmixing, signals)
    assert sorted(which) == list(range(len(labels)))
    assert max(off) < 1e-9
    assert float(found.errors.max()) < 1e-6


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.3])
def test_signals_of_a_leaky_relu_are_unmixed_by_its_slope(slope: float) -> None:
    signals = two_valued([0, 1, 2, 2, 5], slope=slope)
    columns = mixed(signals)
    found = unmix_two_valued(columns, slope=slope)
    assert found.complete
    which, off = relative_errors(columns @ found.unmixing, signals)
    assert sorted(which) == list(range(5))
    assert max(off) < 1e-7


@pytest.mark.parametrize(("noise", "error"), [(1e-6, 1e-4), (1e-5, 1e-3), (1e-4, 1e-2)])
def test_noise_moves_two_valued_signals_by_little(noise: float, error: float) -> None:
    signals = two_valued([0, 1, 2, 2, 5, 7])
    columns = mixed(signals, noise=noise)
    found = unmix_two_valued(columns)
    assert found.complete
    which, off = relative_errors(columns @ found.unmixing, signals)
    assert sorted(which) == list(range(6))
    assert max(off) < error


def test_the_draws_follow_the_seed() -> None:
    columns = mixed(two_valued([0, 1, 2, 2]))
    assert torch.equal(unmix_two_valued(columns, seed=3).directions, unmix_two_valued(columns, seed=3).directions)


@pytest.mark.parametrize("images", [1, 2, 6])
def test_signals_without_two_values_are_not_confirmed(images: int) -> None:
    columns = randn(256, 16, images, key="no levels")
    found = unmix_two_valued(columns, rounds=3)
    assert not found.confirmed.any()
    assert not found.complete


def test_sparse_signals_with_arbitrary_values_do_not_pass_for_two_valued() -> None:
    columns = mixed(sparse(256 * 16, 4, kind="signals")).unflatten(0, (256, 16))
    assert not unmix_two_valued(columns, rounds=3).confirmed.any()


def test_a_single_position_tells_nothing_of_two_values() -> None:
    columns = mixed(two_valued([0, 1, 2], positions=1))
    assert not unmix_two_valued(columns, rounds=2).confirmed.any()


def test_columns_in_which_images_were_merged_are_not_confirmed_as_images() -> None:
    signals = two_valued([0, 1, 2, 3, 4])
    merged = torch.stack([signals[..., 0], signals[..., 1], signals[..., 2:].sum(-1)], -1)  # a sum of three is no image
    columns = mixed(merged)
    found = unmix_two_valued(columns, rounds=5)
    which, off = relative_errors(columns @ found.unmixing, signals)
    assert sorted(which) == [0, 1]
    assert max(off) < 1e-9


@pytest.mark.parametrize("kind", ["signals", "features"])
@pytest.mark.parametrize(("images", "noise"), [(1, 1e-6), (2, 1e-6), (8, 0), (8, 1e-6), (8, 1e-5), (16, 1e-6)])
def test_sparse_rows_are_unmixed(kind: str, images: int, noise: float) -> None:
    signals = sparse(1024, images, kind=kind)
    rows = mixed(signals, noise=noise)
    found = unmix_sparse(rows)
    assert found.complete
    which, off = relative_errors(rows @ found.unmixing, signals)
    assert sorted(which) == list(range(images))
    assert max(off) < max(300 * noise, 1e-9)


@pytest.mark.parametrize("images", [1, 3, 8])
def test_rows_without_zeros_are_not_confirmed(images: int) -> None:
    assert not unmix_sparse(randn(2048, images, key="dense"), rounds=3).confirmed.any()


def test_rows_of_merged_images_are_not_confirmed_as_images() -> None:
    signals = sparse(2048, 6, kind="signals")
    merged = torch.stack([signals[:, 0], signals[:, 1], signals[:, 2:].sum(-1)], -1)
    rows = mixed(merged, noise=1e-6)
    found = unmix_sparse(rows, rounds=5)
    which, off = relative_errors(rows @ found.unmixing, signals)
    assert sorted(which) == [0, 1]
    assert max(off) < 1e-3


@pytest.mark.parametrize("row", range(8))
def test_a_combination_that_one_row_fixes_by_chance_is_not_confirmed(row: int) -> None:
    signals = sparse(512, 16, kind="signals")
    problem = SparseUnmixing(mixed(signals, noise=1e-8), stream(0, "unmixing", "draw"))
    both = (signals[:, 0] != 0) & (signals[:, 1] != 0)
    one, other = signals[both][row, :2].tolist()
    inverse = torch.linalg.inv(randn(16, 16, key=(0, "mixing")))
    direction = torch.linalg.solve(problem.whitening, other * inverse[:, 0] - one * inverse[:, 1])  # zero in that row
    confirmed, _, _ = problem.judge_one(direction / direction.norm())
    assert not confirmed
    image = torch.linalg.solve(problem.whitening, inverse[:, 0])
    assert problem.judge_one(image / image.norm())[0]


@pytest.mark.parametrize("images", [2, 4])
def test_alike_features_are_told_apart_where_none_is_below_zero(images: int) -> None:
    common = randn(8000, 1, key="alike")
    features = (common + 0.5 * randn(8000, images, key="own")).clamp_min(0)
    rows = mixed(features, noise=1e-9)
    assert not unmix_sparse(rows).complete
    found = unmix_sparse(rows, nonnegative=True)
    assert found.complete
    which, off = relative_errors(rows @ found.unmixing, features)
    assert sorted(which) == list(range(images))
    assert max(off) < 1e-6
