"""What an attack confirms of an update whose rule nobody stated, or stated wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support import chains
from support.brief import brief_picture_searches
from support.cover import pairwise
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, Result, build
from attacks.update.label_gradients import MAX_TRIED_LABELS
from attacks.update.update_rule import guess_update_rule
from attacks.verification.comparison import comparison
from attacks.verification.confirmation import confirm
from attacks.verification.error_bounds import MAX_PIXEL_ERROR, PARTIAL_TOLERANCE
from benchmarks.reliability import confirmed
from benchmarks.reliability.rules import RULES, Grads, Rule, by_torch
from fl.capture import from_batch, from_update
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.fedper import FedPer
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView, ThreatModel

SHAPE = (3, 8, 8)
UNSTATED = ThreatModel(knows_optimizer=False)


def mlp() -> nn.Sequential:
    return chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, 10))).float()


def image(key: object = 0) -> Tensor:
    rough = torch.rand(1, 3, 3, 3, generator=stream(0, "borne out", key))
    return (functional.interpolate(rough, (8, 8), mode="bilinear", align_corners=True) * 255).round() / 255


def gradient(model: nn.Module, x: Tensor, label: int = 3) -> dict[str, Tensor]:
    loss = functional.cross_entropy(model(x), torch.full((len(x),), label))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip([name for name, _ in model.named_parameters()], grads, strict=True))


def view_of(model: nn.Module, moved: dict[str, Tensor], method: Method | None = None, classes: int = 10) -> ServerView:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    sent = {name: value - (value - moved[name]) for name, value in weights.items()}  # a float32 difference
    return from_update(model, sent, input_shape=SHAPE, num_classes=classes, method=method)


def stepped(model: nn.Module, x: Tensor, kind: type[torch.optim.Optimizer], lr: float) -> dict[str, Tensor]:
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return by_torch(kind, weights, gradient(model, x), lr)


def verified(result: Result) -> bool:
    return isinstance(result, Reconstruction) and result.verified is True


ADAPTIVE = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax]


@pytest.mark.parametrize("attack", ["analytic", "cascade", "spear", "rconv", "headless+analytic"])
@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize("method", [None, FedAvg(lr=1e-3, steps=1, batch_size=None)], ids=["unstated", "stated"])
def test_a_step_of_another_optimizer_is_not_confirmed(
    attack: str, kind: type[torch.optim.Optimizer], method: Method | None
) -> None:
    model, x = mlp(), image()
    result = build(attack)(view_of(model, stepped(model, x, kind, 1e-3), method))
    assert not verified(result)
    assert getattr(result, "fixed", None) is None


@pytest.mark.parametrize("lr", [1.0, 0.1, 0.01, 1e-3])
@pytest.mark.parametrize("attack", ["analytic", "cascade", "spear", "rconv", "headless+analytic"])
def test_a_step_of_plain_sgd_still_is(attack: str, lr: float) -> None:
    model, x = mlp(), image()
    result = build(attack)(view_of(model, stepped(model, x, torch.optim.SGD, lr)))
    assert verified(result)
    assert isinstance(result, Reconstruction)
    torch.testing.assert_close(result.inputs, x, atol=0.5 / 255, rtol=0)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize("method", [None, FedAvg(steps=1, batch_size=None)], ids=["unstated", "stated"])
def test_biases_at_a_step_size_of_their_own_are_noticed(factor: float, method: Method | None) -> None:
    """They make the picture darker or brighter, and every layer's update stays an outer product."""
    model, x = mlp(), image()
    grads = gradient(model, x)
    moved = {name: value * (factor if name.endswith("bias") else 1.0) for name, value in grads.items()}
    result = build("analytic")(view_of(model, moved, method))
    assert isinstance(result, Reconstruction)
    assert result.verified is False
    assert "one step of SGD on it does not make the rest" in result.note


