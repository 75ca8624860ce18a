"""What weight decay alone takes off a parameter, against torch's optimiser on a gradient of zero."""

import pytest
import torch

from fl.decay import decay_shares
from fl.types import Group, Phase

HEAD = Group(prefixes=("head.",), lr=0.1, weight_decay=1e-2)
REST = Group(lr=0.02, weight_decay=5e-3, max_norm=1.0)


def taken(lr: float, decay: float, steps: int, *, momentum: float = 0.0, nesterov: bool = False) -> float:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.SGD([weight], lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        solver.step()
    return 1 - float(weight.detach())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, True)])
def test_it_is_what_torchs_sgd_takes_off(momentum: float, nesterov: bool) -> None:
    phase = Phase(groups=(HEAD, REST), momentum=momentum, nesterov=nesterov, epochs=3)
    shares = decay_shares([phase], (((5,),) * 7,), ["head.weight", "body.weight"])
    assert shares["head.weight"] == pytest.approx(taken(0.1, 1e-2, 7, momentum=momentum, nesterov=nesterov), rel=1e-12)
    assert shares["body.weight"] == pytest.approx(taken(0.02, 5e-3, 7, momentum=momentum, nesterov=nesterov), rel=1e-12)


def test_each_phase_starts_afresh_and_moves_its_own() -> None:
    phases = [Phase(groups=(HEAD,), momentum=0.5, epochs=1), Phase(groups=(HEAD, REST), momentum=0.5, epochs=1)]
    shares = decay_shares(phases, (((2,),) * 3, ((2,),) * 4), ["head.bias", "body.bias"])
    kept = (1 - taken(0.1, 1e-2, 3, momentum=0.5)) * (1 - taken(0.1, 1e-2, 4, momentum=0.5))
    assert shares["head.bias"] == pytest.approx(1 - kept, rel=1e-12)
    assert shares["body.bias"] == pytest.approx(taken(0.02, 5e-3, 4, momentum=0.5), rel=1e-12)


def test_what_stands_still_or_does_not_decay_has_none() -> None:
    phase = Phase(groups=(HEAD, Group(prefixes=("body.",), lr=0.1)), epochs=2)
    assert decay_shares([phase], (((1,),) * 9,), ["other", "body.weight"]) == {"other": 0.0, "body.weight": 0.0}


def test_what_can_not_be_told_is_left_out() -> None:
    epochs, steps = Phase(groups=(HEAD,), epochs=2), Phase(groups=(HEAD,), steps=2)
    assert decay_shares([epochs], None, ["head.bias", "body.bias"]) == {"body.bias": 0.0}
    assert decay_shares([steps], None, ["head.bias"])["head.bias"] == pytest.approx(taken(0.1, 1e-2, 2), rel=1e-12)
    adam = Phase(groups=(HEAD, Group(lr=0.1)), optimizer="adam", steps=2)
    assert decay_shares([adam], None, ["head.bias", "body.bias"]) == {"body.bias": 0.0}
