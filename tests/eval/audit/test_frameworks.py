"""Updates as frameworks write them: prefixes, lists, weights before and after, tied and buffered states."""

import copy

import numpy as np
import pytest
import torch
from support.captured import CLASSES, SHAPE, after, batch, change, network
from torch import nn

from defenses import Defense
from eval.audit.captured_files import load_update
from eval.audit.captured_update import of_update
from eval.audit.execution import audit_updates
from eval.audit.tensor_names import with_model_names
from fl.capture import ClientSettings, from_update
from fl.method import methods
from fl.methods.fedavg import FedAvg


def subject(model, path, given=None, size=1, method=None):
    client = ClientSettings(method=method, defense=Defense())
    return of_update(
        model, with_model_names(load_update(path), model), client, input_shape=SHAPE, batch_size=size, given=given
    )


@pytest.mark.parametrize("prefix", ["model.", "net.", "_module.", "module.", "_orig_mod.", "a.b.", "_module.net."])
def test_what_stands_before_all_names_is_taken_off(tmp_path, prefix):
    model, data = network(), batch()
    torch.save({prefix + name: value for name, value in change(model, data).items()}, tmp_path / "u.pt")
    found = with_model_names(load_update(tmp_path / "u.pt"), model)
    assert found.update.keys() == dict(model.named_parameters()).keys()
    assert found.notes[0].startswith("names lose ")
    assert not subject(model, tmp_path / "u.pt", data).mismatched


def test_what_the_model_has_before_all_names_is_put_on(tmp_path):
    inner, data = network(), batch()
    torch.save(change(inner, data), tmp_path / "u.pt")
    model = nn.Sequential()
    model.add_module("net", inner)
    found = with_model_names(load_update(tmp_path / "u.pt"), model)
    assert found.notes == ("names gain net., as the model has them",)
    assert not subject(model, tmp_path / "u.pt", data).mismatched


