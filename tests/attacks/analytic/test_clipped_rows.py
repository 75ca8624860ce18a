"""Gradients clipped by value: rows of the first layer that the clip left as they were give the input away."""

from __future__ import annotations

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks.analytic.clipped_rows import UNCLIPPED_ROWS
from attacks.base import NotApplicable, Reconstruction, Result, build
from eval.federations.exposures import proved_exposures
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

SHAPE, LR = (1, 8, 8), 0.1


def network(classes: int = 10) -> nn.Module:
    layers = nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes)
    return chains.initialized(nn.Sequential(*layers)).float()


def pictures(count: int = 1) -> Tensor:
    return (255 * torch.rand(count, *SHAPE, generator=stream(0, "clipped"))).round() / 255


def clipped(
    share: float, count: int = 1, classes: int = 10, *, head: float = 1.0, one_label: bool = False, lr: float = LR
) -> ServerView:
    """A step on pictures stated as one, each number of whose gradient is cut at a share of the largest.

    The weights of the classifier are multiplied by `head`, and those of the layer below set so that all its units work.
    """
    model = network(classes)
    if head != 1:
        hidden, _, last = list(model)[1:]
        with torch.no_grad():
            hidden.bias.fill_(3.0)
            last.weight.mul_(head)
    labels = torch.full((count,), 1) if one_label else torch.arange(count) % classes
    loss = functional.cross_entropy(model(pictures(count)), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    if head != 1:  # the bound is reached in the first layer alone
        bound = float(grads[0].abs().amax(1).median())
        share = bound / max(float(grad.abs().max()) for grad in grads)
    bound = share * max(float(grad.abs().max()) for grad in grads)
    moved = {}
    for (name, value), grad in zip(model.named_parameters(), grads, strict=True):
        moved[name] = (value - (value - lr * grad.clamp(-bound, bound))).detach()
    method = FedAvg(lr=lr, steps=1, batch_size=None)
    return from_update(model, moved, input_shape=SHAPE, num_classes=classes, batch_size=1, method=method)


def found(view: ServerView) -> Result:
    return build("analytic")(view)


@pytest.mark.parametrize("share", [0.1, 0.05, 0.03])
def test_rows_that_agree_prove_the_input(share: float) -> None:
    view = clipped(share)
    result = found(view)
    assert isinstance(result, Reconstruction)
    assert result.note.startswith(UNCLIPPED_ROWS)
    assert torch.allclose(dense(result.private["features/1.weight"]), pictures().flatten(), atol=1e-3)
    assert not result.verified
    assert not result.approximate
    assert "features" in {one.kind for one in proved_exposures("analytic", result, view)}


def test_a_single_row_proves_nothing() -> None:
    view = clipped(0.02)
    result = found(view)
    assert isinstance(result, Reconstruction)
    assert result.note.startswith("clipped by value: not confirmed, 1 rows")
    assert not result.verified
    assert not proved_exposures("analytic", result, view)


def test_where_every_row_reaches_the_bound_it_is_refused() -> None:
    view = clipped(0.05)
    weight = dense(view.update["1.weight"])
    weight[:, 0] = weight.abs().max()
    result = found(view)
    assert isinstance(result, NotApplicable)
    assert "in every row of '1' the clip was reached" in result.reason


@pytest.mark.parametrize("share", [0.3, 0.1, 0.05, 0.01])
@pytest.mark.parametrize(("count", "classes"), [(2, 10), (4, 10), (2, 2)])
def test_rows_of_several_pictures_prove_nothing(share: float, count: int, classes: int) -> None:
    view = clipped(share, count, classes)
    result = found(view)
    assert not (isinstance(result, Reconstruction) and (result.verified or result.approximate))
    assert not [one for one in proved_exposures("analytic", result, view) if one.kind != "labels"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("head", [1e-3, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("lr", [0.1, 10.0])
def test_rows_that_see_one_mixture_of_pictures_prove_nothing(head: float, count: int, lr: float) -> None:
    view = clipped(0.0, count, head=head, one_label=True, lr=lr)
    result = found(view)
    assert not (isinstance(result, Reconstruction) and (result.verified or result.approximate))
    assert not [one for one in proved_exposures("analytic", result, view) if one.kind != "labels"]


@pytest.mark.parametrize("labels", [[1, 1], [0, 1]])
@pytest.mark.parametrize(("rival", "others"), [(True, -6.0), (False, -16.0)])
def test_rows_that_see_one_mixture_prove_nothing_where_these_outputs_alone_send_back_one_direction(
    labels: list[int], rival: bool, others: float
) -> None:
    """Of classes that are likely there are two, or a loss takes two outputs, which hang on them."""
    model = network()
    with torch.no_grad():
        model.get_parameter("1.bias").fill_(3.0)
        model.get_parameter("3.bias")[2:] = others
    for start in range(2):
        unlike = torch.rand(2, *SHAPE, generator=stream(start, "unlike"))
        for pair in (unlike, torch.stack([unlike[0], unlike[0] + 0.4 * (unlike[1] - unlike[0])])):
            outputs, own = model(pair), torch.tensor(labels)
            loss = _hardest_rival(outputs, own) if rival else functional.cross_entropy(outputs, own)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            bound = 0.03 * max(float(grad.abs().max()) for grad in grads)
            named = zip(model.named_parameters(), grads, strict=True)
            moved = {n: (v - (v - LR * grad.clamp(-bound, bound))).detach() for (n, v), grad in named}
            method = FedAvg(lr=LR, steps=1, batch_size=None)
            stated = _hardest_rival if rival else "cross-entropy"
            view = from_update(model, moved, input_shape=SHAPE, batch_size=1, method=method, loss=stated)
            assert not [one for one in proved_exposures("analytic", found(view), view) if one.kind != "labels"]


def _hardest_rival(outputs: Tensor, labels: Tensor) -> Tensor:
    own = outputs.gather(1, labels[:, None])[:, 0]
    return functional.softplus(outputs.scatter(1, labels[:, None], -torch.inf).amax(1) - own).mean()


def test_rows_of_one_picture_prove_it_below_a_classifier_of_smaller_weights() -> None:
    view = clipped(0.0, head=0.3, lr=10.0)
    result = found(view)
    assert isinstance(result, Reconstruction)
    assert result.note.startswith(UNCLIPPED_ROWS)
    assert "features" in {one.kind for one in proved_exposures("analytic", result, view)}


def test_where_a_layer_above_got_another_update_nothing_is_proved() -> None:
    view = clipped(0.05)
    view.update["3.bias"] = 1.01 * dense(view.update["3.bias"])
    result = found(view)
    assert isinstance(result, Reconstruction)
    assert not proved_exposures("analytic", result, view)


def test_a_gradient_that_was_not_clipped_is_read_as_ever() -> None:
    result = found(clipped(1.0))
    assert isinstance(result, Reconstruction)
    assert result.verified
    assert UNCLIPPED_ROWS not in result.note
