"""Two pictures nearly alike, stated as one: what is handed out is their mean, and no attack may call it verified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from support import chains
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import Reconstruction, Remark, build
from attacks.verification.confirmation import confirm
from attacks.verification.eight_bit_pixels import are_between_levels, at_levels
from attacks.verification.error_bounds import MAX_PIXEL_ERROR
from attacks.verification.words import MORE_THAN_ROUNDING, PAIRS_HIDDEN, UNLIKE_HIDDEN
from fl.capture import CapturedUpdateSettings, from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.seeds import stream
from fl.tensors import dense as as_dense
from fl.view import ServerView

SHAPE = (3, 8, 8)
ALIKE = [20, 25, 30, 35, 40]
"""How far apart the two pictures are (dB)."""


class Residual(nn.Module):
    """A residual block beside a shortcut, with activations that bend everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.elu(self.stem(x))
        return self.head((x + functional.elu(self.norm(self.inner(x)))).mean((2, 3)))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10))


def convolutional() -> nn.Module:
    body = nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(256, 20), nn.LeakyReLU(0.2)
    return nn.Sequential(*body, nn.Linear(20, 10))


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "analytic": ("analytic", dense),
    "cascade": ("cascade", convolutional),
    "headless+analytic": ("headless+analytic", dense),
}


def picture(*, levels: bool = True) -> Tensor:
    rough = torch.rand(1, 3, 3, 3, generator=stream(0, "one of two"))
    smooth = 0.1 + 0.8 * functional.interpolate(rough, (8, 8), mode="bilinear", align_corners=True)
    return (smooth * 255).round() / 255 if levels else smooth


def other(picture: Tensor, decibels: float, kind: str) -> Tensor:
    """Another picture so far away: another brightness, or a slow or a quick change over the picture."""
    draw = stream(1, "the other")
    change = {
        "brighter": picture,
        "slow": functional.interpolate(torch.randn(1, 3, 2, 2, generator=draw), (8, 8), mode="bilinear"),
        "quick": torch.randn(picture.shape, generator=draw),
    }[kind]
    return picture + change * 10 ** (-decibels / 20) / change.square().mean().sqrt()


def stated_as_one(model: nn.Module, pictures: Tensor, lr: float = 0.1, *, label: int = 3) -> ServerView:
    """The view of a step of SGD on pictures of one label, stated to be on one picture."""
    outputs = model(pictures)
    loss = functional.cross_entropy(outputs, torch.full((len(pictures),), label))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    named = {name: value.detach() for name, value in model.named_parameters()}
    sent = {name: value - (value - lr * grad) for (name, value), grad in zip(named.items(), grads, strict=True)}
    method = FedAvg(lr=lr, steps=1, batch_size=None, train_mode=False)
    return from_update(model, sent, input_shape=SHAPE, num_classes=outputs.shape[1], method=method)


