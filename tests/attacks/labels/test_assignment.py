"""Labels of images once they are found: of one by the rule, of several by what each left in the classifier."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attacks import Reconstruction
from attacks.base import build
from attacks.labels.assignment import assign_labels
from attacks.search_control import SearchControl, StoppedError, limited_by
from attacks.update.step_gradient import exact_step_gradient
from fl.capture import from_batch, from_update
from fl.data.sources.embedded import Faces
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.seeds import stream
from fl.types import Truth
from fl.view import ServerView

LABELS = torch.tensor([3, 1, 3, 0])
STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def network(bias: bool = True) -> nn.Module:
    layers = [nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.LeakyReLU(0.01), nn.Flatten(), nn.Linear(1152, 24), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(24, 5, bias=bias))
    draw = stream(0, "weights")
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw) * p.shape[1:].numel() ** -0.5
    return model


def seen(count: int, method: Method = STEP, bias: bool = True) -> tuple[ServerView, Truth]:
    images = Faces(size=16).load().train.inputs[:count]
    return from_batch(network(bias), images, LABELS[:count], method=method)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_images_in_whatever_order_get_their_own_labels(count: int, bias: bool) -> None:
    view, truth = seen(count, bias=bias)
    gradient = exact_step_gradient(view, batches=True)
    assert isinstance(gradient, dict)
    for order in (torch.arange(count), torch.arange(count).flip(0)):
        found = assign_labels(view, gradient, truth.inputs[order])
        assert found is not None
        assert torch.equal(found, LABELS[:count][order])


def test_labels_are_asked_of_a_loss_no_longer_than_the_time_limit() -> None:
    control, asked = SearchControl(), []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        asked.append(len(targets))
        return nn.functional.multi_margin_loss(outputs, targets)

    images = Faces(size=16).load().train.inputs[:2]
    view, truth = from_batch(network(), images, LABELS[:2], loss=loss, method=STEP)
    gradient = exact_step_gradient(view, batches=True)
    assert isinstance(gradient, dict)
    assert assign_labels(view, gradient, truth.inputs) is not None
    asked.clear()
    control.interrupt()
    with limited_by(control), pytest.raises(StoppedError):
        assign_labels(view, gradient, truth.inputs)
    assert not asked


def test_images_that_left_something_else_get_none() -> None:
    view, truth = seen(2)
    gradient = exact_step_gradient(view, batches=True)
    assert isinstance(gradient, dict)
    assert assign_labels(view, gradient, torch.rand(truth.inputs.shape, generator=stream(0, "others"))) is None
    assert assign_labels(view, gradient, truth.inputs * float("nan")) is None
    twins = truth.inputs[:1].expand(2, -1, -1, -1)
    assert assign_labels(view, gradient, twins) is None


@pytest.mark.parametrize("count", [1, 2])
def test_cascade_names_the_label_of_every_image(count: int) -> None:
    view, truth = seen(count)
    result = build("cascade")(view)
    assert isinstance(result, Reconstruction)
    assert result.inputs is not None
    assert result.labels is not None
    off = (result.inputs[:, None] - truth.inputs).abs().flatten(2).amax(-1)
    assert float(off.amin(1).max()) < 1e-3
    assert torch.equal(result.labels, LABELS[off.argmin(1)])
    assert result.knowledge == ()


def test_a_private_classifier_tells_no_label() -> None:
    for count in (1, 2):
        result = build("cascade")(seen(count, method=FedPer(lr=0.1, steps=1, batch_size=None))[0])
        assert isinstance(result, Reconstruction)
        assert result.inputs is not None
        assert result.labels is None


@pytest.mark.parametrize(
    "attack",
    ["cascade", {"name": "headless+ig", "iterations": 3}, {"name": "lti", "auxiliary": {"name": "faces", "size": 16}}],
    ids=["cascade", "headless", "lti"],
)
def test_one_image_s_label_is_read_off_the_classifier_but_not_with_its_sign_turned(attack: object) -> None:
    if isinstance(attack, dict) and attack["name"] == "lti":
        attack = {**attack, "iterations": 2, "batch_size": 4, "width": 8, "hash_size": 64}
    view, _ = seen(1)
    result = build(attack)(view)  # type: ignore[arg-type]
    assert isinstance(result, Reconstruction)
    assert result.labels is not None
    assert result.labels.tolist() == [3]
    turned = {name: -value for name, value in view.update.items()}
    view = from_update(network(), turned, input_shape=(1, 16, 16), num_classes=5, method=STEP)  # type: ignore[arg-type]
    result = build(attack)(view)  # type: ignore[arg-type]
    if isinstance(result, Reconstruction):
        assert result.labels is None
        assert "sign of the update seems turned" in result.note
    else:
        assert "turned" in result.reason
