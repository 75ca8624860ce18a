"""An update is attacked alike in whatever unit it comes, as far as its type holds the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import chains
from torch import nn

from attacks.base import Reconstruction, build
from attacks.gradient_matching.engine.objectives import normalize
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.verification.confirmation import confirm
from fl.capture import from_batch
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, Term, dense, norm
from fl.view import ServerView

IMAGE = torch.rand(1, 1, 8, 8, generator=stream(0, "image")).double()


def view(dtype: torch.dtype, size: float, *, bias: bool = True) -> ServerView:
    """What a chain of layers without pooling sends of one image, as a gradient by itself, times `size`."""
    layers = (nn.Conv2d(1, 12, 3, padding=1, bias=bias), nn.LeakyReLU(0.2), nn.Flatten())
    dense_layers = (nn.Linear(768, 20, bias=bias), nn.LeakyReLU(0.2), nn.Linear(20, 5, bias=bias))
    model = chains.initialized(nn.Sequential(*layers, *dense_layers)).to(dtype)
    seen = from_batch(model, IMAGE.to(dtype), torch.tensor([1]))[0]
    moved = {n: (dense(v).double() * size).to(dtype) for n, v in seen.update.items()}
    return replace(seen, update=moved, rounded=False)


@pytest.mark.parametrize("attack", ["ig", "headless+ig", "surrogate+ig"])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, x) for x in (1e-10, 1e-30, 1e-40, 1e37)]
    + [(torch.float64, x) for x in (1e-200, 1e-310, 1e200, 1e300)],
)
def test_a_search_for_a_direction_goes_the_same_way(attack: str, dtype: torch.dtype, size: float) -> None:
    search = build({"name": attack, "iterations": 20})
    usual, other = search(view(dtype, 1.0)), search(view(dtype, size))
    assert isinstance(usual, Reconstruction)
    assert isinstance(other, Reconstruction), other
    assert usual.inputs is not None
    assert other.inputs is not None
    assert float((usual.inputs - other.inputs).abs().max()) < 1e-2  # of a few bits each number has below 1e-38
    assert other.objective == pytest.approx(usual.objective, rel=1e-3)


@pytest.mark.parametrize("size", [1e-310, 1e-200, 1.0, 1e200, 1e300])
def test_a_picture_that_is_off_is_not_verified_whatever_the_size(size: float) -> None:
    off = IMAGE + 0.01 * torch.randn(IMAGE.shape, generator=stream(1, "off"), dtype=torch.float64)
    seen = view(torch.float64, size)
    right, wrong = (
        confirm(seen, Reconstruction(inputs=one, labels=torch.tensor([1]), verified=True)) for one in (IMAGE, off)
    )
    assert right.verified
    assert not wrong.verified


@pytest.mark.parametrize("attack", ["rgap", "rconv", "cascade"])
@pytest.mark.parametrize("size", [1e-310, 1e-200, 1e200, 1e300])
def test_a_layerwise_inversion_is_as_exact(attack: str, size: float) -> None:
    found = build(attack)(view(torch.float64, size))
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert found.inputs is not None
    assert float((found.inputs - IMAGE).abs().max()) < 1e-9
    assert found.objective < 1e-9


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_without_biases_a_size_that_no_logits_have_is_no_answer(size: float) -> None:
    found = build("rgap")(view(torch.float64, size, bias=False))
    assert not isinstance(found, Reconstruction) or not found.verified


@pytest.mark.parametrize("size", [0.0, 1e-310, 3.0, 1e300])
def test_a_unit_changes_no_digit(size: float) -> None:
    whole = LowRank(None, 0.0, (Term(size, torch.ones(1, 2).double(), torch.ones(1, 3).double()),), (2, 3))
    given: Tensors = {"a": torch.tensor([0.5, -1.0, 0.0]).double() * size, "b": whole}
    found, unit = rescale_to_unit(given)
    assert unit == 1 if size == 0 else 1 <= float(norm(found)) < 10
    for name, value in given.items():
        assert torch.equal(dense(found[name]) * unit, dense(value))


def test_the_direction_of_zeros_is_zero() -> None:
    for odd in (float("nan"), float("inf")):
        assert not bool(dense(normalize({"a": torch.tensor([odd, 1.0])})[0]["a"]).isfinite().all())
    found, _ = normalize({"a": torch.zeros(3)})
    assert torch.equal(dense(found["a"]), torch.zeros(3))
