"""In which order a model flattens channels, as one forward pass shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from eval.audit.flatten_order import flattened_channels

Head = Callable[["Branches", Tensor, Tensor], Tensor]


class Branches(nn.Module):
    """Two convolutions, of whose maps (4, 5, 5) and (6, 5, 5) a head makes what the first linear layer takes."""

    def __init__(self, head: Head, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.inner, self.out = nn.Linear(width, width), nn.Linear(width, 5)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 5
        maps = self.one(x)
        return self.out(self.head(self, maps, self.two(maps)).relu())


def orders(head: Head, width: int, size: int = 5) -> dict[str, tuple[int, ...] | None]:
    model = Branches(head, width)
    return flattened_channels(model, (3, size, size), ["inner.weight", "out.weight"])


def joined(model: Branches, first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], 1)


@pytest.mark.parametrize(
    "head",
    [
        lambda model, one, two: model.inner(joined(model, one, two).flatten(1)),
        lambda model, one, two: model.inner(joined(model, one, two).flatten(1)[:, None]).flatten(1),
        lambda model, one, two: nn.functional.linear(joined(model, one, two).flatten(1), model.inner.weight),
    ],
    ids=["joined", "with a side more", "by a function"],
)
def test_maps_joined_by_channels_are_one_map(head: Head) -> None:
    """And the layer behind, which is as wide, takes no map."""
    assert orders(head, 250) == {"inner.weight": (10, 5, 5)}


@pytest.mark.parametrize(
    "head",
    [
        lambda model, one, two: model.inner(torch.cat([one.flatten(1), two.flatten(1)], 1)),
        lambda model, one, two: model.inner(torch.cat([one.flatten(1), two.flatten(1)], 1).relu()),
    ],
    ids=["joined behind", "changed behind"],
)
def test_an_order_that_one_map_does_not_tell_is_unknown(head: Head) -> None:
    assert orders(head, 250)["inner.weight"] is None


@pytest.mark.parametrize(
    "head",
    [
        lambda model, one, two: model.inner(two.mean((2, 3))),
        lambda model, one, two: model.inner(nn.functional.adaptive_avg_pool2d(two, 1).flatten(1)),
        lambda model, one, two: model.inner(two[:, :, 0, 0]),
    ],
    ids=["mean", "pooled", "one place"],
)
def test_one_number_of_each_channel_has_no_order(head: Head) -> None:
    assert orders(head, 6) == {}


def test_maps_with_channels_last_stay() -> None:
    turned: Head = lambda model, one, two: model.inner(two.permute(0, 2, 3, 1).relu().flatten(1))  # noqa: E731
    assert orders(turned, 150) == {}


def test_an_order_is_unknown_where_the_weight_is_multiplied_by_itself() -> None:
    product: Head = lambda model, one, two: two.flatten(1) @ model.inner.weight.T  # noqa: E731
    assert orders(product, 150)["inner.weight"] is None


def test_a_model_that_refuses_the_input_tells_no_order() -> None:
    flat: Head = lambda model, one, two: model.inner(two.flatten(1))  # noqa: E731
    assert orders(flat, 150, size=4)["inner.weight"] is None


def test_without_a_convolution_a_series_and_a_table_are_not_told_apart() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, 3))
    assert flattened_channels(model, (3, 4), ["1.weight", "2.weight"]) == {"1.weight": None}
    assert flattened_channels(model, (3, 2, 2), ["1.weight", "2.weight"]) == {"1.weight": (3, 2, 2)}
    assert flattened_channels(model, (12,), ["1.weight", "2.weight"]) == {}
