"""What attacks of one's own hand back: refused by name where it fits no view, doubted where nobody can ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support import worlds
from torch import Tensor

from attacks.base import Attack, run_checked
from attacks.result import Reconstruction, Result
from fl.capture import from_batch
from fl.types import Truth
from fl.view import ServerView

TRUE = worlds.images(1, "result checks")


@dataclass(frozen=True, kw_only=True)
class Returns(Attack):
    """Returns what a function makes."""

    name: ClassVar[str] = "returns"

    made: Callable[[], Reconstruction]

    def attack_view(self, view: ServerView, seed: int) -> Result:
        return self.made()


def _captured() -> tuple[ServerView, Truth]:
    return from_batch(worlds.flat().model, TRUE.inputs, TRUE.labels)


def _run(inputs: Tensor | None, labels: Tensor | None = None, *, verified: bool | None = True) -> Reconstruction:
    attack = Returns(made=lambda: Reconstruction(inputs=inputs, labels=labels, verified=verified))
    (found,) = run_checked(attack, [_captured()[0]], [0])
    assert isinstance(found, Reconstruction)
    return found


def test_the_true_image_is_confirmed() -> None:
    assert _run(TRUE.inputs).verified


@pytest.mark.parametrize(
    ("inputs", "labels", "said"),
    [
        (torch.zeros(1, 3, 8, 8), None, r"inputs of attack 'returns' in the shape \(N, 1, 8, 8\), got \(1, 3, 8, 8\)"),
        (torch.zeros(1, 8, 8), None, r"in the shape \(N, 1, 8, 8\), got \(1, 8, 8\)"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), None, r"floating-point numbers in \[0, 1\], got torch.uint8"),
        (TRUE.inputs, torch.tensor([1.0]), r"labels of attack 'returns' as int64 \(N,\).*got torch.float32"),
        (TRUE.inputs, torch.tensor(1), r"labels of attack 'returns' as int64 \(N,\), got \(\)"),
        (TRUE.inputs, torch.tensor([99]), r"labels of attack 'returns' in \[0, 3\), got 99 to 99"),
    ],
)
def test_what_fits_no_view_is_refused_by_name(inputs: Tensor, labels: Tensor | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _run(inputs, labels)


@pytest.mark.parametrize("others", [torch.zeros(1, 1, 8, 8), torch.ones(3, 1, 8, 8)])
def test_more_images_than_the_update_is_of_are_not_confirmed(others: Tensor) -> None:
    found = _run(torch.cat([others.double(), TRUE.inputs]))
    assert found.verified is None
    assert f"{len(others) + 1} images for an update of 1" in found.note


def test_images_without_numbers_are_not_confirmed() -> None:
    found = _run(torch.full_like(TRUE.inputs, torch.nan))
    assert found.verified is False
    assert "not finite" in found.note