def test_where_nothing_else_was_sent_an_unstated_optimizer_stays_open() -> None:
    """Behind a private classifier, one layer fits whatever brightness its bias asks for."""
    model, x = mlp(), image()
    method = FedPer(lr=1.0, steps=1, batch_size=None)
    for threat, sure in ((ThreatModel(), True), (UNSTATED, None)):
        view, _ = from_batch(model, x, torch.tensor([3]), method=method, threat=threat)
        for attack in ("analytic", "headless+analytic", "cascade"):
            result = build(attack)(view)
            assert isinstance(result, Reconstruction)
            assert result.verified is sure
            assert ("nothing in the update tells" in result.note) is not bool(sure)


def test_layers_below_a_private_classifier_bear_each_other_out() -> None:
    layers = [nn.Linear(192, 40), nn.LeakyReLU(0.2), nn.Linear(40, 30), nn.LeakyReLU(0.2), nn.Linear(30, 10)]
    model = chains.initialized(nn.Sequential(nn.Flatten(), *layers))
    method = FedPer(lr=1.0, steps=1, batch_size=None)
    view, _ = from_batch(model, image().double(), torch.tensor([3]), method=method, threat=UNSTATED)
    assert verified(build("analytic")(view))
    weight = "1.weight"
    half = replace(view, update={**view.update, weight: dense(view.update[weight]) * 0.5})
    assert not verified(build("analytic")(half))


@pytest.mark.parametrize("size", [1e-9, 1e-14, 1e-19])
def test_an_update_below_the_rounding_of_weights_neither_confirms_nor_contradicts(size: float) -> None:
    """No difference of weights is so small; whoever says that it is a gradient has it decided."""
    model, x = mlp(), image()
    moved = {name: size * value for name, value in gradient(model, x).items()}
    steeper = {name: (1.5 if name.endswith("bias") else 1) * value for name, value in moved.items()}
    method = FedAvg(lr=size, steps=1, batch_size=None)
    for sent in (moved, steeper):
        found = build("analytic")(from_update(model, sent, input_shape=SHAPE, method=method))
        assert isinstance(found, Reconstruction)
        assert found.verified is None
        assert not found.approximate
        assert "not decided" in found.note
    assert verified(build("analytic")(from_update(model, moved, input_shape=SHAPE, kind="gradient")))
    assert not verified(build("analytic")(from_update(model, steeper, input_shape=SHAPE, kind="gradient")))


def test_a_batch_is_asked_as_a_whole() -> None:
    model = mlp()
    both = gradient(model, image(1), 3), gradient(model, image(2), 5)
    grads = {name: (both[0][name] + both[1][name]) / 2 for name in both[0]}
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for moved, sure in ((grads, True), ({n: g / g.norm() for n, g in grads.items()}, False)):
        sent = {name: value - (value - moved[name]) for name, value in weights.items()}
        view = from_update(model, sent, input_shape=SHAPE, num_classes=10, batch_size=2)
        assert verified(build("rconv")(view)) is sure


def conv_net(classes: int = 10) -> nn.Sequential:
    """Its convolutions have too few equations to be undone by `analytic`, which reads features."""
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(6, 4, 3, stride=2), nn.LeakyReLU(0.2)]
    head = [nn.Flatten(), nn.Linear(36, 40), nn.ReLU(), nn.Linear(40, classes)]
    return chains.initialized(nn.Sequential(*body, *head)).float()


