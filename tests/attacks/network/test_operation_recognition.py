"""What stands between a network's layers is told by what it does; what is refused is named truly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.network.layer_chain import extract_layer_chain


class Forward(nn.Module):
    """A function of the modules that it is given, on 2x8x8 images."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.way = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def conv(filters: int = 12) -> nn.Conv2d:
    return nn.Conv2d(2, filters, 3, padding=1)


def twice_normed(layer: nn.Module) -> nn.Module:
    """A weight under weight norm that is doubled afterwards."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    return parametrize.register_parametrization(parametrizations.weight_norm(layer), "weight", Doubled())


def test_a_weight_under_weight_norm_is_read_as_a_plain_one() -> None:
    seen(nn.Sequential(parametrizations.weight_norm(conv(2)), nn.Flatten(), nn.Linear(128, 4)), "rconv")


def seen(model: nn.Module, attack: str) -> Reconstruction:
    view, truth = chains.seen(chains.initialized(model).eval())
    result = attacks.build(attack)(view)
    assert isinstance(result, Reconstruction), result
    assert result.inputs is not None
    assert float((result.inputs - truth.inputs).abs().max()) < 1e-5
    assert result.verified
    return result


def chain(way: Callable[[nn.Module, Tensor], Tensor], filters: int = 24) -> Forward:
    return Forward(lambda m, x: m.fc(way(m, m.conv(x)).flatten(1)), conv=conv(filters), fc=nn.Linear(64 * filters, 4))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "celu": lambda x: F.celu(x, 2.0),
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "selu": F.selu,
    "relu by hand": lambda x: x * (x > 0),
    "leaky by hand": lambda x: F.relu(x) - 0.2 * F.relu(-x),
    "softsign": F.softsign,
    "hardtanh": lambda x: F.hardtanh(x, -3, 3),
    "clamped": lambda x: x.clamp(min=0),
    "scaled before and after": lambda x: F.leaky_relu(x * 2 - 0.1, 0.3),
}


@pytest.mark.parametrize("attack", ["rconv", "cascade"])
@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activations_are_told_by_what_they_do(kind: str, attack: str) -> None:
    function = ACTIVATIONS[kind]
    seen(chain(lambda m, x: function(x)), attack)


class PerChannel(nn.Module):
    """A mean and a deviation of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.tensor([0.4, 0.5]).view(1, 2, 1, 1))
        self.register_buffer("s", torch.tensor([0.2, 0.3]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.m) / self.s  # type: ignore[operator]


FIRST: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "own normalization": lambda m, x: m.norm(x),
    "times two minus one": lambda m, x: x * 2 - 1,
    "levels": lambda m, x: (x * 255 - 127.5) / 128,
    "channels the other way": lambda m, x: x[:, [1, 0]],
    "flipped channels": lambda m, x: x.flip(1) * 3,
    "trained scale": lambda m, x: x * m.scale,
    "clamped": lambda m, x: x.clamp(0, 1) - 0.5,
    "functional batch norm": lambda m, x: F.batch_norm(x, m.norm.m.flatten(), m.norm.s.flatten(), training=False),
    "padded": lambda m, x: F.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1],
    "low precision": lambda m, x: x.float() if x.dtype == torch.float32 else x,
}


@pytest.mark.parametrize("attack", ["rconv", "cascade"])
@pytest.mark.parametrize("kind", list(FIRST))
def test_what_comes_before_the_first_layer_is_told_by_what_it_does(kind: str, attack: str) -> None:
    change = FIRST[kind]
    model = Forward(
        lambda m, x: m.fc(F.leaky_relu(m.conv(change(m, x)), 0.2).flatten(1)),
        conv=conv(),
        fc=nn.Linear(768, 4),
        norm=PerChannel(),
        scale=nn.Parameter(torch.full((1, 2, 1, 1), 1.5)),
    )
    seen(model, attack)


@pytest.mark.parametrize("attack", ["analytic", "cascade", "rconv"])
@pytest.mark.parametrize("transposed", [False, True])
def test_layers_may_be_parameters_of_ones_own(attack: str, transposed: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1).reshape(len(x), -1)
        x = x @ m.w + m.b if transposed else F.linear(x, m.w, m.b)  # type: ignore[operator]
        return m.fc(torch.relu(x))  # type: ignore[operator, no-any-return]

    shape = (128, 20) if transposed else (20, 128)
    w, b = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(20))
    result = seen(Forward(forward, w=w, b=b, fc=nn.Linear(20, 4)), attack)
    assert attack == "analytic" or any("/w" in name for name in result.private)


