"""A network of convolutions and one with a residual block, written in many ways: exact attacks give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.pictures import photograph
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchvision.transforms import Normalize
from torchvision.transforms import v2 as transforms

import attacks
from attacks.base import Reconstruction
from attacks.network.reading_cache import readings_cached
from fl.capture import from_batch
from fl.network import Network
from fl.seeds import stream
from fl.view import ServerView

LABEL = torch.tensor([1])
MEAN, STD = 0.25, 0.5
"""Numbers that single precision holds."""


class Convolutions(nn.Module):
    """Like LeNet, with strides in place of pooling: all steps but the normalization are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.fc, self.head = nn.Linear(24 * 16, 32), nn.Linear(32, 5)
        self.act, self.act2, self.act3, self.flat = (
            nn.LeakyReLU(0.2),
            nn.LeakyReLU(0.2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.register_buffer("mean", torch.full((1, 1, 1), MEAN))
        self.register_buffer("std", torch.full((1, 1, 1), STD))

    def normalize(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.act2(self.conv2(self.act(self.conv1(self.normalize(x)))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act3(self.fc(self.flat(self.features(x)))))
        return out


class Functions(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(F.conv2d((x - MEAN) / STD, self.conv1.weight, self.conv1.bias, padding=1), 0.2)
        x = F.leaky_relu(F.conv2d(x, self.conv2.weight, self.conv2.bias, 2, 1), 0.2)
        x = F.leaky_relu(F.linear(torch.flatten(x, 1), self.fc.weight, self.fc.bias), 0.2)
        return F.linear(x, self.head.weight, self.head.bias)


class ScaleAndShift(Convolutions):
    """One activation for all, `view`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(x * (1 / STD) + (-MEAN / STD)))))
        out: Tensor = self.head(self.act(self.fc(x.view(x.size(0), -1))))
        return out


class Torchvision(Convolutions):
    def normalize(self, x: Tensor) -> Tensor:
        out: Tensor = Normalize([MEAN], [STD])(x)
        return out


class TorchvisionV2(Convolutions):
    def normalize(self, x: Tensor) -> Tensor:
        out: Tensor = transforms.Normalize([MEAN], [STD])(x)
        return out


class InPlace(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x -= MEAN
        x /= STD
        x = self.conv1(x)
        F.leaky_relu_(x, 0.2)
        x = F.leaky_relu(self.conv2(x), 0.2, inplace=True)
        x = nn.LeakyReLU(0.2, inplace=True)(self.fc(x.reshape(len(x), -1)))
        out: Tensor = self.head(x)
        return out


class Patches(Convolutions):
    """Convolutions as products of patches; one as a linear layer over them."""

    def features(self, x: Tensor) -> Tensor:
        count = len(x)
        patches = F.unfold(self.normalize(x), 3, padding=1)
        x = (self.conv1.weight.flatten(1) @ patches + self.conv1.bias[:, None]).view(count, 16, 8, 8)  # type: ignore
        patches = F.unfold(self.act(x), 3, padding=1, stride=2)
        x = F.linear(patches.mT, self.conv2.weight.flatten(1), self.conv2.bias).mT
        out: Tensor = self.act(F.fold(x, (4, 4), 1).reshape(count, 24, 4, 4))
        return out


class Einsum(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(torch.einsum("bi,oi->bo", self.features(x).flatten(1), self.fc.weight) + self.fc.bias)
        return torch.einsum("bi,oi->bo", x, self.head.weight) + self.head.bias


class Products(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.features(x).flatten(1) @ self.fc.weight.T + self.fc.bias)
        return x.matmul(self.head.weight.t()).add(self.head.bias)


class Autocast(Convolutions):
    """That is off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class ChannelsLast(Convolutions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class Choices(Convolutions):
    """Activations as one writes them by oneself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.normalize(x))
        x = self.conv2(torch.maximum(x, 0.2 * x))
        x = self.fc(torch.where(x > 0, x, 0.2 * x).flatten(1))
        out: Tensor = self.head(F.relu(x) - 0.2 * F.relu(-x))
        return out


class Aliased(Convolutions):
    """Every layer has two names."""

    def __init__(self) -> None:
        super().__init__()
        layers = [self.conv1, self.act, self.conv2, self.act2, self.flat, self.fc, self.act3, self.head]
        self.steps = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.steps(self.normalize(x))
        return out


class Transposed(Convolutions):
    """A weight that lies the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.weight = nn.Parameter(self.fc.weight.detach().T.clone())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(torch.addmm(self.fc.bias, self.features(x).flatten(1), self.fc.weight))
        out: Tensor = self.head(x)
        return out


class TurnedTwice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.flip(0).flip(0)


def numbers(model: nn.Module) -> nn.Module:
    """The weights that all styles share."""
    draw, own = stream(0, "ten styles"), dict(model.named_parameters())
    kind = Residual if isinstance(model, Residual) else Convolutions
    with torch.no_grad():
        for name, like in sorted(kind().named_parameters()):
            value = torch.randn(like.shape, generator=draw) * (like[0].numel() if like.ndim > 1 else 4) ** -0.5
            own[name].copy_(value if own[name].shape == value.shape else value.T)
    return model.eval()


def parametrized() -> nn.Module:
    model = numbers(Convolutions())
    parametrize.register_parametrization(model.fc, "weight", TurnedTwice())  # type: ignore[arg-type]
    return model


STYLES: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: lambda kind=kind: numbers(kind())  # type: ignore[misc]
        for kind in (
            Functions,
            ScaleAndShift,
            Torchvision,
            TorchvisionV2,
            InPlace,
            Patches,
            Einsum,
            Products,
            Autocast,
            ChannelsLast,
            Choices,
            Aliased,
            Transposed,
        )
    },
    "traced by fx": lambda: torch.fx.symbolic_trace(numbers(Convolutions())),
    "in parallel": lambda: nn.DataParallel(numbers(Convolutions())),
    "compiled": lambda: torch.compile(numbers(Convolutions())),  # type: ignore[dict-item, return-value]
    "all channels last": lambda: numbers(Convolutions()).to(memory_format=torch.channels_last),
    "parametrized": parametrized,
}
ATTACKS = ("cascade", "rconv", "rgap", "analytic", "spear", "headless", "headless+rconv")


def view_of(model: nn.Module, plain: ServerView | None) -> ServerView:
    """A view of the one update that all styles give, up to rounding."""
    own, _ = from_batch(model, photograph(8).float(), LABEL)
    if plain is None:
        return own
    same = {}
    for name, value in own.update.items():
        right = plain.update[name.replace("parametrizations.", "").replace(".original", "")]
        right = right if right.shape == value.shape else right.T.contiguous()  # type: ignore[union-attr]
        torch.testing.assert_close(value, right, rtol=1e-3, atol=1e-6)
        same[name] = right
    return replace(own, update=same)


def answers(view: ServerView, names: tuple[str, ...]) -> dict[str, Reconstruction]:
    found = {}
    with readings_cached():
        for name in names:
            result = attacks.build(name)(view)
            assert isinstance(result, Reconstruction), (name, result)
            found[name] = result
    return found


def assert_same(found: Reconstruction, right: Reconstruction) -> None:
    assert found.verified is right.verified
    assert (found.inputs is None) is (right.inputs is None)
    if found.inputs is not None and right.inputs is not None:
        assert torch.equal(found.inputs, right.inputs)
    assert torch.equal(found.labels, right.labels)  # type: ignore[arg-type]
    assert ("features" in found.private) is ("features" in right.private)
    if "features" in right.private:
        assert torch.equal(found.private["features"], right.private["features"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> ServerView:
    return view_of(numbers(Convolutions()), None)


@pytest.fixture(scope="module")
def right(plain: ServerView) -> dict[str, Reconstruction]:
    found = answers(plain, ATTACKS)
    for name in ("cascade", "rconv", "rgap", "headless+rconv"):
        assert found[name].verified
        assert found[name].inputs is not None
        assert float((found[name].inputs - photograph(8)).abs().max()) < 1e-5  # type: ignore[operator]
    return found


@pytest.mark.parametrize("style", STYLES)
def test_every_exact_attack_gives_the_same_bytes_however_a_network_is_written(
    style: str, plain: ServerView, right: dict[str, Reconstruction]
) -> None:
    for name, found in answers(view_of(STYLES[style](), plain), ATTACKS).items():
        assert_same(found, right[name])


# ---- a residual network ----------------------------------------------------------------------------------------------
class Residual(nn.Module):
    """A stem, a block with a skip, average pooling, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.relu, self.pool, self.fc, self.head = nn.ReLU(), nn.AvgPool2d(4), nn.Linear(24, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = self.relu(self.norm2(self.two(self.relu(self.norm1(self.one(x))))) + x)
        out: Tensor = self.head(self.relu(self.fc(self.pool(x).flatten(1))))
        return out


class ResidualByFunctions(Residual):
    def norm(self, layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.stem.weight, self.stem.bias, padding=1).clamp_min(0)
        y = torch.relu(self.norm(self.norm1, self.one(x)))
        x = F.relu(torch.add(x, self.norm(self.norm2, self.two(y))))
        x = F.linear(F.avg_pool2d(x, 4).view(-1, 24), self.fc.weight, self.fc.bias)
        return F.linear(F.relu(x), self.head.weight, self.head.bias)


class ResidualInPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.stem(x))
        y = self.norm2(self.two(F.relu_(self.norm1(self.one(x)))))
        y += x
        y = F.adaptive_avg_pool2d(F.relu_(y), 2).reshape(len(x), -1)
        return F.relu_(y @ self.fc.weight.T + self.fc.bias) @ self.head.weight.T + self.head.bias


@pytest.mark.parametrize("style", [ResidualByFunctions, ResidualInPlace])
def test_what_is_read_above_a_residual_block_is_the_same_however_that_is_written(style: type[Residual]) -> None:
    names = ("analytic", "spear", "headless")
    view = view_of(numbers(Residual()), None)
    expected = answers(view, names)
    assert expected["analytic"].verified
    for name, found in answers(view_of(numbers(style()), view), names).items():
        assert_same(found, expected[name])


def test_what_headless_cuts_off_is_the_network_up_to_the_layer_when_forward_calls_no_module() -> None:
    view = view_of(numbers(Functions()), None)
    headless = attacks.build("headless")
    assert hasattr(headless, "rewrite")
    cut = headless.rewrite(view)
    assert isinstance(cut, ServerView), cut
    x = torch.rand(1, 1, 8, 8, generator=stream(0, "cut"))
    weights = {name: value for name, value in cut.shared.items() if isinstance(value, Tensor)}
    found = Network(cut.client.task.model, weights, cut.buffers)(x)
    model = numbers(Convolutions())
    expected = model.fc(model.flat(model.features(x)))  # type: ignore[operator]
    torch.testing.assert_close(found, expected)
    assert not any(name.startswith("head") for name in cut.shared)
