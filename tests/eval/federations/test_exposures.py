"""What a screening says is shown rests on what results say of themselves for code, and labels on what confirms them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support import recorded as support
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, Remark, build
from eval.federations import exposures
from eval.federations.exposures import proved_exposures
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.view import ServerView

STEP = FedAvg(lr=0.1, steps=1, batch_size=None, train_mode=False)
SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1)


def view_of(
    model: nn.Module, stated: object, *, made: nn.Module | None = None, count: int = 1, clip: float = 1.0
) -> ServerView:
    """The view of one step on so many pictures under one loss, of which another or the same is stated.

    Numbers of the gradient are clipped at a share of the largest.
    """
    (inputs, labels), trained = support.examples(count), copy.deepcopy(model)
    (made or nn.CrossEntropyLoss())(trained(inputs), labels).backward()
    named = dict(trained.named_parameters())
    bound = max(float(value.grad.abs().max()) for value in named.values() if value.grad is not None) * clip
    update = {}
    for name, value in named.items():
        assert value.grad is not None
        update[name] = (value - (value - 0.1 * value.grad.clamp(-bound, bound))).detach()
    return from_update(model, update, input_shape=support.SHAPE, method=STEP, batch_size=count, loss=stated)


def shown(view: ServerView, attack: str = "analytic") -> dict[str, str]:
    """What is proved, in words by kind."""
    return {one.kind: one.words for one in proved_exposures(attack, build(attack)(view), view)}


def test_a_picture_that_may_be_a_mixture_is_shown_as_such() -> None:
    view = view_of(support.dense_network(), "mse")
    found = build("analytic")(view)
    assert isinstance(found, Reconstruction)
    assert Remark.MAY_BE_MIXTURE in found.remarks
    assert "if it is of 1 alone: a mixture would not show" in shown(view)["images"]
    assert "mixture" not in shown(view_of(support.dense_network(), "cross-entropy"))["images"]


def test_targets_that_are_numbers_are_shown_under_the_loss_as_stated_alone() -> None:
    """Some target of a squared error makes the step of whatever loss it was."""
    for made in (nn.CrossEntropyLoss(), SMOOTHED):
        told = shown(view_of(support.dense_network(), "mse", made=made))
        assert "images" in told
        assert told["labels"] == "labels are recovered, if the loss is as stated (mse): 1"


@pytest.mark.parametrize("stated", ["cross-entropy", functional.cross_entropy, SMOOTHED])
@pytest.mark.parametrize("count", [1, 3])
def test_labels_that_the_whole_update_confirms_rest_on_nothing_else(stated: object, count: int) -> None:
    made = SMOOTHED if stated is SMOOTHED else None
    view = view_of(support.dense_network(), stated, made=made, count=count)
    claimed = Reconstruction(inputs=support.examples(count)[0], verified=True)
    found = build("analytic").confirm(view, claimed)
    words = {one.kind: one.words for one in proved_exposures("analytic", found, view)}
    assert words["labels"] == f"labels are recovered: {count}"


def test_a_label_beside_features_is_confirmed_with_them_or_said_to_rest_on_the_loss() -> None:
    model = support.network()
    assert shown(view_of(model, "cross-entropy"))["labels"] == "labels are recovered: 1"
    view = view_of(model, "cross-entropy", made=SMOOTHED)
    features = Reconstruction(
        inputs=None, labels=torch.tensor([3]), private={"features/4.weight": torch.ones(100)}, verified=True
    )
    (words,) = [one.words for one in proved_exposures("analytic", features, view) if one.kind == "labels"]
    assert words == "labels are recovered, if the loss is as stated (cross-entropy): 1"


@pytest.mark.parametrize(("left", "is_shown"), [(0.6, False), (1e-5, True)])
@pytest.mark.parametrize("own", [True, False])
def test_what_a_layer_takes_is_shown_where_its_equations_leave_next_to_nothing(
    left: float, is_shown: bool, own: bool
) -> None:
    """Those of the layer alone, where they are known, else all that it was read from."""
    view = view_of(support.dense_network(), "cross-entropy", count=2)
    residual = {"residual/1.weight": torch.tensor([left])} if own else {}
    private = {"features/1.weight": support.examples(1)[0].flatten(1), **residual}
    found = Reconstruction(inputs=None, private=private, verified=False, objective=0.6 if own else left)
    kinds = [one.kind for one in proved_exposures("analytic", found, view, replayable=False)]
    assert kinds == (["features"] if is_shown else [])


def test_labels_are_those_that_were_confirmed() -> None:
    view = view_of(support.dense_network(), SMOOTHED, made=SMOOTHED, count=3)
    inputs, labels = support.examples(3)
    wrong = Reconstruction(inputs=inputs, labels=(labels + 1) % 10, verified=True)
    found = build("analytic").confirm(view, wrong)
    assert isinstance(found, Reconstruction)
    assert found.labels is not None
    assert torch.equal(found.labels, labels)
    assert Remark.LABELS_CONFIRMED in found.remarks
    again = build("analytic").confirm(view, replace(found, inputs=inputs.flip(3)))
    assert isinstance(again, Reconstruction)
    assert Remark.LABELS_CONFIRMED not in again.remarks


class _Gray(nn.Module):
    """A network that sees the sum of neighboring pixels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AvgPool2d(2, ceil_mode=False), nn.Flatten(), nn.Linear(49, 24), nn.Tanh())
        self.head = nn.Linear(24, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels))


