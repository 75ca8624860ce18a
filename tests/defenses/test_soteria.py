from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference.defended_gradients import soteria
from support import worlds
from support.compare import assert_near, assert_same

from attacks.base import build
from defenses.clip import Clip
from defenses.compose import Chain
from defenses.soteria import Soteria
from eval.metrics.score import score
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.models import build as network
from fl.predict import predict
from fl.tensors import Tensors, dense
from fl.view import ThreatModel

STEP = FedAvg(lr=1.0, steps=1, batch_size=None)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("images", [1, 3])
def test_it_equals_a_loop_over_units_and_images(ratio: float, images: int) -> None:
    task, batch = worlds.task(), worlds.images(images)
    run = Federation(Client(task, STEP, Soteria(ratio=ratio)), [ClientData(batch, batch)])
    assert_near(run.train(0).upload.update, soteria(task.model, "head", batch.inputs, batch.labels, ratio), 1e-12)


def test_soteria_prunes_the_layer_that_is_named() -> None:
    task, batch = worlds.task(), worlds.images(2)
    run = Federation(Client(task, STEP, Soteria(ratio=0.5, layer="body.fc1")), [ClientData(batch, batch)])
    expected = soteria(task.model, "body.fc1", batch.inputs, batch.labels, 0.5)
    assert_near(run.train(0).upload.update, expected, 1e-12)


def test_no_ratio_is_no_defense() -> None:
    with_, without = (worlds.federation(STEP, d).train(0).upload for d in (Soteria(ratio=0.0), None))
    assert_same(with_.update, without.update)


@pytest.mark.parametrize(
    "defense", [Soteria(ratio=0.5), Chain(parts=(Soteria(ratio=0.5), Clip(max_norm=1e-2)))], ids=str
)
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, defense: Any) -> None:
    view, truth = worlds.federation(method, defense).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)


def test_the_search_leaves_the_pruned_columns_out() -> None:
    view, truth = worlds.federation(worlds.one_step(FedAvg.example()), Soteria(ratio=0.5)).observe(1)
    full = predict(view, truth.candidate(), use_search_gradient=True)
    assert dense(full["head.weight"]).all(0).all()
    assert_same(view.defense.surrogate(full, view.update), view.update)


def test_other_columns_are_compared() -> None:
    observed: Tensors = {"a.weight": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]), "a.bias": torch.zeros(2)}
    ones: Tensors = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}
    found = Soteria().surrogate(ones, observed)
    assert dense(found["a.weight"]).tolist() == [[0, 1, 1], [0, 1, 1]]
    assert dense(found["a.bias"]).tolist() == [1, 1]
    assert_same(Soteria(layer="b").surrogate(ones, observed), ones)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"ratio: expected a (whole )?number in \[0, 1\), got 1.2"):
        Soteria(ratio=1.2)
    with pytest.raises(ValueError, match="expected 'nowhere' in the network, got body"):
        Client(worlds.task(), STEP, Soteria(layer="nowhere"))
    with pytest.raises(ValueError, match="expected 4 outputs of the last linear layer, got 3"):
        Client(replace(worlds.task(), num_classes=4), STEP, Soteria())


def test_an_attacker_who_knows_it_does_better() -> None:
    """Balunovic et al. (ICLR 2022): without the defended layer the attack works as well as ever."""
    task = network("lenet-zhu", num_classes=10, seed=0, input_shape=(1, 16, 16))
    images = worlds.images(2, shape=(1, 16, 16))
    images = replace(images, inputs=torch.nn.functional.avg_pool2d(images.inputs.float(), 5, 1, 2))
    run = Federation(Client(task, STEP, Soteria(ratio=0.8)), [ClientData(images, images)])
    found = {}
    for known in (True, False):
        seen = [
            run.observe(0, data=images.take(torch.tensor([i])), threat=ThreatModel(knows_defense=known)) for i in (0, 1)
        ]
        results = build({"name": "ig", "iterations": 60}).run([view for view, _ in seen], [0, 1])
        found[known] = [score(result, truth)[0]["psnr"] for result, (_, truth) in zip(results, seen, strict=True)]
    assert all(knowing > 3 + not_knowing for knowing, not_knowing in zip(found[True], found[False], strict=True)), found
