"""The peel of HyperFL-LPM: adapters, their gradient, and the features that go into the last of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_near
from torch import Tensor

from attacks import NotApplicable, Reconstruction
from attacks.base import build
from attacks.hypernetworks.peel import HypernetPeel
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.hyperfl_lpm import HyperFLLPM
from fl.models import models
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.predict import predict
from fl.tensors import dense, sub
from fl.types import Batch, Task, Truth
from fl.view import ServerView

STEP = HyperFLLPM(steps=1, head_epochs=0, batch_size=None, parametrization=Hypernetwork(init="scaled"))
BOTH = pytest.mark.parametrize("name", ["resnet18-adapter", "vit-adapter"])
LAST = {
    "resnet18-adapter": {"body.adapter2"},
    "vit-adapter": {f"body.vit.blocks.1.mlp.adapter.{layer}" for layer in ("down", "up")},
}


def task(name: str, dtype: torch.dtype) -> Task:
    if name == "vit-adapter":
        pytest.importorskip("timm")
    given = dict(models.examples())[name].build_task(num_classes=worlds.CLASSES, seed=0).to(dtype=dtype)
    if name == "vit-adapter":  # as drawn, tokens hardly differ, and with them what an adapter is given
        with torch.no_grad():
            for parameter in given.model.parameters():
                if not parameter.requires_grad and parameter.ndim > 1:
                    parameter.mul_(20)
    return given


def victim(name: str, n: int = 1, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[ServerView, Truth]:
    images = worlds.images(n, "victim")
    data = Batch(images.inputs.to(dtype), images.labels)
    return Federation(Client(task(name, dtype), replace(STEP, **settings)), [ClientData(data, data)]).observe(0)


def apart(found: dict[str, Any], truth: dict[str, Any]) -> float:
    mine, theirs = (torch.cat([dense(x[n]).flatten() for n in truth]) for x in (found, truth))
    return float((mine - theirs).norm() / theirs.norm())


def adapters(found: Reconstruction) -> dict[str, Any]:
    return {n.removeprefix("extractor/"): v for n, v in found.private.items() if n.startswith("extractor/")}


@pytest.mark.parametrize("uploaded", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@BOTH
def test_one_step_gives_the_adapters_in_single_precision(name: str, n: int, uploaded: bool) -> None:
    view, truth = victim(name, n, torch.float32)
    if uploaded:  # the same as the difference of two dense models, rounded as they are
        update = {n: dense(view.shared[n]) - sub(view.shared[n], u) for n, u in view.update.items()}
        view = replace(view, update=update)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert apart(adapters(found), truth.extractor) < 1e-5
    assert apart({EMBEDDING: found.private[EMBEDDING]}, {EMBEDDING: truth.private[EMBEDDING]}) < 1e-4


@pytest.mark.parametrize("n", [1, 3])
@BOTH
def test_what_is_left_is_a_known_network_with_a_known_gradient(name: str, n: int) -> None:
    view, truth = victim(name, n)
    plain = HypernetPeel(classifier="joint").rewrite(view)
    assert isinstance(plain, ServerView)
    assert apart(plain.shared, truth.extractor) < 1e-12
    assert set(plain.private) == {"head.weight", "head.bias"}
    private = {name: truth.private[name] for name in plain.private}
    assert_near(predict(plain, replace(truth.candidate(), private=private)), plain.update, 1e-8)


def _given(view: ServerView, truth: Truth, layer: str) -> Tensor:
    """What a layer was really given: its first token, or the mean over its map."""
    client, seen = view.client, []
    model = client.fixed_statistics_model
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    params = view.method.parametrization.lift({**view.shared, **truth.private})
    client.network(params, client.task.buffers)(truth.inputs)
    handle.remove()
    (value,) = seen
    return value[0, 0] if value.ndim == 3 else value.mean((0, 2, 3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-2)])
@BOTH
def test_the_last_adapters_input_is_in_the_update(name: str, dtype: torch.dtype, tolerance: float) -> None:
    view, truth = victim(name, dtype=dtype)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    read = {n.removeprefix("features/"): v for n, v in found.private.items() if n.startswith("features/")}
    assert read.keys() == LAST[name]
    for layer, value in read.items():
        # of the adapter's first norm: what it makes small, rounding hides
        slope = truth.extractor.get(f"{layer}.before.weight", 1.0)
        assert apart({"x": value * slope}, {"x": _given(view, truth, layer) * slope}) < tolerance
    rewritten = build({"name": "peel+ig", "iterations": 1})(view)
    assert isinstance(rewritten, Reconstruction)
    assert {n for n in rewritten.private if n.startswith("features/")} == {f"features/{n}" for n in read}


@BOTH
def test_a_batch_does_not_give_single_inputs_away(name: str) -> None:
    found = HypernetPeel()(victim(name, 3)[0])
    assert isinstance(found, Reconstruction)
    assert not any(n.startswith("features/") for n in found.private)


def test_batch_statistics_hide_the_input_but_not_the_adapters() -> None:
    view, truth = victim("resnet18-adapter", 2, train_mode=True)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert apart(adapters(found), truth.extractor) < 1e-9
    assert not any(n.startswith("features/") for n in found.private)


@pytest.mark.parametrize("attack", ["peel+ig", "peel+joint", "joint", "bilevel"])
@BOTH
def test_searches_go_on_from_there(name: str, attack: str) -> None:
    view, _ = victim(name)
    settings = {"name": attack, "iterations": 3, "restarts": 2}
    found = build(settings | ({"lower_iterations": 3} if attack == "bilevel" else {}))(view)
    assert not isinstance(found, NotApplicable)
    assert found.inputs is not None
    assert found.inputs.shape == (1, 1, 8, 8)
    assert found.inputs.isfinite().all()


def test_a_search_lowers_its_objective() -> None:
    found = build({"name": "peel+ig", "iterations": 30, "tv_weight": 0.0})(victim("resnet18-adapter")[0])
    assert isinstance(found, Reconstruction)
    assert found.objective < 0.8


@pytest.mark.parametrize("max_norm", [50.0, 1e-3, None])
def test_a_step_shorter_than_the_clip_keeps_its_size(max_norm: float | None) -> None:
    view, truth = victim("resnet18-adapter", max_norm=max_norm)
    plain = HypernetPeel(classifier="joint").rewrite(view)
    assert isinstance(plain, ServerView)
    assert plain.scale_unknown == (max_norm == 1e-3)
    private = {n: truth.private[n] for n in plain.private}
    predicted = predict(plain, replace(truth.candidate(), private=private))
    name = "body.adapter1.conv.weight"
    ratio = float(dense(plain.update[name]).norm() / dense(predicted[name]).detach().norm())
    assert (abs(ratio - 1) < 1e-9) == (max_norm != 1e-3)


@pytest.mark.parametrize(
    ("n", "counts"),
    [
        (1, "at most 52 independent equations for the 64 numbers that go in and flow back at 4 positions"),
        (2, "at most 72 independent equations for the 128 numbers that go in and flow back at 8 positions"),
    ],
)
@pytest.mark.parametrize("attack", ["peel+backsolve", "peel+cascade"])
def test_exact_attacks_count_what_pointwise_adapters_tell(attack: str, n: int, counts: str) -> None:
    """The frozen layers between them send nothing, and the classifier, from which signals would come, is private."""
    found = build(attack)(victim("resnet18-adapter", n, torch.float32)[0])
    assert isinstance(found, NotApplicable)
    assert found.reason.endswith(counts)
    assert "body.adapter2.conv.weight" in found.reason
