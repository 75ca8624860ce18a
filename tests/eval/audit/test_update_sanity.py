"""What an update says of itself without its images: its sign, its number of images, its loss."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import hyperleak
from defenses.noise import Noise
from defenses.prune import Prune
from eval.audit.capture_plan import describe_contradiction
from eval.audit.captured_files import CapturedUpdate
from eval.audit.captured_update import of_update
from eval.audit.execution import audit_updates
from eval.audit.update_sanity import find_inconsistency
from eval.audit.user_model import Subject
from fl.capture import ClientSettings, from_batch, from_update
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch

SHAPE, CLASSES = (1, 6, 6), 10
TURNED = "the sign of the update is turned"


def network(bias=True, classes=CLASSES):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Sigmoid(), nn.Linear(20, classes, bias=bias))
    generator = stream(0, "plausible")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


def view(images=1, turn=1.0, size=None, change=lambda name, value: value, model=None, like=None, **settings):
    """The view that a user's captured update belongs to, made of so many images and said to be of `size`."""
    model = model or network()
    inputs = torch.rand(images, *SHAPE, generator=stream(images, "images"))
    classes = model[-1].out_features
    labels = torch.arange(images) % classes
    seen, _ = from_batch(model, inputs, labels, **({"method": like} if like else {}))
    update = {name: change(name, turn * value) for name, value in seen.update.items()}
    return from_update(model, update, input_shape=SHAPE, num_classes=classes, batch_size=size or images, **settings)


@pytest.mark.parametrize("images", [1, 2, 4])
def test_a_turned_sign_is_told_without_images(images):
    assert find_inconsistency(view(images)) == ""
    assert find_inconsistency(view(images, turn=0.01)) == ""
    said = find_inconsistency(view(images, turn=-1.0))
    assert said.startswith(TURNED)
    assert f"where {images} image(s) leave {images} at most; give weights before - after" in said


def test_zeros_alone_are_said_to_be_that_and_not_to_have_the_wrong_sign():
    zero = view(1, change=lambda name, value: torch.zeros_like(value))
    said = find_inconsistency(zero)
    assert said.startswith("all numbers of the update are zero, so it tells nothing of any image: the client trained")
    data = Batch(torch.rand(1, *SHAPE, generator=stream(1, "images")), torch.zeros(1, dtype=torch.int64))
    update = CapturedUpdate({name: torch.zeros_like(value) for name, value in zero.update.items()})
    for client in (ClientSettings(method=FedAvg(steps=1, batch_size=None)), ClientSettings()):  # and of unknown size
        subject = of_update(network(), update, client, input_shape=SHAPE, batch_size=1, given=data)
        assert describe_contradiction(subject) == said
    moved = view(1, change=lambda name, value: value if name == "3.bias" else torch.zeros_like(value))
    assert find_inconsistency(moved) == ""


def test_what_can_not_be_told_is_left_unsaid():
    assert find_inconsistency(view(8, turn=-1.0)) == ""  # no more than eight classes are negative either way
    assert find_inconsistency(view(1, turn=-1.0, model=network(classes=2))) == ""
    assert find_inconsistency(view(1, turn=-1.0, model=network(bias=False))) == ""
    assert find_inconsistency(view(1, turn=-1.0, defense=Noise(std=0.1))) == ""
    lifted = {"change": lambda name, value: value + 1}
    assert find_inconsistency(view(1, **lifted)).startswith("the update is not that of a softmax")
    for method in (FedAvg(steps=1, weight_decay=2.0), FedAvg(steps=2, weight_decay=2.0)):
        assert find_inconsistency(view(1, **lifted, method=method)) == ""


@pytest.mark.parametrize("like", [FedAvg(steps=3, lr=0.1), FedAvg(steps=3, lr=0.1, momentum=0.9)])
def test_steps_without_decay_keep_the_signs(like):
    assert find_inconsistency(view(1, like=like)) == ""
    assert find_inconsistency(view(1, like=like, method=like)) == ""
    assert find_inconsistency(view(1, turn=-1.0, like=like, method=like)).startswith(TURNED)


def test_more_images_than_were_said_are_told():
    assert "is negative for 4 classes, where 2 image(s) leave 2 at most; check --batch-size" in find_inconsistency(
        view(4, size=2)
    )
    assert find_inconsistency(view(2, size=4)) == ""


def test_an_update_of_another_loss_is_told():
    noise = stream(0, "noise")
    said = find_inconsistency(view(1, change=lambda name, value: torch.rand(value.shape, generator=noise)))
    assert "sums to 1 of its size and not to zero" in said
    rounded = view(1, change=lambda name, value: value.half().float())
    assert find_inconsistency(rounded) == ""