def network(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().eval()
    initialize(model, stream(0, "network"))
    return model


@pytest.mark.parametrize("lr", [0.1, 1e-3])
@pytest.mark.parametrize("attack", list(NETWORKS))
def test_one_picture_is_verified(attack: str, lr: float) -> None:
    name, make = NETWORKS[attack]
    found = build(name)(stated_as_one(network(make), picture(), lr))
    assert isinstance(found, Reconstruction)
    assert found.verified is True, found.note
    assert found.inputs is not None
    assert float((found.inputs - picture()).square().mean().sqrt()) < MAX_PIXEL_ERROR


@pytest.mark.parametrize("lr", [0.1, 1e-2, 1e-4])
@pytest.mark.parametrize(
    ("attack", "kind"),
    [("analytic", "brighter"), ("analytic", "slow"), ("analytic", "quick"), ("headless+analytic", "slow")]
    + [pytest.param("cascade", kind, marks=pytest.mark.slow) for kind in ("brighter", "slow", "quick")],
)
def test_two_nearly_alike_are_not(attack: str, kind: str, lr: float) -> None:
    name, make = NETWORKS[attack]
    model, one = network(make), picture()
    for apart in ALIKE:
        found = build(name)(stated_as_one(model, torch.cat([one, other(one, apart, kind)]), lr))
        assert isinstance(found, Reconstruction)
        assert not found.verified, apart


@pytest.mark.parametrize("attack", list(NETWORKS))
def test_two_that_differ_by_one_level_of_a_pixel_count_as_one(attack: str) -> None:
    name, make = NETWORKS[attack]
    one = picture()
    changed = one.clone()
    changed[0, 1, 4, 4] += 1 / 255
    found = build(name)(stated_as_one(network(make), torch.cat([one, changed])))
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    for true in (one, changed):
        assert not found.verified or float((found.inputs - true).square().mean().sqrt()) < MAX_PIXEL_ERROR


@pytest.mark.parametrize("make", [dense, convolutional, Residual])
@pytest.mark.parametrize("kind", ["brighter", "slow", "quick"])
def test_the_mean_of_two_is_borne_out_and_not_verified(make: Callable[[], nn.Module], kind: str) -> None:
    """Whichever attack hands it out: the whole update is asked."""
    model, one = network(make), picture()
    for apart in ALIKE[2:]:
        pair = torch.cat([one, other(one, apart, kind)])
        claimed = Reconstruction(inputs=pair.mean(0, keepdim=True), labels=torch.tensor([3]), verified=True)
        found = confirm(stated_as_one(model, pair), claimed)
        assert isinstance(found, Reconstruction)
        assert (found.verified, found.approximate) in {(None, True), (False, False)}
        assert found.approximate or apart < 40
    alone = confirm(stated_as_one(model, one), replace(claimed, inputs=one))
    assert isinstance(alone, Reconstruction)
    assert (alone.verified, alone.approximate) == (True, False)


def test_what_rounding_hides_is_not_verified_off_levels() -> None:
    """At small steps the mean of two makes the same update as both: pictures at levels of 8 bits are no means."""
    model, one = network(dense), picture(levels=False)
    words = {1.0: "", 1e-4: PAIRS_HIDDEN}
    for lr, said in words.items():
        found = build("analytic")(stated_as_one(model, one, lr))
        assert isinstance(found, Reconstruction)
        assert (found.verified, found.note) == ((True, "") if not said else (None, said))
        assert found.approximate is bool(said)
    pair = torch.cat([one, other(one, 30, "slow")])
    found = build("analytic")(stated_as_one(model, pair, 1.0))
    assert isinstance(found, Reconstruction)
    assert found.note == MORE_THAN_ROUNDING


def test_a_few_pixels_between_levels_make_no_mean() -> None:
    """Three lie at thirds of levels by chance, or as dark ones that an update hardly tells."""
    few, pair = picture(), torch.cat([picture(), other(picture(), 25, "quick")])
    few.view(-1)[[3, 70, 150]] += 0.35 / 255
    pair = (255 * pair).round() / 255
    assert are_between_levels(pair.mean(0, keepdim=True))
    assert not are_between_levels(few)
    for lr, verified in ((1.0, True), (1e-4, None)):
        found = build("analytic")(stated_as_one(network(dense), few, lr))
        assert isinstance(found, Reconstruction)
        assert found.verified is verified
        assert "mean of two to four" not in found.note
    for apart in (25, 35):  # where as few pixels are elsewhere
        unlike = picture()
        unlike.view(-1)[[3, 70, 150]] += 10 ** (-apart / 20) * (192 / 3) ** 0.5
        mean = torch.cat([picture(), (255 * unlike).round() / 255])
        found = build("analytic")(stated_as_one(network(dense), mean, 1.0))
        assert isinstance(found, Reconstruction)
        assert not found.verified


@pytest.mark.parametrize("count", [2, 3])
def test_what_flows_back_in_one_direction_verifies_no_mixture_off_levels(count: int) -> None:
    """Of two classes and units that are all active, a picture between several makes exactly their update."""
    model = network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 2)))
    layer = model.get_submodule("1")
    assert isinstance(layer, nn.Linear)
    layer.bias.data.fill_(3.0)
    pictures = torch.rand(count, *SHAPE, generator=stream(2, "mixture"))
    found = build("analytic")(stated_as_one(model, pictures, label=1))
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert float((found.inputs - pictures).flatten(1).square().mean(1).sqrt().min()) > 20 * MAX_PIXEL_ERROR
    assert (found.verified, found.note) == (None, UNLIKE_HIDDEN)
    assert Remark.MAY_BE_MIXTURE in found.remarks
    assert Remark.LABELS_CONFIRMED not in found.remarks


def at_zero(model: nn.Module) -> nn.Module:
    """A network whose outputs, and what flows back into them, are the same whatever it is given."""
    for value in model.parameters():
        value.data.zero_()
    return model


