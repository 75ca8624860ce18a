"""Models that take channels last or pixels as bytes: the hint, taken literally, ends in an audit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import hyperleak

PIXELS = torch.randint(0, 256, (1, 4, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABEL = torch.tensor([1])
HINT = re.compile(r"model\.register_forward_pre_hook\(lambda module, inputs: \(.*?,\)\)")
SETTINGS = {"method": {"name": "fedavg", "lr": 0.1, "steps": 1}, "attacks": ["analytic"]}


class Network(nn.Module):
    def __init__(self, *, last: bool, strict: bool = False) -> None:
        super().__init__()
        self.last, self.strict = last, strict
        self.one, self.two = nn.Linear(48, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.last or x.shape[-1] == 3
        assert not self.strict or x.dtype == torch.uint8
        return self.two(torch.sigmoid(self.one(x.flatten(1).float())))


def psnr(model: nn.Module, images: Tensor, **more: object) -> float:
    return hyperleak.audit(model, images, LABEL, **SETTINGS, **more).best("psnr") or 0.0


def test_hints_lead_a_model_that_takes_channels_last_to_its_pictures() -> None:
    model, images = Network(last=True), PIXELS.permute(0, 3, 1, 2).float() / 255
    with pytest.raises(ValueError, match="that fit the model, got 3x4x4") as refused:
        psnr(model, images)
    (line,) = HINT.findall(str(refused.value))
    eval(line, {"model": model})  # as a reader would: a line of this module's own making
    assert psnr(model, images) > 60


def test_bytes_are_brought_to_a_model_that_scales_them_itself() -> None:
    class Scaled(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float() / 255)

    model = Scaled(last=False)
    images = PIXELS.permute(0, 3, 1, 2)
    with pytest.raises(ValueError, match=r"give images\.float\(\) / 255") as refused:
        psnr(model, images)
    (line,) = HINT.findall(str(refused.value))
    eval(line, {"model": model})
    assert psnr(model, images.float() / 255) > 60
    assert torch.equal(model(images.float() / 255), Scaled.forward(model, images))


@pytest.mark.parametrize("last", [False, True])
def test_a_model_that_takes_bytes_alone_is_refused_with_why(last: bool) -> None:
    with pytest.raises(ValueError, match=r"runs on bytes \(uint8\) alone, by which nothing is differentiated") as said:
        psnr(Network(last=last, strict=True), PIXELS.permute(0, 3, 1, 2).float() / 255)
    assert ("channels last" in str(said.value)) == last
