"""A screening of a model that is given ids reads them off the rows of an embedding that moved."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from eval.federations.screening import Screener, Screening
from fl.seeds import stream

pytestmark = pytest.mark.usefixtures("own_time")


class Words(nn.Module):
    """An embedding, a GRU and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru, self.fc = nn.Embedding(50, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.gru(self.words(ids))[0][:, -1])
        return logits


def sent(model: nn.Module, ids: Tensor, facts: TrainingFacts) -> RecordedUpdate:
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(facts.steps or 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(ids), torch.arange(len(ids)) % 5).backward()
        optimizer.step()
    before, after = ({name: value.clone() for name, value in one.state_dict().items()} for one in (model, trained))
    return RecordedUpdate(before=before, after=after, training=facts, origin={})


def screened(model: nn.Module, update: RecordedUpdate, **settings: object) -> Screening:
    example = torch.zeros(1, 6, dtype=torch.int64)
    return Screener(model=lambda: model, input_shape=example, seconds=5, **settings)(update)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "steps"), [(1, 3), (3, 1), (3, 2)])
def test_ids_that_were_fed_are_a_leak(count: int, steps: int) -> None:
    model, facts = Words(), replace(support.PLAIN, steps=steps, examples=count)
    ids = torch.randint(50, (count, 6), generator=stream(0, "ids"))
    update = sent(model, ids, facts)
    found = screened(model, update)
    assert found.verdict == "leaked"
    counted = f"{len(ids.unique())} of words"
    assert found.reason == f"which ids were fed is recovered, if not in what order: {counted} (tokens)"
    assert ("labels" in {exposure.kind for exposure in found.exposures}) == (steps == 1 or count == 1)
    assert screened(model, update, allowed="features").verdict != "leaked"


def test_ids_are_not_told_where_every_row_moved() -> None:
    model = Words()
    update = sent(model, torch.arange(48).view(8, 6), replace(support.PLAIN, examples=8))
    noise = 1e-3 * torch.randn(50, 12, generator=stream(1, "ids"))
    noised = replace(update, after={**update.after, "words.weight": update.after["words.weight"] + noise})
    found = screened(model, noised)
    assert found.verdict != "leaked"
    assert "every row of the embeddings moved" in found.tried["tokens"]


class Tied(Words):
    """The same with one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True)
        self.fc = nn.Linear(16, 50)
        self.fc.weight = self.words.weight


@pytest.mark.parametrize("left_out", ["", "words.weight", "fc.weight"])
def test_a_tied_embedding_may_be_sent_under_either_name(left_out: str) -> None:
    """Safetensors keeps one name of a tensor that has two."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = Tied().eval()
    ids, trained = torch.tensor([[3, 7, 1, 22, 9]]), copy.deepcopy(model)
    nn.functional.cross_entropy(trained(ids), torch.tensor([5])).backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    before, after = (
        {name: value.detach().clone() for name, value in one.state_dict().items() if name != left_out}
        for one in (model, trained)
    )
    update = RecordedUpdate(before=before, after=after, training=support.PLAIN)
    found = Screener(model=lambda: model, input_shape=ids, seconds=3)(update)
    assert found.verdict == "leaked"
    assert "which ids were fed is recovered" in found.reason
