"""Autoencoders, whose targets are their inputs: the hints, followed one after the other, end in an attack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hyperleak

STATED = {"method": {"name": "fedavg", "lr": 0.1, "steps": 1, "train_mode": False}, "attacks": ["analytic"]}
PICTURE = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Variational(nn.Module):
    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always
        self.encode, self.mu, self.spread = nn.Linear(36, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.decode = nn.Linear(4, 36)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.sigmoid(self.encode(x.flatten(1)))
        mu, spread = self.mu(hidden), self.spread(hidden)
        code = mu + torch.randn_like(mu) * (spread / 2).exp() if self.always or self.training else mu
        return self.decode(code).view_as(x), mu, spread


def joined(found: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten(1) for part in found], 1)


def loss(outputs: Tensor, images: Tensor) -> Tensor:
    picture, mu, spread = outputs.split([36, 4, 4], 1)
    return mse_loss(picture.view_as(images), images) - (1 + spread - mu**2 - spread.exp()).mean() / 2


def update_of(model: nn.Module) -> dict[str, Tensor]:
    gradient = torch.autograd.grad(loss(joined(model(PICTURE)), PICTURE), list(model.parameters()))
    return {name: 0.1 * part for (name, _), part in zip(model.named_parameters(), gradient, strict=True)}


def test_the_hints_lead_from_several_outputs_and_noise_to_a_picture() -> None:
    model = Variational(always=True)
    update = update_of(model)
    with pytest.raises(ValueError, match=r"For a loss of several \(a VAE's\).*part.flatten\(1\) for part in found"):
        hyperleak.audit(model, PICTURE, PICTURE, update=update, loss=loss, **STATED)
    with pytest.raises(ValueError, match=r"a VAE: mu \+ noise if self.training else mu"):
        hyperleak.audit(model, PICTURE, PICTURE, update=update, loss=loss, output=joined, **STATED)
    model.always = False
    report = hyperleak.audit(model, PICTURE, PICTURE, update=update, loss=loss, output=joined, **STATED)
    assert report.best("psnr") > 60
    alone = hyperleak.audit(model, update=update, input_shape=(1, 6, 6), loss=loss, output=joined, **STATED)
    assert "confirms" not in alone.findings[0].verdict