@pytest.mark.parametrize(
    "words", [("before", "after"), ("global_weights", "local_weights"), ("Initial", "Final state")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_weights_before_and_after_in_one_file(tmp_path, words, turned):
    model, data = network(norm=True), batch(2)
    other = copy.deepcopy(model)
    parts = {words[0]: dict(model.state_dict()), words[1]: after(model, data)}
    torch.save(dict(sorted(parts.items(), reverse=turned)), tmp_path / "both.pt")
    with torch.no_grad():
        other[0].weight.zero_()  # the file's weights are those that were sent
    found = subject(other, tmp_path / "both.pt", data, 2)
    assert not found.mismatched
    assert found.view.buffers_after is not None
    notes = with_model_names(load_update(tmp_path / "both.pt"), other).notes
    assert notes[0] == f"the update is {words[0]!r} - {words[1]!r} of both.pt"


def test_weights_before_and_after_in_one_npz_file(tmp_path):
    model, data = network(), batch()
    flat = {f"before/{name}": value.numpy() for name, value in model.state_dict().items()}
    np.savez(tmp_path / "both.npz", **flat, **{f"after/{n}": v.numpy() for n, v in after(model, data).items()})
    assert not subject(model, tmp_path / "both.npz", data).mismatched


def test_weights_that_do_not_belong_together_are_refused(tmp_path):
    torch.save({"before": {"a": torch.ones(2)}, "after": {"b": torch.ones(2)}}, tmp_path / "u.pt")
    with pytest.raises(
        ValueError, match="expected the same names under 'before' and 'after', got 'b' in 'after' alone"
    ):
        with_model_names(load_update(tmp_path / "u.pt"), network())
    torch.save({"before": {"a": torch.ones(2)}, "after": {"a": torch.ones(3)}}, tmp_path / "u.pt")
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
        load_update(tmp_path / "u.pt")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.b(self.a(x.flatten(1)).sigmoid()).sigmoid())


def test_tied_weights_come_by_both_names(tmp_path):
    model, data = Tied(), batch()
    update = change(model, data)
    torch.save(update, tmp_path / "u.pt")
    found = with_model_names(load_update(tmp_path / "u.pt"), model)
    assert found.notes == ("b.weight: further names of parameters that have another (tied weights)",)
    assert not subject(model, tmp_path / "u.pt", data).mismatched
    assert "a.weight" in from_update(model, update, input_shape=SHAPE, num_classes=CLASSES).update
    with pytest.raises(ValueError, match=r"the same numbers for 'a.weight' and 'b.weight', which are one parameter"):
        from_update(model, {**update, "b.weight": torch.zeros(36, 36)}, input_shape=SHAPE, num_classes=CLASSES)


def test_layers_that_were_not_sent_count_as_frozen(tmp_path):
    model, data = network(), batch()
    update = {name: value for name, value in change(model, data).items() if not name.startswith("0.")}
    torch.save(update, tmp_path / "u.pt")
    found = subject(model, tmp_path / "u.pt", data)
    assert found.view.update.keys() == update.keys()
    assert not found.mismatched
    assert found.notes == (
        "2 of 4 trained parameters are in the file; the others (0.weight, 0.bias) count as frozen, with the numbers "
        "that your function gives them",
    )
    assert model[0].weight.requires_grad
    model[0].requires_grad_(False)
    assert subject(model, tmp_path / "u.pt").notes == ()
    torch.save({**update, "strange": torch.ones(1)}, tmp_path / "u.pt")
    with pytest.raises(ValueError, match="unexpected 'strange'"):
        subject(network(), tmp_path / "u.pt")


def test_what_a_method_keeps_to_its_clients_is_not_missing(tmp_path):
    model, data = network(), batch()
    update = {name: value for name, value in change(model, data).items() if not name.startswith("3.")}
    torch.save(update, tmp_path / "u.pt")
    found = subject(model, tmp_path / "u.pt", method=methods.build({"name": "fedper", "lr": 0.1}))
    assert set(found.view.private) == {"3.weight", "3.bias"}
    assert found.notes == ()


def said(found):
    return audit_updates("x", [found], {}).mismatch


def test_statistics_that_moved_contradict_evaluation_mode(tmp_path):
    model, data = network(norm=True), batch(2)
    torch.save(change(model, data), tmp_path / "u.pt")
    assert said(subject(model, tmp_path / "u.pt", size=2)) == ""
    assert "in the file have moved, which they do in training mode alone" in said(
        subject(model.eval(), tmp_path / "u.pt", size=2)
    )
    still = FedAvg(steps=1, batch_size=None, train_mode=False)
    assert "have moved" in said(subject(model.train(), tmp_path / "u.pt", size=2, method=still))
    torch.save(change(model.eval(), data), tmp_path / "u.pt")
    assert "have not moved, as in evaluation mode" in said(subject(model.train(), tmp_path / "u.pt", size=2))


@pytest.mark.parametrize("norm", [False, True])
def test_weights_in_place_of_their_change(tmp_path, norm):
    model, data = network(norm), batch(2)
    torch.save(after(model, data), tmp_path / "u.pt")
    assert "seems to be weights and not their change" in said(subject(model, tmp_path / "u.pt", size=2))
    torch.save({name: -value for name, value in after(model, data).items()}, tmp_path / "u.pt")
    assert "seems to be weights and not their change" in said(subject(model, tmp_path / "u.pt", size=2))
    decay = {name: 1e-4 * value for name, value in model.state_dict().items()}
    torch.save(decay, tmp_path / "u.pt")
    assert "seems to be weights" not in said(subject(model, tmp_path / "u.pt", size=2))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_that_nobody_stated_leaves_the_audit_undecided(tmp_path, optimizer):
    from attacks.base import build

    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    torch.save(change(model, batch(), optimizer=optimizer, lr=1e-3), tmp_path / "u.pt")
    for given in (None, batch()):
        found = audit_updates("x", [subject(model, tmp_path / "u.pt", given)], {"analytic": build("analytic")})
        assert found.open_questions({})
        assert found.open_questions({"psnr": 60})
        assert found.mismatch


@pytest.mark.parametrize("joint", ["/", ".", "_"])
def test_weights_before_and_after_may_have_numbers_beside(tmp_path, joint):
    model, data = network(), batch()
    halves = {"before": dict(model.state_dict()), "after": after(model, data)}
    arrays = {f"{word}{joint}{name}": v.numpy() for word, half in halves.items() for name, v in half.items()}
    np.savez(tmp_path / "u.npz", **arrays, lr=np.float64(0.1), framework=np.array("flower"))
    torch.save({**{name: torch.tensor(v) for name, v in arrays.items()}, "round": 3}, tmp_path / "u.pt")
    for file in ("u.npz", "u.pt"):
        assert not subject(model, tmp_path / file, data).mismatched


def test_tensors_under_two_names_are_not_chosen_among(tmp_path):
    model, update = network(), change(network(), batch())
    both = {f"{word}.{name}": value for word in ("student", "teacher") for name, value in update.items()}
    torch.save(both, tmp_path / "u.pt")
    with pytest.raises(ValueError, match=r"the model's tensors once, got them under 'student\.' and under 'teacher\.'"):
        with_model_names(load_update(tmp_path / "u.pt"), model)
    torch.save({**update, **both}, tmp_path / "u.pt")  # the model's own names go before others
    assert not subject(model, tmp_path / "u.pt", batch()).mismatched


def test_parts_of_a_model_may_be_called_global_and_local(tmp_path):
    given = {"global_pool.weight": torch.ones(2), "local_conv.bias": torch.ones(3)}
    torch.save(given, tmp_path / "u.pt")
    assert load_update(tmp_path / "u.pt").update.keys() == given.keys()
