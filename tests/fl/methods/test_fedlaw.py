"""FedLAW against its rounds written out, and where it comes to FedAvg."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.public_rounds import averaged, fedlaw, state, trained
from support import unequal, worlds
from support.compare import assert_near, assert_same
from support.unequal import read_back

from fl.data.sources.embedded import Faces, Photos
from fl.methods.fedavg import FedAvg
from fl.methods.fedlaw import FedLAW, combine_networks
from fl.types import Task

LOCAL = {**unequal.LOCAL, "weight_decay": 0.01}
SERVER: dict[str, Any] = {"public": Faces(size=8), "images": 6, "server_epochs": 3, "server_lr": 0.2, "server_batch": 4}
NORM = worlds.task(batch_norm=True)
PUBLIC = Faces(size=8).load().train
fed = partial(unequal.federation, sizes=(2, 4, 6))


@pytest.mark.parametrize("task", [None, NORM], ids=["plain", "batch-norm"])
def test_rounds_equal_those_written_out(task: Task | None) -> None:
    method = FedLAW(**LOCAL, **SERVER)
    run = fed(method, task=task)
    for clients in ([0, 1, 2], [0, 2]):
        sent, before = state(run), run.server
        models = trained(run, sent, run.run_round(clients), method)
        chosen = [torch.arange(154, 160)[index] for index in method.batches(before, method.server_phase(), 6)]
        assert [len(index) for index in chosen] == [4, 2] * 3
        batches = [(PUBLIC.inputs[index].double(), PUBLIC.labels[index]) for index in chosen]
        expected, shares, gamma = fedlaw(models, run.client.base.model, batches, 0.2)
        assert_near(state(run), expected, 1e-10)
        assert abs(gamma - 1) > 0.01
        mean = averaged(models)
        assert not torch.allclose(expected["head.weight"], gamma * mean["head.weight"], rtol=1e-3)
        assert float(shares.sum()) == pytest.approx(1)


def test_what_is_learned_fits_the_servers_images() -> None:
    method = FedLAW(**LOCAL, **{**SERVER, "images": None, "server_batch": 160})
    run = fed(method)
    sent = state(run)
    models = trained(run, sent, run.run_round(), method)
    model, losses = run.client.base.model, []
    for values in (averaged(models), state(run)):
        model.load_state_dict(values)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model(PUBLIC.inputs.double()), PUBLIC.labels)))
    assert losses[1] < losses[0] - 1e-3


def test_without_a_step_size_it_is_fedavg() -> None:
    ours, theirs = fed(FedLAW(**LOCAL, **{**SERVER, "server_lr": 0.0})), fed(FedAvg(**LOCAL))
    for clients in ([0, 1, 2], [1, 2]):
        for run in (ours, theirs):
            run.run_round(clients)
    assert_near(ours.server.shared, theirs.server.shared, 1e-13)


def test_weights_by_hand() -> None:
    rows = {"w": torch.tensor([[1.0, 2.0], [3.0, -2.0]])}
    weights = torch.tensor([3.0, 1.0, 0.5]).log()
    torch.testing.assert_close(combine_networks(weights, rows)["w"], torch.tensor([0.75, 0.5]))


def test_a_federation_read_back_goes_on_as_the_whole_one(tmp_path: Path) -> None:
    whole, again = read_back(lambda: fed(FedLAW(**LOCAL, **SERVER), task=NORM), tmp_path, [0, 1], ([1, 2],))
    assert_same(state(again), state(whole))  # type: ignore[arg-type]


def test_a_round_of_nobody_changes_nothing() -> None:
    run = fed(FedLAW(**LOCAL, **SERVER))
    before = state(run)
    run.run_round([])
    assert_same(state(run), before)  # type: ignore[arg-type]
    assert run.server.round == 1


def test_labels_of_other_classes_are_refused_at_once() -> None:
    photos = Photos(size=8, mode="gray")
    with pytest.raises(ValueError, match=r"public: expected labels below 3, the task's classes, got 7"):
        fed(FedLAW(**LOCAL, **{**SERVER, "public": photos, "images": None}))


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="server_lr: expected a number >= 0, got"):
        FedLAW(**LOCAL, **{**SERVER, "server_lr": -0.1})
    with pytest.raises(ValueError, match="server_batch: expected a whole number >= 1"):
        FedLAW(**LOCAL, **{**SERVER, "server_batch": 0})
