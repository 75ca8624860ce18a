"""Targets of other losses than cross entropy, read off what flows back into the outputs."""

import pytest
import torch
from torch import nn

import attacks
from attacks.labels.targets import output_signal, read_targets
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream


class Negated(nn.Module):
    """A model that turns the sign of its last layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.head(x)


def network(outputs: int, make: type[nn.Module] | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)) if make is None else make(outputs)
    generator = stream(0, "targets")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


ROW = torch.rand(1, 6, generator=stream(1, "row"))


@pytest.mark.parametrize("target", [[[1.0]], [[0.0]], [[1.0, 0.0, 0.0, 1.0]]])
def test_labels_of_a_yes_or_no_are_signs(target):
    target = torch.tensor(target)
    view, _ = from_batch(network(target.shape[1]), ROW, target, loss="bce")
    assert torch.equal(read_targets(view), target)


def test_no_sign_is_read_where_it_is_turned_on_the_way():
    view, _ = from_batch(network(1, Negated), ROW, torch.tensor([1.0]), loss="bce")
    assert output_signal(view) is None
    assert read_targets(view) is None


@pytest.mark.parametrize("steps", [1, 2])
def test_numbers_follow_from_the_input_and_one_step_of_known_size(steps):
    target = torch.tensor([[2.5, -1.0]])
    method = FedAvg(steps=steps, lr=0.1, batch_size=None)
    view, _ = from_batch(network(2), ROW, target, loss="mse", method=method)
    found = attacks.build("analytic")(view)
    if steps == 1:
        torch.testing.assert_close(found.labels, target, rtol=1e-4, atol=1e-4)
    else:
        assert found.labels is None


def test_numbers_are_not_told_where_the_step_size_is_not():
    model, target = network(1), torch.tensor([[2.5]])
    gradient = torch.autograd.grad(nn.functional.mse_loss(model(ROW), target), list(model.parameters()))
    update = {name: 0.3 * value for (name, _), value in zip(model.named_parameters(), gradient, strict=True)}
    view = from_update(model, update, input_shape=(6,), loss="mse")
    found = attacks.build("analytic")(view)
    torch.testing.assert_close(view.task.inputs.restore(found.inputs), ROW, rtol=1e-4, atol=1e-4)
    assert found.labels is None


def test_a_search_begins_with_numbers_on_the_side_that_the_bias_tells():
    view, _ = from_batch(network(1), ROW, torch.tensor([2.5]), loss="mse")
    found = attacks.build({"name": "ig", "iterations": 300})(view)
    assert found.misfit < 1e-3
    assert float(found.labels) == pytest.approx(2.5, abs=1e-2)


def test_adam_is_not_taken_for_sgd_under_another_loss():
    model, target = network(1), torch.tensor([[1.0]])
    gradient = torch.autograd.grad(
        nn.functional.binary_cross_entropy_with_logits(model(ROW), target), list(model.parameters())
    )
    update = {
        name: 1e-3 * value / (value.abs() + 1e-8)
        for (name, _), value in zip(model.named_parameters(), gradient, strict=True)
    }
    view = from_update(model, update, input_shape=(6,), loss="bce")
    for name in ("analytic", "cascade", "rconv"):
        assert getattr(attacks.build(name)(view), "verified", None) is not True


def test_a_wrong_rule_is_not_verified_where_targets_are_unknown_numbers():
    model, target = network(3), torch.tensor([[2.5, 1.0, -1.0]])
    gradient = torch.autograd.grad(nn.functional.mse_loss(model(ROW), target), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    plain = dict(zip(names, gradient, strict=True))
    apart = {**plain, "0.bias": 0.7 * plain["0.bias"]}  # a step size of its own: the row seems brighter
    method = FedAvg(steps=1, batch_size=None, lr=1.0)
    for update, verified in ((plain, True), (apart, False)):
        for known in ({}, {"method": method}):
            found = attacks.build("analytic")(from_update(model, update, input_shape=(6,), loss="mse", **known))
            assert bool(found.verified) is verified, found.note
