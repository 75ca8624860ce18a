"""What is said of pictures is said of rows where a network takes rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks.result import NotApplicable, Reconstruction, Remark
from attacks.verification.words import in_words_of
from eval.audit.verdict import describe_no_images
from fl.capture import from_update
from fl.inputs.form import InputForm, InputPart
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def table(count: int, limit: float) -> ServerView:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    for name, value in model.named_parameters():
        value.data = (torch.rand(value.shape, generator=stream(0, name)) - 0.5) / 2
    rows: Tensor = 3 * torch.randn(count, 12, generator=stream(0, "rows"))
    loss = nn.functional.cross_entropy(model(rows), torch.arange(count) % 3)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    update = {name: 0.1 * value for (name, _), value in zip(model.named_parameters(), gradient, strict=True)}
    return from_update(
        model, update, input_shape=(12,), input_range=(-limit, limit), batch_size=count, num_classes=3, method=STEP
    )


def test_rows_beyond_their_range_are_no_pixels() -> None:
    result = attacks.build("analytic")(table(1, 1.0))
    assert isinstance(result, Reconstruction)
    assert "lies beyond the range of inputs as stated" in result.note
    assert "pixel" not in result.note
    assert Remark.BEYOND_RANGE in result.remarks
    said = describe_no_images([{"unscored": ["features"], "remarks": sorted(result.remarks)}])
    assert "what the first layer takes, beyond the range of inputs" in said
    within = attacks.build("analytic")(table(1, 20.0))
    assert isinstance(within, Reconstruction)
    assert within.verified
    assert within.note == ""


def test_refusals_are_said_of_rows_too() -> None:
    result = attacks.build("analytic")(table(4, 1.0))
    assert isinstance(result, NotApplicable)
    assert result.reason == "every neuron sees several examples: no ratio of its gradients is an example"


@pytest.mark.parametrize(
    ("words", "other"),
    [
        ("a picture, an image and a pixel", "an example, an example and a number"),
        ("pictures (--images) of true_images", "examples (--images) of true_images"),
    ],
)
def test_words_change_where_inputs_are_no_pictures(words: str, other: str) -> None:
    assert in_words_of(InputForm("table", ()), words) == other
    assert in_words_of(InputForm("image", ()), words) == words


def test_words_change_beside_ids_where_no_picture_is_among_the_inputs() -> None:
    ids, row, picture = InputPart("", (4,), ids=9, whole="int64"), InputPart("", (3,)), InputPart("", (3, 8, 8))
    assert in_words_of(InputForm("tokens", (ids,)), "the picture") == "the example"
    assert in_words_of(InputForm("several", (ids, row)), "the picture") == "the example"
    assert in_words_of(InputForm("several", (ids, picture)), "the picture") == "the picture"
