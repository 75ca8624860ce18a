"""Batches that hold one picture several times, behind any activation and under losses of few targets."""

from dataclasses import replace

import pytest
import torch
from support import worlds
from torch import nn

from attacks import NotApplicable, Reconstruction, build
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)
PICTURES = (255 * worlds.images(2, "copies").inputs.float()).round() / 255


def network(activation: nn.Module, outputs: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), activation, nn.Linear(48, outputs))
    initialize(net, stream(0, "copies"))
    return net


def attack(name: str, view: ServerView) -> Reconstruction | NotApplicable:
    found = build(name)(view)
    assert isinstance(found, Reconstruction | NotApplicable)
    return found


def assert_all_found(found: Reconstruction | NotApplicable, count: int) -> None:
    assert isinstance(found, Reconstruction), found
    assert found.inputs is not None
    assert len(found.inputs) == count
    assert found.verified is True, found.note
    torch.testing.assert_close(found.inputs.float(), PICTURES[[0] * count], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["analytic", "spear", "cascade"])
@pytest.mark.parametrize("activation", [nn.LeakyReLU(), nn.Sigmoid()])
@pytest.mark.parametrize("labels", [[1, 1], [0, 2, 2]])
def test_copies_come_back_as_often_as_they_were_fed(name: str, activation: nn.Module, labels: list[int]) -> None:
    view, _ = from_batch(network(activation), PICTURES[[0] * len(labels)], torch.tensor(labels), method=STEP)
    found = attack(name, view)
    assert_all_found(found, len(labels))
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == labels
    assert "no label" not in found.note


@pytest.mark.parametrize("name", ["analytic", "spear"])
@pytest.mark.parametrize("labels", [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0, 1.0]])
def test_labels_of_copies_are_counted_by_size_where_all_that_flows_back_has_one_direction(
    name: str, labels: list[float]
) -> None:
    targets = torch.tensor(labels)[:, None]
    net, pictures = network(nn.ReLU(), 1).double(), PICTURES[[0] * len(labels)].double()
    view, _ = from_batch(net, pictures, targets.double(), loss="bce", method=STEP)
    found = attack(name, view)
    assert_all_found(found, len(labels))
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert sorted(found.labels.flatten().tolist()) == labels
    unsized = attack(name, replace(view, scale_unknown=True))
    assert not (isinstance(unsized, Reconstruction) and unsized.verified)


@pytest.mark.parametrize("name", ["analytic", "spear", "cascade"])
@pytest.mark.parametrize("loss", ["bce", "cross-entropy"])
def test_a_copy_with_a_label_that_the_network_is_certain_of_is_not_confirmed(name: str, loss: str) -> None:
    """The network takes all for the first class: another picture of that class leaves as much as the copy, nothing."""
    net = network(nn.Tanh(), 1 if loss == "bce" else 3)
    with torch.no_grad():
        net[3].bias[0] = -60 if loss == "bce" else 60
    targets = torch.tensor([[1.0], [0.0]]) if loss == "bce" else torch.tensor([1, 0])
    for pictures in (PICTURES, PICTURES[[0, 0]]):
        view, _ = from_batch(net, pictures, targets, loss=loss, method=STEP)
        found = attack(name, view)
        whole = isinstance(found, Reconstruction) and found.inputs is not None and len(found.inputs) == 2
        assert not (whole and found.verified), found.note


@pytest.mark.parametrize("loss", ["bce", "cross-entropy"])
def test_different_pictures_behind_one_direction_are_no_copies(loss: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1 if loss == "bce" else 2))
    initialize(net, stream(0, "one direction"))
    targets = torch.tensor([[1.0], [1.0]]) if loss == "bce" else torch.tensor([1, 1])
    view, _ = from_batch(net, PICTURES, targets, loss=loss, method=STEP)
    for name in ("analytic", "spear", "cascade"):
        found = attack(name, view)
        assert not (isinstance(found, Reconstruction) and found.verified)


def test_copies_are_found_behind_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.LeakyReLU(), nn.Flatten()
    )
    net = nn.Sequential(*net, nn.Linear(128, 3)).double()
    initialize(net, stream(0, "copies"))
    pictures = PICTURES[[0, 0]].double()
    found = attack("cascade", from_batch(net, pictures, torch.tensor([1, 1]), method=STEP)[0])
    assert isinstance(found, Reconstruction), found
    torch.testing.assert_close(found.inputs, pictures, atol=1e-3, rtol=0)
