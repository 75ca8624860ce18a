from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_near

from fl.methods.fedavg import FedAvg
from fl.methods.fedgma import FedGMA, mask
from fl.tensors import dense


def test_mask_by_hand() -> None:
    updates = [torch.tensor(v) for v in ([1.0, 1.0, 1.0, 0.0], [2.0, 3.0, -1.0, 0.0], [0.5, -9.0, 0.0, 0.0])]
    torch.testing.assert_close(mask(updates, 0.7), torch.tensor([1.0, 1 / 3, 0.0, 0.0]))
    torch.testing.assert_close(mask(updates, 0.3), torch.tensor([1.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize(("tau", "server_lr"), [(0.7, 1.0), (0.3, 0.1)])
def test_a_round_equals_weight_by_weight(tau: float, server_lr: float) -> None:
    run = worlds.federation(replace(FedGMA.example(), tau=tau, server_lr=server_lr), rounds=0)
    before = {name: dense(value).clone() for name, value in run.server.shared.items()}
    rounds = run.run_round()
    expected = {}
    for name, value in before.items():
        flat = value.flatten().clone()
        moves = [dense(done.upload.update[name]).flatten() for done in rounds]
        weights = [done.upload.weight for done in rounds]
        for j in range(len(flat)):
            signs = [(float(m[j]) > 0) - (float(m[j]) < 0) for m in moves]
            agreement = abs(sum(signs)) / len(signs)
            average = sum(w * float(m[j]) for w, m in zip(weights, moves, strict=True)) / sum(weights)
            flat[j] -= server_lr * (1.0 if agreement >= tau else agreement) * average
        expected[name] = flat.view_as(value)
    assert_near(run.server.shared, expected, 1e-10)


def test_without_threshold_it_is_fedavg() -> None:
    ours = worlds.federation(replace(FedGMA.example(), tau=0.0))
    theirs = worlds.federation(FedAvg.example())
    assert_near(ours.server.shared, theirs.server.shared, 1e-12)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"tau: expected a number in \[0, 1\], got 1\.5"):
        FedGMA(tau=1.5)
    with pytest.raises(ValueError, match=r"server_lr: expected a (whole )?number > 0( or null)?, got 0"):
        FedGMA(server_lr=0.0)
