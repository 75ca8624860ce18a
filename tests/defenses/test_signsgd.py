from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import worlds
from support.compare import assert_same
from support.updates import numbers

from attacks.base import NotApplicable, build
from defenses.signsgd import AGREEMENT_MARGIN, SignSGD
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import LowRank, Tensors, dense, scale_tensors

UPDATE: Tensors = {
    "small": numbers(20, 5) * 1e-3,
    "structured": LowRank.outer(numbers(12), numbers(10)),
    "some": torch.tensor([0.0, 3.0, -1.0, 0.0], dtype=torch.float64),
}


def test_signs_times_the_mean_size() -> None:
    sent = SignSGD().transform_update(UPDATE, stream(0))
    assert torch.equal(dense(sent["some"]), torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=torch.float64))
    for name, value in UPDATE.items():
        assert torch.equal(dense(sent[name]).sign(), dense(value).sign())
        assert float(dense(sent[name]).abs().sum()) == pytest.approx(float(dense(value).abs().sum()), rel=0.5)
    assert len(dense(sent["structured"]).unique()) == 2


def test_signs_times_a_step() -> None:
    sent = SignSGD(step=0.25).transform_update(UPDATE, stream(0))
    assert all(set(dense(value).unique().tolist()) <= {-0.25, 0.0, 0.25} for value in sent.values())


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_settings_are_checked(step: float) -> None:
    with pytest.raises(ValueError, match=r"step: expected a (whole )?number > 0"):
        SignSGD(step=step)


@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: FedAvg) -> None:
    view, truth = worlds.federation(method, SignSGD()).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)


def test_agreement_is_complete_beyond_the_margin_alone() -> None:
    observed: Tensors = {"w": torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0], dtype=torch.float64)}
    guess = torch.tensor([1.0, 0.01, -1.0, 1.0, 1.0], dtype=torch.float64)
    found = dense(SignSGD().surrogate({"w": guess}, observed)["w"])
    size = float(guess.square().mean().sqrt())
    expected = [2.0, 2 * 0.01 / (AGREEMENT_MARGIN * size), -2.0, 2 / (AGREEMENT_MARGIN * size), 0.0]
    assert found.tolist() == pytest.approx(expected)
    assert torch.allclose(found, dense(SignSGD().surrogate({"w": guess * 1024}, observed)["w"]))


def test_no_decay_is_taken_off_signs() -> None:
    defense = SignSGD()
    observed = defense.transform_update(UPDATE, None)
    assert not any(
        dense(value).any() for value in defense.transmit_known_part(scale_tensors(UPDATE, 0.5), observed).values()
    )


@pytest.mark.parametrize("known", [True, False])
def test_signs_are_no_equations(known: bool) -> None:
    """The signs of an outer product are one, so a peel would find its equations satisfied by a wrong embedding."""
    view, _ = worlds.federation(worlds.one_step(HyperFL.example()), SignSGD()).observe(1)
    result = build("peel")(replace(view, threat=replace(view.threat, knows_defense=known)))
    assert isinstance(result, NotApplicable)
