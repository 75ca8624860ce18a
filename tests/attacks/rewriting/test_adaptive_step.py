"""Pictures off the first step of Adam: the exact reading of a linear layer, and the view that a search is given."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from attacks.base import NotApplicable, build
from fl.capture import from_update
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import dense
from fl.types import Candidate


def network(*lower, inputs=64):
    model = nn.Sequential(*lower, nn.Flatten(), nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, 4))
    draw = stream(0, "adaptive step")
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.05, generator=draw)
    return model


def images(count):
    return torch.rand(count, 1, 8, 8, generator=stream(0, "adaptive pictures"))


def view_of(model, count=1, optimizer=torch.optim.Adam, name="adam", lr=1e-3, **settings):
    after = copy.deepcopy(model)
    rule = optimizer(after.parameters(), lr=lr, **settings)
    nn.functional.cross_entropy(after(images(count)), torch.arange(count) + 1).backward()
    rule.step()
    moved = dict(after.named_parameters())
    update = {n: (value - moved[n]).detach() for n, value in model.named_parameters()}
    method = FedAvg(optimizer=name, lr=lr, steps=1, batch_size=None, **settings)
    return from_update(model, update, input_shape=(1, 8, 8), num_classes=4, method=method, batch_size=count)


@pytest.mark.parametrize(
    ("name", "optimizer", "settings"),
    [
        ("adam", torch.optim.Adam, {}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.01}),
        ("rmsprop", torch.optim.RMSprop, {}),
    ],
)
def test_one_picture_comes_back_from_the_first_step(name, optimizer, settings):
    result = build("adaptive-step")(view_of(network(), 1, optimizer, name, lr=1e-2, **settings))
    off = float((result.inputs - images(1)).square().mean().sqrt())
    assert off < 0.05
    assert result.labels.tolist() == [1]
    assert result.verified is None
    assert 0.3 < result.objective < 2  # misfit in standard errors
    error = float(result.note.split("standard error is ")[1].split(" ")[0])
    assert 0.1 * off < error < 10 * off
    assert 0.3 * off < result.relative_error * float(images(1).square().mean().sqrt()) < 3 * off


def test_a_layer_behind_others_gives_its_input():
    model = network(nn.Conv2d(1, 2, 3), nn.ReLU(), inputs=72)
    result = build("adaptive-step")(view_of(model))
    features = model[:3](images(1))[0].detach()
    assert result.inputs is None
    assert float((result.private["features"] - features).abs().max()) < 0.1 * float(features.max())


def test_signs_alone_are_refused_as_such():
    view = view_of(network())
    signs = {name: 1e-3 * dense(value).sign() for name, value in view.update.items()}
    for attack in ("adaptive-step", "adaptive-step+ig"):
        result = build(attack)(replace(view, update=signs))
        assert isinstance(result, NotApplicable)
        assert "sizes show in 0.00% of the numbers" in result.reason
    assert "takes a batch of one" in build("adaptive-step")(view_of(network(), 2)).reason
    assert "SGD's step" in build("adaptive-step")(replace(view, method=FedAvg(lr=1e-3, steps=1))).reason
    decayed = replace(view, method=replace(view.method, weight_decay=0.1))
    assert "weight decay is mixed" in build("adaptive-step")(decayed).reason


def test_signs_of_a_picture_with_black_pixels_are_none_of_its_sizes():
    """Each tensor's signs have a size of its own, and black pixels move nothing."""
    model, dark = network(), images(1) * (images(1) > 0.3)
    model[-1] = nn.Linear(48, 10)
    initialize(model, stream(0, "signs of an adaptive step"))
    nn.functional.cross_entropy(model(dark), torch.tensor([1])).backward()
    steps = {n: (v.detach(), 1e-2 * v.grad.abs().mean() * v.grad.sign()) for n, v in model.named_parameters()}
    signs = {name: value - (value - step) for name, (value, step) in steps.items()}  # as rounded as weights are
    rate = float(max(value.abs().max() for value in signs.values()))
    method = FedAvg(optimizer="adam", lr=rate, steps=1, batch_size=None)
    view = from_update(model, signs, input_shape=(1, 8, 8), num_classes=10, method=method, batch_size=1)
    result = build("adaptive-step")(view)
    assert isinstance(result, NotApplicable)
    assert "is of one size: signs" in result.reason


