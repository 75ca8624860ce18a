"""One image of a vision transformer follows from the gradients of its position embedding and its patch layer."""

from __future__ import annotations

import pytest
import torch
from support.pictures import photograph
from torch import Tensor, nn
from torch.nn import functional as F

from attacks.analytic.april import April
from attacks.base import NotApplicable, Reconstruction
from fl.capture import from_batch
from fl.seeds import stream
from fl.view import ServerView

LABEL = torch.tensor([3])


class ViT(nn.Module):
    """Patches by a convolution, the mean of all tokens."""

    patches, side = 16, 8

    def __init__(self) -> None:
        super().__init__()
        self.patch = self.patched()
        self.pos = nn.Parameter(torch.zeros(1, self.patches, 32))
        self.enc = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def patched(self) -> nn.Module:
        return nn.Conv2d(3, 32, self.side, stride=self.side)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.enc(self.patch(x).flatten(2).mT + self.pos).mean(1))
        return out


class Unfolded(ViT):
    """Patches by hand through a linear layer, a normalization, and a class token with a position of its own."""

    patches = 17

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))

    def patched(self) -> nn.Module:
        return nn.Linear(192, 32)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(F.unfold((x - 0.45) / 0.25, 8, stride=8).mT)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.pos
        out: Tensor = self.head(self.enc(tokens).mean(1))
        return out


class Rearranged(ViT):
    """Patches by views and a permutation, the position without a dimension for images."""

    def patched(self) -> nn.Module:
        self.more = nn.Identity()
        return nn.Linear(192, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(len(x), 16, 192)
        out: Tensor = self.head(self.enc(self.more(self.patch(x)) + self.pos[0]).mean(1))
        return out


class Fine(ViT):
    """More patches than numbers to each."""

    patches, side = 64, 4


class Fixed(ViT):
    """A position that nobody learns."""

    def __init__(self) -> None:
        super().__init__()
        self.pos.requires_grad_(False)


def seen(model: nn.Module, images: int = 1) -> tuple[ServerView, Tensor]:
    draw = stream(0, "vit")
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=draw) * (value[0].numel() if value.ndim > 1 else 25) ** -0.5)
    picture = photograph(32, 3).float().repeat(images, 1, 1, 1)
    return from_batch(model, picture, LABEL.repeat(images))[0], picture


@pytest.mark.parametrize("model", [ViT, Unfolded, Rearranged])
def test_the_image_comes_back(model: type[ViT]) -> None:
    view, picture = seen(model())
    result = April()(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    assert float((result.inputs - picture).abs().max()) < 0.5 / 255
    assert result.verified or model is Rearranged  # its equations magnify rounding
    assert result.labels is not None
    assert result.labels.tolist() == [3]


def test_more_patches_than_equations_are_counted() -> None:
    result = April()(seen(Fine())[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert "32 equations (patch.weight) for 64 patches at each of 48 places" in result.reason


def test_what_it_needs_is_named() -> None:
    for view, words in (
        (seen(ViT(), 2)[0], "the signals of 2 images are summed"),
        (seen(Fixed())[0], "the gradient of pos was not sent"),
        (seen(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)))[0], "no learned position embedding"),
    ):
        result = April()(view)
        assert isinstance(result, NotApplicable)
        assert words in result.reason
        assert not result.limit


@pytest.mark.parametrize("fits", [0.0, 1.0])
def test_settings_are_checked(fits: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        April(fits=fits)


def test_wrapped_networks_are_unwrapped() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        view, _ = from_batch(wrapped, photograph(32, 3).float(), LABEL)  # type: ignore[arg-type]
        assert set(view.update) == {"1.weight", "1.bias"}