@pytest.mark.parametrize("count", [3, 5])
def test_the_mean_of_black_and_white_pictures_is_not_verified_though_it_is_at_levels(count: int) -> None:
    model = at_zero(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    pictures = torch.rand(count, *SHAPE, generator=stream(0, "mixture")).round()
    found = build("analytic")(stated_as_one(model, pictures))
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert torch.allclose(found.inputs, pictures.mean(0), atol=1e-4)
    assert not found.verified
    alone = build("analytic")(stated_as_one(model, pictures[:1]))
    assert isinstance(alone, Reconstruction)
    assert alone.verified


def test_a_mixture_of_pictures_of_few_shades_is_not_verified_though_it_is_at_levels() -> None:
    """Of two classes and active units any mixture makes the update, and its few numbers may be whole ones."""
    model = network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 2)))
    layer, head = model.get_submodule("1"), model.get_submodule("3")
    assert isinstance(layer, nn.Linear)
    assert isinstance(head, nn.Linear)
    layer.bias.data.fill_(3.0)
    drawing = torch.rand(1, *SHAPE, generator=stream(0, "drawing")).round()
    drawings = torch.cat([drawing, 1 - drawing])
    at_whole_levels = 0
    for number in range(6):
        head.bias.data = torch.tensor([number / 10.0, 0.0])
        found = build("analytic")(stated_as_one(model, drawings, label=1))
        assert isinstance(found, Reconstruction)
        assert found.inputs is not None
        assert not found.verified
        at_whole_levels += at_levels(found.inputs) is not None
    assert at_whole_levels
    alone = build("analytic")(stated_as_one(model, drawing, label=1))
    assert isinstance(alone, Reconstruction)
    assert alone.verified


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_rows_of_tables_and_features_stated_as_one_are_not_verified(classes: int) -> None:
    loss: nn.Module = nn.CrossEntropyLoss() if classes > 1 else nn.MSELoss()
    model = at_zero(nn.Sequential(nn.Flatten(), nn.Linear(6, classes)))
    rows = torch.rand(4, 6, generator=stream(0, "rows"))
    targets = torch.full((4,), classes - 1) if classes > 1 else torch.ones(4, 1)
    grads = torch.autograd.grad(loss(model(rows), targets), list(model.parameters()))
    named = dict(zip(dict(model.named_parameters()), grads, strict=True))
    settings = CapturedUpdateSettings(
        method=FedAvg(lr=1.0, steps=1, batch_size=None), kind="gradient", loss="cross-entropy" if classes > 1 else "mse"
    )
    found = build("analytic")(from_update(model, named, input_shape=(6,), num_classes=classes, options=settings))
    assert isinstance(found, Reconstruction)
    assert not found.verified
    if classes == 10:
        assert found.note.endswith(UNLIKE_HIDDEN)


@pytest.mark.parametrize("kind", ["slow", "quick"])
def test_cascade_verifies_no_mean_of_two_nearly_alike(kind: str) -> None:
    pair = torch.cat([picture(), other(picture(), 40, kind)])
    for lr in (0.1, 1e-2):
        found = build("cascade")(stated_as_one(network(convolutional), pair, lr))
        assert isinstance(found, Reconstruction)
        assert not found.verified


def test_backsolve_verifies_no_mean_of_two() -> None:
    model = chains.initialized(Residual()).float().eval()
    found = build("backsolve")(stated_as_one(model, torch.cat([picture(), other(picture(), 20, "quick")])))
    assert not getattr(found, "verified", False)


def bent_at_zero(one: Tensor) -> Iterator[nn.Module]:
    """Networks with a unit that `one` puts above zero in float32, and below it without rounding."""
    for unit in range(64):
        model = network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)))
        layer, flat = model.get_submodule("1"), one.flatten(1)
        assert isinstance(layer, nn.Linear)
        exact = float(flat.double()[0] @ layer.weight[unit].detach().double())
        for offset in torch.linspace(-1e-6, 1e-6, 41).tolist():
            with torch.no_grad():
                layer.bias[unit] = offset - exact
                rounded = float(layer(flat)[0, unit])
            if rounded > 0 > exact + float(layer.bias[unit].detach()):
                yield model
                break


def test_a_picture_next_to_a_bend_is_verified_though_rounding_puts_it_on_the_other_side() -> None:
    one = picture()
    models = list(bent_at_zero(one))
    assert len(models) > 10
    for model in models:
        claimed = Reconstruction(inputs=one, labels=torch.tensor([3]), verified=True)
        found = confirm(stated_as_one(model, one), claimed)
        assert isinstance(found, Reconstruction)
        assert found.verified is True, found.note


def test_a_picture_next_to_a_bend_is_verified_in_whatever_order_a_client_adds() -> None:
    """A client that adds pixels in another order may put a unit on the other side of zero."""
    one, active = picture(), []
    for unit in range(24):
        model = network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)))
        weight, bias = model.get_parameter("1.weight").data, model.get_parameter("1.bias").data
        bias[unit] = -float(one.flatten().double() @ weight[unit].double())
        order = torch.randperm(192, generator=stream(unit, "order"))
        reordered = copy.deepcopy(model)
        reordered.get_parameter("1.weight").data = weight[:, order]
        update = {**stated_as_one(reordered, one.flatten(1)[:, order].view(1, *SHAPE)).update}
        update["1.weight"] = as_dense(update["1.weight"])[:, order.argsort()]
        active.append(bool(as_dense(update["1.bias"])[unit] != 0))
        view = replace(stated_as_one(model, one), update=update)
        found = confirm(view, Reconstruction(inputs=one, labels=torch.tensor([3]), verified=True))
        assert isinstance(found, Reconstruction)
        assert found.verified is True, found.note
    assert 4 < sum(active) < 20