def test_rounding_of_weights_is_no_sum():
    """Steps so small that weights lose most of their digits: the bias's update no longer sums to zero."""
    model = network()
    with torch.no_grad():
        model[-1].bias += 15.0

    def captured(name, value):
        before = dict(model.named_parameters())[name].detach()
        return before - (before - 3e-6 * value)

    seen = view(1, model=model, change=captured)
    assert seen.update["3.bias"].sum().abs() > 0.05 * seen.update["3.bias"].abs().sum()
    assert find_inconsistency(seen) == ""


class Negated(nn.Module):
    """A network whose last linear layer gives the logits with their signs turned."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return -self.body(x)


def test_a_model_whose_bias_is_not_that_of_logits_is_left_alone():
    inputs = torch.rand(1, *SHAPE, generator=stream(1, "images"))
    seen, _ = from_batch(Negated(), inputs, torch.tensor([0]))
    captured = from_update(Negated(), seen.update, input_shape=SHAPE, num_classes=CLASSES)
    assert int((captured.update["body.3.bias"] < 0).sum()) == CLASSES - 1
    assert find_inconsistency(captured) == ""


def test_an_audit_says_it():
    seen = view(1, turn=-1.0)
    assert audit_updates("x", [Subject(seen, None, inconsistency=find_inconsistency(seen))], {}).mismatch.startswith(
        TURNED
    )


@pytest.mark.parametrize("size", [1e-6, 1e-10, 1e-30])
def test_a_small_gradient_has_its_signs_where_a_small_difference_has_none(size):
    for turn, said in ((size, ""), (-size, TURNED)):
        seen = view(1, turn=turn, kind="gradient")
        assert find_inconsistency(seen).startswith(said)
        assert bool(find_inconsistency(seen)) == bool(said)
    assert find_inconsistency(replace(view(1, turn=-1e-10, kind="gradient"), rounded=True)) == ""


@pytest.mark.parametrize("images", [1, 3])
def test_an_update_of_which_some_numbers_are_sent_is_named(images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, CLASSES))
    generator = stream(0, "sparse")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        model[1].bias.sub_(0.2)  # some units are at rest

    def kept(ratio):
        return lambda name, value: Prune(ratio=ratio).transform_update({name: value}, None)[name]

    how = {"model": model, "method": FedAvg(steps=1, batch_size=None)}
    said = find_inconsistency(view(images, change=kept(0.6), **how))
    assert "of its numbers are missing in other places of each row" in said
    assert "--defense '{name: prune, ratio: 0.9}'" in said
    assert find_inconsistency(view(images, **how)) == ""
    assert find_inconsistency(view(images, change=kept(0.6), defense=Prune(ratio=0.6), **how)) == ""
    holes = torch.rand(images, *SHAPE, generator=generator).mul(2).sub(1).relu()  # pixels at zero, others by image
    seen, _ = from_batch(model, holes, torch.arange(images))
    assert any(bool((value == 0).any()) for value in seen.update.values())
    for update in (seen.update, {name: value * 1e-7 for name, value in seen.update.items()}):
        sent = {
            name: value - (value - change)
            for (name, change), value in zip(update.items(), model.parameters(), strict=True)
        }
        again = from_update(model, sent, input_shape=SHAPE, batch_size=images, method=how["method"])
        assert "missing" not in find_inconsistency(again)


def test_sparsified_with_error_feedback_is_said_to_be_explained_by_no_statement() -> None:
    """A client adds what earlier rounds left out, so that what it sends is no pruned step on its images."""
    model, pruned, left = network(), Prune(ratio=0.6), {}
    how = FedAvg(steps=1, batch_size=None)
    for number in range(2):
        inputs, labels = torch.rand(1, *SHAPE, generator=stream(number, "feedback")), torch.tensor([number])
        step = from_batch(model, inputs, labels, method=how)[0].update
        whole = {name: value + left.get(name, 0) for name, value in step.items()}
        sent = pruned.transform_update(whole, None)
        left = {name: value - sent[name] for name, value in whole.items()}
        said = find_inconsistency(from_update(model, sent, input_shape=SHAPE, method=how))
        assert "with error feedback, where a client adds what earlier rounds left out, no statement explains" in said
        given = Batch(inputs, labels)
        stated = hyperleak.audit(model, given, update=sent, attacks="analytic", method=how, defense=pruned)
        assert bool(stated.mismatch) == (number > 0)


def test_zeros_of_a_convolutional_networks_gradient_are_no_sparsification() -> None:
    """A convolution takes many patches of each example, so that its zeros lie in as many patterns."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
    images = torch.rand(1, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    view, _ = from_batch(model, images, torch.tensor([3]))
    assert "sparsified" not in find_inconsistency(view)


def test_numbers_that_a_parametrization_does_not_look_at_are_not_called_sparsified():
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(36, 20))
    model = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(20, CLASSES))
    seen = view(1, model=model, method=FedAvg(steps=1, batch_size=None))
    assert float((seen.update["1.parametrizations.weight.original"] == 0).double().mean()) > 0.2
    assert find_inconsistency(seen) == ""
