"""Networks that take batches of one size alone."""

import pytest
import torch
from torch import Tensor, nn

from attacks import Reconstruction, build
from fl.capture import from_batch
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream

PICTURES = torch.randint(256, (2, 1, 6, 6), generator=stream(0, "fixed batches")) / 255


class FixedBatch(nn.Module):
    """Has the number of images written into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.view(2, 36))


@pytest.mark.parametrize("name", ["analytic", "spear"])
@pytest.mark.parametrize("labels", [[1, 2], [3, 3]])
def test_both_pictures_come_back(name: str, labels: list[int]) -> None:
    net = FixedBatch()
    initialize(net, stream(0, "fixed batches"))
    found = build(name)(from_batch(net, PICTURES, torch.tensor(labels))[0])
    assert isinstance(found, Reconstruction), found
    assert found.inputs is not None
    assert (found.inputs[:, None] - PICTURES).flatten(2).abs().amax(2).amin(0).max() < 1e-3
    assert found.verified is True, found.note
    assert found.labels is not None
    assert sorted(found.labels.tolist()) == labels
