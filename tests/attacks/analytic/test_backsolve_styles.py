"""Residual networks are solved alike however their forward is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from support.residual import Block, ResNet, assert_exact, pictures
from torch import Tensor, nn
from torch.nn import functional

import attacks
from attacks.analytic import backsolve
from attacks.base import Reconstruction
from fl.capture import from_batch
from fl.view import ServerView

Activation: TypeAlias = Callable[[Tensor], Tensor]
Shortcut: TypeAlias = Callable[[Block, Tensor], Tensor]


class Written(nn.Module):
    """The small residual network, with activations and shortcuts written in another way."""

    def __init__(self, activation: Activation = torch.relu, shortcut: Shortcut = lambda block, x: block.shortcut(x)):
        super().__init__()
        self.net, self.activation, self.shortcut = ResNet(), activation, shortcut

    def forward(self, x: Tensor) -> Tensor:
        net, act = self.net, self.activation
        x = act(net.norm(net.stem(x)))
        for block in net.blocks:
            assert isinstance(block, Block)
            inner = act(block.bn1(block.conv1(x)))
            x = act(block.bn2(block.conv2(inner)) + self.shortcut(block, x))
        out: Tensor = net.head(x.mean((2, 3)))
        return out


def written(activation: Activation = torch.relu, shortcut: Shortcut = lambda block, x: block.shortcut(x)) -> nn.Module:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return Written(activation, shortcut).eval()


def padded(block: Block, x: Tensor) -> Tensor:
    """A shortcut without parameters: channels of zeros beside those that it takes."""
    if isinstance(block.shortcut, nn.Identity):
        return x
    x = functional.avg_pool2d(x, 2)
    missing = len(block.conv2.weight) - x.shape[1]
    return torch.cat([x, torch.zeros_like(x).repeat(1, missing // x.shape[1] + 1, 1, 1)[:, :missing]], 1)


@pytest.mark.parametrize(
    ("attack", "shortcut"),
    [
        ("backsolve", padded),
        ("cascade", padded),
        ("backsolve", lambda block, x: block.shortcut(x) + 0 * x.argmax() + torch.zeros_like(x).mean()),
    ],
)
def test_operations_that_pass_no_gradient_end_no_attack(attack: str, shortcut: Shortcut) -> None:
    images, labels = pictures(1)
    view, _ = from_batch(written(shortcut=shortcut), images, labels)
    assert_exact(attacks.build(attack)(view), images)


def zeroed(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < 0] = 0
    return x


RELUS: dict[str, Activation] = {
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where with zeros_like": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "where with 0 * x": lambda x: torch.where(x > 0, x, 0 * x),
    "mask": lambda x: x * (x > 0),
    "mask of floats": lambda x: (x > 0).to(x.dtype) * x,
    "abs": lambda x: (x + x.abs()) / 2,
    "masked_fill": lambda x: x.masked_fill(x < 0, 0),
    "written into": zeroed,
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "max of a stack": lambda x: torch.stack([x, torch.zeros_like(x)]).amax(0),
    "clamp": lambda x: x.clamp(min=0),
    "threshold": lambda x: functional.threshold(x, 0, 0),
    "in place": lambda x: functional.relu_(x.clone()),
}
OTHERS: dict[str, tuple[Activation, Activation]] = {
    "leaky": (lambda x: functional.leaky_relu(x, 0.1), lambda x: torch.where(x > 0, x, 0.1 * x)),
    "relu6": (functional.relu6, lambda x: torch.relu(x).clamp(max=6)),
}


@pytest.fixture(scope="module")
def plain() -> ServerView:
    return from_batch(written(), *pictures(1))[0]


def solved(view: ServerView) -> Reconstruction:
    """What is found before pictures are put at levels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backsolve, "_snap", lambda images: (images, False))
        found = attacks.build("backsolve")(view)
    assert isinstance(found, Reconstruction)
    return found


def assert_same(found: Reconstruction, right: Reconstruction) -> None:
    assert found.inputs is not None
    assert right.inputs is not None
    assert torch.equal(found.inputs, right.inputs)
    assert (found.verified, found.note, found.objective) == (right.verified, right.note, right.objective)
    assert list(found.private) == list(right.private)
    for name, value in right.private.items():
        assert isinstance(value, Tensor)
        assert torch.equal(found.private[name], value)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def right(plain: ServerView) -> Reconstruction:
    found = solved(plain)
    assert list(found.private) == ["features/net.stem.weight"]
    return found


@pytest.mark.parametrize("style", RELUS)
def test_relu_gives_the_same_bytes_however_it_is_written(style: str, plain: ServerView, right: Reconstruction) -> None:
    view, _ = from_batch(written(RELUS[style]), *pictures(1))
    for name, value in view.update.items():
        torch.testing.assert_close(value, plain.update[name], rtol=1e-3, atol=1e-6)
    assert_same(solved(replace(view, update=plain.update)), right)


@pytest.mark.parametrize("style", OTHERS)
def test_other_activations_give_the_same_bytes_as_modules_do(style: str) -> None:
    by_torch, by_hand = (from_batch(written(activation), *pictures(1))[0] for activation in OTHERS[style])
    assert_same(solved(replace(by_hand, update=by_torch.update)), solved(by_torch))


class FakeQuantized(nn.Linear):
    """Rounds its weight by a scale that it takes out of torch as a number, as quantization-aware training does."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.weight.detach().abs().max()) / 127
        weight = torch.fake_quantize_per_tensor_affine(self.weight, scale, 0, -128, 127)
        return functional.linear(x, weight, self.bias)


def test_numbers_that_a_forward_takes_out_of_torch_are_no_error() -> None:
    model = nn.Sequential(nn.Flatten(), FakeQuantized(48, 16), nn.ReLU(), FakeQuantized(16, 10))
    view, _ = from_batch(model, *pictures(1, size=4))
    for name in ("cascade", "backsolve"):
        result = attacks.build(name)(view)
        assert not isinstance(result, Reconstruction)
        assert "no convolution" in result.reason or "computed from" in result.reason
