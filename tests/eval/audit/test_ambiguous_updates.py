"""What may be an update or weights is told apart, or refused with what to give."""

import numpy as np
import pytest
import torch
from support.captured import SHAPE, after, batch, change, network
from torch import nn

import hyperleak
from eval.audit.captured_files import as_state, load_pair, load_update
from eval.audit.tensor_names import with_model_names


def vector(state):
    return torch.cat([value.flatten() for value in state.values()])


def audit(update, **settings):
    return hyperleak.audit(network(), update=update, input_shape=SHAPE, attacks="analytic", **settings)


def test_two_vectors_are_no_list_of_arrays(tmp_path):
    model = network()
    pair = vector(model.state_dict()), vector(after(model, batch()))
    torch.save(pair, tmp_path / "pair.pt")
    arrays = pair[0].numpy(), pair[1].numpy()
    for given in (pair, list(pair), arrays, (pair[0][None], pair[1][None]), tmp_path / "pair.pt"):
        with pytest.raises(ValueError, match=r"got two of one shape, .*give them as \{'before': .*\}"):
            audit(given)
    found = with_model_names(load_pair(*pair), model)
    assert all(torch.allclose(found.update[n], v, atol=1e-6) for n, v in change(model, batch()).items())


def test_two_arrays_that_the_model_has_are_one_update():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    update = tuple(change(model, batch()).values())
    found = hyperleak.audit(model, update=update, input_shape=SHAPE, attacks="analytic")
    assert "2 arrays without names" in found.notes[0]


def test_two_states_in_a_list_are_told_how_to_come(tmp_path):
    model = network()
    states = [dict(model.state_dict()), after(model, batch())]
    for given in (states, [list(state.values()) for state in states]):
        with pytest.raises(ValueError, match=r"both as \{'before': \.\.\., 'after': \.\.\.\}"):
            audit(given)


@pytest.mark.parametrize("sorted_half", ["before", "after"])
def test_a_list_in_the_models_order_beside_one_sorted_by_name(tmp_path, sorted_half):
    model = network()
    halves = {"before": dict(model.state_dict()), "after": after(model, batch())}
    expected = change(model, batch())
    lists = {
        half: [state[name] for name in (sorted(state) if half == sorted_half else state)]
        for half, state in halves.items()
    }
    torch.save(lists, tmp_path / "lists.pt")
    for captured in (load_pair(lists["before"], lists["after"]), load_update(tmp_path / "lists.pt")):
        found = with_model_names(captured, model)
        assert all(torch.allclose(found.update[name], value, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize("word", ["after", "local", "before", "global_model"])
def test_weights_alone_are_no_update(tmp_path, word):
    state = after(network(), batch())
    torch.save({word: state}, tmp_path / "one.pt")
    np.savez(tmp_path / "one.npz", **{f"{word}/{name}": value.numpy() for name, value in state.items()})
    for given in ({word: state}, {word: list(state.values())}, tmp_path / "one.pt", tmp_path / "one.npz"):
        with pytest.raises(ValueError, match=r"training are no update; give those (before|after) beside"):
            audit(given)


@pytest.mark.parametrize("word", ["local_update", "final_gradient", "update", "sent.delta", "sent", "received"])
def test_a_change_by_whatever_name_is_one(word):
    update = change(network(), batch())
    found = with_model_names(as_state({word: update}, "update"), network())
    assert all(torch.equal(found.update[name], value) for name, value in update.items())


def test_two_updates_are_not_subtracted():
    update = change(network(), batch())
    with pytest.raises(ValueError, match="got a dict under"):
        audit({"global_update": update, "local_update": update})


@pytest.mark.parametrize("shape", [(1, -1), (-1, 1), (1, 1, -1)])
def test_a_vector_with_dimensions_of_length_one_is_a_vector(tmp_path, shape):
    update = change(network(), batch())
    row = vector(update).reshape(shape)
    np.save(tmp_path / "row.npy", row.numpy())
    torch.save(row, tmp_path / "row.pt")
    captured = [as_state(given, "update") for given in (row, row.numpy(), [row])]
    captured += [load_update(tmp_path / "row.npy"), load_update(tmp_path / "row.pt")]
    for one in captured:
        found = with_model_names(one, network())
        assert all(torch.equal(found.update[name], value) for name, value in update.items())


def test_what_is_no_vector_is_refused_with_its_shape():
    for value in (torch.tensor(3.0), torch.zeros(2, 3), np.zeros((2, 3))):
        with pytest.raises(ValueError, match=r"one vector of all numbers, got one array \("):
            audit(value)


def test_a_folder_that_can_not_be_written_is_refused_in_python_words(tmp_path):
    (tmp_path / "file").write_text("x")
    update = change(network(), batch())
    for out in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(ValueError, match="folder") as refusal:
            audit(update, out=out)
        assert "--" not in str(refusal.value)
    with pytest.raises(ValueError, match="choose another out") as refusal:
        hyperleak.run("quickstart", tmp_path / "file")
    assert "--" not in str(refusal.value)
