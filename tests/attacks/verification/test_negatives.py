"""Networks that take a picture for its negative: neither of the two may be called verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction, build
from attacks.verification.confirmation import confirm
from attacks.verification.same_outputs import WholeNetwork
from fl.capture import from_batch
from fl.methods.fedper import FedPer
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def network(bend: Callable[[Tensor], Tensor], *, gray: float = 0.5, bias: bool = False, classes: int = 4) -> nn.Module:
    centered, first = Applied(lambda x: 3 * (x - gray)), nn.Conv2d(1, 8, 3, bias=bias)
    last = nn.Linear(128, classes, bias=bend is not torch.tanh)
    return nn.Sequential(centered, first, Applied(bend), nn.Flatten(), last)


def values(count: int = 1, least: int = 0) -> Tensor:
    drawn = torch.rand(count, 1, 6, 6, generator=stream(0, "negatives"))
    return (least + drawn * (255 - least)).round() / 255


def one_with_a_negative() -> Tensor:
    return torch.cat([values(), values() * 0.8])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "squares": (lambda: network(torch.square), values, True),
    "absolute values": (lambda: network(torch.abs), values, True),
    "squares about another gray": (lambda: network(torch.square, gray=0.6), lambda: values(least=60), True),
    "a negative out of range": (lambda: network(torch.square, gray=0.4), values, False),
    "squares of two pictures": (lambda: network(torch.square), lambda: values(2), True),
    "squares of two, one with a negative": (lambda: network(torch.square, gray=0.4), one_with_a_negative, True),
    "squares and a bias": (lambda: network(torch.square, bias=True), values, False),
    "two classes of odd functions": (lambda: network(torch.tanh, classes=2), values, True),
    "two pictures and classes of odd functions": (lambda: network(torch.tanh, classes=2), lambda: values(2), True),
    "more classes of odd functions": (lambda: network(torch.tanh, classes=3), values, False),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_picture_is_verified_where_its_negative_does_not_make_the_update(name: str) -> None:
    make, pictures, ambiguous = NETWORKS[name]
    model, images = make(), pictures()
    initialize(model, stream(1, "negatives"))
    if "bias" in name:
        nn.init.normal_(model[1].bias, generator=stream(2, "negatives"))  # type: ignore[index, union-attr]
    view, truth = from_batch(model, images, torch.arange(len(images)))
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is (None if ambiguous else True), held.note
    assert ("its negative" in held.note) is ambiguous
    assert not (ambiguous and held.approximate)


def test_a_batch_is_not_verified_where_only_all_of_its_negatives_make_the_update() -> None:
    """Statistics of a batch take off what its pictures have in common, so that all have to be negated at once."""
    bend = nn.BatchNorm2d(8, affine=False), Applied(torch.square), nn.Flatten()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), *bend, nn.Linear(128, 4)).train()
    initialize(model, stream(1, "negatives"))
    view, truth = from_batch(model, values(2), torch.arange(2))
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified is None
    assert "its negative" in held.note


def test_numbers_drawn_for_a_private_classifier_do_not_close_it() -> None:
    head = nn.Sequential(nn.Linear(1024, 8), nn.Tanh(), nn.Linear(8, 4))
    model = nn.Sequential(Applied(lambda x: 20 * x), nn.Flatten(), nn.Linear(36, 1024), nn.ReLU(), head)
    initialize(model, stream(1, "negatives"))
    view, truth = from_batch(model, values(), torch.tensor([1]))
    private = {name: view.shared[name] for name in view.shared if name.startswith("4.")}
    network = WholeNetwork.of(replace(view, private=private), truth.inputs)
    assert network is not None
    other = truth.inputs.double()
    other[..., 0, 0] = 1 - other[..., 0, 0]
    assert not bool(network.same(other).any())


def test_a_known_label_tells_a_picture_from_its_negative_of_the_other_class() -> None:
    model = network(torch.tanh, classes=2)
    initialize(model, stream(1, "negatives"))
    view, truth = from_batch(model, values(), torch.tensor([1]), threat={"knows_labels": True})
    held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(held, Reconstruction)
    assert held.verified


def test_a_picture_that_an_attack_found_as_its_negative_is_not_verified() -> None:
    centered, first, last = Applied(lambda x: x - 0.5), nn.Linear(36, 48, bias=False), nn.Linear(48, 4)
    model = nn.Sequential(centered, nn.Flatten(), first, Applied(torch.cos), last)
    initialize(model, stream(1, "negatives"))
    for images in (values().round(), 1 - values().round()):
        view, _ = from_batch(model, images, torch.tensor([1]))
        result = build("cascade")(view, seed=0)
        assert isinstance(result, Reconstruction)
        assert not result.verified


def test_behind_a_private_classifier_what_it_is_given_tells_whether_a_negative_is_told() -> None:
    for bend, verified in ((torch.square, None), (torch.relu, True)):
        model = network(bend)
        initialize(model, stream(1, "negatives"))
        view, truth = from_batch(model, values(), torch.tensor([1]), method=FedPer(steps=1, batch_size=None))
        held = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
        assert isinstance(held, Reconstruction)
        assert held.verified is verified, held.note
