"""Per-FedAvg by itself: rounds by plain loops and by the true Hessian, and what clients predict by."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from reference import personal_rounds as plain
from support import worlds
from support.compare import assert_near, assert_same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.per_fedavg import PerFedAvg
from fl.simulation.protocol import Protocol
from fl.simulation.scores import scores
from fl.tensors import dense

METHOD = replace(PerFedAvg.example(), epochs=None, steps=3)


def gradient(
    model: nn.Module, shift: dict[str, Tensor], size: float, batch: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """That of the loss of `batch` at the model's weights + size * shift."""
    moved = plain.loaded(model, {name: w + size * shift[name] for name, w in plain.weights_of(model).items()})
    nn.functional.cross_entropy(moved(batch[0]), batch[1]).backward()
    return {name: w.grad.clone() for name, w in moved.named_parameters() if w.grad is not None}


def direction(model: nn.Module, batches: list[tuple[Tensor, Tensor]], variant: str) -> dict[str, Tensor]:
    zero = {name: torch.zeros_like(w) for name, w in plain.weights_of(model).items()}
    meta = gradient(model, gradient(model, zero, 0.0, batches[0]), -0.1, batches[1])
    if variant == "fo":
        return meta
    ahead, behind = (gradient(model, meta, size, batches[2]) for size in (1e-3, -1e-3))
    return {name: v - 0.1 * (ahead[name] - behind[name]) / 2e-3 for name, v in meta.items()}


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_two_rounds_equal_plain_loops(variant: Literal["fo", "hf"]) -> None:
    run, model = worlds.federation(replace(METHOD, variant=variant), rounds=0), worlds.task().model
    for _ in range(2):
        trained = []
        for done in run.run_round():
            local = plain.loaded(model, {})
            optimizer = torch.optim.SGD(local.parameters(), 0.1, 0.5, weight_decay=5e-4)
            fed = [plain.fed(done.trace, 0, j) for j in range(3 if variant == "hf" else 2)]
            assert [len(part) for part in fed] == [3] * len(fed)
            for batches in zip(*fed, strict=True):
                grads = direction(local, list(batches), variant)
                for name, value in local.named_parameters():
                    value.grad = grads[name]
                clip_grad_norm_(local.parameters(), 1.0)
                optimizer.step()
            trained.append(plain.weights_of(local))
        model = plain.loaded(model, plain.average(trained, [4, 4, 4]))
        assert_near(run.server.shared, plain.weights_of(model), 1e-10)


def test_the_difference_stands_for_the_hessian() -> None:
    method = PerFedAvg(alpha=0.1, variant="hf", delta=1e-4, lr=1.0, steps=1, batch_size=None)
    done = worlds.federation(method, rounds=0).train(0)
    model = worlds.task().model
    names, weights = zip(*model.named_parameters(), strict=True)
    inputs, labels = plain.fed(done.trace, 0)[0]
    slope = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), weights, create_graph=True)
    moved = {name: (w - 0.1 * g).detach() for name, w, g in zip(names, weights, slope, strict=True)}
    after = plain.loaded(model, moved)
    meta = torch.autograd.grad(nn.functional.cross_entropy(after(inputs), labels), list(after.parameters()))
    curved = torch.autograd.grad(slope, weights, grad_outputs=meta)
    expected = {name: v - 0.1 * h for name, v, h in zip(names, meta, curved, strict=True)}
    assert_near(done.upload.update, expected, 1e-5)
    first_order = dict(zip(names, meta, strict=True))
    with pytest.raises(AssertionError):
        assert_near(done.upload.update, first_order, 1e-4)


def test_without_adaptation_it_is_fedavg_on_every_second_batch() -> None:
    still = replace(METHOD, alpha=0.0, batch_size=None)
    settings = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "steps": 3, "batch_size": None}
    ours, theirs = (worlds.federation(kind, rounds=2) for kind in (still, FedAvg(**settings)))  # type: ignore[arg-type]
    assert_near(ours.server.shared, theirs.server.shared, 1e-12)


def test_clients_predict_after_one_step() -> None:
    data = [ClientData(worlds.images(4, "train", i), worlds.images(40, "test", i)) for i in range(3)]
    method = replace(METHOD, alpha=1.0, batch_size=None)
    run = Federation(Client(worlds.task(), method), data, protocol=Protocol(held_out_clients=1, fine_tune_epochs=2))
    rounds = run.run_round(evaluate=True)
    before, everyone = worlds.task().parameters, dict(run.server.shared)

    def stepped(weights: dict[str, Tensor], number: int, steps: int) -> float:
        model, own = plain.loaded(worlds.task().model, weights), data[number]
        plain.sgd(model, lambda name: True, [(own.train.inputs, own.train.labels)] * steps, lr=1.0)
        return plain.accuracy(model, own.test.inputs, own.test.labels)

    assert run.accuracy() == [stepped(everyone, i, 1) for i in (0, 1)]  # type: ignore[arg-type]
    locals_ = [done.result.trained(before) for done in rounds]  # type: ignore[arg-type]
    assert [done.accuracy for done in rounds] == [stepped(own, i, 1) for i, own in enumerate(locals_)]  # type: ignore[arg-type]
    assert run.accuracy() != [run.score(i, adapted=False) for i in (0, 1)]
    found = scores(run)
    assert found["tuned"] == tuple(stepped(everyone, i, 2) for i in (0, 1))  # type: ignore[arg-type]
    assert found["unseen_tuned"] == (stepped(everyone, 2, 2),)  # type: ignore[arg-type]
    assert_same(run.server.shared, everyone)


def test_constants_are_the_papers_and_others_are_refused() -> None:
    (phase,) = PerFedAvg().phases(worlds.task(), 0)
    assert (phase.groups[0].lr, phase.steps, phase.batch_size, phase.batches_per_step) == (1e-3, 10, 40, 2)
    assert PerFedAvg(variant="hf").phases(worlds.task(), 0)[0].batches_per_step == 3
    assert PerFedAvg(epochs=2).steps is None
    with pytest.raises(ValueError, match="alpha: expected a number >= 0, got -1"):
        PerFedAvg(alpha=-1.0)
    with pytest.raises(ValueError, match=r"delta: expected a (whole )?number > 0( or null)?, got 0"):
        PerFedAvg(delta=0.0)
    with pytest.raises(ValueError, match="variant: expected 'fo' or 'hf', got 'so'"):
        PerFedAvg(variant="so")  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_a_client_of_few_images_takes_one_step(variant: Literal["fo", "hf"]) -> None:
    method = PerFedAvg(lr=0.1, variant=variant, epochs=1, batch_size=40)
    images = worlds.images(3, "few")
    view, _ = Federation(Client(worlds.task(), method), [ClientData(images, images)]).observe(0)
    assert view.schedule == (((3,) * (3 if variant == "hf" else 2),),)
    assert any(bool(dense(value).any()) for value in view.update.values())