def test_pooling_is_told_by_what_it_does() -> None:
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 4),
        lambda x: x.view(len(x), x.shape[1], 4, 2, 4, 2).mean((3, 5)),
        lambda x: F.max_pool2d(x, 2),
        lambda x: x.view(len(x), x.shape[1], 4, 2, 4, 2).amax((3, 5)),
    )
    for i, pooled in enumerate(ways):
        model = Forward(
            lambda m, x, p=pooled: m.fc(F.leaky_relu(p(m.conv(x)), 0.2).flatten(1)), conv=conv(24), fc=nn.Linear(384, 4)
        )
        view, _ = chains.seen(chains.initialized(model))
        stages = extract_layer_chain(view, lossy=True)
        assert isinstance(stages, tuple)
        assert isinstance(stages[0].after[0], nn.MaxPool2d if i > 2 else nn.AvgPool2d | nn.AdaptiveAvgPool2d)
    whole = Forward(lambda m, x: m.fc(m.conv(x).mean((2, 3))), conv=conv(24), fc=nn.Linear(24, 4))
    stages = extract_layer_chain(chains.seen(chains.initialized(whole))[0])
    assert isinstance(stages, tuple)
    assert isinstance(stages[0].after[0], nn.AdaptiveAvgPool2d)


def test_the_chain_ends_with_a_linear_layer_whatever_stands_above_it() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.fc(F.leaky_relu(m.conv(x), 0.2).flatten(1))  # type: ignore[operator]
        x = x + F.gelu(m.more(x)).softmax(1)  # type: ignore[operator]
        return F.layer_norm(m.head(x), (4,))  # type: ignore[operator]

    parts = {"conv": conv(), "fc": nn.Linear(768, 20), "more": nn.Linear(20, 20), "head": nn.Linear(20, 4)}
    for attack in ("cascade", "rconv"):
        seen(Forward(forward, **parts), attack)


# ---- what is refused, and why ----------------------------------------------------------------------------------------
def shared(m: nn.Module, x: Tensor) -> Tensor:
    y = F.leaky_relu(m.conv(m.conv(x)), 0.2)  # type: ignore[operator]
    return m.fc(y.flatten(1))  # type: ignore[operator, no-any-return]


def by_brightness(m: nn.Module, x: Tensor) -> Tensor:
    return m.fc(m.conv(x if x.mean() > 0.3 else 1 - x).flatten(1))  # type: ignore[operator, no-any-return]


def standardized(m: nn.Module, x: Tensor) -> Tensor:
    return m.fc(m.conv((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).flatten(1))  # type: ignore[operator, no-any-return]


def cut_off(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)  # type: ignore[operator]
    return m.fc((y.detach() * 2 - y).flatten(1))  # type: ignore[operator, no-any-return]


def pair() -> dict[str, nn.Module]:
    return {"conv": conv(2), "fc": nn.Linear(128, 4)}


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a layer used twice": (lambda: Forward(shared, **pair()), "conv runs twice, so that its gradients are summed"),
    "residual": (lambda: Forward(lambda m, x: m.fc((m.conv(x) + x).flatten(1)), **pair()), "a residual connection"),
    "branches": (
        lambda: Forward(
            lambda m, x: m.fc(torch.cat([m.conv(x), m.conv(2 * x)], 1).flatten(1)), conv=conv(1), fc=nn.Linear(128, 4)
        ),
        "used more than once before all of it comes together",
    ),
    "decides by the image": (lambda: Forward(by_brightness, **pair()), "depends on the image"),
    "standardizes each pixel": (lambda: Forward(standardized, **pair()), "div in the forward"),
    "gelu": (lambda: Forward(lambda m, x: m.fc(F.gelu(m.conv(x)).flatten(1)), **pair()), "the same value at several"),
    "silu": (lambda: Forward(lambda m, x: m.fc(F.silu(m.conv(x)).flatten(1)), **pair()), "the same value at several"),
    "softmax": (
        lambda: Forward(lambda m, x: m.fc(m.conv(x).softmax(1).flatten(1)), **pair()),
        "softmax in the forward",
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(conv(2)), nn.Flatten(), nn.Linear(128, 4)),
        "its weight is computed from 0.parametrizations.weight.original",
    ),
    "weight norm and another": (
        lambda: nn.Sequential(twice_normed(conv(2)), nn.Flatten(), nn.Linear(128, 4)),
        "its weight is computed from 0.parametrizations.weight.original0, 0.parametrizations.weight.original1",
    ),
    "a gradient that is cut off": (lambda: Forward(cut_off, **pair()), "what flows back is changed"),
    "tokens": (
        lambda: Forward(lambda m, x: m.fc(m.tok(x.flatten(2))).mean(1), tok=nn.Linear(64, 6), fc=nn.Linear(6, 4)),
        "sees more than one input per image",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_refusals_say_what_is_true_and_that_they_are_limits(kind: str) -> None:
    model, words = REFUSED[kind]
    result = attacks.build("rconv")(chains.seen(chains.initialized(model()).eval())[0])
    assert isinstance(result, NotApplicable), result
    assert words in result.reason
    assert result.limit
