"""Networks whose matrices multiply from the left, one column for each image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.base import Reconstruction, build
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream

PICTURE = torch.randint(256, (1, 1, 6, 6), generator=stream(0, "columns")) / 255


class Columns(nn.Module):
    """Turns what it is given, and turns it back before its head, or at the end."""

    def __init__(self, *, deep: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(24, 36)), nn.Parameter(torch.zeros(24, 1))
        self.second = nn.Parameter(torch.zeros(20, 24)) if deep else None
        self.head = nn.Linear(20 if deep else 24, 4)
        initialize(self.head, stream(0, "head"))
        for name, value in self.named_parameters(recurse=False):
            draw = torch.randn(value.shape, generator=stream(0, name))
            value.data.copy_(draw * value.shape[-1] ** -0.5 * 0.8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.weight @ x.flatten(1).T + self.bias)
        if self.second is not None:
            x = nn.functional.leaky_relu(self.second @ x)
        return self.head(x.T)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["analytic", "cascade"])
def test_columns_are_followed(name: str, deep: bool) -> None:
    found = build(name)(from_batch(Columns(deep=deep), PICTURE, torch.tensor([1]))[0])
    assert isinstance(found, Reconstruction), found
    torch.testing.assert_close(found.inputs, PICTURE, atol=1e-3, rtol=0)
    assert found.verified, found.note
