"""Pictures of whole levels on the lines through found ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.verification.level_lines import pictures_on_lines
from fl.seeds import stream


def picture(seed: int) -> Tensor:
    return torch.randint(30, 220, (1, 3, 6, 6), generator=stream(seed, "levels")).double() / 255


def of_two_levels(seed: int, dark: int, bright: int) -> Tensor:
    return torch.where(picture(seed) > 0.5, bright, dark).double() / 255


def of_other_contrast(image: Tensor, gray: float) -> Tensor:
    """Three pictures of the same features but for contrast."""
    return torch.stack([gray + factor * (image - gray) for factor in (0.9, 1.02, 1.1)])


@pytest.mark.parametrize("seed", range(5))
def test_no_other_contrast_of_a_picture_is_at_whole_levels(seed: int) -> None:
    image = picture(seed)
    assert pictures_on_lines(image, of_other_contrast(image, 0.48)) == []


def test_other_contrasts_of_two_levels_are_at_whole_levels() -> None:
    image = of_two_levels(0, 100, 140)
    found = pictures_on_lines(image, of_other_contrast(image, 120 / 255))
    assert found is not None
    for dark in (0, 99, 101, 120, 240):  # negatives too, and none beyond the range
        wanted = of_two_levels(0, dark, 240 - dark)
        assert any(torch.equal((255 * other).round(), (255 * wanted).round()) for other in found), dark
    assert len(found) == 240


def test_pictures_off_the_line_leave_it_undecided() -> None:
    image = picture(1)
    others = of_other_contrast(image, 0.48)
    others[1, 0, 0, 0, 0] += 0.05 / 255
    assert pictures_on_lines(image, others) is None


def test_each_picture_of_a_batch_has_a_line_of_its_own() -> None:
    images = torch.cat([picture(2), of_two_levels(3, 100, 139)])
    found = pictures_on_lines(images, of_other_contrast(images, 119.5 / 255))
    assert found is not None
    changed = [other for other in found if not torch.equal((255 * other[0]).round(), (255 * images[0]).round())]
    assert len(found) - len(changed) == 239  # all of the second one's
    (negative,) = changed
    assert torch.allclose(255 * negative[0], 239 - 255 * images[0])
