"""Other pictures are looked for with few passes through a network, and none is overlooked for it."""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction
from attacks.network.reading_cache import readings_cached
from attacks.verification import other_pictures
from attacks.verification.confirmation import confirm
from attacks.verification.error_bounds import LAST_DIGIT_DRAWS, ErrorBounds
from attacks.verification.same_outputs import LARGE, WholeNetwork
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream

SIDE = 112
"""Of a picture that is large."""
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda values: values + (values - 0.1).floor() * 0.1,
    "division that rounds": lambda values: values + torch.div(values, 0.05, rounding_mode="floor"),
    "threshold": lambda values: functional.threshold(values, 0.7, 0.0),
    "hardshrink": lambda values: functional.hardshrink(values, 0.7),
}
"""Operations that make large differences of small ones now and then."""


class Patches(nn.Module):
    """A network that looks at patches, and counts its passes by precision.

    Args:
        placed: whether it knows their places.
        steps: which of `STEPS` it makes of them; "" for none.
    """

    passes: ClassVar[Counter[torch.dtype]] = Counter()

    def __init__(self, *, placed: bool, steps: str = "") -> None:
        super().__init__()
        self.placed, self.steps = placed, steps
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.head = nn.Linear(8 * 49 if placed else 8, 4)

    def forward(self, images: Tensor) -> Tensor:
        self.passes[images.dtype] += len(images)
        values = functional.softplus(self.patches(images - 0.5))
        values = STEPS[self.steps](values) if self.steps else values
        return self.head(values.flatten(1) if self.placed else values.mean((2, 3)))


def picture() -> Tensor:
    return (255 * torch.rand(1, 3, SIDE, SIDE, generator=stream(0, "other pictures"))).round() / 255


def held(net: nn.Module) -> Reconstruction:
    initialize(net, stream(1, "other pictures"))
    view, truth = from_batch(net, picture(), torch.tensor([1]))
    Patches.passes.clear()
    with readings_cached():
        result = confirm(view, Reconstruction(inputs=truth.inputs, labels=truth.labels, verified=True))
    assert isinstance(result, Reconstruction)
    return result


def test_of_a_large_picture_single_precision_is_asked_which_orders_are_far_from_the_same() -> None:
    assert 3 * SIDE**2 >= LARGE
    assert held(Patches(placed=True)).verified
    orders = Patches.passes[torch.float32]
    assert orders > 60
    assert Patches.passes[torch.float64] < 30


def test_no_order_is_overlooked_by_single_precision() -> None:
    result = held(Patches(placed=False))
    assert result.verified is None
    assert "another order" in result.note


@pytest.mark.parametrize(("steps", "side"), [*((steps, SIDE) for steps in STEPS), ("", 16)])
def test_single_precision_is_not_asked_of_a_network_with_steps_nor_of_a_small_picture(steps: str, side: int) -> None:
    net = Patches(placed=False, steps=steps)
    initialize(net, stream(1, "other pictures"))
    view, truth = from_batch(net, picture()[..., :side, :side], torch.tensor([1]))
    network = WholeNetwork.of(view, truth.inputs)
    assert network is not None
    Patches.passes.clear()
    assert not bool(network.same(truth.inputs.double().roll(1, -1)).any())
    assert bool(network.same(truth.inputs.double().roll(16, -1)).all())
    assert dict(Patches.passes) == {torch.float64: 2}


class Coupled(nn.Module):
    """A network in which pictures of a batch have a part in each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 32**2, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head((images - images.mean(0)).flatten(1).abs())


@pytest.mark.parametrize("coupled", [False, True])
def test_other_pictures_are_asked_together_where_they_have_no_part_in_each_other(coupled: bool) -> None:
    one = picture()[..., :32, :32]
    images = torch.cat([one, one.flip(-1)])
    net = Coupled() if coupled else nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 8), nn.ReLU(), nn.Linear(8, 4))
    initialize(net, stream(1, "other pictures"))
    view, truth = from_batch(net, images, torch.tensor([1, 2]))
    network = WholeNetwork.of(view, truth.inputs)
    assert network is not None
    given = truth.inputs.double()
    others = [given.roll(1, -1), given, given.flip(-2)]
    left = network.undecided(others)
    assert [any(other is one for one in left) for other in others] == [coupled, True, coupled]
    assert [bool(network.same(other).all()) for other in others] == [False, True, False]


def test_all_checks_have_one_network_and_one_exact_prediction_of_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    made, changes = WholeNetwork.of, ErrorBounds._last_digit_change
    networks, predicted = [], []

    def counted_network(view: object, images: Tensor) -> object:
        networks.append(images)
        return made(view, images)  # type: ignore[arg-type]

    def counted_change(bounds: ErrorBounds, one: object) -> dict[str, float]:
        predicted.append(one.images)  # type: ignore[attr-defined]
        return changes(bounds, one)  # type: ignore[arg-type]

    monkeypatch.setattr(WholeNetwork, "of", counted_network)
    monkeypatch.setattr(ErrorBounds, "_last_digit_change", counted_change)
    asked = Counter[str]()
    names = [check.__name__ for check in other_pictures.CHECKS]
    checks = [
        lambda found, name=name, check=check: asked.update([name]) or check(found)
        for name, check in zip(names, other_pictures.CHECKS, strict=True)
    ]
    monkeypatch.setattr(other_pictures, "CHECKS", checks)
    assert held(Patches(placed=True)).verified
    assert asked == Counter(names)
    assert len(networks) == 1
    assert sum(torch.equal(one, picture()) for one in predicted) == LAST_DIGIT_DRAWS
