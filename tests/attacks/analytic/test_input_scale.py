"""Pictures whose direction alone stands in the update: first layers without a bias that moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support import chains
from support.cover import pairwise
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, build
from attacks.network.pixel_layers import PixelNetwork
from attacks.search_control import TIME_LIMIT, StoppedError
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from eval.federations.exposures import proved_exposures
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.view import ServerView

SHAPE, LR = (1, 8, 8), 0.1
Loss = Callable[[Tensor, Tensor], Tensor]


class Written(nn.Module):
    """Layers put together by a function."""

    def __init__(self, run: Callable[[Written, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x.flatten(1))


def plain(count: int, out: int) -> nn.Linear:
    return nn.Linear(count, out, bias=False)


def residual(net: Written, x: Tensor) -> Tensor:
    inner = net.a(x).relu()
    out: Tensor = net.c(inner + net.b(inner).relu())
    return out


def gated(net: Written, x: Tensor) -> Tensor:
    out: Tensor = net.c(net.a(x) * functional.silu(net.b(x)))
    return out


def halves(net: Written, x: Tensor) -> Tensor:
    out: Tensor = net.c(torch.cat([net.a(x[:, :32]).relu(), net.b(x[:, 32:]).relu()], 1))
    return out


class Normalized(nn.Sequential):
    """Normalizes its pixels itself, with other numbers than the view knows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward((x - 0.3) / 0.25)
        return out


def chain(classes: int = 10, activation: type[nn.Module] = nn.ReLU, *, bias: bool = False) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24, bias=bias), activation(), nn.Linear(24, classes, bias=bias))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Sequential(nn.Flatten(), plain(64, 10)),
    "chain": chain,
    "an activation that rises and falls": lambda: chain(activation=nn.GELU),
    "residual": lambda: Written(residual, a=plain(64, 24), b=plain(24, 24), c=plain(24, 10)),
    "gated": lambda: Written(gated, a=plain(64, 24), b=plain(64, 24), c=plain(24, 10)),
    "two towers": lambda: Written(halves, a=plain(32, 24), b=plain(32, 24), c=plain(48, 10)),
    "normalized": lambda: Normalized(nn.Flatten(), plain(64, 24), nn.Tanh(), plain(24, 10)),
}


def picture(seed: int = 0, brightness: float = 1.0) -> Tensor:
    drawn = torch.rand(1, *SHAPE, generator=stream(seed, "direction"))
    return (255 * brightness * drawn).round() / 255


def entropy(outputs: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, label)


def moved(
    model: nn.Module, x: Tensor, label: Tensor | None = None, *, only: str = "", loss: Loss = entropy, steps: int = 1
) -> dict[str, Tensor]:
    """How much SGD moves the tensors of a model, or those alone whose names end so."""
    after, label = copy.deepcopy(model), torch.full((len(x),), 3) if label is None else label
    trained = [p for n, p in after.named_parameters() if p.requires_grad and n.endswith(only)]
    for _ in range(steps):
        with torch.enable_grad():
            grads = torch.autograd.grad(loss(after(x), label), trained)
        with torch.no_grad():
            for value, grad in zip(trained, grads, strict=True):
                value -= LR * grad
    return {n: p.detach() - dict(after.named_parameters())[n].detach() for n, p in model.named_parameters()
            if p.requires_grad}  # fmt: skip


def view_of(model: nn.Module, update: dict[str, Tensor], classes: int = 10, **settings: object) -> ServerView:
    method = FedAvg(**{"lr": LR, "steps": 1, "batch_size": None, **settings})  # type: ignore[arg-type]
    return from_update(model, update, input_shape=SHAPE, num_classes=classes, batch_size=1, method=method)


def network(make: Callable[[], nn.Module]) -> nn.Module:
    return chains.initialized(make()).float().eval()


def found(view: ServerView) -> Reconstruction:
    result = build("analytic")(view)
    assert isinstance(result, Reconstruction), result
    return result


def is_right(result: Reconstruction, x: Tensor) -> bool:
    return result.inputs is not None and float((result.inputs - x).square().mean().sqrt()) < MAX_PIXEL_ERROR


@pytest.mark.parametrize("name", NETWORKS)
def test_a_picture_comes_out_without_a_bias_whatever_stands_above(name: str) -> None:
    model, x = network(NETWORKS[name]), picture()
    result = found(view_of(model, moved(model, x)))
    assert is_right(result, x)
    assert result.verified, result.note
    assert result.labels is not None
    assert result.labels.tolist() == [3]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("only", ["weight", "1.weight"])