def single_head() -> nn.Sequential:
    """What the classifier is given is all that can be read."""
    body = [nn.Conv2d(3, 6, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(216, 5)]
    return chains.initialized(nn.Sequential(*body)).float()


def two_groups(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """Adam with a step size of their own for the upper half of the tensors."""
    half = len(weights) // 4 * 2
    leaves = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    each = list(leaves.values())
    torch.optim.Adam([{"params": each[:half], "lr": 1e-2}, {"params": each[half:]}], lr=1e-3).step()
    return {name: weights[name] - leaf.detach() for name, leaf in leaves.items()}


def bounded(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """Clipped by value, as low as makes one size of all."""
    return {name: lr * value.clamp(-1e-5, 1e-5) for name, value in grads.items()}


def head_alone(weights: Grads, grads: Grads, lr: float, draw: torch.Generator) -> Grads:
    """Adam for the classifier, SGD below."""
    last = list(grads)[-2:]
    return {name: 1e-3 * value.sign() if name in last else lr * value for name, value in grads.items()}


ODD: dict[str, Rule] = {
    **{name: RULES[name] for name in ("Adam", "AdamW", "RMSprop", "Lion, signs", "clipped by tensor", "LARS")},
    "Adam, two groups": two_groups,
    "clipped by value": bounded,
    "Adam, the head alone": head_alone,
    "biases twice as fast": RULES["biases twice as fast"],
}


@pairwise(
    rule=ODD,
    attack=("analytic", "spear", "cascade", "rconv", "rgap", "headless", "headless+rconv"),
    network=(conv_net, single_head),
)
def test_features_of_another_rule_are_not_confirmed_whatever_is_stated(
    rule: str, attack: str, network: Callable[[], nn.Module]
) -> None:
    """A layer's signs, or its tensors at step sizes of their own, are an outer product as well as its gradient."""
    model, x = network(), image()
    classes = len(list(model.parameters())[-1])
    weights = {name: value.detach() for name, value in model.named_parameters()}
    moved = ODD[rule](weights, gradient(model, x), 0.1, stream(0, rule))
    for method in (None, FedAvg(lr=0.1, steps=1, batch_size=None)):
        # of pictures `backsolve` searches for seconds, which is done for one rule
        with nullcontext() if rule == "Adam" else brief_picture_searches():
            result = build(attack)(view_of(model, moved, method, classes))
        if rule == "Adam, the head alone" and network is conv_net and isinstance(result, Reconstruction):
            continue  # the first linear layer's update is a gradient: what it is given is right, the rest is not
        assert not verified(result)


@pytest.mark.parametrize("rule", ["Adam", "AdamW", "RMSprop", "Lion, signs", "clipped by value", "Adam, two groups"])
@pytest.mark.parametrize("network", [mlp, conv_net])
def test_behind_a_private_classifier_an_update_that_looks_otherwise_is_not_confirmed(
    rule: str, network: Callable[[], nn.Module]
) -> None:
    model = network()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    moved = ODD[rule](weights, gradient(model, image()), 0.1, stream(0, rule))
    head = list(moved)[-1].rpartition(".")[0]
    sent = {n: weights[n] - (weights[n] - v) for n, v in moved.items() if not n.startswith(head)}
    method = FedPer(lr=0.1, steps=1, batch_size=None)
    view = from_update(model, sent, input_shape=SHAPE, num_classes=10, method=method)
    assert view.private
    for attack in ("analytic", "spear", "headless+analytic", "cascade"):
        assert not verified(build(attack)(view))


@pytest.mark.parametrize("network", [conv_net, single_head])
@pytest.mark.parametrize("lr", [1.0, 0.01])
@pytest.mark.parametrize("attack", ["analytic", "spear"])
def test_features_of_plain_sgd_are_confirmed_by_the_layers_above(
    network: Callable[[], nn.Module], lr: float, attack: str
) -> None:
    model, x = network(), image()
    moved = stepped(model, x, torch.optim.SGD, lr)
    for method in (None, FedAvg(lr=lr, steps=1, batch_size=None)):
        result = build(attack)(view_of(model, moved, method, len(list(model.parameters())[-1])))
        assert isinstance(result, Reconstruction)
        assert verified(result), result.note
        assert result.inputs is None


def test_features_of_a_batch_are_asked_with_the_labels_that_explain_them() -> None:
    model, x = conv_net(), torch.cat([image(1), image(2)])
    loss = functional.cross_entropy(model(x), torch.tensor([3, 5]))
    grads = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    for moved, sure in ((grads, True), ({n: g / g.norm() for n, g in grads.items()}, False)):
        view = from_update(model, moved, input_shape=SHAPE, num_classes=10, batch_size=2, kind="gradient")
        result = build({"name": "spear", "samples": 500})(view)
        assert isinstance(result, Reconstruction)
        assert result.inputs is None
        assert verified(result) is sure


def test_features_below_which_the_image_reaches_the_end_by_another_way_are_not_asked() -> None:
    class Skipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc, self.side = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(36, 10), nn.Linear(36, 10)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x).flatten(1)
            out: Tensor = self.fc(h.sigmoid()) + self.side(h)
            return out

    model = chains.initialized(Skipped()).float()
    for threat, sure in ((ThreatModel(), True), (UNSTATED, None)):
        view, _ = from_batch(model, image(), torch.tensor([3]), threat=threat)
        result = build("analytic")(view)
        assert isinstance(result, Reconstruction)
        assert result.verified is sure


def test_none_of_a_sample_of_rules_is_confirmed_wrongly() -> None:
    """Twelve of the updates of `benchmarks.reliability.confirmed`."""
    cases = [case for case in confirmed.cases(50) if case.net != "CNN, max pooling"][:30:2][:12]
    found, _ = confirmed.figures([(case, confirmed.answers(case)) for case in cases])
    assert [figure.found.split()[0] for figure in found[:3]] == ["0", "0", "0"]
    assert found[3].met


@pytest.mark.parametrize("rule", [name for name in RULES if name != "decay of 0.05"])
def test_no_rule_of_the_benchmark_is_plain_sgd(rule: str) -> None:
    model, draw = mlp(), stream(0, rule)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    grads = gradient(model, image())
    moved = RULES[rule](weights, grads, 0.1, draw)
    factors = {float((moved[n] * g).sum() / g.square().sum()) for n, g in grads.items()}
    apart = max(float((moved[n] / max(factors) - g).norm() / g.norm()) for n, g in grads.items())
    assert apart > 1e-3


@pytest.mark.parametrize("lr", [1.0, 0.01])
def test_where_no_direction_tells_how_bright_an_image_is_the_stated_step_size_has_to(lr: float) -> None:
    """One layer and two classes: the update is an outer product of (1, -1) and the image, whatever made it."""
    model, x = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))).float(), image()
    grads = gradient(model, x, 1)
    for factor, sure in ((1.0, True), (1.3, None), (2.0, None)):
        moved = {name: lr * value * (factor if name.endswith("bias") else 1.0) for name, value in grads.items()}
        for attack in ("analytic", "cascade", "rconv", "spear"):
            result = build(attack)(view_of(model, moved, FedAvg(lr=lr, steps=1, batch_size=None), classes=2))
            assert isinstance(result, Reconstruction)
            assert result.verified is sure, (attack, factor)
            assert ("of another size" in result.note) is not bool(sure)


