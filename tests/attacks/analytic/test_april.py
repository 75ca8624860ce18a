"""One image of a vision transformer follows from the gradients of its position embedding and its patch layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cover import SLOW, one_at_a_time
from support.pictures import photograph
from torch import Tensor, nn
from torch.nn import functional as F

import attacks
from attacks.analytic.april import April
from attacks.base import NotApplicable, Reconstruction
from fl.capture import from_batch, from_update
from fl.seeds import stream
from fl.tensors import dense
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


class Wide(nn.Module):
    """Few patches of many numbers, a class token, two blocks of normalized tokens with GELU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, stride=16)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.zeros(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), self.patch(x).flatten(2).mT], 1) + self.pos
        out: Tensor = self.head(self.enc(tokens)[:, 0])
        return out


class Averaged(Wide):
    """The same with the mean of all tokens, ReLU, and normalization after each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.zeros(1, 4, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.enc(self.patch(x).flatten(2).mT + self.pos).mean(1))
        return out


def batch(model: nn.Module, labels: list[int], *, copies: bool = False) -> tuple[ServerView, Tensor]:
    draw = stream(1, "vit")
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.copy_(torch.randn(value.shape, generator=draw) * value[0].numel() ** -0.5)
    whole = photograph(32, 3).float()
    pictures = torch.cat([whole, whole.flip(-1), 1 - whole.mT])[: len(labels)]
    pictures = (pictures * 255).round() / 255
    if copies:
        pictures = pictures[:1].expand_as(pictures).contiguous()
    return from_batch(model, pictures, torch.tensor(labels))[0], pictures


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
    assert result.verified or result.approximate or model is Rearranged  # its equations magnify rounding
    assert result.labels is not None
    assert result.labels.tolist() == [3]


def test_more_patches_than_equations_are_counted() -> None:
    result = April()(seen(Fine())[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert "32 equations (patch.weight) for 64 patches at each of 48 places" in result.reason


@one_at_a_time(model=[Wide, Averaged], labels=[[3, 7], [3, 3, 8]])
def test_the_images_of_a_batch_come_back(model: type[Wide], labels: list[int]) -> None:
    view, pictures = batch(model(), labels)
    result = April()(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    assert result.labels is not None
    order = [int((result.inputs - picture).square().flatten(1).sum(1).argmin()) for picture in pictures]
    assert sorted(order) == list(range(len(labels)))
    assert float((result.inputs[order] - pictures).abs().max()) < 0.5 / 255
    assert result.labels[order].tolist() == labels
    assert result.verified


def test_a_picture_that_is_there_twice_comes_back_twice() -> None:
    view, pictures = batch(Wide(), [3, 3], copies=True)
    result = April()(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    assert float((result.inputs - pictures).abs().max()) < 0.5 / 255


def unstated(model: nn.Module, labels: list[int], factor: float, *, copies: bool = False) -> tuple[ServerView, Tensor]:
    """The same with a step size that the server does not know."""
    view, pictures = batch(model, labels, copies=copies)
    update = {name: factor * dense(value) for name, value in view.update.items()}
    return from_update(model, update, input_shape=(3, 32, 32), num_classes=10, batch_size=len(labels)), pictures


def test_an_unknown_step_size_makes_no_copies() -> None:
    view, pictures = unstated(Wide(), [3, 7], 2.0)
    result = April()(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    order = [int((result.inputs - picture).square().flatten(1).sum(1).argmin()) for picture in pictures]
    assert sorted(order) == [0, 1]
    assert float((result.inputs[order] - pictures).abs().max()) < 0.5 / 255
    result = April()(unstated(Wide(), [3, 3], 2.0, copies=True)[0])
    assert isinstance(result, NotApplicable)
    assert "told 1 of 2 images apart" in result.reason


def test_equations_for_a_batch_are_counted() -> None:
    result = April()(batch(ViT(), [3, 7])[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert result.reason.startswith("2 images have 32 tokens, which fill most of the 32 numbers of one: ")
    assert result.reason.endswith("for the 512 unknowns of an image are too few")


@pytest.mark.parametrize("share", [1e-2, pytest.param(1.0, marks=SLOW)])
def test_noise_is_no_batch(share: float) -> None:
    view = batch(Wide(), [3, 7])[0]
    draw = stream(0, "noise")
    update = {
        n: v + share * v.norm() / v.numel() ** 0.5 * torch.randn(v.shape, generator=draw)
        for n, v in view.update.items()
    }
    result = April()(replace(view, update=update))
    assert isinstance(result, NotApplicable) or not result.verified


def test_large_searches_wait_for_a_higher_bound() -> None:
    result = April(max_unknowns=30)(batch(Wide(), [3, 7])[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert "32 unknowns" in result.reason
    assert "max_unknowns" in result.reason


def test_what_it_needs_is_named() -> None:
    for view, words in (
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


def test_cascade_hands_vision_transformers_over() -> None:
    view, _ = seen(ViT())
    found, own = attacks.build("cascade")(view), April()(view)
    assert isinstance(found, Reconstruction)
    assert isinstance(own, Reconstruction)
    assert (found.verified, found.note, found.approximate) == (own.verified, own.note, True)
    assert torch.equal(found.inputs, own.inputs)  # type: ignore[arg-type]


def test_a_refusal_of_cascade_says_why_april_refuses() -> None:
    view, _ = seen(ViT())
    update = {name: value for name, value in view.update.items() if name != "pos"}
    refused = attacks.build("cascade")(replace(view, update=update))
    assert isinstance(refused, NotApplicable)
    assert refused.reason.endswith("; by april: the gradient of pos was not sent")
    assert not refused.reason.startswith("the gradient of pos")
