"""How many ids each column of a network's input takes, which is asked of the network and not of the data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attacks
import hyperleak
from attacks.base import Reconstruction
from fl.capture import from_batch
from fl.simulation.id_counts import count_ids


class Ratings(nn.Module):
    """Factorizes a matrix of ratings: the first column is a user, the second an item."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 4), nn.Embedding(80, 4)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return a rating for each pair (B, 2)."""
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)


class Offsets(nn.Module):
    """Has one embedding for all columns, each of which begins at a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(10 + 7 + 30, 4), nn.Linear(12, 3)
        self.register_buffer("starts", torch.tensor([0, 10, 17]))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of ids (B, 3)."""
        return self.head(self.rows(ids + self.starts).flatten(1))


PAIRS = torch.tensor([[3, 5], [3, 17], [3, 70]])


@pytest.mark.parametrize(
    ("model", "ids", "counts"),
    [
        (Ratings(), PAIRS[:1], (50, 80)),
        (Ratings(), torch.tensor([[0, 0]]), (50, 80)),
        (Offsets(), torch.tensor([[9, 0, 2]]), (47, 37, 30)),
        (nn.Sequential(nn.Embedding(60, 2), nn.Flatten(), nn.Linear(4, 3)), PAIRS[:1] % 60, (60,)),
    ],
)
def test_the_network_tells_how_many_ids_each_column_takes(
    model: nn.Module, ids: Tensor, counts: tuple[int, ...]
) -> None:
    assert count_ids(model, ids) == [counts]


def test_ids_are_read_off_embeddings_of_columns_with_dictionaries_of_their_own() -> None:
    view, _ = from_batch(Ratings(), PAIRS, torch.tensor([5.0, 3.0, 1.0]), loss="mse")
    result = attacks.build("tokens")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.private["tokens/users.weight"].tolist() == [3]
    assert result.private["tokens/items.weight"].tolist() == [5, 17, 70]


def test_a_captured_update_takes_true_ids_beyond_those_of_the_first_example() -> None:
    model = Ratings()
    view, _ = from_batch(model, PAIRS, torch.tensor([5.0, 3.0, 1.0]), loss="mse")
    settings = {"loss": "mse", "batch_size": 3, "attacks": ["tokens"]}
    report = hyperleak.audit(model, PAIRS, torch.tensor([5.0, 3.0, 1.0]), update=dict(view.update), **settings)
    assert not report.mismatch
    assert "4 of the 4 that occur" in report.findings[0].verdict


def test_true_ids_that_no_embedding_has_are_refused_in_words() -> None:
    """The example has few ids, and no embedding says that there are more."""

    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(9, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(nn.functional.one_hot(ids[:, 0], 9).float())

    update = {name: torch.rand_like(value) for name, value in OneHot().named_parameters()}
    with pytest.raises(ValueError, match=r"expected ids below 3, .* got 8: give an example with the largest ids"):
        hyperleak.audit(
            OneHot(), torch.tensor([[8]]), torch.tensor([1]), update=update, input_shape=torch.tensor([[2]])
        )


def test_a_shape_in_place_of_ids_is_told_how_they_are_stated() -> None:
    update = {name: torch.rand_like(value) for name, value in Ratings().named_parameters()}
    with pytest.raises(ValueError, match=r"give an example of them \(input_shape=ids\[:1\], or let your function"):
        hyperleak.audit(Ratings(), update=update, input_shape=(2,), loss="mse")
