"""What torch can't do with a network."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, build
from attacks.network.autograd_support import flat_obstacle
from fl.capture import from_batch
from fl.view import ServerView, ThreatModel

KNOWN = ThreatModel(knows_labels=True)


class Rounded(nn.Module):
    """Looks at pixels through whole numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear((4 * images.flatten(1)).round())


def seen_of(model: nn.Module) -> ServerView:
    """The server's view of one step on a picture."""
    picture = torch.rand((1, 3, 2, 2), generator=torch.Generator().manual_seed(1))
    return from_batch(model, picture, torch.tensor([1]))[0]


def test_a_network_is_flat_where_it_rounds_and_not_where_only_its_weights_are_zero() -> None:
    head = nn.Linear(12, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    assert flat_obstacle(seen_of(nn.Sequential(nn.Flatten(), head))) is None
    assert "rounding, thresholds" in str(flat_obstacle(seen_of(Rounded())))


class InTwoTypes(nn.Module):
    """Computes its first layer in double precision and its classifier in single."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 8).double(), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.first(images.flatten(1).double())).float())
        return logits


def test_a_network_in_two_types_is_refused_for_that() -> None:
    found = build("analytic")(seen_of(InTwoTypes()))
    assert isinstance(found, NotApplicable)
    assert "a network's numbers in one type" in found.reason
    assert "x.to(self.layer.weight.dtype)" in found.reason


def test_a_batch_of_a_network_in_two_types_is_searched_without_its_labels() -> None:
    pictures = torch.rand((2, 3, 2, 2), generator=torch.Generator().manual_seed(2))
    view, _ = from_batch(InTwoTypes(), pictures, torch.tensor([1, 2]))
    assert isinstance(build({"name": "ig", "iterations": 2})(view), Reconstruction)


def aligned(outputs: Tensor, targets: Tensor) -> Tensor:
    """Connectionist temporal classification of steps that come second."""
    steps = [torch.full((len(outputs),), size) for size in (outputs.shape[1], targets.shape[1])]
    return functional.ctc_loss(outputs.transpose(0, 1).log_softmax(2), targets, *steps)


def test_a_loss_without_a_second_derivative_is_refused_for_that() -> None:
    model = nn.Sequential(nn.Flatten(1, 2), nn.Linear(2, 4))
    view, _ = from_batch(model, torch.rand(1, 3, 2, 2), torch.tensor([[1, 2]]), loss=aligned, threat=KNOWN)
    found = build({"name": "ig", "iterations": 2})(view)
    assert isinstance(found, NotApplicable)
    assert "the gradient of the loss, and torch can't: derivative for aten::_ctc_loss_backward" in found.reason
