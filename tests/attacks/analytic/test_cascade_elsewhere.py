"""Exact inversion in single precision on a made-up device: what searches and settles pixels there mixes no devices.

Updates of a small step are rounded, so that all that a picture needs is called for: levels that are open, places gone
through, linear programs, closest vectors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.elsewhere import ELSEWHERE, elsewhere
from support.pictures import LEAKY, POOLED, STEP, network, photograph
from torch import Tensor, nn

from attacks import Reconstruction
from attacks.analytic.cascade import Cascade
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.types import Batch, Task
from fl.view import ServerView

SMALL = replace(STEP, lr=0.01, batch_size=None)
TWICE = (nn.Conv2d(12, 60, 3, padding=1), nn.MaxPool2d(2), LEAKY)
WIDE = (nn.Conv2d(1, 16, 3), nn.MaxPool2d(2), LEAKY, nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), LEAKY)
PAIR = torch.cat([photograph(14), 1 - photograph(14).transpose(2, 3)])
CASES = {
    "color": (
        network(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), LEAKY, channels=3),
        (photograph(14, 3) * 255).round() / 255,
    ),
    "closed form": (network(*POOLED, *TWICE), photograph(14)),
    "two": (network(*WIDE), PAIR),
}


def seen(task: Task, images: Tensor, device: str) -> ServerView:
    """What the server sees of one step on the images, in single precision."""
    labels = torch.arange(len(images)) % 3
    batch = Batch(images.float().to(device), labels.to(device))
    client = Client(task.to(dtype=torch.float32, device=device), SMALL)
    return Federation(client, [ClientData(batch, batch)]).observe(0)[0]


@pytest.mark.parametrize("case", ["color", "closed form", pytest.param("two", marks=pytest.mark.slow)])
def test_a_picture_comes_back_where_the_view_lies(case: str) -> None:
    task, images = CASES[case]
    here = Cascade()(seen(task, images, "cpu"))
    assert isinstance(here, Reconstruction)
    with elsewhere():
        there = Cascade()(seen(task, images, ELSEWHERE))
        assert isinstance(there, Reconstruction)
        assert (there.inputs is None) == (here.inputs is None)
        if there.inputs is not None and here.inputs is not None:
            assert there.inputs.is_meta
            assert torch.allclose(there.inputs.cpu(), here.inputs, atol=1e-3)
    assert there.verified == here.verified
    assert bool(there.note) == bool(here.note)  # numbers in it are rounded otherwise
