"""A module is called with explicit weights, and keeps its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl.network import Network


class Twice(nn.Module):
    """The same layer under two names, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.steps = nn.Sequential(self.first, nn.BatchNorm1d(3), self.second)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.steps(x))
        return out


def test_a_module_with_two_names_has_its_own_tensors_after_a_call() -> None:
    model = Twice().eval()
    before = dict(model.named_parameters())
    weights = {name: torch.full_like(value, 2.0) for name, value in before.items()}
    buffers = dict(model.named_buffers())
    x = torch.rand(2, 3)
    for _ in range(3):
        out = Network(model, weights, buffers)(x)
        after = dict(model.named_parameters())
        assert all(value is before[name] and isinstance(value, nn.Parameter) for name, value in after.items())
        assert after.keys() == before.keys()
    inner = nn.functional.linear(x, torch.full((3, 3), 2.0), torch.full((3,), 2.0)) / (1 + 1e-5) ** 0.5 * 2 + 2
    for _ in range(2):
        inner = nn.functional.linear(inner, torch.full((3, 3), 2.0), torch.full((3,), 2.0))
    torch.testing.assert_close(out, inner)


def test_what_is_missing_is_named() -> None:
    model = Twice()
    weights = {name: value.detach() for name, value in model.named_parameters() if not name.startswith("second")}
    with pytest.raises(RuntimeError, match="second"):
        Network(model, weights, dict(model.named_buffers()))(torch.rand(2, 3))
