"""Networks that know no order of their parts: others make the same update, so that none may be called verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, Remark, build
from attacks.network.layer_chain import trace_view
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.observed_update import ObservedUpdate
from attacks.verification.confirmation import confirm
from attacks.verification.negatives import has_negative
from attacks.verification.rearrangements import has_rearranged, rearranged
from attacks.verification.same_outputs import WholeNetwork
from attacks.verification.update_comparison import UpdateComparison
from fl.capture import from_batch
from fl.methods.fedper import FedPer
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream


class Points(nn.Module):
    """Adds up what it makes of each point, with or without a place of its own."""

    def __init__(self, *, placed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.places = torch.arange(3)[:, None] / 3 if placed else torch.zeros(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x.mT) + self.places)))
        return self.head(x.sum(1))


class Absolute(nn.Module):
    """Takes absolute values about a middle gray."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5).abs()


class Compared(nn.Module):
    """Compares two rows by one encoder; their difference tells which is which, its square does not."""

    def __init__(self, *, signed: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.signed = nn.Linear(6, 16), nn.Linear(16, 2), signed

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        apart = torch.tanh(self.encoder(first)) - torch.tanh(self.encoder(second))
        return self.head(apart if self.signed else apart.square())


class Turned(nn.Module):
    """Applies a convolution turned by quarters or halves, and adds up what comes, as networks do that know no angle."""

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__()
        self.first, self.head, self.turns = nn.Conv2d(1, 16, 3), nn.Linear(16, 3), turns

    def forward(self, x: Tensor) -> Tensor:
        maps = [functional.conv2d(x, self.first.weight.rot90(turn, (2, 3)), self.first.bias) for turn in self.turns]
        return self.head(torch.stack([torch.tanh(one).square().mean((2, 3)) for one in maps]).sum(0))


class Branching(Points):
    """Points whose sum goes another way in bright pictures than in dark ones, and changes with each pass if told so."""

    def __init__(self, *, placed: bool = False, drifting: bool = False) -> None:
        super().__init__(placed=placed)
        self.drift, self.drifting = 0.0, drifting

    def forward(self, x: Tensor) -> Tensor:
        self.drift += 0.01 * self.drifting
        returned = super().forward(x)
        return returned + self.drift if float(x.detach().mean()) > 0.3 else returned.square()


def moved_around() -> nn.Module:
    first = nn.Conv2d(1, 16, 3, stride=2, padding=1, padding_mode="circular")
    return nn.Sequential(first, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def added_up() -> nn.Module:
    first = nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(16, 4))


def beside_black(above: int, below: int) -> Tensor:
    return functional.pad(values(1, 1, 6, 6), (0, 0, above, below))


def patches(head: Callable[[], nn.Module] = lambda: nn.AdaptiveAvgPool2d(1), width: int = 32) -> nn.Module:
    body = nn.Conv2d(1, 32, 2, stride=2), nn.Tanh(), nn.Conv2d(32, 32, 1), nn.Tanh(), head(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(width, 4))


def values(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=stream(0, "rearranged")) * 255).round() / 255


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], object], bool]] = {
    "points": (Points, lambda: values(1, 2, 3), True),
    "points with places": (lambda: Points(placed=True), lambda: values(1, 2, 3), False),
    "two rows": (Compared, lambda: values(2, 1, 6).unbind(), True),
    "two rows and a sign": (lambda: Compared(signed=True), lambda: values(2, 1, 6).unbind(), False),
    "patches": (patches, lambda: values(1, 1, 6, 6), True),
    "quarter turns": (lambda: Turned(range(4)), lambda: values(1, 1, 6, 6), True),
    "half turns": (lambda: Turned((0, 2)), lambda: values(1, 1, 5, 6), True),
    "no turns": (lambda: Turned((0,)), lambda: values(1, 1, 6, 6), False),
    "moved around by twos": (moved_around, lambda: values(1, 1, 6, 6), True),
    "room above alone": (added_up, lambda: beside_black(3, 1), True),
    "room below alone": (added_up, lambda: beside_black(1, 3), True),
    "no room": (added_up, lambda: beside_black(0, 0), False),
    "patches in their places": (lambda: patches(nn.Identity, 288), lambda: values(1, 1, 6, 6), False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_picture_is_verified_where_no_other_order_of_its_parts_makes_the_update(name: str) -> None:
    make, inputs, ambiguous = NETWORKS[name]
    model = make()
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, inputs(), torch.tensor([1]))
    right = Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True)
    held = confirm(view, right)
    assert isinstance(held, Reconstruction)
    assert held.verified is (None if ambiguous else True), held.note
    assert ("another order" in held.note) is ambiguous
    assert not (ambiguous and held.approximate)


