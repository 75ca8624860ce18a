"""The pictures of a run that people look at."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.utils import make_grid

from eval.run.results import write_image_grid


@pytest.mark.parametrize(("count", "channels", "columns"), [(6, 3, 3), (5, 1, 2), (2, 3, 4)])
def test_a_grid_has_torchvisions_layout(tmp_path: Path, count: int, channels: int, columns: int) -> None:
    images = torch.rand(count, channels, 96, 100, generator=torch.Generator().manual_seed(0))
    write_image_grid(images, tmp_path / "grid.png", columns)
    expected = (255 * make_grid(images, nrow=columns, pad_value=1.0) + 0.5).permute(1, 2, 0).to(torch.uint8)
    with Image.open(tmp_path / "grid.png") as grid:
        assert np.array_equal(np.asarray(grid), expected.numpy())
