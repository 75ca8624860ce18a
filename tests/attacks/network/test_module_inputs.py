"""What linear layers are given is read however a network calls them, and nothing that a network keeps is changed."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.network.module_inputs import inputs_of_linear
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.view import ServerView

SHAPE, LABELS = (1, 8, 8), torch.tensor([3, 8])


def images(count: int = 2) -> Tensor:
    return (255 * torch.rand(count, *SHAPE, generator=stream(0, "pictures"))).round() / 255


class ByName(nn.Module):
    """Calls its layers by the name of their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(input=torch.relu(self.body(input=x.flatten(1))))
        return logits


class Bare(nn.Module):
    """Has parameters and no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(48, 64)), nn.Parameter(torch.zeros(48))
        self.last_weight, self.last_bias = nn.Parameter(torch.zeros(10, 48)), nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(functional.linear(x.flatten(1), self.weight, self.bias))
        return functional.linear(hidden, self.last_weight, self.last_bias)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def in_training_mode(wrap: str) -> nn.Module:
    wrappers = {"parametrization": parametrizations.spectral_norm, "hooks": nn.utils.spectral_norm}
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = dense()
        wrappers[wrap](model[3])
    return model.train()


def seen(model: nn.Module, count: int, **settings: object) -> ServerView:
    return from_batch(initialized(model), images(count).double(), LABELS[:count], **settings)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("build", "settings"), [(ByName, {}), (Bare, {"head": "last_"})])
@pytest.mark.parametrize("name", ["analytic", "ig"])
def test_a_batch_is_read_however_layers_are_called(build: type[nn.Module], settings: dict[str, str], name: str) -> None:
    attack = attacks.build({"name": name, "iterations": 2} if name == "ig" else name)
    found = attack(seen(build(), 2, **settings))
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert set(found.labels.tolist()) <= set(LABELS.tolist())


def test_no_layer_is_taken_for_one_that_has_another_weight() -> None:
    x = torch.ones(2, 64)
    for model, weight in (
        (Bare(), "weight"),
        (Bare(), "last_weight"),
        (parametrizations.weight_norm(dense()[3]), "weight"),
    ):
        with inputs_of_linear(model, weight) as given:
            pass
        assert not given
    with inputs_of_linear(model := dense(), "3.weight") as given:
        model(x.view(2, 1, 8, 8))
    assert [tuple(value.shape) for value in given] == [(2, 48)]
    assert not model[3]._forward_pre_hooks


@pytest.mark.parametrize("wrap", ["parametrization", "hooks"])
def test_attacks_leave_what_a_network_writes_as_it_was_sent(wrap: str) -> None:
    """Spectral norm moves its vectors each time it runs in training mode, by which the next run differs."""
    view, _ = from_batch(in_training_mode(wrap), images(1), LABELS[:1])
    sent = {name: value.clone() for name, value in view.buffers.items()}
    for name in ("analytic", "rconv", "cascade"):
        found = attacks.build(name)(view)
        assert isinstance(found, Reconstruction)
        assert found.verified
    for name, value in view.buffers.items():
        torch.testing.assert_close(value, sent[name], atol=0, rtol=0)


def test_a_layer_that_is_the_whole_network_is_attacked() -> None:
    """Its parameters have no module's name before them, which is no reason to refuse."""
    rows = torch.rand(1, 30, generator=stream(0, "rows"), dtype=torch.float64)
    view, _ = from_batch(initialized(nn.Linear(30, 10)), rows, LABELS[:1])
    for name in ("rconv", "cascade"):
        found = attacks.build(name)(view)
        assert isinstance(found, Reconstruction)
        assert found.verified
        assert found.inputs is not None
        torch.testing.assert_close(found.inputs.flatten(1), rows.to(found.inputs), atol=1e-6, rtol=0)
    cut = attacks.build("headless+cascade")(view)
    assert isinstance(cut, NotApplicable)
    assert cut.limit
    assert "(head)" in cut.reason


def test_rows_that_span_a_classifier_alone_are_not_called_examples() -> None:
    """Of a logistic regression each basis of the rows makes the update under some loss."""
    model = initialized(nn.Linear(30, 10), 0)
    rows = torch.rand(2, 30, generator=stream(0, "rows"), dtype=torch.float64)
    functional.cross_entropy(model(rows), LABELS).backward()
    update = {name: 0.1 * value.grad for name, value in model.named_parameters() if value.grad is not None}
    how = FedAvg(lr=0.1, steps=1, batch_size=None)
    found = attacks.build("analytic")(from_update(model, update, input_shape=(30,), batch_size=2, method=how))
    assert isinstance(found, NotApplicable)


class Arranged(nn.Module):
    """Returns a picture of what its last layer returns, as an autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 24), nn.Linear(24, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.outer(torch.tanh(self.inner(x.flatten(1))))).view_as(x)


class OfTwo(nn.Module):
    """Takes a picture and a row, and returns logits among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.told, self.head = nn.Conv2d(1, 16, 3), nn.Linear(5, 12), nn.Linear(16 * 36 + 12, 10)

    def forward(self, image: Tensor, row: Tensor) -> dict[str, Tensor]:
        both = [torch.relu(self.seen(image)).flatten(1), torch.relu(self.told(row))]
        return {"logits": self.head(torch.cat(both, 1))}


def test_outputs_that_are_arranged_and_several_inputs_are_followed() -> None:
    view, _ = from_batch(initialized(Arranged()), images(1).double(), images(1).double(), loss="mse")
    found = attacks.build("cascade")(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    torch.testing.assert_close(found.inputs, images(1).to(found.inputs), atol=1e-4, rtol=0)
    rows = torch.rand(1, 5, generator=stream(0, "rows"), dtype=torch.float64)
    view, _ = from_batch(initialized(OfTwo()), {"image": images(1).double(), "row": rows}, LABELS[:1])
    assert isinstance(attacks.build("cascade")(view), Reconstruction)
