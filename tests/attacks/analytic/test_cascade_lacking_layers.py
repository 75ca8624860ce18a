"""Updates in which a layer of the chain did not move or was not sent: `cascade` begins at what did."""

from __future__ import annotations

import pytest
import torch
from support.chains import initialized
from torch import nn

from attacks import NotApplicable, Reconstruction
from attacks.analytic.backsolve import Backsolve
from attacks.analytic.cascade import Cascade
from attacks.result import Remark
from fl.capture import from_batch
from fl.seeds import stream


def chain(*head: nn.Module) -> nn.Module:
    """Return two convolutions below linear layers, for pictures of 6 by 6."""
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()]
    return initialized(nn.Sequential(*convolutions, nn.Flatten(), *head).eval()).float()


def without_head(model: nn.Sequential) -> nn.Sequential:
    nn.init.zeros_(model[-1].weight)
    return model


def frozen(model: nn.Sequential, number: int) -> nn.Sequential:
    model[number].requires_grad_(False)
    return model


LACKING = {
    "head at zero": lambda: without_head(chain(nn.Linear(288, 10))),
    "first convolution frozen": lambda: frozen(chain(nn.Linear(288, 10)), 0),
}


@pytest.mark.parametrize("build", LACKING.values(), ids=LACKING.keys())
def test_backsolve_is_asked_where_a_layer_of_the_chain_did_not_move(build) -> None:
    picture = (255 * torch.rand(1, 3, 6, 6, generator=stream(0, "picture"))).round() / 255
    result = Cascade()(from_batch(build(), picture, torch.tensor([1]))[0])
    assert isinstance(result, Reconstruction)
    assert result.verified is True
    assert torch.equal((255 * result.inputs).round(), (255 * picture).round())


def test_what_tells_too_little_is_refused_for_the_layer_that_did_not_move() -> None:
    model = without_head(chain(nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10)))
    picture = torch.rand(1, 3, 6, 6, generator=stream(0, "picture"))
    result = Cascade()(from_batch(model, picture, torch.tensor([1]))[0])
    assert isinstance(result, NotApplicable)
    assert "the update says nothing of 0" in result.reason
    assert not result.limit


def test_pictures_of_which_much_is_open_are_not_borne_out() -> None:
    """Others with the same features make the same update."""
    model = without_head(chain(nn.Linear(288, 100), nn.ReLU(), nn.Linear(100, 10)))
    picture = (255 * torch.rand(1, 3, 6, 6, generator=stream(0, "picture"))).round() / 255
    result = Backsolve()(from_batch(model, picture, torch.tensor([1]))[0])
    assert isinstance(result, Reconstruction)
    assert Remark.PARTLY_TOLD in result.remarks
    assert not result.verified
    assert not result.approximate