def test_biases_that_are_frozen_or_did_not_move_are_no_obstacle(only: str, frozen: bool) -> None:
    model, x = network(lambda: chain(bias=True)), picture()
    for name, value in model.named_parameters():
        value.requires_grad_(not frozen or name.endswith(only))
    result = found(view_of(model, moved(model, x, only=only)))
    assert is_right(result, x)
    assert result.verified, result.note
    assert ("did not move" in result.note) is not frozen


def test_at_another_step_size_than_stated_a_picture_is_found_and_not_verified() -> None:
    model, x = network(chain), picture()
    view = view_of(model, moved(model, x), lr=0.02)
    result = found(view)
    assert is_right(result, x)
    assert not result.verified
    assert {"features", "images"} & {one.kind for one in proved_exposures("analytic", result, view)}
    assert "at the stated step size no picture makes the update" in result.note


def smoothed(share: float) -> Loss:
    return lambda outputs, label: functional.cross_entropy(outputs, label, label_smoothing=share)


OTHER_LOSSES: dict[str, Loss] = {
    "smoothing 0.05": smoothed(0.05),
    "smoothing 0.1": smoothed(0.1),
    "smoothing 0.2": smoothed(0.2),
    "soft targets": lambda outputs, label: functional.cross_entropy(outputs, torch.tensor([[0.15, 0.8, 0.05]])),
    "focal": lambda outputs, label: (1 - torch.exp(-entropy(outputs, label))) ** 2 * entropy(outputs, label),
    "hinge": functional.multi_margin_loss,
}


@pairwise(
    make=(
        lambda: nn.Sequential(nn.Flatten(), plain(64, 3)),
        lambda: chain(3),
        lambda: chain(3, nn.Tanh),
        lambda: chain(3, nn.GELU),
        lambda: chain(4),
    ),
    brightness=(1.0, 0.6),
    loss=OTHER_LOSSES,
)
def test_of_few_classes_no_size_is_claimed_under_another_loss_than_stated(
    make: Callable[[], nn.Module], brightness: float, loss: str
) -> None:
    model, x = network(make), picture(brightness=brightness)
    classes = len(list(model.parameters())[-1])
    if classes > 3 and loss in {"soft targets", "focal", "hinge"}:
        pytest.skip("written for three classes, or of the same direction")
    view = view_of(model, moved(model, x, torch.tensor([1]), loss=OTHER_LOSSES[loss]), classes)
    result = build("analytic")(view)
    shown = proved_exposures("analytic", result, view)
    assert not (isinstance(result, Reconstruction) and (result.verified or result.approximate))
    assert all("up to a factor" in one.words for one in shown if one.kind == "features")


def test_of_few_classes_a_picture_as_stated_is_verified() -> None:
    model, x = network(lambda: chain(3)), picture()
    result = found(view_of(model, moved(model, x, torch.tensor([1])), 3))
    assert is_right(result, x)
    assert result.verified


def test_a_bias_of_the_classifier_tells_the_brightness_of_a_picture_of_few_classes() -> None:
    model = network(lambda: nn.Sequential(nn.Flatten(), plain(64, 24), nn.ReLU(), nn.Linear(24, 3)))
    x, label = picture(), torch.tensor([1])
    for loss, step in ((entropy, LR), (smoothed(0.1), LR), (smoothed(0.1), 0.02), (entropy, 0.02)):
        view = view_of(model, moved(model, x, label, loss=loss), 3, lr=step)
        result = build("analytic")(view)
        as_stated = loss is entropy and step == LR
        assert isinstance(result, Reconstruction)
        assert bool(result.verified) is as_stated
        assert is_right(result, x) or not (result.verified or result.approximate)


def test_a_label_that_the_update_tells_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    signals = PixelNetwork.signals

    def count(self: PixelNetwork, pictures: Tensor, targets: Tensor, loss: object) -> list[Tensor]:
        tried.append(len(targets))
        return signals(self, pictures, targets, loss)  # type: ignore[arg-type]

    monkeypatch.setattr(PixelNetwork, "signals", count)
    model, x = network(lambda: chain(300)), picture()
    result = found(view_of(model, moved(model, x, torch.tensor([299])), 300))
    assert is_right(result, x)
    assert result.verified
    assert sum(tried) == 1


