"""A captured update as users have it: whole states, wrapped names, dictionaries in others, images in any order."""

import copy

import pytest
import torch
from support.captured import SHAPE, network
from torch import nn

from defenses import Defense
from eval.audit.captured_files import CapturedUpdate, load_update
from eval.audit.captured_update import of_update
from eval.audit.execution import audit_updates
from eval.audit.input_shape import check_images_fit
from eval.audit.tensor_names import with_model_names
from fl.capture import ClientSettings, from_batch
from fl.methods.fedavg import FedAvg
from fl.seeds import stream
from fl.types import Batch


def images(count=6):
    return Batch(torch.rand(count, *SHAPE, generator=stream(0, "images")), torch.tensor([3, 1, 4, 1, 0, 2])[:count])


def change(model, batch, steps=1, lr=0.1):
    """What a user saves: the whole state before minus that after."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(batch.inputs), batch.labels).backward()
        optimizer.step()
    after = trained.state_dict()
    return {name: value - after[name] for name, value in model.state_dict().items()}


def subject(model, update, given=None, size=1, method=None):
    client = ClientSettings(method=method, defense=Defense())
    return of_update(
        model, with_model_names(CapturedUpdate(update), model), client, input_shape=SHAPE, batch_size=size, given=given
    )


def said(found):
    return audit_updates("x", [found], {}).mismatch


def test_a_whole_state_is_taken_and_its_buffers_are_what_the_server_sees_after_training():
    model, batch = network(norm=True), images(4)
    update = change(model, batch)
    captured = with_model_names(CapturedUpdate(update), model)
    assert captured.update.keys() == dict(model.named_parameters()).keys()
    assert captured.notes == (
        "3 buffer(s) of the file (running statistics, say) are no part of the update; attacks are told how they moved",
    )
    found = subject(model, update, batch, 4)
    assert not found.mismatched
    seen, _ = from_batch(model, batch.inputs, batch.labels, method=FedAvg(steps=1, batch_size=None, lr=0.1))
    assert found.view.buffers_after.keys() == seen.buffers_after.keys()
    for name, value in seen.buffers_after.items():
        torch.testing.assert_close(found.view.buffers_after[name], value)
        assert not value.equal(found.view.buffers[name])
    bare = {name: value for name, value in update.items() if name in captured.update}
    assert subject(model, bare, batch, 4).view.buffers_after is None
    with pytest.raises(ValueError, match=r"the buffer '1.running_var' of shape \(4,\), got \(2,\)"):
        subject(model, {**update, "1.running_var": torch.zeros(2)}, batch, 4)
    with pytest.raises(ValueError, match=r"finite numbers in the buffer '1.running_mean'"):
        subject(model, {**update, "1.running_mean": torch.full((4,), torch.nan)}, batch, 4)


def test_frozen_parameters_of_a_whole_state_are_left_out_unless_they_moved():
    model = network()
    model[0].requires_grad_(False)
    update = change(model, images(1))
    captured = with_model_names(CapturedUpdate(update), model)
    assert set(captured.update) == {"3.weight", "3.bias"}
    assert captured.notes == ("2 frozen parameter(s) of the file that have not moved are left out",)
    with pytest.raises(ValueError, match=r"unexpected '0\.bias' \(frozen by requires_grad=False"):
        subject(model, {**update, "0.bias": torch.ones(4)})


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda name: f"module.{name}", "module."),
        (lambda name: f"_orig_mod.{name}", "_orig_mod."),
        (lambda name: f"_orig_mod.module.{name}", "_orig_mod. and module."),
    ],
)
def test_names_lose_what_wrapping_a_model_adds(wrap, words):
    model, update = network(), change(network(), images(1))
    captured = with_model_names(CapturedUpdate({wrap(name): value for name, value in update.items()}), model)
    assert captured.update == update
    assert captured.notes == (f"names lose {words}, which wrapping a model adds",)
    assert with_model_names(CapturedUpdate(update), model).notes == ()
    strange = {"module.extra": torch.zeros(1)} | {wrap(name): value for name, value in update.items()}
    del strange[wrap("3.bias")]
    assert with_model_names(CapturedUpdate(strange), model) == CapturedUpdate(
        strange
    )  # then the error names what the user knows


def test_a_models_own_part_may_be_called_module():
    model = nn.ModuleDict({"module": network()})
    update = dict(model.state_dict())
    assert with_model_names(CapturedUpdate(update), model) == CapturedUpdate(update)


def test_one_dictionary_inside_another_is_the_update(tmp_path):
    update, path = change(network(), images(1)), tmp_path / "nested.pt"
    torch.save({"epoch": 3, "model": update}, path)
    found = load_update(path)
    assert found.update.keys() == update.keys()
    assert found.notes == ("the update is what nested.pt holds under 'model'",)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"a": {"x": torch.ones(1)}, "b": {"x": torch.ones(1)}}, "or two called 'before' and 'after', got 'a' and 'b'"),
        (
            {"w": torch.ones(1), "more": {"x": torch.ones(1)}},
            "got a dict under 'more': save the update, weights",
        ),
        ({"w": torch.ones(1), "lr": {1, 2}}, "got a set under 'lr': leave it out"),
        ([torch.ones(1), 3], "got a list with a int at place 1: give arrays alone"),
        (torch.ones(2, 2), "one vector of all numbers, got one array"),
        ({}, "got none"),
    ],
)
def test_what_is_no_tensor_is_named(tmp_path, held, words):
    torch.save(held, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=words):
        load_update(tmp_path / "odd.pt")


def test_images_that_are_not_the_first_are_found():
    model, given = network(), images()
    update = change(model, Batch(given.inputs[2:3], given.labels[2:3]))
    found = subject(model, update, given)
    assert found.n_given == 6
    assert len(found.truth.inputs) == 1
    assert "relative error 1" in said(found)
    assert "makes of images[2] of those given" in said(found)
    assert "the images: the first 1 of 6 given, in their order" in said(found)
    second = change(model, Batch(given.inputs[1:2], given.labels[1:2]))
    assert "makes of images[1] of those given" in said(subject(model, second, given))
    pair = change(model, Batch(given.inputs[3:5], given.labels[3:5]))
    assert "makes of images[3:5] of those given" in said(subject(model, pair, given, 2))
    assert "makes of all 6 images given: give --batch-size 6" in said(subject(model, change(model, given), given))
    assert "of those given" not in said(subject(model, change(network(), images(), steps=40), given))
    assert said(subject(model, update, images(3), 1, FedAvg(lr=0.2, steps=1))).startswith("the update is not what")


def test_of_all_sizes_that_fit_a_model_the_likeliest_is_said():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(100, 3))
    with pytest.raises(ValueError, match=r"got 3x32x32; it runs on 1x10x10$"):
        check_images_fit(flat, (3, 32, 32))
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    for shape, fits in (((1, 30, 30), "3x32x32"), ((1, 48, 48), "3x48x48")):
        with pytest.raises(ValueError, match=rf"it runs on {fits} \(and 10 more"):
            check_images_fit(pooled, shape)
    check_images_fit(pooled, (3, 50, 50))


def test_the_order_of_local_steps_is_found():
    model, given = network(), images(2)
    method = FedAvg(lr=2.0, steps=2, batch_size=1)
    update = change(model, Batch(given.inputs[1:], given.labels[1:]), lr=2.0)
    moved = network()
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter -= update[name]
    second = change(moved, Batch(given.inputs[:1], given.labels[:1]), lr=2.0)
    update = {name: value + second[name] for name, value in update.items()}
    found = subject(model, update, given, 2, method)
    assert found.mismatched
    assert "makes of images[1, 0] of those given" in said(found)