@pytest.mark.parametrize("lr", [1.0, 0.01])
def test_a_nearly_uniform_image_is_borne_out_by_the_stated_step_size(lr: float) -> None:
    """Of one layer and two classes, its gradient looks like signs: nearly all entries are of one size.

    It has few shades, as a mixture of others may have.
    """
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))).float()
    x = (255 * (1 - 0.03 * image())).round() / 255
    grads = gradient(model, x, 1)
    largest = max(float(value.abs().max()) for value in grads.values())
    for size, sure in ((1.0, True), (1 / largest, False)):
        view = view_of(
            model,
            {name: lr * size * value for name, value in grads.items()},
            FedAvg(lr=lr, steps=1, batch_size=None),
            classes=2,
        )
        assert guess_update_rule(view).startswith("signs, or the first step")
        for attack in ("analytic", "cascade", "rconv"):
            found = build(attack)(view)
            assert isinstance(found, Reconstruction)
            assert not found.verified
            assert found.approximate is sure, (attack, size)


def test_a_black_and_white_image_is_told_from_signs_by_the_stated_step_size() -> None:
    """Of one layer and two classes its gradient has numbers of one size, too; of free targets any size is a step's."""
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))).float()
    x, lr = image().round(), 0.1
    grads = gradient(model, x, 1)
    signs = {name: value.sign() for name, value in grads.items()}
    for made, sure in ((grads, True), (signs, None)):
        moved = {name: lr * value for name, value in made.items()}
        for attack in ("analytic", "cascade"):
            found = build(attack)(view_of(model, moved, FedAvg(lr=lr, steps=1, batch_size=None), classes=2))
            assert isinstance(found, Reconstruction)
            assert found.verified is sure
        unsized = from_update(model, moved, input_shape=tuple(x.shape[1:]), num_classes=2)
        refused = build("analytic")(unsized)
        assert isinstance(refused, NotApplicable)
        assert "only signs" in refused.reason
    layer = model.get_submodule("1")
    assert isinstance(layer, nn.Linear)
    layer.bias.data += torch.tensor([0.5, -0.5]) * (model(x)[0, 1] - model(x)[0, 0] + 4e-4)  # next to p = 1/2
    half = {name: 0.5 * lr * value.sign() for name, value in gradient(model, x, 1).items()}
    found = build("analytic")(view_of(model, half, FedAvg(lr=lr, steps=1, batch_size=None), classes=2))
    assert isinstance(found, Reconstruction)
    assert not found.verified
    free = from_update(model, moved, input_shape=tuple(x.shape[1:]), loss="mse", method=FedAvg(lr=lr, steps=1))
    assert isinstance(build("analytic")(free), NotApplicable)


