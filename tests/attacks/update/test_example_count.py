"""The rank of an update tells how many examples one step was taken on, or nothing does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attacks.update.example_count import count_examples
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.view import ServerView

SHAPE = (1, 14, 14)


def dense(hidden: int = 24) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(196, hidden), nn.Tanh(), nn.Linear(hidden, 10))


class Tokens(nn.Module):
    """A network whose first linear layer is given each row of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(14, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x[:, 0]).tanh().mean(1))


def seen(model: nn.Module, count: int, *, lr: float = 0.1, decay: float = 0.0, noise: float = 0.0) -> ServerView:
    initialize(model, stream(0, "count"))
    draw, trained = stream(1, "count"), copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr, weight_decay=decay)
    inputs, labels = torch.rand(count, *SHAPE, generator=draw), torch.randint(10, (count,), generator=draw)
    nn.functional.cross_entropy(trained(inputs), labels).backward()
    optimizer.step()
    after = dict(trained.named_parameters())
    update = {
        name: (value - after[name]).detach() + noise * torch.randn(value.shape, generator=draw)
        for name, value in model.named_parameters()
    }
    method = FedAvg(lr=lr, steps=1, batch_size=None, weight_decay=decay)
    return from_update(model, update, input_shape=SHAPE, batch_size=4, method=method)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_the_rank_is_the_number_of_examples(count: int, decay: float) -> None:
    assert count_examples(seen(dense(), count, decay=decay)) == count


def test_nothing_is_told_where_the_rank_is_full_or_hidden() -> None:
    assert count_examples(seen(dense(), 22)) is None  # of 24 rows
    assert count_examples(seen(dense(4), 3)) is None
    assert count_examples(seen(dense(), 3, noise=1e-3)) is None
    assert count_examples(seen(Tokens(), 3)) is None
