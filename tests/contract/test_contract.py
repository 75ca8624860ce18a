"""What every method keeps to, under every defense: training and prediction are one function."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from support import worlds
from support.compare import assert_near, assert_same, tensors
from support.matrix import COLUMNS, ROWS, cells, federation, named, observed, refusal, shares, star
from torch.func import vmap

from fl.gradient import func_derivative
from fl.method import methods
from fl.predict import predict
from fl.tensors import dense, norm
from fl.view import ThreatModel

seen = cache(observed)
"""For tests that change nothing of what they are given."""
CELLS = pytest.mark.parametrize(("row", "column"), cells())
STAR = pytest.mark.parametrize(("row", "column"), star())
REPLAYABLE = pytest.mark.parametrize(("row", "column"), cells(replayable=True))


def test_matrix_covers_the_registries() -> None:
    assert set(methods.names()) <= set(ROWS)
    assert {"none", "prune", "noise"} <= set(COLUMNS)
    assert [row for row in ROWS if not shares(row)] == ["local"]
    assert ("hyperfl", "prune") in named(replayable=True)
    assert ("hyperfl", "noise") not in named(replayable=True)


def test_what_a_defense_cannot_defend_it_refuses_with_a_reason() -> None:
    refused = {(row, column): refusal(row, column) for row in ROWS for column in COLUMNS if refusal(row, column)}
    assert {("hyperfedzero", "dp-sgd"), ("fedavg+norm", "dp-sgd"), ("hyperfedzero", "precode")} <= set(refused)
    assert {column for _, column in refused} == {"dp-sgd", "precode", "secagg", "soteria"}
    assert all(str(reason).startswith(f"{column}: expected ") for (_, column), reason in refused.items())
    assert not any(row in {"fedavg", "fedper", "hyperfl"} for row, _ in refused)


@REPLAYABLE
def test_the_true_candidate_predicts_the_update_bit_for_bit(row: str, column: str) -> None:
    view, truth = seen(row, column)
    assert_same(predict(view, truth.candidate()), view.update)


@REPLAYABLE
def test_a_wrong_candidate_does_not(row: str, column: str) -> None:
    view, truth = seen(row, column)
    wrong = replace(truth.candidate(), inputs=1 - truth.inputs)
    predicted = predict(view, wrong)
    assert any(not torch.equal(dense(predicted[name]), dense(value)) for name, value in view.update.items())


@REPLAYABLE
def test_stacked_candidates_predict_it_to_rounding(row: str, column: str) -> None:
    view, truth = seen(row, column)
    right = truth.candidate()
    private = {name: dense(value) for name, value in right.private.items()}
    client = view.client  # built here: a network that draws its own initial weights can't be built under vmap

    def one(inputs: torch.Tensor, private: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        candidate = replace(right, inputs=inputs, private=private)
        predicted = predict(view, candidate, derivative=func_derivative, client=client)
        return {name: dense(value) for name, value in predicted.items()}

    stack = vmap(one)(
        torch.stack([1 - right.inputs, right.inputs]),
        {name: torch.stack([value + 0.1, value]) for name, value in private.items()},
    )
    assert_near({name: value[1] for name, value in stack.items()}, view.update, 1e-12)


@CELLS
def test_gradients_reach_everything_the_server_does_not_see(row: str, column: str) -> None:
    view, truth = seen(row, column)
    inputs = truth.inputs.clone().requires_grad_()
    private = {name: dense(value).clone().requires_grad_() for name, value in truth.private.items()}
    predicted = predict(view, replace(truth.candidate(), inputs=inputs, private=private))
    grads = torch.autograd.grad(norm(predicted), [inputs, *private.values()])
    for name, g in zip(["inputs", *private], grads, strict=True):
        assert g.isfinite().all(), name
        assert g.any(), name


@STAR
def test_observing_twice_gives_the_same_update(row: str, column: str) -> None:
    assert_same(observed(row, column)[0].update, observed(row, column)[0].update)


@STAR
def test_the_same_seed_gives_the_same_federation(row: str, column: str) -> None:
    first, probe = federation(row, column), ROWS[row]
    again = worlds.federation(probe.method, first.client.defense, probe.task)
    other = worlds.federation(probe.method, first.client.defense, probe.task, seed=1)
    states = [list(tensors([run.server, run.clients])) for run in (first, again, other)]
    assert all(torch.equal(x, y) for x, y in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(states[0], states[2], strict=True))


@STAR
def test_a_prediction_changes_nothing(row: str, column: str) -> None:
    view, truth = observed(row, column)
    held = [
        view,
        truth,
        view.client.task.parameters,
        view.client.task.buffers,
        view.client.fixed_statistics_model.state_dict(),
    ]
    before = [value.clone() for value in tensors(held)]
    predict(view, truth.candidate())
    with torch.no_grad():
        predict(view, replace(truth.candidate(), inputs=1 - truth.inputs))
    after = list(tensors(held))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not any(value.requires_grad for value in tensors([view, truth]))


@pytest.mark.parametrize("row", [row for row in ROWS if shares(row)])
def test_training_changes_nothing_but_what_it_returns(row: str) -> None:
    probe = ROWS[row]
    run = worlds.federation(probe.method, probe.defense, probe.task)
    held = [run.server, run.clients, [d.train for d in run.data], run.client.task.parameters, run.client.task.buffers]
    before = [value.clone() for value in tensors(held)]
    run.train(0)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors(held), strict=True))


@pytest.mark.parametrize("row", list(ROWS))
def test_accuracies_are_shares(row: str) -> None:
    run = federation(row, "none")
    for tuned in (False, True):
        scores = run.accuracy(tuned=tuned)
        assert len(scores) == 3
        assert all(0 <= score <= 1 for score in scores)


@pytest.mark.parametrize("row", [row for row in ROWS if shares(row)])
def test_no_tensor_of_the_view_is_one_of_the_truth(row: str) -> None:
    for rounds in (0, 1):
        probe = ROWS[row]
        view, truth = worlds.federation(probe.method, probe.defense, probe.task, rounds=rounds).observe(1)
        model = view.task.model
        seen = [*tensors(view), *model.parameters(), *model.buffers(), *view.client.task.parameters.values()]
        hidden = [truth.inputs, *tensors(truth.private), *truth.extractor.values()]
        for secret in (value for value in hidden if value.is_floating_point() and value.any()):
            assert not any(secret.shape == value.shape and torch.equal(secret, value) for value in seen)


def test_an_unknown_defense_is_not_predicted() -> None:
    probe = ROWS["dp-sgd"]
    run = worlds.federation(probe.method, probe.defense, probe.task)
    for known in (True, False):
        view, truth = run.observe(1, threat=ThreatModel(knows_defense=known))
        predicted = predict(view, truth.candidate())
        same = all(torch.equal(dense(predicted[name]), dense(value)) for name, value in view.update.items())
        assert same is known
