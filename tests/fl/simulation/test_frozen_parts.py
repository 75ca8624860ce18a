"""Batch norm, or another part, that a user put into evaluation mode stays in it while the network around it trains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hyperleak
from attacks.gradient_matching.gradinversion import known_moments
from fl.capture import from_batch, from_update
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.simulation.frozen_parts import keep_frozen_parts


def network(frozen: tuple[int, ...]) -> nn.Sequential:
    """Return a network that trains, but for batch norm at these places."""
    draw = stream(0, "network")
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    for value in [*model.parameters(), model[1].running_mean, model[4].running_mean]:
        nn.init.uniform_(value, -0.3, 0.3, draw)
    for place in frozen:
        model[place].eval()
    return model


def step(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what one step of size 1 subtracts from the weights, by plain torch."""
    own = copy.deepcopy(model)
    nn.functional.cross_entropy(own(images), labels).backward()
    return {name: value.grad for name, value in own.named_parameters() if value.grad is not None}


IMAGES, LABELS = torch.rand(2, 1, 8, 8, generator=stream(0, "images")), torch.tensor([0, 2])


@pytest.mark.parametrize("method", [None, FedAvg(lr=1.0, steps=1, batch_size=None)], ids=["own", "stated"])
@pytest.mark.parametrize("frozen", [(1, 4), (1,)], ids=["all", "first"])
def test_a_client_trains_in_the_modes_of_its_network(frozen: tuple[int, ...], method: FedAvg | None) -> None:
    model = network(frozen)
    truth = step(model, IMAGES, LABELS)
    view, _ = from_batch(model, IMAGES, LABELS, method=method)
    for name, value in truth.items():
        torch.testing.assert_close(view.update[name], value, atol=1e-5, rtol=1e-4)
    captured = from_update(model, truth, input_shape=(1, 8, 8), batch_size=2, method=method)
    assert [captured.client.task.model[place].training for place in (1, 4)] == [place not in frozen for place in (1, 4)]
    assert model[frozen[0]].train().training  # the user's own is left alone


def test_an_update_of_frozen_norms_fits_its_true_images() -> None:
    model = network((1, 4))
    report = hyperleak.audit(
        model, IMAGES, LABELS, update=step(model, IMAGES, LABELS), batch_size=2,
        method={"name": "fedavg", "lr": 1.0, "steps": 1}, attacks=[{"name": "ig", "iterations": 2}],
    )  # fmt: skip
    assert not report.mismatch


def test_a_method_that_evaluates_puts_all_into_that() -> None:
    view, _ = from_batch(network((1,)), IMAGES, LABELS, method=FedAvg(steps=1, batch_size=None, train_mode=False))
    assert not any(module.training for module in view.client.task.model.modules())


def test_copies_stay_frozen() -> None:
    model = network((1,))
    keep_frozen_parts(model)
    other = copy.deepcopy(model).train()
    assert not other[1].training
    assert other[4].training


class Wrapped(nn.Module):
    """Does otherwise in training mode, without a module of PyTorch that does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return features, which lose their mean in training mode."""
        return x - x.mean(0) if self.training else nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("method", [None, FedAvg(lr=1.0, steps=1, batch_size=None)], ids=["own", "stated"])
@pytest.mark.parametrize("part", [nn.Dropout(0.5), Wrapped(), nn.Sequential(nn.Dropout(0.5))], ids=lambda p: str(p)[:9])
def test_any_part_stays_in_its_mode(part: nn.Module, method: FedAvg | None) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), part.eval(), nn.Linear(24, 3)).train()
    part.eval()
    truth = step(model, IMAGES, LABELS)
    view, _ = from_batch(model, IMAGES, LABELS, method=method)
    for name, value in truth.items():
        torch.testing.assert_close(view.update[name], value, atol=1e-5, rtol=1e-4)
    captured = from_update(model, truth, input_shape=(1, 8, 8), batch_size=2, method=method)
    assert not any(module.training for module in captured.client.task.model[3].modules())


def test_statistics_of_a_frozen_norm_are_not_taken_for_those_of_the_batch() -> None:
    model = network((1,))
    model[1].reset_running_stats()  # to zero and one, which say nothing
    view, _ = from_batch(model, IMAGES, LABELS, method=FedAvg(lr=0.1, steps=1, batch_size=None))
    assert [*known_moments(view)] == ["4"]


def test_frozen_statistics_that_did_not_move_contradict_nothing() -> None:
    model = network((1, 4))
    update = step(model, IMAGES, LABELS) | {name: torch.zeros_like(value) for name, value in model.named_buffers()}
    settings = {"input_shape": (1, 8, 8), "batch_size": 2, "attacks": [{"name": "ig", "iterations": 1}]}
    report = hyperleak.audit(model, update=update, **settings)
    assert not report.mismatch
    assert not any("have not moved" in note for note in report.notes)
    assert "have not moved" in hyperleak.audit(network(()), update=update, **settings).mismatch


def test_a_private_method_takes_frozen_norms_and_refuses_others() -> None:
    how = DPFedAvg(lr=0.1, steps=1)
    from_batch(network((1, 4)), IMAGES, LABELS, method=how)
    with pytest.raises(ValueError, match="expected a model without batch statistics, got 4: use group norm"):
        from_batch(network((1,)), IMAGES, LABELS, method=how)


def test_a_frozen_part_is_itself_after_a_change_of_mode() -> None:
    model = network((1,))
    keep_frozen_parts(model)
    for other in (model, copy.deepcopy(model)):
        assert other[1].train() is other[1]
        assert other.eval().train()[1] is other[1]
        assert not other[1].training
