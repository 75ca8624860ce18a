"""What the watch says of a client's optimizer is true, and what it can't be sure of it leaves out."""

import threading

import pytest
import torch
from torch import nn

from eval.federations.optimizer_watch import watch_optimizers


def step(optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.1}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0, "weight_decay": 0}),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ),
        (torch.optim.Adam, {}, {"optimizer": "adam", "lr": 0.001, "momentum": 0, "weight_decay": 0}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.5)}, {"optimizer": "adamw", "lr": 0.5, "weight_decay": 0.01}),
    ],
)
def test_settings_of_one_optimizer(kind, settings, expected):
    with watch_optimizers() as watch:
        step(kind(weights(), **settings), times=3)
    found = watch.facts()
    assert found["steps"] == 3
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_nothing_is_said_without_steps():
    with watch_optimizers() as watch:
        torch.optim.SGD(weights(), lr=0.1)
    assert watch.facts() == {}


def test_steps_before_and_after_do_not_count():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    step(optimizer)
    with watch_optimizers() as watch:
        step(optimizer)
    step(optimizer)
    assert watch.facts()["steps"] == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"betas": (0.5, 0.9)}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adam, {"eps": 1e-3}),
        (torch.optim.Adam, {"maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Adagrad, {"lr_decay": 0.1}),
        (torch.optim.NAdam, {}),
    ],
)
def test_an_optimizer_that_no_method_of_ours_has_gets_no_name(kind, settings):
    with watch_optimizers() as watch:
        step(kind(weights(), lr=0.1, **settings))
    assert watch.facts() == {"steps": 1, "lr": 0.1, "optimizer": None}


def test_momentum_that_is_kept_from_before_leaves_the_optimizer_open():
    optimizer = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    step(optimizer)
    with watch_optimizers() as watch:
        step(optimizer)
    assert watch.facts() == {"steps": 1, "lr": 0.1, "optimizer": None}


def test_a_step_size_that_changes_is_not_known():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    with watch_optimizers() as watch:
        step(optimizer)
        optimizer.param_groups[0]["lr"] = 0.2
        step(optimizer)
    assert "lr" not in watch.facts()
    assert watch.facts()["steps"] == 2


def test_parameter_groups_that_differ_leave_what_differs_open():
    first, second = weights()
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second]}]
    with watch_optimizers() as watch:
        step(torch.optim.SGD(groups, lr=0.1))
    assert watch.facts() == {"steps": 1, "lr": 0.1, "optimizer": None}


def test_two_optimizers_leave_the_steps_open():
    with watch_optimizers() as watch:
        step(torch.optim.SGD(weights(), lr=0.1))
        step(torch.optim.SGD(weights(), lr=0.1))
    assert watch.facts() == {"lr": 0.1, "optimizer": None}


def test_other_threads_do_not_count():
    with watch_optimizers() as watch:
        other = threading.Thread(target=lambda: step(torch.optim.SGD(weights(), lr=0.1)))
        other.start()
        other.join()
    assert watch.facts() == {}


def test_other_threads_count_where_all_are_watched():
    with watch_optimizers(all_threads=True) as watch:
        other = threading.Thread(target=lambda: step(torch.optim.SGD(weights(), lr=0.1)))
        other.start()
        other.join()
    assert watch.facts()["steps"] == 1


class Odd(torch.optim.SGD):
    """An optimizer whose settings are of a form that nobody expects."""

    def __init__(self, params, setting):
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(setting)

    def step(self, closure=None):
        return None


@pytest.mark.parametrize("setting", [{"lr": "fast"}, {"lr": torch.ones(3)}, {"momentum": object()}])
def test_odd_settings_disturb_no_training_and_say_nothing(setting):
    with watch_optimizers() as watch:
        step(Odd(weights(), setting), times=2)
    assert watch.facts() == {"optimizer": None}


def test_constants_that_cannot_be_compared_are_unusual():
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.param_groups[0]["dampening"] = torch.zeros(2)
    with watch_optimizers() as watch:
        optimizer.step()
    assert watch.facts()["optimizer"] is None
