"""Layers that a network uses more than once are passed over: the next one gives its input away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, build
from eval.federations.exposures import proved_exposures
from fl.capture import from_batch
from fl.seeds import stream
from fl.tensors import dense

SHAPE = (1, 8, 8)


class Recurrent(nn.Module):
    """A classifier of what a recurrent layer makes of the rows."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows, self.head = kind(8, 12, batch_first=True), nn.Linear(12, 10)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(x.squeeze(1))[0][:, -1])
        return out


class Cell(nn.Module):
    """The same, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x[:, 0].unbind(1):
            state = self.cell(row, state)
        assert state is not None
        out: Tensor = self.head(state[0])
        return out


class Tied(nn.Module):
    """A classifier of what an autoencoder of one weight returns."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        back = functional.linear(self.code(x.flatten(1)).relu(), self.code.weight.T).sigmoid()
        out: Tensor = self.head(self.code(back).relu())
        return out


class Siamese(nn.Module):
    """A classifier of the difference of two halves, which one layer looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.flatten(1).split(32, 1)
        out: Tensor = self.head((self.both(one).relu() - self.both(other).relu()).abs())
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM cell": Cell,
    "tied": Tied,
    "siamese": Siamese,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_the_classifier_is_given_comes_out(name: str) -> None:
    model = chains.initialized(NETWORKS[name]()).float().eval()
    x = torch.rand(1, *SHAPE, generator=stream(0, "passed over"))
    seen: list[Tensor] = []
    hook = model.get_submodule("head").register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(x)
    hook.remove()
    view, _ = from_batch(model, x, torch.tensor([3]))
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified, result.note
    assert torch.allclose(dense(result.private["features"]), seen[0][0], atol=1e-5)
    assert "what 'head' takes" in result.note
    assert (
        proved_exposures("analytic", result, view)[0].words
        == f"what head takes is recovered: {seen[0].numel()} numbers"
    )


@pytest.mark.parametrize("name", ["LSTM", "siamese"])
def test_of_two_pictures_stated_as_one_it_is_not_verified(name: str) -> None:
    model = chains.initialized(NETWORKS[name]()).float().eval()
    x = torch.rand(2, *SHAPE, generator=stream(1, "passed over"))
    grads = torch.autograd.grad(functional.cross_entropy(model(x), torch.tensor([3, 3])), list(model.parameters()))
    view, _ = from_batch(model, x[:1], torch.tensor([3]))
    for (key, _), grad in zip(model.named_parameters(), grads, strict=True):
        dense(view.update[key]).copy_(grad)
    result = build("analytic")(view)
    assert not (isinstance(result, Reconstruction) and result.verified)
