"""What the first step of an adaptive optimizer shows of a gradient, number by number, of torch.optim's own steps."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from attacks.result import NotApplicable
from attacks.update.adaptive_first_step import AdaptiveFirstStep, read_step_size
from defenses import defenses
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def network():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    draw = stream(0, "adaptive")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.1, generator=draw)
    return model


def step(optimizer, lr=1e-3, batch=8, **settings):
    """A view of torch's own first step, and the gradients that it was taken along."""
    model = network()
    images = torch.rand(batch, 1, 8, 8, generator=stream(0, "adaptive images"))
    after = copy.deepcopy(model)
    rule = OPTIMIZERS[optimizer](after.parameters(), lr=lr, **settings)
    nn.functional.cross_entropy(after(images), torch.arange(batch) % 4).backward()
    rule.step()
    moved = dict(after.named_parameters())
    update = {name: (value - moved[name]).detach() for name, value in model.named_parameters()}
    method = FedAvg(optimizer=optimizer, lr=lr, steps=1, batch_size=None, **settings)
    view = from_update(model, update, input_shape=(1, 8, 8), num_classes=4, method=method, batch_size=batch)
    return view, {name: value.grad for name, value in moved.items()}


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("adam", {}), ("adam", {"eps": 1e-6}), ("adamw", {"weight_decay": 0.01}), ("rmsprop", {}), ("adagrad", {})],
)
def test_sizes_are_told_within_their_errors(optimizer, settings):
    view, gradients = step(optimizer, **settings)
    read = AdaptiveFirstStep.of(view)
    assert set(read.names) == set(gradients)
    for name, gradient in gradients.items():
        value, error = read.reciprocals(name)
        moved = gradient.abs() > 1e-7
        off = ((value - 1 / gradient.double()).abs() / error)[moved]
        assert float(off.median()) < 2
        assert float((off < 5).double().mean()) > 0.98
    if optimizer == "adagrad":  # its eps is a hundredth of Adam's
        assert read.share_of_sizes < 0.1
        return
    assert read.share_of_sizes > 0.2
    known = read.gradients(limit=1e3)["1.weight"]
    small = (gradients["1.weight"].abs() < 0.03 * read.resolved_size) & (gradients["1.weight"] != 0)
    assert int(small.sum()) > 5
    torch.testing.assert_close(known[small], gradients["1.weight"][small], rtol=0.2, atol=0)


def test_gradients_of_zero_stay_zero():
    view, gradients = step("adamw", batch=1, weight_decay=0.01)
    read = AdaptiveFirstStep.of(view)
    silent = gradients["1.weight"] == 0
    assert silent.any()
    assert not read.steps["1.weight"][silent].any()
    assert not read.gradients(limit=1.0)["1.weight"][silent].any()


def test_a_step_size_is_read_off_and_another_one_is_contradicted():
    for optimizer in ("adam", "rmsprop"):
        view, _ = step(optimizer, lr=3e-3)
        assert read_step_size(view.update, optimizer) == 3e-3
        assert isinstance(AdaptiveFirstStep.of(view), AdaptiveFirstStep)
        for lr in (1e-3, 1e-2):
            other = AdaptiveFirstStep.of(replace(view, method=replace(view.method, lr=lr)))
            assert isinstance(other, NotApplicable)
            assert "give lr: 0.003, another optimizer, or the number of steps" in other.reason


def test_what_was_rounded_further_shows_no_sizes():
    view, _ = step("adam")
    for kind in (torch.float16, torch.bfloat16):
        rounded = {name: value.to(kind).float() for name, value in view.update.items()}
        after = {name: value - (value - view.update[name]).to(kind).float() for name, value in view.shared.items()}
        for update in (rounded, after):
            found = AdaptiveFirstStep.of(replace(view, update=update))
            assert isinstance(found, NotApplicable)
            assert found.reason.startswith("the largest step of a number is")


@pytest.mark.parametrize(("lr", "written"), [(0.9999e-3, "0.0009999"), (1.0001e-3, "0.0010001")])
def test_a_step_size_that_is_off_in_a_later_digit_is_no_size_of_gradients(lr, written):
    """It is said in as many digits as rounding of the weights leaves."""
    view, _ = step("adam", lr=lr)
    assert isinstance(AdaptiveFirstStep.of(view), AdaptiveFirstStep)
    found = AdaptiveFirstStep.of(replace(view, method=replace(view.method, lr=1e-3)))
    assert isinstance(found, NotApplicable)
    assert f"lr is another in a later digit (about {written}; it has to be given in full)" in found.reason


@pytest.mark.parametrize(
    ("lr", "stated", "written"),
    [(1e-7, 1e-6, "1e-07"), (1e-2, 1e-3, "0.01"), (3e-3, 1e-3, "0.003"), (1.234567e-4, 1.23e-4, "0.0001235")],
)
def test_another_step_size_is_named_in_known_digits_and_never_as_the_one_stated(lr, stated, written):
    """Those of a step far below the weights' last place are few."""
    view, _ = step("adam", lr=lr)
    found = AdaptiveFirstStep.of(replace(view, method=replace(view.method, lr=stated)))
    assert isinstance(found, NotApplicable)
    assert f"give lr: {written}, another optimizer" in found.reason
    assert "is 1 times" not in found.reason
    assert "e+" not in found.reason


def test_gradients_that_are_all_small_are_no_other_step_size():
    view, gradients = step("adam")
    most = max(float(g.abs().max()) for g in gradients.values())
    small = {name: 1e-3 * (g * 1e-5 / most / ((g * 1e-5 / most).abs() + 1e-8)) for name, g in gradients.items()}
    read = AdaptiveFirstStep.of(replace(view, update=small))
    assert isinstance(read, AdaptiveFirstStep)
    assert read.share_of_sizes > 0.9


def test_what_is_no_first_step_of_such_an_optimizer_is_refused():
    view, _ = step("adam")

    def refusal(**changes):
        method = replace(view.method, **changes)
        steps = method.steps or 1
        found = AdaptiveFirstStep.of(replace(view, method=method, schedule=(tuple(((8,),) * steps),)))
        assert isinstance(found, NotApplicable)
        return found.reason

    assert "the first step alone" in refusal(steps=2)
    assert "SGD's step is the gradient's" in refusal(optimizer="sgd")
    assert "clipping" in refusal(max_norm=1.0)
    noisy = replace(view, defense=defenses.build({"name": "noise", "std": 0.1}))
    assert "the defense noise" in AdaptiveFirstStep.of(noisy).reason
    assert "the first step alone" in AdaptiveFirstStep.of(replace(view, schedule=None)).reason
