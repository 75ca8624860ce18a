"""Many steps taken for one: exact where there is one, right to first order for more, else refused with a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.matrix import ROWS
from torch import Tensor

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.rewriting.surrogate import ONE_STEP_SURROGATE, Surrogate, count_local_steps, total_step_size
from fl.capture import from_batch
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedbabu import FedBABU
from fl.methods.fedper import FedPer
from fl.predict import predict
from fl.tensors import Tensors, dense
from fl.types import Group, Phase, Task, Truth
from fl.view import ServerView, ThreatModel


def victim(method: Method, n: int = 4, **threat: Any) -> tuple[ServerView, Truth, Task]:
    task, images = worlds.task(), worlds.images(n, "surrogate")
    seen = from_batch(
        task.model, images.inputs, images.labels, method=method, head=task.head, threat=ThreatModel(**threat)
    )
    return *seen, task


def rewritten(view: ServerView, **settings: Any) -> ServerView:
    made = Surrogate(**settings).rewrite(view)
    assert isinstance(made, ServerView), made
    return made


def gradient(task: Task, truth: Truth) -> dict[str, Tensor]:
    """Of the mean loss of all images at the network sent."""
    loss = torch.nn.functional.cross_entropy(task.model(truth.inputs), truth.labels)
    names = list(task.parameters)
    return dict(zip(names, torch.autograd.grad(loss, [task.model.get_parameter(n) for n in names]), strict=True))


def assert_near(found: Tensors, expected: dict[str, Tensor], most: float) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert (dense(found[name]) - value).norm() <= most * value.norm(), name


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 7, "batch_size": None},
        {"epochs": 3, "batch_size": None, "momentum": 0.9},
        {"epochs": 3, "batch_size": 2, "weight_decay": 1e-3},  # its momentum would weigh the first batches more
        {"steps": 5, "batch_size": None, "weight_decay": 0.1, "momentum": 0.5},
    ],
    ids=["plain", "momentum", "batches", "decay"],
)
def test_short_steps_give_the_gradient_itself(settings: dict[str, Any]) -> None:
    view, truth, task = victim(FedAvg(lr=1e-6, **settings))
    made = rewritten(view)
    assert_near(made.update, gradient(task, truth), 1e-4)
    assert (made.schedule, made.batch_size, made.order) == ((((4,),),), 4, None)


def test_one_step_is_exact_and_stays_where_it_was() -> None:
    view, truth, task = victim(FedAvg(lr=0.5, steps=1, batch_size=None, momentum=0.5, weight_decay=0.3))
    made = rewritten(view, along=0.7)
    assert_near(made.update, gradient(task, truth), 1e-10)
    assert all(torch.equal(dense(made.shared[n]), dense(view.shared[n])) for n in view.shared)
    again = predict(made, replace(truth.candidate(), order=None))
    assert_near(again, gradient(task, truth), 1e-12)


def test_the_network_lies_between_the_one_sent_and_the_one_returned() -> None:
    view, _, _ = victim(FedAvg(lr=0.5, epochs=2, batch_size=2))
    for along in (0.0, 0.25, 1.0):
        made = rewritten(view, along=along)
        for name, sent in view.shared.items():
            assert torch.allclose(dense(made.shared[name]), dense(sent) - along * dense(view.update[name]), rtol=1e-12)


def test_the_middle_is_right_to_second_order() -> None:
    """Halving short steps halves the error of the start's gradient; the middle's is small from the beginning."""
    errors = {}
    for lr in (2e-4, 1e-4):
        view, truth, _ = victim(FedAvg(lr=lr, steps=8, batch_size=None))
        for along in (0.0, 0.5):
            made = rewritten(view, along=along)
            found = predict(made, replace(truth.candidate(), order=None))
            left = torch.cat([(dense(found[n]) - dense(v)).flatten() for n, v in made.update.items()])
            errors[along, lr] = float(left.norm().detach())
    assert 1.7 < errors[0.0, 2e-4] / errors[0.0, 1e-4] < 2.3
    # the k-th of T steps starts (k - 1) / T along, half a step before the middle on average
    assert errors[0.5, 1e-4] < 0.3 * errors[0.0, 1e-4]


def naive(phase: Phase, group: Group, counts: list[int]) -> float:
    """How far torch.optim.SGD moves a number against a gradient of 1."""
    value = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    settings = {"momentum": phase.momentum, "nesterov": phase.nesterov, "weight_decay": group.weight_decay}
    optimizer = torch.optim.SGD([value], lr=group.lr, **settings)  # type: ignore[arg-type]
    for count in counts:
        value.grad = torch.tensor(float(count > 0), dtype=torch.float64)
        optimizer.step()
    return -value.item()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("counts", [[3], [2, 2, 1], [0, 2, 0, 3]])
def test_movement_is_that_of_torchs_optimizer(nesterov: bool, counts: list[int]) -> None:
    group = Group(lr=0.3, weight_decay=0.2, max_norm=1e-3)
    phase = Phase(groups=(group,), momentum=0.7, nesterov=nesterov, epochs=1)
    schedule = (tuple((count,) for count in counts), ((4,),))
    still = Phase(groups=(Group(lr=1.0),), epochs=1)
    assert total_step_size([phase, still], schedule, [group, None]) == pytest.approx(
        naive(phase, group, counts), rel=1e-12
    )


def test_without_a_schedule_the_gradient_is_known_up_to_its_size() -> None:
    view, truth, task = victim(FedAvg(lr=1e-6, epochs=5, batch_size=None, momentum=0.5), knows_schedule=False)
    made = rewritten(view)
    assert made.scale_unknown
    expected = gradient(task, truth)
    factors = [dense(made.update[n]).norm() / g.norm() for n, g in expected.items()]
    assert torch.allclose(torch.stack(factors), factors[0].expand(len(factors)), rtol=1e-4)
    assert isinstance(attacks.build({"name": "ig", "iterations": 2})(view), NotApplicable)
    assert isinstance(attacks.build({"name": "surrogate+ig", "iterations": 2})(view), Reconstruction)


def test_a_clipped_round_has_lost_its_size() -> None:
    assert rewritten(victim(FedAvg(lr=0.1, epochs=3, batch_size=None, max_norm=1e-3))[0]).scale_unknown
    one = FedPer(lr=0.1, epochs=2, batch_size=2, max_norm=1.0)
    assert rewritten(victim(one)[0]).scale_unknown
    assert not rewritten(victim(replace(one, max_norm=None))[0]).scale_unknown


def test_the_classifier_stays_private() -> None:
    view, _, _ = victim(FedPer(lr=0.1, epochs=2, batch_size=2))
    made = rewritten(view)
    assert isinstance(made.method, FedPer)
    assert made.private == view.private
    found = attacks.build({"name": "surrogate+ig", "iterations": 5})(view)
    assert isinstance(found, Reconstruction)
    assert set(found.private) == set(view.private)


def test_a_stated_number_of_images_stands_for_an_unknown_one() -> None:
    view, _, _ = victim(FedAvg(lr=0.1, epochs=2, batch_size=2), knows_batch_size=False)
    refused = Surrogate().rewrite(view)
    assert isinstance(refused, NotApplicable)
    assert "images" in refused.reason
    found = attacks.build({"name": "ig", "iterations": 3})(rewritten(view, images=3))
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.shape == (3, 1, 8, 8)


class ByAdam(FedAvg):
    """Local training by Adam."""

    name = "by-adam"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        return tuple(replace(phase, optimizer="adam", momentum=0.0) for phase in super().phases(task, round))


class Apart(FedAvg):
    """Convolutions and the rest are clipped apart."""

    name = "apart"

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        groups = (Group(prefixes=("body.conv",), lr=0.1, max_norm=1.0), Group(lr=0.1, max_norm=1.0))
        return tuple(replace(phase, groups=groups) for phase in super().phases(task, round))


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (ROWS["hyperfl"].method, "peel it first"),
        (ROWS["scaffold"].method, "gradient of its loss"),
        (ROWS["fedsam"].method, "gradient of its loss"),
        (ByAdam(lr=0.1), "adam rescales"),
        (Apart(lr=0.1), "clipped apart"),
    ],
    ids=["hyperfl", "scaffold", "fedsam", "adam", "apart"],
)
def test_what_is_not_plain_sgd_is_refused(method: Method, why: str) -> None:
    federation = Federation(Client(worlds.task(), method), [ClientData(worlds.images(4), worlds.images(4))])
    federation.run_round()  # before it the control terms of SCAFFOLD are known to be zero
    view, _ = federation.observe(0)
    refused = Surrogate().rewrite(view)
    assert isinstance(refused, NotApplicable)
    assert why in refused.reason


def test_the_first_round_of_scaffold_is_one_step_of_plain_sgd() -> None:
    rounds = [ClientData(worlds.images(4), worlds.images(4))]
    made = {}
    for name in ("fedavg", "scaffold"):
        method = replace(ROWS[name].method, lr=0.1, momentum=0.0, epochs=1, batch_size=2)
        view, _ = Federation(Client(worlds.task(), method), rounds).observe(0)
        made[name] = rewritten(view).update
    assert made["scaffold"].keys() == made["fedavg"].keys()
    assert all(torch.allclose(value, made["fedavg"][name]) for name, value in made["scaffold"].items())


def test_results_say_that_they_rest_on_an_approximation() -> None:
    several, _, _ = victim(FedAvg(lr=0.1, epochs=2, batch_size=2))
    single, _, _ = victim(FedAvg(lr=0.1, steps=1, batch_size=None), n=1)
    assert (count_local_steps(several), count_local_steps(single)) == (4, 1)
    attack = attacks.build({"name": "surrogate+ig", "iterations": 3})
    approximate, exact = attack(several), attack(single)
    assert isinstance(approximate, Reconstruction)
    assert isinstance(exact, Reconstruction)
    assert ONE_STEP_SURROGATE in approximate.knowledge
    assert ONE_STEP_SURROGATE not in exact.knowledge
    sure = Reconstruction(inputs=None, verified=True, fixed=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    assert Surrogate().lift_result(several, rewritten(several), sure).verified is None
    assert Surrogate().lift_result(several, rewritten(several), sure).fixed is None
    assert Surrogate().lift_result(single, rewritten(single), sure).verified is True


@pytest.mark.parametrize("settings", [{"along": -0.1}, {"along": 1.1}, {"images": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Surrogate(**settings)


def test_what_a_method_keeps_frozen_stays_frozen_in_the_plain_view() -> None:
    view, truth, _ = victim(FedBABU(lr=0.05, momentum=0.0, epochs=1, batch_size=2), knows_labels=True)
    made = rewritten(view)
    head = view.task.head
    assert not any(name.startswith(head) for name in (*made.shared, *made.update, *made.private))
    found = attacks.build({"name": "surrogate+ig", "iterations": 3})(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert found.inputs.shape == truth.inputs.shape
