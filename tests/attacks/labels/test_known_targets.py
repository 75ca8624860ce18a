"""Batches whose targets the server knows, in no order: confirmed under whatever loss, and mixtures are not."""

import pytest
import torch
from support.function_losses import claimed, convolutional, linear, network, pictures, unbent
from torch import nn
from torch.nn import functional

import attacks
from attacks.labels.known_targets import KnownTargets
from attacks.verification.words import ORDER_UNTOLD
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream

COUNT, OUTPUTS = 4, 6
DRAWN = torch.rand(COUNT, OUTPUTS, generator=stream(0, "targets"))


def ordinal(outputs, targets):
    return functional.binary_cross_entropy_with_logits(outputs, (targets[:, None] > torch.arange(OUTPUTS)).to(outputs))


LOSSES = {
    "bce": ("bce", DRAWN.round()),
    "mse": ("mse", DRAWN),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 7.0)), DRAWN.round()),
    "soft targets": (lambda outputs, targets: functional.cross_entropy(outputs, targets), DRAWN.softmax(1)),
    "ordinal": (ordinal, torch.tensor([1, 5, 3, 0])),
}


def seen(model, loss, targets):
    return from_batch(model, pictures(COUNT), targets, loss=loss, threat={"knows_labels": True})[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_with_known_targets_is_confirmed_in_whatever_order_it_is_found(name):
    view = seen(network(), *LOSSES[name])
    assert claimed(view, pictures(COUNT).flip(0)).verified is True
    assert torch.equal(KnownTargets.of(view, pictures(COUNT).flip(0)).orders[0], view.labels.flip(0))


def test_one_number_for_each_picture_tells_which_is_whose():
    view = seen(network(1), "mse", DRAWN[:, :1])
    assert claimed(view, pictures(COUNT)[[2, 0, 3, 1]]).verified is True


def test_an_attack_confirms_what_the_way_on_promises():
    found = attacks.build("spear")(seen(network(), *LOSSES["bce"]))
    assert found.verified is True, found.note


@pytest.mark.parametrize("make", [network, convolutional, linear, lambda: unbent(0.0)])
@pytest.mark.parametrize("name", ["bce", "mse"])
def test_no_mixture_is_confirmed_with_known_targets(make, name):
    view = seen(make(), *LOSSES[name])
    for share in (0.5, 0.1, 0.01):
        mixed = torch.lerp(pictures(COUNT), pictures(COUNT).roll(1, 0), share)
        assert not claimed(view, mixed).verified


def weighed(outputs, targets):
    """By where an example stands in its batch."""
    return (torch.tensor([4.0, 0.5, 2.0, 1.0]).to(outputs) * (outputs - targets).square().mean(1)).mean()


def ranked(outputs, targets):
    """By its neighbor in the batch."""
    return (outputs * outputs.roll(1, 0)).mean() + (outputs - targets).square().mean()


@pytest.mark.parametrize("loss", [weighed, ranked])
def test_where_the_order_is_not_told_right_pictures_are_not_contradicted(loss):
    view = seen(network(), loss, DRAWN)
    found = claimed(view, pictures(COUNT)[[1, 0, 3, 2]])
    assert found.verified is None
    assert ORDER_UNTOLD in found.note


class Spread(nn.Module):
    """Its classifier is a convolution, which tells of no single picture."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU()), nn.Conv2d(8, OUTPUTS, 1)

    def forward(self, x):
        return self.head(self.body(x)).mean((2, 3))


def test_few_targets_are_asked_in_every_order_where_no_classifier_tells():
    model = Spread()
    initialize(model, stream(0, "network"))
    view = seen(model, "mse", DRAWN)
    known = KnownTargets.of(view, pictures(COUNT).flip(0))
    assert known.complete
    assert len(known.orders) == 24
    assert claimed(view, pictures(COUNT).flip(0)).verified is True
