"""Ids that a network makes one-hot vectors of: a matrix that these are multiplied by is an embedding."""

import pytest
import torch
from torch import nn

import attacks
from attacks.base import NotApplicable
from eval.metrics.tokens import token_scores
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

IDS = torch.tensor([[3, 3, 7, 0], [11, 7, 2, 0]])
LABELS = torch.tensor([1, 0])
ONE_HOT = nn.functional.one_hot


class OneHot(nn.Module):
    """Multiplies one-hot vectors of 20 ids by a matrix, (20, 6) or (6, 20)."""

    def __init__(self, look_up, shape=(20, 6), head=6) -> None:
        super().__init__()
        self.rows, self.head, self.look_up = nn.Parameter(torch.empty(shape)), nn.Linear(head, 3), look_up
        with torch.no_grad():
            for value in self.parameters():
                value.normal_(0, 0.5, generator=stream(0, "one-hot"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.look_up(ids, self.rows))


def as_linear(ids, rows):
    return nn.functional.linear(ONE_HOT(ids, 20).float(), rows).mean(1)


BY_ROWS = {
    "product": lambda ids, rows: (ONE_HOT(ids, 20).float() @ rows).mean(1),
    "matmul": lambda ids, rows: torch.matmul(ONE_HOT(ids, 20).to(rows.dtype), rows).mean(1),
    "bag": lambda ids, rows: ONE_HOT(ids, 20).float().mean(1) @ rows,
    "turned linear": lambda ids, rows: as_linear(ids, rows.T),
    "unit matrix": lambda ids, rows: (torch.eye(20, device=rows.device)[ids] @ rows).mean(1),
    "equality": lambda ids, rows: ((ids[..., None] == torch.arange(20)).float() @ rows).mean(1),
    "scatter": lambda ids, rows: (torch.zeros(*ids.shape, 20).scatter_(2, ids[..., None], 1.0) @ rows).mean(1),
    "masked": lambda ids, rows: ((ONE_HOT(ids, 20) * (ids > -1).unsqueeze(-1)).float() @ rows).mean(1),
}
BY_COLUMNS = {
    "linear": as_linear,
    "turned product": lambda ids, rows: (ONE_HOT(ids, 20).float() @ rows.t()).mean(1),
}


def read(view):
    """Return what `tokens` makes of a view, and how much of it is right."""
    found = attacks.build("tokens")(view)
    return found, token_scores(found.private, view.task, view.task.inputs.pack(IDS, torch.float32))


@pytest.mark.parametrize(("name", "look_up"), [*BY_ROWS.items(), *BY_COLUMNS.items()], ids=[*BY_ROWS, *BY_COLUMNS])
def test_ids_of_one_hot_vectors_are_read(name, look_up):
    shape = (6, 20) if name in BY_COLUMNS else (20, 6)
    found, scores = read(from_batch(OneHot(look_up, shape), IDS, LABELS)[0])
    assert found.private["tokens/rows"].tolist() == IDS.unique().tolist()
    assert found.verified
    assert scores["tokens_recall"] == scores["tokens_precision"] == 1


@pytest.mark.parametrize("method", [FedAvg(steps=1, optimizer="adam", lr=1e-2), FedAvg(weight_decay=0.01)])
@pytest.mark.parametrize("bias", [False, True])
def test_ids_are_read_off_a_linear_layer_that_is_fed_one_hot_vectors(bias, method):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Linear(20, 6, bias=bias), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ONE_HOT(ids, num_classes=20).float()).tanh().mean(1))

    found, scores = read(from_batch(Layer(), IDS, LABELS, method=method)[0])
    assert found.private["tokens/words.weight"].tolist() == IDS.unique().tolist()
    assert found.verified
    assert scores["tokens_recall"] == scores["tokens_precision"] == 1


def test_columns_that_score_the_outputs_as_well_are_read_by_the_span_of_all_others():
    def tied(ids, columns):
        return as_linear(ids, columns) @ columns

    class Tied(OneHot):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return tied(ids, self.rows)

    view, _ = from_batch(Tied(None, (6, 20)), IDS, LABELS, head="rows")
    found, _ = read(view)
    assert found.private["tokens/rows"].tolist() == IDS.unique().tolist()


def test_momentum_kept_by_adam_shows_in_columns_as_well():
    model = OneHot(as_linear, (6, 20))
    rule = torch.optim.Adam(model.parameters(), lr=1e-2)
    for ids, labels in ((torch.tensor([[13, 0, 0, 0]]), LABELS[:1]), (IDS[:1], LABELS[:1])):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rule.zero_grad()
        nn.functional.cross_entropy(model(ids), labels).backward()
        rule.step()
    update = {name: before[name] - value for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    how = FedAvg(lr=1e-2, optimizer="adam", steps=1, batch_size=None)
    stated = {"input_shape": torch.tensor([[19, 0, 0, 0]]), "batch_size": 1, "method": how, "head": "head."}
    found = attacks.build("tokens")(from_update(model, update, **stated))
    assert found.verified is None
    assert "times what the first step of adam" in found.note


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Hardtanh(), nn.Linear(2, 2)),
    ],
)
def test_layers_that_are_fed_no_one_hot_vectors_are_no_embeddings(network):
    view, _ = from_batch(network, torch.rand(2, 1, 4, 4, generator=stream(0, "x")), LABELS)
    found = attacks.build("tokens")(view)
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("no embedding")


def test_sums_over_ids_are_no_one_hot_vectors():
    def counted(ids, rows):
        return ONE_HOT(ids, 20).float().sum(-1) @ rows

    found = attacks.build("tokens")(from_batch(OneHot(counted, (4, 6)), IDS, LABELS)[0])
    assert isinstance(found, NotApplicable)
    assert found.reason.startswith("no embedding")
