"""Recurrent layers, all of whose states reach a linear layer: cascade solves all their steps together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, build
from fl.capture import from_batch
from fl.seeds import stream

STEPS, LABELS = 5, torch.tensor([1])


class Layers(nn.Module):
    """A classifier of all states of a recurrent layer, or of the last alone."""

    def __init__(self, kind: type[nn.RNNBase], *, last: bool = False) -> None:
        super().__init__()
        self.states = kind(3, 12, batch_first=True)  # type: ignore[call-arg]
        self.last, self.head = last, nn.Linear(12 if last else 12 * STEPS, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.states(x.mT)[0]
        return self.head(states[:, -1] if self.last else states.flatten(1))


class Cells(nn.Module):
    """The same, step by step."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(3, 12), nn.Linear(12 * STEPS, 4)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for step in x.unbind(2):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.cat(states, 1))


def drawn(kind: type[nn.Module]) -> nn.Module:
    network = (Layers if issubclass(kind, nn.RNNBase) else Cells)(kind)  # type: ignore[arg-type]
    return started(network)


def started(network: nn.Module) -> nn.Module:
    draw = stream(0, "weights")
    with torch.no_grad():
        for value in network.parameters():
            value.copy_((torch.rand(value.shape, generator=draw) - 0.5) * 0.6)
    return network


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell], ids=lambda kind: kind.__name__)
def test_a_series_whose_states_all_reach_the_head_is_solved(kind: type[nn.Module]) -> None:
    series = torch.rand(1, 3, STEPS, generator=stream(0, "series"))
    view, truth = from_batch(drawn(kind), series, LABELS)
    result = build("cascade")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)


def test_a_picture_read_row_by_row_is_confirmed_at_its_levels() -> None:
    picture = (torch.rand(1, 1, 3, STEPS, generator=stream(0, "picture")) * 255).round() / 255

    class Rows(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, 0])

    view, _ = from_batch(started(Rows(nn.GRU)), picture, LABELS)
    result = build("cascade")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert result.fixed is not None
    torch.testing.assert_close(result.inputs, picture, atol=1e-6, rtol=0)


def test_what_is_not_solved_is_never_confirmed() -> None:
    series = torch.rand(1, 3, STEPS, generator=stream(0, "series"))
    view, truth = from_batch(started(Layers(nn.GRU, last=True)), series, LABELS)
    result = build("cascade")(view)
    if isinstance(result, NotApplicable):
        assert "is recurrent" in result.reason
    elif (result.inputs - truth.inputs).abs().max() > 0.01:  # type: ignore[operator]
        assert not result.verified
        assert not result.approximate