def test_the_search_of_the_size_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise StoppedError(TIME_LIMIT)

    model, x = network(lambda: chain(300)), picture()
    view = view_of(model, moved(model, x, torch.tensor([299]), loss=smoothed(0.1)), 300)
    monkeypatch.setattr("attacks.analytic.scale_search.check_time_limit", stop)
    result = found(view)
    assert result.cut_short == TIME_LIMIT
    assert "was not found before the time limit" in result.note
    assert "up to a factor" in proved_exposures("analytic", result, view)[0].words


@pytest.mark.parametrize("where", ["tells_brightness", "reproduces_update", "ScaleSearch.tells_pairs_apart"])
def test_a_picture_that_was_found_is_kept_where_the_time_limit_comes_while_it_is_judged(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def stop(*_: object) -> bool:
        raise StoppedError(TIME_LIMIT)

    model, x = network(chain), picture()
    view = view_of(model, moved(model, x))
    if where != "tells_brightness":
        monkeypatch.setattr("attacks.analytic.scale_judgment.tells_brightness", lambda *_: False)
        assert not found(view).cut_short
    monkeypatch.setattr(f"attacks.analytic.scale_judgment.{where}", stop)
    result = build("analytic").attack_view(view, 0)
    assert isinstance(result, Reconstruction)
    assert is_right(result, x)
    assert result.verified is None
    assert not result.approximate
    assert result.cut_short == f"not held to the update before {TIME_LIMIT}"
    assert not result.private


def test_a_picture_at_another_step_size_is_kept_where_the_time_limit_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> bool:
        raise StoppedError(TIME_LIMIT)

    model, x = network(chain), picture()
    monkeypatch.setattr("attacks.analytic.scale_search.ScaleSearch.tells_pairs_apart", stop)
    result = build("analytic").attack_view(view_of(model, moved(model, x), lr=0.02), 0)
    assert isinstance(result, Reconstruction)
    assert is_right(result, x)
    assert (result.verified, result.cut_short) == (None, TIME_LIMIT)


def test_a_direction_is_not_said_to_be_told_where_the_time_limit_comes_before_pairs_were_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> bool:
        raise StoppedError(TIME_LIMIT)

    model, x = network(chain), picture()
    for name in ("check_time_limit", "ScaleSearch.tells_pairs_apart"):
        monkeypatch.setattr(f"attacks.analytic.scale_search.{name}", stop)
    result = build("analytic").attack_view(view_of(model, moved(model, x)), 0)
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert result.cut_short


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_smoothed_label_is_no_reason_to_call_a_picture_normalized(share: float) -> None:
    model, x = network(chain), picture()
    view = view_of(model, moved(model, x, loss=smoothed(share)))
    result = found(view)
    assert not result.verified
    assert not result.approximate
    assert "normalize" not in result.note
    features = result.private["features/1.weight"].flatten()  # type: ignore[union-attr]
    assert float(functional.cosine_similarity(features, x.flatten(), dim=0)) > 1 - 1e-5
    assert "up to a factor" in proved_exposures("analytic", result, view)[0].words


def test_the_mean_of_pictures_of_one_label_is_no_input() -> None:
    """Of small weights of the classifier all send back the same, so that their layer's update is that of one."""
    model, x = network(chain), torch.cat([picture(seed) for seed in range(4)])
    with torch.no_grad():
        next(reversed(list(model.parameters()))).mul_(1e-4)
    for loss in (entropy, smoothed(0.1)):
        view = view_of(model, moved(model, x, loss=loss))
        result = build("analytic")(view)
        assert not (isinstance(result, Reconstruction) and result.verified)
        assert not [one for one in proved_exposures("analytic", result, view) if one.kind == "features"]


@pytest.mark.parametrize("factor", [1.0, 0.3, 3.0])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Flatten(), plain(64, 2)), lambda: chain(2)])
def test_where_the_size_alone_tells_the_brightness_nothing_is_verified(
    make: Callable[[], nn.Module], factor: float
) -> None:
    """Of two classes, whatever flows back into a network without biases has one direction."""
    model, x = network(make), picture()
    update = {name: factor * value for name, value in moved(model, x, torch.tensor([1])).items()}
    result = build("analytic")(view_of(model, update, 2))
    assert not (isinstance(result, Reconstruction) and (result.verified or result.approximate or result.private))


@pytest.mark.parametrize("brightness", [0.3, 0.05, 0.02])
@pytest.mark.parametrize("name", ["one layer", "chain", "two towers"])
def test_a_dim_picture_is_verified_only_if_it_is_right(name: str, brightness: float) -> None:
    model, x = network(NETWORKS[name]), picture(brightness=brightness)
    result = found(view_of(model, moved(model, x)))
    assert is_right(result, x) or not result.verified
    assert brightness < 0.3 or result.verified


