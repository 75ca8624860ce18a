"""The same network, however its forward is written, gives the same away, bit for bit; what does not is named truly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.pictures import photograph
from torch import Tensor, nn
from torch.nn import functional as F

import attacks
from attacks.base import Reconstruction
from attacks.network.layer_chain import Stage, extract_layer_chain
from fl.capture import from_batch, from_update
from fl.seeds import stream
from fl.view import ServerView

SIZE, KEPT = 14, 14 * 14
LABEL = torch.tensor([1])


class Modules(nn.Module):
    """HyperFL's extractor for gray images, small: every step of forward is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 16, 5), nn.Linear(16 * 25, 12), nn.Linear(12, 3)
        self.pool, self.act, self.flat = nn.MaxPool2d(2), nn.LeakyReLU(0.1), nn.Flatten()
        self.top = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.top(self.fc(self.flat(self.act(self.pool(self.conv(x)))))))
        return out


class Functions(Modules):
    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(F.max_pool2d(self.conv(x), 2), 0.1)
        out: Tensor = self.head(F.leaky_relu(self.fc(torch.flatten(x, 1)), 0.1))
        return out


class OneActivation(Modules):
    """One activation used twice."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.fc(self.act(self.pool(self.conv(x))).view(-1, 400))))
        return out


class Methods(Modules):
    """Tensors' own methods, in place as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu_(self.pool(self.conv(x)), 0.1)
        x = self.fc(x.reshape(x.size(0), -1))
        out: Tensor = self.head(torch.where(x >= 0, x, x * 0.1))
        return out


class Weights(Modules):
    """Functions of the layers' weights; the layers themselves never run."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.conv.weight, self.conv.bias)
        x = torch.max_pool2d(x, 2)
        x = F.linear(F.leaky_relu(x, negative_slope=0.1).flatten(1), self.fc.weight, self.fc.bias)
        return torch.addmm(self.head.bias, F.leaky_relu(x, 0.1), self.head.weight.t())


class Slope(nn.LeakyReLU):
    """One's own activation."""

    def __init__(self) -> None:
        super().__init__(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, x * self.negative_slope)


class Own(Modules):
    """Classes of one's own, in a list that forward loops over."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([self.conv, self.pool, Slope(), self.flat, self.fc, Slope(), self.head])

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class AtRest(Modules):
    """With what does nothing in evaluation mode, and identities."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.same = nn.Dropout(0.5), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.dropout(self.same(self.conv(x)), 0.3, training=self.training))
        x = self.flat(self.act(F.max_pool2d(x, kernel_size=2, stride=2)).contiguous().clone())
        out: Tensor = self.head(self.top(self.fc(x)))
        return out


class Nested(Modules):
    """Containers with a forward of their own, an adaptive pooling, unflattening."""

    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(super().forward(x), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_max_pool2d(self.conv(x), 5).unflatten(1, (4, 4)).flatten(1, 2)
        x = self.Block(self.flat, self.fc)(self.act(x))
        out: Tensor = self.head(x)
        return out


class Logged(Modules):
    """With a log-softmax at the end, which cross entropy does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(super().forward(x), dim=1)


class Careful(Modules):
    """Looks at its input, and decides by its shape."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.min() >= -1
        if x.dim() == 3:
            x = x.unsqueeze(1)
        with torch.no_grad():
            x.mean().item()
        x = self.pool(self.conv(x.clamp(0, 1)))
        x = nn.functional.leaky_relu(input=x, negative_slope=0.1)
        out: Tensor = self.head(self.top(self.fc(x.view(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]))))
        return out


STYLES = (Functions, OneActivation, Methods, Weights, Own, AtRest, Nested, Logged, Careful)


def numbers(model: nn.Module) -> nn.Module:
    """The weights that all styles share."""
    with torch.no_grad():
        draw = stream(0, "styles")
        for _, value in sorted(dict(model.named_parameters()).items()):
            fan = value[0].numel() if value.ndim > 1 else 4
            value.copy_(torch.randn(value.shape, generator=draw, dtype=value.dtype) * fan**-0.5)
    return model.eval()


def view_of(style: Callable[[], nn.Module]) -> ServerView:
    """A view of the one update that all styles give, up to rounding."""
    own, one = (from_batch(numbers(kind()), photograph(SIZE).float(), LABEL)[0] for kind in (style, Modules))
    for name, value in one.update.items():
        torch.testing.assert_close(own.update[name], value, rtol=1e-3, atol=1e-6)
    return replace(own, update=one.update)


@pytest.fixture(scope="module")
def right() -> Reconstruction:
    result = attacks.build("cascade")(view_of(Modules))
    assert isinstance(result, Reconstruction)
    assert result.verified
    return result


@pytest.mark.parametrize("style", STYLES)
def test_the_same_network_gives_the_same_bytes_however_it_is_written(
    style: type[Modules], right: Reconstruction
) -> None:
    view = view_of(style)
    result = attacks.build("cascade")(view)
    assert isinstance(result, Reconstruction), result
    assert result.verified
    assert result.inputs is not None
    assert right.inputs is not None
    assert torch.equal(result.inputs, right.inputs)
    assert result.objective == right.objective
    stages, others = (
        extract_layer_chain(view, lossy=True),
        extract_layer_chain(view_of(Modules), lossy=True),
    )
    assert isinstance(stages, tuple)
    assert isinstance(others, tuple)
    assert [stage.name for stage in stages] == [stage.name for stage in others]
    assert [type(stage.activation) for stage in stages] == [type(stage.activation) for stage in others]


class Quickstart(nn.Module):
    """Flower's first example for color images: one pooling used twice, functions, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        out: Tensor = self.fc3(F.relu(self.fc2(x)))
        return out


def test_the_quickstart_network_is_a_chain() -> None:
    view, _ = from_batch(Quickstart(), photograph(32, 3).float(), LABEL)
    stages = extract_layer_chain(view, lossy=True)
    assert isinstance(stages, tuple)
    assert [stage.name for stage in stages] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert all(isinstance(stage.activation, nn.ReLU) for stage in stages[:-1])


def test_images_in_any_layout_are_taken_by_a_network_that_flattens_by_view() -> None:
    rows = torch.rand(1, 32, 32, 3).permute(0, 3, 1, 2)
    view, truth = from_batch(Quickstart(), rows, LABEL)
    assert torch.equal(truth.inputs, rows)
    assert from_update(
        Quickstart(),
        {n: torch.ones_like(v) for n, v in view.shared.items()},
        input_shape=(3, 32, 32),
        num_classes=10,  # type: ignore[arg-type]
    )


def test_a_stage_knows_its_names_in_the_update() -> None:
    stage = Stage("conv", nn.Conv2d(2, 12, 3), torch.Size((2, 8, 8)))
    assert (stage.parameter_name("weight"), stage.parameter_name("bias")) == ("conv.weight", "conv.bias")
    value = torch.rand(12, 2, 3, 3)
    assert stage.arrange("weight", value) is value
