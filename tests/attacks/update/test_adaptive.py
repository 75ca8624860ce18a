"""Clients that train by Adam and its like: what an attack that knows it makes of their updates."""

from __future__ import annotations

import pytest
import torch
from support import worlds
from torch import nn

import attacks
from attacks.base import NotApplicable, Reconstruction
from attacks.labels.recovery import recover_labels
from attacks.update.observed_update import ObservedUpdate
from fl.capture import from_batch
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.types import Truth
from fl.view import ServerView

ADAPTIVE = ["adam", "adamw", "rmsprop", "adagrad"]
EXACT = ["analytic", "spear", "cascade", "rconv", "rgap", "headless+ig", "surrogate+ig", "first-step+analytic"]


def view_of(name: str, images: int = 1, decay: float = 0.0, steps: int = 1) -> tuple[ServerView, Truth]:
    """The view of a client that trains an MLP on so many images, of as many classes as can be."""
    method = FedAvg(optimizer=name, lr=1e-3, batch_size=None, weight_decay=decay, steps=steps)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    initialize(model, stream(0, "adaptive"))
    return from_batch(model, worlds.images(images).inputs, torch.arange(images) % 10, method=method)


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("attack", EXACT)
def test_equations_of_gradients_are_refused_with_what_can_be_tried(name: str, attack: str) -> None:
    view, _ = view_of(name)
    result = attacks.build(attack)(view)
    assert isinstance(result, NotApplicable)
    assert f"{name} rescales every number apart" in result.reason
    assert "ig" in result.reason


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("decay", [0.0, 1e-4])
@pytest.mark.parametrize("steps", [1, 3])
def test_signs_tell_the_label_of_one_image(name: str, decay: float, steps: int) -> None:
    view, truth = view_of(name, decay=decay, steps=steps)
    found = recover_labels(ObservedUpdate(view))
    assert found is None or torch.equal(found, truth.labels)
    assert found is not None or decay


@pytest.mark.parametrize("name", ADAPTIVE)
def test_signs_tell_labels_that_differ_and_no_others(name: str) -> None:
    view, truth = view_of(name, images=3)
    found = recover_labels(ObservedUpdate(view))
    assert found is not None
    assert torch.equal(found, truth.labels.sort().values)
    more, _ = view_of(name, images=11)
    assert recover_labels(ObservedUpdate(more)) is None


def test_a_search_takes_the_same_step_on_its_guess() -> None:
    view, truth = view_of("adam")
    result = attacks.build({"name": "ig", "iterations": 2})(view)
    assert isinstance(result, Reconstruction)
    assert result.labels is not None
    assert torch.equal(result.labels, truth.labels)