@pytest.mark.parametrize("features", [False, True])
def test_a_label_that_was_not_tried_contradicts_nothing(features: bool) -> None:
    classes = MAX_TRIED_LABELS + 20
    model = chains.initialized(nn.Sequential(nn.Flatten(), nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, classes)))
    model, x = model.float(), image()
    found = Reconstruction(inputs=x, verified=True)
    if features:
        found = Reconstruction(inputs=None, private={"features": x.flatten(1)}, verified=True)
    for label in (3, classes - 1):
        result = confirm(view_of(model, gradient(model, x, label), classes=classes), found)
        assert isinstance(result, Reconstruction)
        # of a label that was not tried by what flowed back into the outputs, which tells no two nearly alike apart
        assert result.approximate if features and label != 3 else result.verified
        assert ("the label is not told" in result.note) == (label != 3)
    one = nn.Sequential(nn.Flatten(), nn.Linear(192, classes))  # whose bias alone tells nothing beside that
    alone = confirm(view_of(one, gradient(one, x, classes - 1), classes=classes), Reconstruction(x, verified=True))
    assert isinstance(alone, Reconstruction)
    assert alone.verified is None
    assert "the label is unknown" in alone.note
    view = view_of(model, gradient(model, x, classes - 1), classes=classes)
    result = confirm(view, Reconstruction(inputs=image(1), labels=torch.tensor([classes - 1]), verified=True))
    assert isinstance(result, Reconstruction)
    assert result.verified is False


@pytest.mark.parametrize("count", [1, 2])
def test_in_training_mode_the_buffers_that_came_back_tell_how_bright_pictures_are(count: int) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    model = chains.initialized(nn.Sequential(*layers)).float().train()
    images, labels = torch.cat([image(number) for number in range(count)]), torch.arange(count)
    view, _ = from_batch(model, images, labels)
    for factor, sure in ((1.0, True), (0.98, None), (0.7, None)):
        result = confirm(view, Reconstruction(inputs=factor * images, labels=labels, verified=True))
        assert isinstance(result, Reconstruction)
        assert result.verified is sure, factor
        assert ("came back" in result.note) is not bool(sure)


def test_a_picture_at_the_bends_of_a_network_may_leave_no_more_than_others() -> None:
    """A change by a quarter of a level switches half of its units, which would let any picture pass."""
    model, x, labels = mlp(), image(), torch.tensor([3])
    first = model[1]
    with torch.no_grad():
        first.bias.copy_(-(first.weight @ x.flatten()))
    view, _ = from_batch(model, image("other"), labels)
    asked = comparison(view, Reconstruction(inputs=x, labels=labels, verified=True))
    check = asked.check
    made = check.predictor.predict(x, labels)
    allowed = check.bounds.of_near_images(x, labels, made, 1.0, MAX_PIXEL_ERROR)
    for name, value in check.observed.items():
        assert allowed[name] <= check.bounds.rounding[name] + PARTIAL_TOLERANCE * float(value.norm())
    assert check.is_explained(x, labels) is False
