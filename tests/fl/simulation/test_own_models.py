"""Models of users that are out of the ordinary: taken as they are, or refused for what is the matter with them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attacks
from attacks.base import NotApplicable, Reconstruction
from fl.capture import from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.predict import predict
from fl.seeds import stream
from fl.view import ThreatModel

SHAPE = (1, 6, 6)


class Inside(nn.Module):
    """Changes its input in place before a linear layer."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.head = change, nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return self.head(x.flatten(1))


def clamped(x: Tensor) -> Tensor:
    return x.clamp_(0.2, 0.8)


def normalized(x: Tensor) -> Tensor:
    return x.sub_(0.5).div_(0.25)


def image() -> Tensor:
    return torch.rand(1, *SHAPE, generator=stream(0, "image"))


LABEL = torch.tensor([2])


def expected(change: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model.head(change(image()).flatten(1)), LABEL)  # type: ignore[operator]
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("change", [clamped, normalized])
def test_a_forward_that_works_in_place_changes_no_image(change: Callable[[Tensor], Tensor]) -> None:
    inputs, model = image(), Inside(change)
    view, truth = from_batch(model, inputs, LABEL, threat=ThreatModel(knows_labels=True))
    assert torch.equal(inputs, image())
    assert torch.equal(truth.inputs, image())
    gradient = expected(change, model)
    captured = from_update(model, gradient, input_shape=SHAPE, num_classes=3, labels=LABEL, kind="gradient")
    for seen in (view, captured):
        again = predict(seen, truth.candidate())
        for name, value in gradient.items():
            torch.testing.assert_close(seen.update[name], value, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-6)
        assert isinstance(attacks.build({"name": "ig", "iterations": 2})(seen), Reconstruction)
    assert torch.equal(truth.inputs, image())


def test_an_image_behind_a_normalization_in_place_comes_back() -> None:
    view, truth = from_batch(Inside(normalized), image(), LABEL, mean=[0.5], std=[0.25])
    result = attacks.build("analytic")(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attack", ["cascade", "rconv", "rgap"])
def test_exact_attacks_follow_what_happens_beside_the_modules(attack: str) -> None:
    view, truth = from_batch(Inside(normalized), image(), LABEL)
    result = attacks.build(attack)(view)
    assert isinstance(result, Reconstruction)
    assert result.verified
    torch.testing.assert_close(result.inputs, truth.inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attack", ["rconv", "rgap"])
def test_exact_attacks_say_that_the_image_itself_is_bent(attack: str) -> None:
    result = attacks.build(attack)(from_batch(Inside(clamped), image(), LABEL)[0])
    assert isinstance(result, NotApplicable)
    assert result.limit
    assert "no weighted layer stands between the activation clamp in the forward and the image" in result.reason


def plain(*, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, outputs))


def updates(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.rand_like(value) for name, value in model.named_parameters()}


@pytest.mark.parametrize("shape", [(3, 6, 6), (1, 8, 8)])
def test_a_shape_that_the_model_does_not_take_is_named(shape: tuple[int, int, int]) -> None:
    said = re.escape(f"expected an input_shape (C, H, W) that the model takes, got {shape}")
    with pytest.raises(ValueError, match=said) as caught:
        from_update(plain(), updates(plain()), input_shape=shape, num_classes=3)
    assert "model.eval()" not in str(caught.value)


def test_arrays_are_refused_as_what_they_are() -> None:
    arrays = {name: value.numpy() for name, value in updates(plain()).items()}
    with pytest.raises(ValueError, match=r"'1.weight' as a tensor \(3, 36\), got ndarray; torch.from_numpy"):
        from_update(plain(), arrays, input_shape=SHAPE, num_classes=3)
    with pytest.raises(ValueError, match=r"expected inputs as a tensor, got ndarray; torch.from_numpy"):
        from_batch(plain(), image().numpy(), LABEL)


def test_torchscript_is_refused_with_the_way_on() -> None:
    """Attacks put other weights into a network, which TorchScript does not take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls it deprecated
        scripted = torch.jit.trace(plain().eval(), image())
    for model, place in ((scripted, ""), (nn.Sequential(nn.Identity(), scripted), " in '1'")):
        with pytest.raises(ValueError, match=f"got TorchScript{place}, which takes no weights but its own: give the"):
            from_batch(model, image(), LABEL)


@pytest.mark.parametrize(
    ("lazy", "name"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "'1.weight'"),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d(affine=False), *plain()), "'0.running_mean'"),
    ],
)
def test_parameters_without_values_are_named(lazy: Callable[[], nn.Module], name: str) -> None:
    said = rf"got {name} without \(nn.LazyLinear, say\): call the model once on images"
    with pytest.raises(ValueError, match=said):
        from_batch(lazy(), image(), LABEL)
    with pytest.raises(ValueError, match=said):
        from_update(lazy(), updates(plain()), input_shape=SHAPE, num_classes=3)
    model = lazy()
    model(image())
    from_batch(model.eval(), image(), LABEL)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = plain()
    model[1].weight.data[0, :2] = value
    said = r"expected a model of finite numbers, got NaN or infinity in '1.weight' \(2 of them\)"
    with pytest.raises(ValueError, match=said):
        from_batch(model, image(), LABEL)
    with pytest.raises(ValueError, match=said):
        from_update(model, updates(model), input_shape=SHAPE, num_classes=3)
    from_update(model, updates(model), input_shape=SHAPE, num_classes=3, shared=updates(model))


def test_a_classifier_of_one_output_is_refused() -> None:
    model = plain(outputs=1)
    with pytest.raises(ValueError, match=r"2 outputs or more, got 1: the loss is cross entropy"):
        from_batch(model, image(), LABEL)
    with pytest.raises(ValueError, match=r"num_classes, an int >= 2, got 1: the loss is cross entropy"):
        from_update(model, updates(model), input_shape=SHAPE, num_classes=1)


def test_weights_by_themselves_are_no_model() -> None:
    weights = plain().state_dict()
    said = "expected model as an nn.Module, got OrderedDict; model.load_state_dict"
    with pytest.raises(ValueError, match=said):
        from_batch(weights, image(), LABEL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        from_update(weights, weights, input_shape=SHAPE, num_classes=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"method": "fedavg"},
            "expected method as a Method, got str 'fedavg'; fl.method.methods.build('fedavg') makes",
        ),
        ({"method": FedAvg}, "expected method as a Method, got the class FedAvg; fl.method.methods.build(...)"),
        ({"defense": "noise"}, "expected defense as a Defense, got str 'noise'; defenses.defenses.build('noise')"),
        ({"defense": {"name": "noise"}}, "defenses.defenses.build({'name': 'noise'}) makes one"),
    ],
)
def test_settings_by_name_are_told_what_makes_them(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        from_batch(plain(), image(), LABEL, **settings)
    with pytest.raises(ValueError, match=re.escape(said)):
        from_update(plain(), updates(plain()), input_shape=SHAPE, num_classes=3, **settings)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_server_knows_or_does_not(value: Any) -> None:
    with pytest.raises(ValueError, match=f"knows_labels: expected true or false, got {value!r}"):
        ThreatModel(knows_labels=value)
