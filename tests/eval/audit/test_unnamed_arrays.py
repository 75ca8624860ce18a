"""Arrays without names, and weights before and after under other names, are paired by the model's own order."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captured import SHAPE, after, batch, change, network
from torch import nn

import hyperleak
from eval.audit.captured_files import as_state, described, load_pair
from eval.audit.tensor_names import with_model_names
from fl.methods.fedavg import FedAvg

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def alike() -> nn.Sequential:
    """A network whose layers, from 1 to 12, have the same shapes, so that sorted names fit as well."""
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(36, 36, bias=False) for _ in range(12)))
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place)) / 6)
    return model


def trainable(state, model):
    return [state[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("norm", [False, True])
def test_a_file_and_a_list_are_paired_by_the_models_order(tmp_path, norm):
    model, data = network(norm), batch(2)
    before, late = dict(model.state_dict()), after(model, data)
    expected = change(model, data)
    save_file(before, tmp_path / "before.safetensors")
    save_file(late, tmp_path / "after.safetensors")
    np.savez(tmp_path / "after.npz", *(value.numpy() for value in late.values()))
    sorted_names = list(load_file(tmp_path / "after.safetensors").values())
    vector = nn.utils.parameters_to_vector(trainable(late, model))
    wrapped = {f"module._orig_mod.{name}": value for name, value in late.items()}
    lightning = {f"model.{name}": value for name, value in late.items()}
    for first, last in (
        (tmp_path / "before.safetensors", tmp_path / "after.npz"),
        (list(before.values()), tmp_path / "after.safetensors"),
        (before, list(late.values())),
        (tmp_path / "before.safetensors", sorted_names),
        (None, sorted_names),
        (before, trainable(late, model)),
        (list(before.values()), trainable(late, model)),
        (tmp_path / "before.safetensors", vector),
        (before, wrapped),
        ({f"net.{name}": value for name, value in before.items()}, wrapped),
        (before, {"state_dict": lightning}),
    ):
        found = with_model_names(load_pair(first, last), model)
        assert found.update.keys() == {name for name, _ in model.named_parameters()}
        for name, value in found.update.items():
            torch.testing.assert_close(value, expected[name])
        report = hyperleak.audit(
            model, data, update=(first, last), attacks="analytic", method=STEP, batch_size=2, input_shape=SHAPE
        )
        assert report.mismatch == ""


def test_where_shapes_leave_it_open_the_nearest_weights_decide(tmp_path):
    model, data = alike(), batch(2)
    before, late = dict(model.state_dict()), after(model, data)
    expected = change(model, data)
    save_file(before, tmp_path / "before.safetensors")
    by_letters = [late[name] for name in sorted(late)]
    assert all(one.shape == other.shape for one, other in zip(by_letters, late.values(), strict=True))
    for pair in (
        (tmp_path / "before.safetensors", list(late.values())),
        (tmp_path / "before.safetensors", by_letters),
        (None, by_letters),
        ([before[name] for name in sorted(before)], by_letters),
        (list(before.values()), list(late.values())),
        ([before[name] for name in sorted(before)], late),
    ):
        found = with_model_names(load_pair(*pair), model)
        assert all(torch.allclose(found.update[name], value, atol=1e-6) for name, value in expected.items())
        assert not any("allow another order" in note for note in found.notes)


def test_where_nothing_tells_the_order_it_is_said():
    model = alike()
    update = change(model, batch(2))
    found = with_model_names(as_state(list(update.values()), "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in update.items())
    assert "their shapes allow another order as well, that of sorted names" in found.notes[0]
    noise = [torch.randn(value.shape, generator=torch.Generator().manual_seed(5)) for value in update.values()]
    assert "allow another order" in " ".join(with_model_names(load_pair(None, noise), model).notes)


def test_an_update_in_the_order_of_sorted_names_is_taken_where_no_other_fits():
    model, data = network(True), batch(2)
    update = change(model, data)
    for names in (sorted(update), sorted(name for name, _ in model.named_parameters())):
        found = with_model_names(as_state([update[name] for name in names], "update"), model)
        assert "sorted, whose shapes they have" in found.notes[0]
        assert all(torch.equal(value, update[name]) for name, value in found.update.items())


def test_weights_that_do_not_belong_together_are_refused_with_the_reason():
    model = network()
    before, late = dict(model.state_dict()), after(model, batch())
    with pytest.raises(ValueError, match=r"shapes of model.state_dict.. from the last to the first"):
        with_model_names(load_pair(list(before.values())[::-1], late), model)
    with pytest.raises(ValueError, match=r"expected arrays without names in the order of model.state_dict.., got"):
        with_model_names(load_pair([*list(before.values())[1:], before[next(iter(before))]], late), model)
    with pytest.raises(ValueError, match=r"the same names under 'before' and 'after', got '3.bias' in 'after' alone"):
        with_model_names(load_pair({n: v for n, v in before.items() if n != "3.bias"}, late), model)
    with pytest.raises(ValueError, match="expected kind 'update' of weights before and after"):
        described(load_pair(list(before.values()), late), "gradient", 1)
    part = {name: value for name, value in late.items() if name.startswith("3.")}
    found = with_model_names(load_pair(before, part), model)
    assert found.update.keys() == part.keys()
    assert "'before': 0.bias, 0.weight left out, since 'after' lacks them" in found.notes
