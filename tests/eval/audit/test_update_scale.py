"""An update that is a multiple of what the model makes of its pictures is said to be that, by which factor."""

import pytest
import torch
from support.captured import SHAPE, batch, change, network
from support.captured import after as after_step
from torch import nn

from eval.audit.capture_plan import describe_contradiction
from eval.audit.captured_files import as_state, described, load_pair, load_update
from eval.audit.captured_update import of_update
from eval.audit.coarse_numbers import DIGITS, rounding_share
from eval.audit.tensor_names import with_model_names
from fl.capture import ClientSettings
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch


def said(update, data=None, captured=None):
    """What is said of an update that is stated to be one step of size 0.1."""
    client = ClientSettings(method=FedAvg(lr=0.1, steps=1, batch_size=None))
    data = data or batch()
    named = with_model_names(captured or load_pair(network(), after(update), said=False), network())
    return describe_contradiction(of_update(network(), named, client, input_shape=SHAPE, batch_size=1, given=data))


def after(update):
    return {name: value - update[name] for name, value in network().state_dict().items()}


def test_another_step_size_is_named():
    update = change(network(), batch())
    assert said(update) == ""
    for factor, words in ((0.25, "0.25 times"), (1024, "1.02e+03 times")):
        told = said({name: factor * value for name, value in update.items()})
        assert f"it is {words} what the model makes of them, to rounding: another step size (lr: " in told
    near = {name: 2 * value * (1.005 if name.startswith("0.") else 1) for name, value in update.items()}
    assert "what the model makes of them, to 0.00" in said(near)
    assert "(lr: 0.025 fits)" in said({name: 0.25 * value for name, value in update.items()})
    assert "it is -1 times what the model makes of them" in said({name: -value for name, value in update.items()})


def test_step_sizes_by_layer_are_named_and_nothing_of_other_pictures():
    update = change(network(), batch())
    by_layer = {name: value * (0.5 if name.startswith("0.") else 3) for name, value in update.items()}
    assert "each tensor is a multiple of what the model makes of them, by 0.5 to 3: step sizes by layer" in said(
        by_layer
    )
    other = change(network(), batch(2).take(torch.tensor([1])))
    assert "multiple" not in said(other)
    assert "times" not in said(other)


SIGNED = sorted(DIGITS.keys() - {torch.float8_e8m0fnu}, key=str)


def test_every_coarse_type_of_torch_is_known():
    kinds = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.is_floating_point}
    assert {kind for kind in kinds if kind.itemsize < 4} - {torch.float4_e2m1fn_x2} == DIGITS.keys()


def test_a_turned_sign_is_named_with_step_sizes_by_layer():
    update = change(network(), batch())
    by_layer = {name: value * (-0.5 if name.startswith("0.") else -3) for name, value in update.items()}
    told = said(by_layer)
    assert "by -3 to -0.5" in told
    assert "the sign of all is turned, give weights before - after" in told
    one = {name: value * (-1 if name == "3.bias" else 1) for name, value in update.items()}
    assert "the sign of 3.bias is turned, and that of others is not" in said(one)