@pytest.mark.parametrize(
    ("name", "optimizer", "settings"),
    [
        ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
        ("rmsprop", torch.optim.RMSprop, {}),
    ],
)
def test_the_rewritten_view_is_of_the_same_client_with_a_larger_eps(name, optimizer, settings):
    view = view_of(network(), 3, optimizer, name, **settings)
    easier = build("adaptive-step").rewrite(view)
    assert easier.method.eps > 1e3 * 1e-8
    made = predict(easier, Candidate(images(3), torch.arange(3) + 1))
    plain = predict(
        replace(view, method=replace(view.method, eps=easier.method.eps)), Candidate(images(3), torch.arange(3) + 1)
    )
    for tensor, value in easier.update.items():
        assert value.dtype == torch.float32
        assert torch.equal(dense(made[tensor]), dense(plain[tensor]))
    whole = [torch.cat([dense(part[n]).flatten().detach() for n in view.update]) for part in (made, easier.update)]
    assert float(nn.functional.cosine_similarity(*whole, dim=0)) > 0.9


def test_a_search_takes_the_rewritten_view():
    result = build({"name": "adaptive-step+ig", "iterations": 30})(view_of(network(), 2))
    assert result.inputs.shape == (2, 1, 8, 8)
    assert sorted(result.labels.tolist()) == [1, 2]


def test_two_images_that_are_stated_as_one_are_no_outer_product():
    two = view_of(network(), 2, lr=1e-2)
    result = build("adaptive-step")(replace(two, batch_size=1, schedule=(((1,),),)))
    assert isinstance(result, NotApplicable)
    assert "standard errors off an outer product" in " ".join(result.reason.split())


@pytest.mark.parametrize(
    ("name", "optimizer", "pictures", "off", "said"),
    [
        ("rmsprop", torch.optim.RMSprop, (0.0, 1.0), 1.01, "lr \\(to its last digit\\)|largest step of a number"),
        ("rmsprop", torch.optim.RMSprop, (0.4, 0.1), 1 + 1e-5, "later digit|lr \\(to its last digit\\)|of one size"),
        ("adagrad", torch.optim.Adagrad, (0.0, 1.0), 1 + 3e-6, "of one size|later digit"),
        ("adagrad", torch.optim.Adagrad, (0.4, 0.1), 1 + 1e-5, "of one size|later digit"),
    ],
)
def test_no_picture_is_read_at_a_step_size_that_is_off(name, optimizer, pictures, off, said):
    """A later digit of lr puts all sizes off alike, which looks like a plain picture; of Adagrad 3e-6 does."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Linear(24, 10))
    draw = stream(0, "off")
    for value in model.parameters():
        value.data.uniform_(-1, 1, generator=draw).mul_(0.07 if value.shape[-1] == 196 else 0.2)
    after = copy.deepcopy(model)
    given = pictures[0] + pictures[1] * torch.rand(1, 1, 14, 14, generator=draw)
    nn.functional.cross_entropy(after(given), torch.tensor([3])).backward()
    optimizer(after.parameters(), lr=1e-3).step()
    moved = dict(after.named_parameters())
    update = {n: (value - moved[n]).detach() for n, value in model.named_parameters()}
    stated = FedAvg(optimizer=name, lr=1e-3 * off, steps=1, batch_size=None)
    view = from_update(model, update, input_shape=(1, 14, 14), num_classes=10, method=stated)
    found = build("adaptive-step")(view)
    assert isinstance(found, NotApplicable), found.note
    assert re.search(said, found.reason), found.reason