def _without_bias() -> nn.Module:
    model = support.dense_network()
    model[1].bias = None
    model[3].bias = None
    return model


@pytest.mark.parametrize(
    ("view", "remark"),
    [
        (lambda: view_of(_without_bias(), nn.MultiMarginLoss()), Remark.DIRECTION_ONLY),
        (lambda: view_of(support.dense_network(), "cross-entropy", clip=0.05), Remark.UNCLIPPED_ROWS),
    ],
)
def test_words_of_notes_change_nothing_that_is_shown(view: object, remark: Remark) -> None:
    seen = view()  # type: ignore[operator]
    result = build("analytic")(seen)
    assert isinstance(result, Reconstruction)
    assert remark in result.remarks
    said = proved_exposures("analytic", result, seen)
    assert said
    assert proved_exposures("analytic", replace(result, note="in other words"), seen) == said
    assert proved_exposures("analytic", replace(result, remarks=frozenset()), seen) != said


def test_a_picture_that_is_seen_in_part_is_said_to_be() -> None:
    model = _Gray()
    view, (inputs, labels) = view_of(model, "cross-entropy"), support.examples(1)
    result = build("analytic").confirm(view, Reconstruction(inputs=inputs, labels=labels, verified=True))
    assert isinstance(result, Reconstruction)
    assert Remark.PARTLY_SEEN in result.remarks
    one = Reconstruction(inputs=inputs, approximate=True, remarks=result.remarks)
    assert "as far as the network sees its pixels" in proved_exposures("analytic", one, view)[0].words
    assert "as far as" not in proved_exposures("analytic", replace(one, remarks=frozenset()), view)[0].words


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_mixture_that_the_layers_above_bear_out_is_no_input_of_its_layer(
    monkeypatch: pytest.MonkeyPatch, decay: float
) -> None:
    monkeypatch.setattr(exposures, "contradicts_features", lambda *_: "")  # as of a mixture that explains these
    model, method = support.dense_network(), replace(STEP, weight_decay=decay)
    inputs, _ = support.examples(2)
    trained = copy.deepcopy(model)
    functional.cross_entropy(trained(inputs), torch.tensor([1, 1])).backward()
    update = {}
    for name, value in trained.named_parameters():
        assert value.grad is not None
        update[name] = 0.1 * (value.grad + decay * value.detach())
    layer = next(name for name, value in update.items() if value.ndim == 2)
    assert torch.linalg.matrix_rank(update[layer] - 0.1 * decay * dict(model.named_parameters())[layer], rtol=1e-3) == 2

    def shown(features: Tensor, count: int) -> list[str]:
        view = from_update(model, update, input_shape=support.SHAPE, method=method, batch_size=count)
        result = Reconstruction(None, None, 0.0, private={f"features/{layer}": features}, verified=False)
        return [one.kind for one in proved_exposures("backsolve", result, view)]

    flat = inputs.flatten(1)
    assert shown(flat.mean(0, keepdim=True), 1) == []
    assert shown(flat[:1], 1) == []
    assert shown(flat, 2) == ["features"]
