"""Networks under weight norm are attacked as the same networks with plain weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from attacks import NotApplicable, Reconstruction, build
from attacks.update.weight_norm import with_plain_weights
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
PICTURES = torch.randint(256, (2, 1, 6, 6), generator=stream(0, "weight norm")) / 255
STEP = FedAvg(lr=0.1, steps=1, batch_size=None)
Norm = Callable[..., nn.Module]
NORMS = [
    weight_norm,
    parametrizations.weight_norm,
    lambda layer: weight_norm(layer, dim=None),
    lambda layer: parametrizations.weight_norm(layer, dim=1 if isinstance(layer, nn.Linear) else 0),
]


def network(norm: Norm) -> nn.Module:

    net = nn.Sequential(nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 4))
    initialize(net, stream(0, "weight norm"))
    net[0] = norm(net[0])
    with torch.no_grad():  # |v| is g at first
        for name, value in net.named_parameters():
            if name.endswith(("weight_g", "original0")):
                value.mul_(1.5)
    return nn.Sequential(nn.Flatten(), *net)


def seen(model: nn.Module, count: int, method: FedAvg = STEP) -> ServerView:
    return from_batch(model, PICTURES[:count], torch.arange(count) + 1, method=method)[0]


@pytest.mark.parametrize("norm", NORMS)
def test_the_rewritten_update_is_that_of_a_plain_weight(norm: Norm) -> None:
    model = network(norm).double()
    plain = with_plain_weights(from_batch(model, PICTURES[:1].double(), torch.tensor([1]), method=STEP)[0])
    net = plain.task.model
    again, _ = from_batch(net, PICTURES[:1].double(), torch.tensor([1]), method=STEP)
    assert again.update.keys() == plain.update.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    for name, value in again.update.items():
        torch.testing.assert_close(plain.update[name], value)
        torch.testing.assert_close(plain.shared[name], again.shared[name])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("name", "count"), [("analytic", 1), ("cascade", 1), ("spear", 2), ("analytic", 2)])
def test_pictures_come_back(norm: Norm, name: str, count: int) -> None:
    found = build(name)(seen(network(norm), count))
    assert isinstance(found, Reconstruction), found
    assert found.inputs is not None
    far = (found.inputs[:, None] - PICTURES[None, :count]).flatten(2).abs().amax(2)
    assert far.amin(1).max() < 1e-3
    assert found.verified is True, found.note


@pytest.mark.parametrize(
    "method", [FedAvg(lr=0.1, steps=2, batch_size=None), FedAvg(lr=0.1, steps=1, batch_size=None, weight_decay=0.1)]
)
def test_further_steps_and_decay_are_left_as_they_are(method: FedAvg) -> None:
    view = seen(network(weight_norm), 1, method)
    assert with_plain_weights(view) is view


def test_the_first_convolution_may_be_under_weight_norm() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = parametrizations.weight_norm(nn.Conv2d(1, 8, 3, padding=1)), nn.Linear(288, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.leaky_relu(self.conv(x)).flatten(1))

    found = build("cascade")(seen(Net(), 1))
    assert not isinstance(found, NotApplicable), found
    torch.testing.assert_close(found.inputs, PICTURES[:1], atol=1e-3, rtol=0)
