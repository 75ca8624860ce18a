"""Ids of adapters of low rank on an embedding whose own weight is frozen, written as PEFT's are."""

import pytest
import torch
from torch import nn

import attacks
from attacks.base import NotApplicable
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

IDS = torch.tensor([[3, 3, 7, 0], [11, 7, 2, 0]])
LABELS = torch.tensor([1, 0])
LOWER = "embedding.lora_embedding_A.default"


def drawn(*shape, zero=False):
    """Return a parameter of zeros, or of random numbers."""
    return nn.Parameter(torch.zeros(shape) if zero else torch.randn(shape, generator=stream(0, f"adapter {shape}")))


class AdaptedEmbedding(nn.Module):
    """Adds to an embedding that is frozen the rows of an adapter, the columns of A (r, V), times B (d, r)."""

    def __init__(self, zero, words, width) -> None:
        super().__init__()
        self.base_layer = nn.Embedding.from_pretrained(drawn(words, width).detach())
        self.lora_embedding_A = nn.ParameterDict({"default": drawn(4, words, zero=zero == "A")})
        self.lora_embedding_B = nn.ParameterDict({"default": drawn(width, 4, zero=zero == "B")})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lower, upper = self.lora_embedding_A["default"].T, self.lora_embedding_B["default"].T
        return self.base_layer(ids) + 2.0 * (nn.functional.embedding(ids, lower) @ upper)


class Adapted(nn.Module):
    """A mean of embeddings and a classifier; `tied` scores words by the frozen embedding."""

    def __init__(self, zero="A", *, tied=False) -> None:
        super().__init__()
        self.embedding = AdaptedEmbedding(zero, 30, 6)
        self.mix, self.tied = nn.Linear(6, 6 if tied else 3), tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.embedding(ids).mean(1))
        return mixed.tanh() @ self.embedding.base_layer.weight.T if self.tied else mixed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", ["A", "neither"])
def test_ids_are_read_off_the_columns_of_an_adapter(zero, tied):
    head = {"head": "mix."} if tied else {}
    found = attacks.build("tokens")(from_batch(Adapted(zero, tied=tied), IDS, LABELS, **head)[0])
    assert {name: ids.tolist() for name, ids in found.private.items()} == {f"tokens/{LOWER}": [0, 2, 3, 7, 11]}
    assert found.verified


def test_an_adapter_whose_upper_matrix_is_zero_tells_no_id_in_its_first_step():
    """What moves is B alone, by mixtures of columns of A."""
    view, _ = from_batch(Adapted("B"), IDS, LABELS)
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert found.limit
    assert found.reason.startswith(f"no row of {LOWER} moves in a step from the weights that were sent")
    assert "Audit a later step" in found.reason
    later, _ = from_batch(Adapted("B"), IDS, LABELS, method=FedAvg(steps=2))
    assert attacks.build("tokens")(later).private[f"tokens/{LOWER}"].tolist() == [0, 2, 3, 7, 11]


def test_a_frozen_embedding_is_named_where_adapters_are_elsewhere():
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding.from_pretrained(drawn(30, 6).detach())
            self.head = nn.Linear(6, 3).requires_grad_(False)
            self.lora_A, self.lora_B = drawn(2, 6), drawn(3, 2, zero=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(ids).mean(1)
            return self.head(hidden) + hidden @ self.lora_A.T @ self.lora_B.T

    found = attacks.build("tokens")(from_batch(Headed(), IDS, LABELS, head="lora_B")[0])
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("embedding.weight is not in the update (frozen, say)")
    assert "An adapter on the embedding shows ids as well" in found.reason
