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


def noisy(update, share):
    draw = stream(0, "noise")
    lengths = {name: share * value.norm() / value.numel() ** 0.5 for name, value in update.items()}
    return {n: v + lengths[n] * torch.randn(v.shape, generator=draw) for n, v in update.items()}


@pytest.mark.parametrize("share", [0.0102, 0.02])
def test_noise_is_no_step_size_of_each_tensor(share):
    told = said(noisy(change(network(), batch()), share))
    assert "the update is not what this model makes of these images" in told
    assert "LARS" not in told
    assert "but for some tensors" not in told


def test_of_two_classes_a_negative_multiple_may_be_another_label():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 2))
    one = Batch(torch.rand(1, 1, 4, 4, generator=stream(0, "one")), torch.tensor([1]))
    update, wrong = change(model, one), Batch(one.inputs, torch.tensor([0]))
    client = ClientSettings(method=FedAvg(lr=0.1, steps=1, batch_size=None))
    captured = with_model_names(described(as_state(update, "update"), "update", 1), model)
    told = describe_contradiction(
        of_update(model, captured, client, input_shape=(1, 4, 4), batch_size=1, given=wrong),
    )
    assert "the sign is turned, give weights before - after" in told
    assert "or the labels are others" in told
    assert "or the labels are others" not in said({name: -v for name, v in change(network(), batch()).items()})


def unstated(update, data=None):
    """What is said of an update of one step whose size nobody states, and what is noted of it."""
    named = with_model_names(load_pair(network(), after(update), said=False), network())
    subject = of_update(
        network(),
        named,
        ClientSettings(),
        input_shape=SHAPE,
        batch_size=1 if data is None else len(data.labels),
        given=data or batch(),
    )
    return describe_contradiction(subject), subject.notes


def test_decay_that_was_read_off_is_no_part_of_a_step_of_unknown_size():
    """The share of the weights is known; the gradient's factor is not. Both were taken times one factor."""
    model = network()
    weights = model.state_dict()
    for factor in (0.3, 1, 20):
        update = {n: factor * v + 0.01 * weights[n] for n, v in change(model, batch()).items()}
        told, notes = unstated(update)
        assert told == ""
        assert any("weight decay by 0.01 of the weights was read off" in note for note in notes)


def test_decay_that_can_not_be_read_off_is_named_with_the_true_images(monkeypatch):
    monkeypatch.setattr("eval.audit.captured_update.with_decay_read_off", lambda view: (view, ""))
    model = network()
    weights = model.state_dict()
    plain = change(model, batch())
    for update in (unstated, lambda update: (said(update),)):
        told = update({name: value + 0.01 * weights[name] for name, value in plain.items()})[0]
        assert "with 0.01 of the weights beside: weight decay" in told
    partly = {name: value + 0.01 * weights[name] * (value.ndim > 1) for name, value in plain.items()}
    assert "with 0.01 of the weights beside in the matrices alone: weight decay" in said(partly)


def test_tensors_that_did_not_move_are_named_where_nobody_knows_the_step_size():
    update = {name: 50 * value for name, value in change(network(), batch()).items()}
    still = {name: value if value.ndim > 1 else 0 * value for name, value in update.items()}
    told, _ = unstated(still)
    assert "LARS" not in told
    assert "3.bias not moved (frozen?" in told or "0.bias" in told


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
