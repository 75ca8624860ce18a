"""What attacks confirm of an update of which a known defense left numbers out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import chains
from torch import Tensor, nn

from attacks.base import NotApplicable, Reconstruction, build
from attacks.verification.confirmation import confirm
from defenses import defenses
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

ONE_STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def pictures(count: int) -> Tensor:
    """Pictures at levels of 8 bits, a third of whose pixels are nearly black: most that tells of these is left out."""
    rough = torch.rand(count, 1, 8, 8, generator=stream(0, "left out", "rough"))
    dark = torch.rand(count, 1, 8, 8, generator=stream(0, "left out", "dark")) < 0.3
    return (torch.where(dark, rough * 0.03, rough) * 255).round() / 255


def mlp() -> nn.Sequential:
    return chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))).float()


def pruned(images: Tensor, *names: dict[str, object]) -> ServerView:
    labels = torch.tensor([3, 7])[: len(images)]
    defense = defenses.build({"name": "chain", "parts": list(names)})
    return from_batch(mlp(), images, labels, defense=defense, method=ONE_STEP)[0]


@pytest.mark.parametrize("clipped", [False, True])
def test_picture_is_held_to_all_that_was_let_through(*, clipped: bool) -> None:
    image = pictures(1)
    clip: list[dict[str, object]] = [{"name": "clip", "max_norm": 0.01}] if clipped else []
    view = pruned(image, *clip, {"name": "prune", "ratio": 0.5})
    told = view.update["1.weight"].any(0).view(1, 1, 8, 8)
    assert not bool(told.all()), "expected pixels of which nothing is sent in the first layer"
    wrong = image + ~told * 4 / 255
    right = confirm(view, Reconstruction(inputs=image, labels=torch.tensor([3]), verified=True))
    assert isinstance(right, Reconstruction)
    assert right.verified
    other = confirm(view, Reconstruction(inputs=wrong, labels=torch.tensor([3]), verified=True))
    assert isinstance(other, Reconstruction)
    assert not other.verified
    assert "let through" in other.note


def test_pictures_of_a_batch_are_verified_only_where_they_are_right() -> None:
    images, verified = pictures(2), []
    for ratio in (0.3, 0.5, 0.6):
        found = build("spear")(pruned(images, {"name": "prune", "ratio": ratio}), seed=0)
        if isinstance(found, Reconstruction) and found.inputs is not None:
            off = max(float((images - each).abs().amax((1, 2, 3)).min()) for each in found.inputs)
            verified.append(bool(found.verified))
            assert not found.verified or off < 0.5 / 255
    assert any(verified)
    assert not all(verified)


def test_last_digits_of_weights_that_did_not_move_are_no_numbers_that_were_let_through() -> None:
    image, label = pictures(1), torch.tensor([3])
    view = pruned(image, {"name": "soteria"}, {"name": "prune", "ratio": 0.3})
    start, moved = dense(view.shared["3.weight"]), dense(view.update["3.weight"])
    still = (moved == 0) & (torch.arange(moved.numel()).view_as(moved) % 3 == 0)
    digit = start.abs() * torch.finfo(start.dtype).eps
    view = replace(view, update={**view.update, "3.weight": moved + still * digit}, rounded=True)
    assert bool((dense(view.update["3.weight"]) != moved).any())
    found = confirm(view, Reconstruction(inputs=image, labels=label, verified=True))
    assert isinstance(found, Reconstruction)
    assert found.verified


@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.2])
def test_columns_that_soteria_left_out_are_known_beside_weight_decay(decay: float) -> None:
    image, label = pictures(1), torch.tensor([3])
    method = FedAvg(lr=0.1, steps=1, batch_size=None, weight_decay=decay)
    soteria = defenses.build("soteria")
    linear = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).float()
    view = from_batch(linear, image, label, defense=soteria, method=method)[0]
    for name in ("analytic", "cascade"):
        found = build(name)(view, seed=0)
        assert isinstance(found, Reconstruction)
        assert not found.verified, "half of the pixels were left out"
    refused = build("backsolve")(view, seed=0)
    assert isinstance(refused, NotApplicable)
    assert "leave inputs open" in refused.reason
    most = defenses.build({"name": "soteria", "ratio": 0.8})
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        bent = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Sigmoid(), nn.Linear(40, 10))
    view = from_batch(bent, image, label, defense=most, method=method)[0]
    found = build({"name": "ig", "iterations": 100, "objective": "l2", "tv_weight": 0})(view, seed=0)
    assert isinstance(found, Reconstruction)
    assert found.objective < 0.1, "a column that was left out counts as compared"
