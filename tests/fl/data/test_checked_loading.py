"""Data sets of one's own: what they return is refused by name where nothing could be made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fl.data import Dataset, Groups, Source, checked_loading
from fl.data.checked_loading import load_checked
from fl.seeds import stream
from fl.types import Batch

IMAGES = torch.rand(6, 1, 40, 24, generator=stream(0, "own data"))
LABELS = torch.arange(6) % 3


@dataclass(frozen=True, kw_only=True)
class Own(Source):
    """Loads what a function makes."""

    name: ClassVar[str] = "own"

    made: Callable[[], object]

    def load(self) -> Dataset:
        return self.made()  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(checked_loading.datasets), "spec", lambda self, source: {"name": source.name})


def of(inputs: Tensor = IMAGES, labels: Tensor = LABELS, test: Tensor = IMAGES) -> Dataset:
    return Dataset(Batch(inputs, labels), Batch(test, LABELS), "own", ("a", "b", "c"), "made up")


def test_images_of_any_size_are_taken() -> None:
    assert load_checked(Own(made=of)).input_shape == (1, 40, 24)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: of((255 * IMAGES).byte()), r"train: expected inputs \(N, C, H, W\) .*got torch.uint8"),
        (lambda: of(IMAGES[:, 0]), r"train: expected inputs \(N, C, H, W\) .*\(6, 40, 24\)"),
        (lambda: of(255 * IMAGES), r"train: expected pixels in \[0, 1\], got .* to 25"),
        (lambda: of(torch.full_like(IMAGES, torch.nan)), r"train: expected pixels in \[0, 1\], got nan"),
        (lambda: of(labels=LABELS.float()), r"train: expected labels int64 \(6,\), got torch.float32"),
        (lambda: of(labels=LABELS[:-1]), r"train: expected labels int64 \(6,\), got torch.int64 \(5,\)"),
        (lambda: of(labels=LABELS + 5), r"train: expected labels in \[0, 3\), one for each of class_names, got 5 to 7"),
        (lambda: of(IMAGES[:0], LABELS[:0]), "train: expected images, got none"),
        (lambda: of(test=IMAGES[..., :20]), r"expected test images of shape \(1, 40, 24\) .*got \(1, 40, 20\)"),
        (lambda: of(IMAGES.double()), r"train: expected pixels in torch.float32, got torch.float64; give inputs.float"),
        (lambda: of(IMAGES.clone().requires_grad_()), r"train: expected images without a gradient; give inputs.detach"),
        (lambda: of(IMAGES.numpy()), r"train: expected tensors, got ndarray; torch.as_tensor"),
        (lambda: replace(of(), train=(IMAGES, LABELS)), r"train: expected a Batch\(inputs, labels\), got tuple"),
        (lambda: replace(of(), class_names=None), "expected class_names as a tuple of words, got NoneType"),
        (
            lambda: replace(of(), groups=Groups(LABELS[:2], LABELS, ("x", "y", "z"))),
            r"train: expected groups int64 \(6,\), one for each image, got \(2,\)",
        ),
        (
            lambda: replace(of(), groups=Groups(LABELS[:0], LABELS, ("x", "y", "z"))),
            r"train: .*one for each image, got \(0,\)",
        ),
        (
            lambda: replace(of(), groups=Groups(LABELS, LABELS, ("x",))),
            r"train: expected groups in \[0, 1\).*got 0 to 2",
        ),
        (lambda: None, "expected load.* to return a Dataset, got NoneType"),
        (lambda: {}["nowhere"], r"load\(\) raised KeyError: 'nowhere' \(test_checked_loading.py, line \d+\)"),
    ],
)
def test_what_is_no_data_set_is_refused_by_name(made: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"data set 'own': {said}"):
        load_checked(Own(made=made))
