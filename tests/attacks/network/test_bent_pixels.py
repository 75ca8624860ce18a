"""Functions of some numbers alone, such as a logarithm of pixels: refusals of them give that as the reason."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import nn

from attacks import NotApplicable
from attacks.analytic.rconv import RConv
from fl.capture import from_batch
from fl.seeds import stream


class Bent(nn.Module):
    """A convolution of what a function makes of pictures of 8 by 8."""

    def __init__(self, bend) -> None:
        super().__init__()
        self.bend, self.convolution, self.head = bend, nn.Conv2d(3, 24, 3, padding=1), nn.Linear(24 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.leaky_relu(self.convolution(self.bend(x))).flatten(1))


def reason(bend) -> str:
    picture = torch.rand(1, 3, 8, 8, generator=stream(0, "picture"))
    result = RConv()(from_batch(initialized(Bent(bend)).float(), picture, torch.tensor([1]))[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    return result.reason


@pytest.mark.parametrize("bend", [torch.log1p, lambda x: (x + 0.01).sqrt(), lambda x: (x + 0.01).log()])
def test_a_function_of_pixels_alone_is_not_called_no_function_of_single_numbers(bend) -> None:
    assert "treats numbers one by one, but is no activation: of some numbers it makes none" in reason(bend)


def test_what_mixes_pixels_is_not_called_so() -> None:
    assert "makes none" not in reason(lambda x: (x + 0.01).log() - x.mean().log())
    assert "makes none" not in reason(lambda x: (x - 0.5).abs())