def test_a_batch_is_not_verified_where_one_of_its_pictures_can_be_moved_around() -> None:
    model = added_up()
    initialize(model, stream(1, "rearranged"))
    images = torch.cat([beside_black(3, 1), values(1, 1, 10, 6)])
    view, truth = from_batch(model, images, torch.tensor([1, 2]))
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is None
    assert "another order" in held.note


def test_other_orders_are_asked_for_no_longer_than_the_time_limit() -> None:
    model = Points(placed=True)
    view, truth = from_batch(model, values(1, 2, 3), torch.tensor([1]))
    network = WholeNetwork.of(view, truth.inputs)
    assert network is not None
    with limited_by(SearchControl(time_limit=0.0)), pytest.raises(StoppedError):
        network.same(truth.inputs.double())


@pytest.mark.parametrize("placed", [True, False])
def test_behind_a_private_classifier_the_layers_below_tell_whether_order_is_known(placed: bool) -> None:
    model = Points(placed=placed)
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, values(1, 2, 3), torch.tensor([1]), method=FedPer(steps=1, batch_size=None))
    assert view.private
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    network = WholeNetwork.of(view, truth.inputs)
    assert has_rearranged(view, check, truth.inputs, truth.labels, network=network) is not placed


@pytest.mark.parametrize("placed", [True, False])
def test_a_network_that_can_not_be_traced_is_run_behind_a_private_classifier(placed: bool) -> None:
    model = Branching(placed=placed)
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, values(1, 2, 3), torch.tensor([1]), method=FedPer(steps=1, batch_size=None))
    assert isinstance(trace_view(view), NotApplicable)
    held = confirm(view, Reconstruction(inputs=truth.inputs, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is (True if placed else None)
    assert ("another order" in held.note) is not placed


@pytest.mark.parametrize("stride", [1, 3])
def test_pixels_that_the_layers_below_a_private_classifier_skip_are_counted(stride: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 2, stride=stride), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
    images = values(1, 1, 6, 6)
    model(images)
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, images, torch.tensor([1]), method=FedPer(steps=1, batch_size=None))
    network = WholeNetwork.of(view, truth.inputs)
    assert network is not None
    assert network.count_unseen() == (0 if stride == 1 else 36 - 4 * 4)


def test_a_negative_is_asked_of_the_update_where_the_network_can_not_be_run() -> None:
    model = nn.Sequential(Absolute(), nn.Flatten(), nn.Linear(36, 4))
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, values(1, 1, 6, 6), torch.tensor([1]))
    check = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    right = Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True)
    assert has_negative(view, right, check, truth.labels, None)
    other = UpdateComparison(view, ObservedUpdate(view).relative_rounding, True)
    assert not has_negative(view, replace(right, inputs=0.9 * truth.inputs), other, truth.labels, None)


def test_where_others_can_not_be_tried_behind_a_private_classifier_nothing_is_verified() -> None:
    model = Branching(placed=True, drifting=True)
    initialize(model, stream(1, "rearranged"))
    view, truth = from_batch(model, values(1, 2, 3), torch.tensor([1]), method=FedPer(steps=1, batch_size=None))
    right = Reconstruction(inputs=truth.inputs, verified=True)
    held = confirm(view, right)
    assert isinstance(held, Reconstruction)
    assert (held.verified, held.approximate) == (None, False)
    assert Remark.UNCOMPARED in held.remarks
    assert "does not run on other" in held.note


def test_points_that_an_attack_found_in_another_order_are_not_verified() -> None:
    model = Points()
    initialize(model, stream(1, "rearranged"))
    view, _ = from_batch(model, values(1, 2, 3), torch.tensor([1]))
    result = build("cascade")(view, seed=0)
    assert isinstance(result, Reconstruction)
    assert not result.verified


def test_blocks_and_single_places_are_exchanged_along_each_axis() -> None:
    model = Points()
    view, truth = from_batch(model, values(1, 2, 3), torch.tensor([1]))
    found = {tuple(other.flatten().tolist()) for other in rearranged(view.task.inputs, truth.inputs.double())}
    points = truth.inputs.double().reshape(2, 3)
    for order in ([1, 0, 2], [0, 2, 1], [2, 1, 0], [2, 0, 1]):
        assert tuple(points[:, order].flatten().tolist()) in found