@pytest.mark.parametrize("kind", SIGNED)
@pytest.mark.parametrize("lr", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("fine", [False, True])
def test_images_are_told_from_others_beyond_the_rounding_of_coarse_weights(kind, lr, fine):
    """Weights before and after in one byte hide most of a small step, but not which images make it.

    The client began at the coarse weights, or at finer ones: right images contradict neither.
    """
    model = network()
    if not fine:
        model.load_state_dict({name: value.to(kind).float() for name, value in model.state_dict().items()})
    before = {name: value.to(kind) for name, value in model.state_dict().items()}
    late = {name: value.to(kind) for name, value in after_step(model, batch(), lr=lr).items()}
    captured = with_model_names(load_pair(before, late), model)
    client = ClientSettings(method=FedAvg(lr=lr, steps=1, batch_size=None))

    def told(data):
        subject = of_update(model, captured, client, input_shape=SHAPE, batch_size=1, given=data)
        return "; ".join([describe_contradiction(subject), *subject.notes])

    assert "not what this model makes of these images" not in told(batch())
    open_ = "whether the images fit can't be told: what the model makes of them is off by"
    wrong = told(Batch(1 - batch().inputs, batch().labels))
    assert ("not what this model makes of these images" in wrong) != (open_ in wrong)
    assert "not what this model makes of these images" in wrong or lr == 0.1
    much = any("rounding may be" in note for note in captured.notes)
    assert much == (rounding_share(captured.update, captured.rounding) > 0.1)
    assert much or kind.itemsize > 1 or lr > 0.1


@pytest.mark.parametrize("kind", SIGNED)
def test_rounding_alone_is_no_contradiction(tmp_path, kind):
    update = change(network(), batch())
    torch.save({name: value.to(kind) for name, value in update.items()}, tmp_path / "u.pt")
    found = load_update(tmp_path / "u.pt")
    assert said({}, captured=found) == ""
    assert f"{str(kind).removeprefix('torch.')}: " in with_model_names(found, network()).notes[-1]
    wrong = {name: (2 * value).to(kind) for name, value in update.items()}
    torch.save(wrong, tmp_path / "u.pt")
    assert "it is 2 times" in said({}, captured=load_update(tmp_path / "u.pt"))


def test_weights_of_half_precision_are_noted_where_they_come_alone():
    large = {name: 50 * value for name, value in change(network(), batch()).items()}
    coarse = {name: value.bfloat16() for name, value in after(large).items()}
    named = with_model_names(load_pair(None, coarse), network())
    assert "bfloat16: 2 to 3 digits of the weights" in named.notes[-1]
    assert 1e-4 < rounding_share(named.update, named.rounding) < 0.1


def test_few_bits_hide_neither_that_images_fit_nor_that_others_do_not():
    model = network()

    def sent(data):
        update = change(model, data)
        steps = {name: value.abs().max() / 127 for name, value in update.items()}
        return {name: (value / steps[name]).round() * steps[name] for name, value in update.items()}

    found = with_model_names(as_state(sent(batch()), "update"), model)
    assert any("3.weight: numbers on an even grid, as sent in 8 bits" in note for note in found.notes)
    assert said({}, captured=found) == ""
    other = with_model_names(as_state(sent(batch(2).take(torch.tensor([1]))), "update"), model)
    assert "not what this model makes of these images" in said({}, captured=other)


def square():
    """Two hidden layers of one shape each way, so that tensors can be turned and exchanged unseen."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 36), nn.Sigmoid(), nn.Linear(36, 36), nn.Sigmoid(), nn.Linear(36, 5)
    )
    generator = stream(0, "square")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            lambda u: {**u, "3.weight": u["3.weight"].T.contiguous()},
            "but for some tensors: 3.weight turned (transpose it)",
        ),
        (lambda u: {**u, "1.weight": u["3.weight"], "3.weight": u["1.weight"]}, "1.weight and 3.weight exchanged"),
        (
            lambda u: {name: value * (not name.startswith("1.")) for name, value in u.items()},
            "1.weight and 1.bias not moved (frozen? let your function freeze them)",
        ),
        (lambda u: {**u, "5.bias": torch.ones(5)}, "but for some tensors: 5.bias of other numbers"),
        (lambda u: {name: torch.ones_like(value) for name, value in u.items()}, ""),
    ],
)
def test_tensors_that_were_mixed_up_are_named(changed, words):
    model = square()
    client = ClientSettings(method=FedAvg(lr=0.1, steps=1, batch_size=None))
    captured = with_model_names(as_state(changed(change(model, batch())), "update"), model)
    told = describe_contradiction(of_update(model, captured, client, input_shape=SHAPE, batch_size=1, given=batch()))
    assert words in told
    assert words or "but for some tensors" not in told


@pytest.mark.parametrize("lr", [0.01, 10.0])
def test_a_gradient_in_few_digits_is_held_to_its_rounding_times_the_step_size(lr):
    model = network()
    client = ClientSettings(method=FedAvg(lr=lr, steps=1, batch_size=None))

    def told(data, given):
        sent = {name: (value / 0.1).to(torch.float8_e4m3fn) for name, value in change(model, data).items()}
        captured = described(with_model_names(as_state(sent, "update"), model), "gradient", 1)
        return describe_contradiction(of_update(model, captured, client, input_shape=SHAPE, batch_size=1, given=given))

    assert told(batch(), batch()) == ""
    assert "not what this model makes" in told(batch(), Batch(1 - batch().inputs, batch().labels))