@pytest.mark.parametrize("kind", ["others", "brighter", "next level", "one direction"])
@pytest.mark.parametrize("name", ["one layer", "chain", "gated", "two towers"])
def test_of_two_pictures_stated_as_one_none_is_verified(name: str, kind: str) -> None:
    model, x = network(NETWORKS[name]), picture(brightness=0.5)
    other = {
        "others": picture(1),
        "brighter": (x + 4 / 255),
        "next level": x + (picture(2) > 0.5) / 255,
        "one direction": 1.5 * x,
    }[kind]
    result = build("analytic")(view_of(model, moved(model, torch.cat([x, other]))))
    assert not (isinstance(result, Reconstruction) and result.verified)


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-3])
def test_noise_keeps_a_picture_from_being_verified(size: float) -> None:
    model, x = network(chain), picture()
    update = moved(model, x)
    draw = stream(0, "noise")
    noisy = {name: value + size * torch.randn(value.shape, generator=draw) for name, value in update.items()}
    result = build("analytic")(view_of(model, noisy))
    assert not (isinstance(result, Reconstruction) and result.verified)
    if size < 1e-3:
        assert isinstance(result, Reconstruction)
        assert is_right(result, x)


def test_where_normalization_takes_the_brightness_off_the_direction_is_told() -> None:
    model = network(lambda: nn.Sequential(nn.Flatten(), plain(64, 24), nn.LayerNorm(24, eps=0.0), plain(24, 10)))
    x = picture()
    view = view_of(model, moved(model, x))
    result = found(view)
    assert not result.verified
    assert not result.approximate
    features = result.private["features/1.weight"]
    assert float(functional.cosine_similarity(features.flatten(), x.flatten(), dim=0)) > 1 - 1e-6  # type: ignore[union-attr]
    shown = proved_exposures("analytic", result, view)
    assert [one.kind for one in shown] == ["features", "labels"]
    assert "up to a factor" in shown[0].words


def test_what_a_loader_normalized_is_handed_out_as_it_is() -> None:
    model, x = network(chain), (picture() - 0.3) / 0.25
    result = found(view_of(model, moved(model, x)))
    assert result.inputs is None
    assert "normalize" in result.note
    assert torch.allclose(result.private["features/1.weight"], x.flatten(), atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["steps", "targets"])
def test_up_to_a_factor_it_is_told_after_several_steps_and_with_unknown_targets(kind: str) -> None:
    model, x = network(chain), picture()
    if kind == "steps":
        view = view_of(model, moved(model, x, steps=3), steps=3)
    else:
        target = torch.rand(1, 10, generator=stream(0, "target"))
        update = moved(model, x, target, loss=functional.mse_loss)
        view = from_update(
            model, update, input_shape=SHAPE, num_classes=10, batch_size=1, loss="mse",
            method=FedAvg(lr=LR, steps=1, batch_size=None),
        )  # fmt: skip
    result = found(view)
    assert not result.verified
    features = result.private["features/1.weight"].flatten()  # type: ignore[union-attr]
    assert float(functional.cosine_similarity(features, x.flatten(), dim=0)) > 1 - 1e-5


def test_a_refusal_says_what_is_missing() -> None:
    model, x = network(lambda: chain(bias=True)), picture()
    update = moved(model, x, only="weight")
    refused = build("cascade")(view_of(model, update))
    assert isinstance(refused, NotApplicable)
    assert "3.bias did not move, though its weight did" in refused.reason
    twice = nn.Sequential(nn.Flatten(), Written(lambda net, x: net.a(x[:, :32]) + net.a(x[:, 32:]), a=plain(32, 10)))
    shared = network(lambda: twice)
    assert isinstance(build("analytic")(view_of(shared, moved(shared, x))), NotApplicable)
    two = moved(network(chain), torch.cat([x, picture(1)]))
    refused = build("analytic")(view_of(network(chain), two))
    assert isinstance(refused, NotApplicable)
    assert "is not that of one input" in refused.reason


def test_labels_that_the_server_knows_are_taken() -> None:
    model, x = network(chain), picture()
    view = view_of(model, moved(model, x))
    known = replace(view, labels=torch.tensor([3]), threat=replace(view.threat, knows_labels=True))
    result = found(known)
    assert is_right(result, x)
    assert result.knowledge == ("labels",)
