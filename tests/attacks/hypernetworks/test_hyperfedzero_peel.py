"""HyperFedZero's embedding networks give away what they were given, whatever noise the client drew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds

import attacks
from attacks import NotApplicable, Reconstruction
from attacks.base import Chain
from attacks.hypernetworks.hyperfedzero_peel import HyperFedZeroPeel
from defenses import defenses
from fl.client import Client
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfedzero import HyperFedZero
from fl.models import build
from fl.predict import predict
from fl.types import Candidate, Task, Truth
from fl.view import ServerView

SMALL: dict[str, Any] = {"embedding": 4, "hidden": (24, 24), "chunk": 40, "optimizer": "sgd", "lr": 0.1}
STEP: dict[str, Any] = {"steps": 1, "batch_size": None}
IMAGE = worlds.images(1, "victim")


def seen(defense: Defense | None = None, task: Task | None = None, **settings: Any) -> tuple[ServerView, Truth]:
    """One step on one image after two rounds."""
    task = task or worlds.task()
    data = [ClientData(worlds.images(6, i), worlds.images(2, i)) for i in range(2)]
    run = Federation(Client(task, HyperFedZero(**{**SMALL, **settings}, steps=2)), data)
    for _ in range(2):
        run.run_round()
    client = Client(task, HyperFedZero(**{**SMALL, **STEP, **settings}), defense or Defense())
    return run.observe(0, data=IMAGE, client=client)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
@pytest.mark.parametrize("condition", ["parameters", "input"])
def test_the_embedding_is_in_the_update_noise_included(kind: str, condition: str) -> None:
    view, truth = seen(extractor=kind, condition=condition)
    result = attacks.build("unembed")(view)
    assert isinstance(result, Reconstruction)
    client = view.client
    z = truth.trace.draws[0][0]["z"]
    made = client.network(view.shared, client.task.buffers)(truth.inputs, z)[1].exp()[0]
    torch.testing.assert_close(result.private["embedding"], made, rtol=1e-9, atol=1e-12)
    assert result.verified
    assert not torch.allclose(made, client.network(view.shared, client.task.buffers)(truth.inputs, 0 * z)[1].exp()[0])


def test_the_mean_of_two_images_stated_as_one_is_no_embedding_that_is_confirmed() -> None:
    """A layer of one unit has one row, of which nothing is left whatever it was given."""
    settings = {**SMALL, **STEP, "hidden": (1, 24)}
    run = Federation(Client(worlds.task(), HyperFedZero(**settings)), [ClientData(worlds.images(2, "pair"), IMAGE)])
    view, _ = run.observe(0)
    result = attacks.build("unembed")(replace(view, batch_size=1, schedule=(((1,),),)))
    assert isinstance(result, Reconstruction)
    assert not result.verified


@pytest.mark.parametrize("part", ["both", "extractor"])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_the_rewritten_view_is_predicted_without_label_and_noise(kind: str, part: Any) -> None:
    view, truth = seen(extractor=kind, alpha=0.3, beta=2.0)
    rewritten = HyperFedZeroPeel(part=part).rewrite(view)
    assert isinstance(rewritten, ServerView)
    assert rewritten.labels is None
    assert rewritten.draws is None
    predicted = predict(rewritten, Candidate(truth.inputs, torch.zeros(1, dtype=torch.int64)))
    assert set(predicted) == set(rewritten.update)
    assert any(name.startswith("noisy.") for name in predicted) is (part == "both")
    for name, value in rewritten.update.items():
        torch.testing.assert_close(predicted[name], value, rtol=1e-9, atol=1e-12)
    wrong = predict(rewritten, Candidate(1 - truth.inputs, torch.zeros(1, dtype=torch.int64)))
    assert not torch.allclose(wrong["extractor.fc.weight"], rewritten.update["extractor.fc.weight"])  # type: ignore[arg-type]


def test_a_linear_first_layer_gives_the_image_itself() -> None:
    view, truth = seen(extractor="mlp")
    for first in ("", "unembed+"):
        result = attacks.build(f"{first}analytic")(view)
        assert isinstance(result, Reconstruction)
        assert result.verified
        torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-8, rtol=0)
    chain = Chain(first=HyperFedZeroPeel(part="extractor"), then=attacks.build("cascade"))(view)
    assert isinstance(chain, Reconstruction)
    torch.testing.assert_close(chain.inputs, truth.inputs, atol=1e-8, rtol=0)


@pytest.mark.parametrize("condition", ["parameters", "input"])
def test_the_search_finds_the_image_and_then_its_label(condition: str) -> None:
    view, truth = seen(extractor="conv", condition=condition)
    result = attacks.build({"name": "unembed+ig", "iterations": 250, "tv_weight": 0.0})(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    gray = (0.5 - truth.inputs).square().mean()
    assert (result.inputs - truth.inputs).square().mean() < 0.1 * gray
    assert torch.equal(result.labels, truth.labels)  # type: ignore[arg-type]
    assert "embedding" in result.private


def test_labels_follow_from_a_known_image() -> None:
    """Of every class, by what it makes of the hypernetwork's gradient."""
    for label in range(worlds.CLASSES):
        view, truth = seen()
        client = Client(worlds.task(), HyperFedZero(**{**SMALL, **STEP}))
        data = worlds.Batch(IMAGE.inputs, torch.tensor([label]))
        run = Federation(client, [ClientData(data, data)])
        view, truth = run.observe(0)
        rewritten = HyperFedZeroPeel().rewrite(view)
        assert isinstance(rewritten, ServerView)
        result = HyperFedZeroPeel().lift_result(view, rewritten, Reconstruction(inputs=truth.inputs))
        assert result.labels is not None
        assert result.labels.item() == label


def test_what_it_can_not_open_it_says() -> None:
    view, _ = seen()
    cases = [
        (seen(optimizer="adam")[0], "adam"),
        (seen(defenses.build("signsgd"))[0], "ratio"),
        (replace(view, schedule=None), "steps"),
        (replace(view, update={}), "nothing"),
        (Federation(Client(worlds.task(), FedAvg(**STEP)), [ClientData(IMAGE, IMAGE)]).observe(0)[0], "fedavg"),
        (replace(view, update={n: 0 * v for n, v in view.update.items()}), "did not move"),  # type: ignore[operator]
    ]
    for other, word in cases:
        result = attacks.build("unembed")(other)
        assert isinstance(result, NotApplicable)
        assert word in result.reason


def test_a_clipped_update_still_gives_the_embedding_and_a_noisy_one_is_unsure() -> None:
    exact = attacks.build("unembed")(seen()[0])
    clipped = attacks.build("unembed")(seen(defenses.build({"name": "clip", "max_norm": 1e-3}))[0])
    assert isinstance(exact, Reconstruction)
    assert isinstance(clipped, Reconstruction)
    torch.testing.assert_close(clipped.private["embedding"], exact.private["embedding"])
    noisy = attacks.build("unembed")(seen(defenses.build({"name": "noise", "std": 0.1}))[0])
    assert isinstance(noisy, NotApplicable) or not noisy.verified


def test_it_opens_the_published_sizes() -> None:
    task = build("lenet-s", num_classes=10, seed=0)
    client = Client(task, HyperFedZero(optimizer="sgd", hidden=(50, 50), **STEP))
    data = worlds.Batch(torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([3]))
    result = attacks.build("unembed")(Federation(client, [ClientData(data, data)]).observe(0)[0])
    assert isinstance(result, Reconstruction)
    assert result.verified
