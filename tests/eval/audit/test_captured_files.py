"""What files of updates hold: lists without names, checkpoints, adapters, two files, half precision, means, damage."""

import numpy as np
import pytest
import torch
from support.captured import CLASSES, SHAPE, after, batch, change, network
from torch import nn
from typer.testing import CliRunner

import hyperleak
from attacks.base import build
from eval import cli
from eval.audit.captured_files import CapturedUpdate, described, load_pair, load_update
from eval.audit.captured_update import of_update
from eval.audit.execution import audit_updates
from eval.audit.tensor_names import with_model_names
from fl.aggregated_view import as_single_client
from fl.capture import ClientSettings, from_update
from fl.methods.fedavg import FedAvg
from fl.types import Batch
from fl.view import ServerView


def subject(model, captured, given=None, size=1, method=None):
    client = ClientSettings(method=method)
    named = with_model_names(captured, model)
    return of_update(model, named, client, input_shape=SHAPE, batch_size=size, given=given)


def arrays(state):
    return [value.numpy() for value in state.values()]


# ---- arrays without names --------------------------------------------------------------------------------------------
def test_buckets_of_distributed_training_are_named_with_what_to_send():
    model = network()
    first, *rest = (value.flatten() for value in list(change(model, batch()).values())[::-1])
    buckets = CapturedUpdate({"0": first, "1": torch.cat(rest)}, nameless=True)
    with pytest.raises(ValueError, match=r"got 2 vectors .* buckets of DistributedDataParallel, .* gradient by name"):
        with_model_names(buckets, model)


@pytest.mark.parametrize(("rows", "columns", "said"), [(4, 64, "4 of 5 rows"), (5, 40, "40 of 64 columns")])
def test_a_part_of_the_rows_or_columns_is_said_to_be_of_a_pruned_model(rows, columns, said):
    model = network()
    update = change(model, batch())
    update["3.weight"] = update["3.weight"][:rows, :columns]
    with pytest.raises(ValueError, match=f"it has {said}, as of a pruned or another model: give the one that the"):
        from_update(model, update, input_shape=(1, 6, 6))


@pytest.mark.parametrize("norm", [False, True])
def test_a_list_has_the_names_of_the_state(tmp_path, norm):
    model, data = network(norm), batch(2)
    update = change(model, data)
    np.savez(tmp_path / "u.npz", *arrays(update))
    torch.save(list(update.values()), tmp_path / "u.pt")
    for captured in (load_update(tmp_path / "u.npz"), load_update(tmp_path / "u.pt")):
        found = subject(model, captured, data, 2)
        assert not found.mismatched
        assert f"{len(update)} arrays without names: taken in the order of model.state_dict()" in found.notes[0]
        assert (found.view.buffers_after is not None) == norm


def test_more_than_ten_arrays_keep_their_order(tmp_path):
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(36, 36) for _ in range(6)), nn.Linear(36, CLASSES))
    update = change(model, batch())
    np.savez(tmp_path / "u.npz", *arrays(update))
    assert not subject(model, load_update(tmp_path / "u.npz"), batch()).mismatched


def test_a_list_of_trained_parameters_or_of_some_layers_is_matched_where_one_place_fits():
    model, data = network(norm=True), batch(2)
    update = change(model, data)
    trained = [update[name].numpy() for name, _ in model.named_parameters()]
    found = subject(model, CapturedUpdate({str(i): torch.tensor(a) for i, a in enumerate(trained)}, nameless=True))
    assert "in the order of the model's trained parameters" in found.notes[0]
    last = CapturedUpdate({"0": update["4.weight"], "1": update["4.bias"]}, nameless=True)
    found = subject(model, last)
    assert set(found.view.update) == {"4.weight", "4.bias"}
    assert "only 4.weight, 4.bias have their shapes" in found.notes[0]


def test_a_list_that_does_not_fit_is_refused_by_its_place():
    model = network()
    values = list(change(model, batch()).values())

    def refusal(given):
        with pytest.raises(ValueError, match="arrays without names") as caught:
            with_model_names(CapturedUpdate({str(i): v for i, v in enumerate(given)}, nameless=True), model)
        return str(caught.value)

    turned = refusal([*values[:2], values[2].T, values[3]])
    assert f"got (64, {CLASSES}) at place 2, where '3.weight' is ({CLASSES}, 64): it is turned" in turned
    assert "got (4,) at place 0, where '0.weight' is (4, 1, 3, 3)" in refusal([values[1], values[0], *values[2:]])
    assert "4 of model.state_dict()" in refusal([*values, values[0]])
    assert "from the last to the first, as buckets of DistributedDataParallel hold them" in refusal(values[::-1])
    assert "give them turned round (arrays[::-1])" in refusal(values[::-1])
    alike = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, CLASSES))
    with pytest.raises(ValueError, match=r"fit the model at 2 places, from 1.weight or 2.weight on: save them by name"):
        with_model_names(CapturedUpdate({"0": torch.ones(36, 36), "1": torch.ones(36)}, nameless=True), alike)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "before and after", "python"])
def test_a_vector_of_all_numbers_is_taken_apart(tmp_path, norm, kind):
    model, data = network(norm), batch(2)
    update = change(model, data)
    trained = [name for name, _ in model.named_parameters()]
    vector = torch.cat([update[name].flatten() for name in trained])
    if kind == "npy":
        np.save(tmp_path / "u.npy", vector.numpy())
    elif kind == "npz":
        np.savez(tmp_path / "u.npz", vector.numpy())
    elif kind == "pt":
        torch.save(vector, tmp_path / "u.pt")
    if kind == "before and after":
        sent = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        captured = load_pair(sent, sent - vector)
    elif kind == "python":
        assert hyperleak.audit(model, update=vector.numpy(), input_shape=SHAPE, attacks=["analytic"]).findings
        return
    else:
        captured = load_update(tmp_path / f"u.{kind}")
    found = subject(model, captured, data, 2)
    assert any(f"a vector of {len(vector)} numbers: those of the model's trained parameters" in n for n in found.notes)
    for name in trained:
        assert torch.allclose(found.view.update[name].to(update[name]), update[name], atol=1e-6)


def test_a_vector_of_a_whole_state_has_its_buffers():
    model, data = network(norm=True), batch(2)
    update = change(model, data)
    whole = torch.cat([value.flatten().float() for value in update.values()])
    found = subject(model, CapturedUpdate({"0": whole}, nameless=True), data, 2)
    assert not found.mismatched
    assert found.view.buffers_after is not None


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"a vector of all numbers to have \d+, as .* got 7: the model may be another"):
        with_model_names(CapturedUpdate({"0": torch.ones(7)}, nameless=True), network())


# ---- pickle and damage -----------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickle_is_refused_with_the_way_on(tmp_path):
    (tmp_path / "u.pkl").write_bytes(b"cnumpy\nndarray\n(I0\ntR.")
    torch.save(arrays(change(network(), batch())), tmp_path / "u.pt")
    for name in ("u.pkl", "u.pt"):
        with pytest.raises(ValueError, match=r"numpy.savez\('update.npz', \*arrays\) for a list of arrays"):
            load_update(tmp_path / name)
    np.save(tmp_path / "u.npy", np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"got one array \(.npy\), float64 \(3, 2\): write all arrays"):
        load_update(tmp_path / "u.npy")
    np.save(tmp_path / "u.npy", np.array(["weights"]))
    with pytest.raises(ValueError, match=r"or one vector of all numbers"):
        load_update(tmp_path / "u.npy")


@pytest.mark.parametrize("kind", ["npz", "pt", "safetensors"])
def test_a_file_that_was_cut_off_is_an_error_that_says_so(tmp_path, kind):
    update, path = change(network(), batch()), tmp_path / f"u.{kind}"
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(update, path)
    elif kind == "pt":
        torch.save(update, path)
    else:
        np.savez(path, **{name: value.numpy() for name, value in update.items()})
    assert not subject(network(), load_update(path), batch()).mismatched
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"can't be read as .{kind}.*If it was cut off, get it again"):
        load_update(path)


# ---- checkpoints and adapters ----------------------------------------------------------------------------------------
def test_checkpoints_of_trainers_hold_more_than_the_model(tmp_path):
    model, data = network(), batch()
    update = change(model, data)
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    wrapped = {f"model.{name}": value for name, value in update.items()} | {"loss.weight": torch.ones(3)}
    held = (
        {"epoch": 1, "state_dict": wrapped, "optimizer_states": [optimizer], "hyper_parameters": {"lr": 0.1}},
        {"model_state_dict": update, "optimizer_state_dict": optimizer, "loss": torch.tensor(2.3), "epoch": 3},
        {**update, "num_examples": 7, "loss": torch.tensor(1.0)},
    )
    for number, state in enumerate(held):
        torch.save(state, tmp_path / f"{number}.ckpt")
        found = subject(model, load_update(tmp_path / f"{number}.ckpt"), data)
        assert not found.mismatched, number
        assert found.notes, number
    assert (
        "loss.weight of the file: not the model's, left out"
        in subject(model, load_update(tmp_path / "0.ckpt")).notes[1]
    )


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, named as PEFT names it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_alone_are_sent_under_names_without_the_adapters_own():
    model, data = (
        nn.Sequential(nn.Flatten(), Adapted(nn.Linear(36, 8)), nn.ReLU(), Adapted(nn.Linear(8, CLASSES))),
        batch(),
    )
    sent = {name.replace(".default", ""): v for name, v in change(model, data).items() if "lora_" in name}
    found = subject(model, CapturedUpdate(sent), data)
    assert not found.mismatched
    assert found.notes == ("names gain the adapter's, 'default', which PEFT leaves out of its files",)
    with pytest.raises(ValueError, match=r"expected a model with the adapter .* peft.get_peft_model"):
        with_model_names(CapturedUpdate(sent), network())


def test_a_wrapped_model_has_the_names_of_what_is_in_it():
    model, data = network(), batch()
    update = {f"module.{name}": value for name, value in change(model, data).items()}
    assert not subject(nn.DataParallel(model), CapturedUpdate(update), data).mismatched


# ---- before and after ------------------------------------------------------------------------------------------------
def test_before_and_after_come_in_two_files_or_as_python_has_them(tmp_path):
    model, data = network(norm=True), batch(2)
    old, new = dict(model.state_dict()), after(model, data)
    torch.save(old, tmp_path / "b.pt")
    np.savez(tmp_path / "a.npz", **{name: value.numpy() for name, value in new.items()})
    trained = network(norm=True)
    trained.load_state_dict(new)
    for pair in (
        (tmp_path / "b.pt", tmp_path / "a.npz"),
        (old, new),
        (model, trained),
        (arrays(old), arrays(new)),
        (None, new),
    ):
        found = subject(model, load_pair(*pair), data, 2)
        assert not found.mismatched
        assert found.view.buffers_after is not None
    assert load_pair(tmp_path / "b.pt", tmp_path / "a.npz").notes == ("the update is b.pt - a.npz",)
    with pytest.raises(FileNotFoundError):
        load_pair(tmp_path / "none.pt", new)
    assert (
        "--after FILE" in audit_updates("x", [subject(network(), CapturedUpdate(after(network(), data)))], {}).mismatch
    )


OWN = "from support.captured import network\ndef build():\n    return network()\n"


def test_the_command_takes_two_files_gradients_and_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_captured.py").write_text(OWN)
    model, data = network(), batch(2)
    torch.save(dict(model.state_dict()), "before.pt")
    torch.save(after(model, data), "after.pt")
    torch.save({name: 10 * value for name, value in change(model, data).items()}, "gradient.pt")
    torch.save(change(model, data), "mean.pt")

    def audit(*words):
        given = ("--model", "own_captured:build", "--input-shape", "1,6,6", "--attack", "analytic")
        return CliRunner().invoke(cli.app, ["audit", "update", *words, *given])

    for words, said in (
        (("--before", "before.pt", "--after", "after.pt", "--batch-size", "2"), "before.pt - after.pt of own_captured"),
        (("--after", "after.pt", "--batch-size", "2"), "the update is the model's own weights - after.pt"),
        (("gradient.pt", "--kind", "gradient", "--batch-size", "2"), "gradient.pt of own_captured"),
        (("mean.pt", "--clients", "2"), "the mean of 2 clients, each of as many images"),
    ):
        result = audit(*words)
        assert result.exit_code == 4, result.output
        assert said in result.output
    for words, said in (
        (("--before", "before.pt"), "expected --after FILE beside --before"),
        ((), "expected FILE, the update, or --after FILE"),
        (("mean.pt", "--after", "after.pt"), "expected the update's file, or --before and --after"),
        (("--after", "after.pt", "--kind", "gradient"), "--kind gradient goes with a file of a gradient"),
        (("mean.pt", "--defense", "secagg"), "say --clients N"),
    ):
        result = audit(*words)
        assert result.exit_code == 2, result.output
        assert said in result.output


def test_an_update_is_given_to_python_in_any_of_these_ways():
    model, data = network(), batch()
    update, new = change(model, data), after(model, data)
    for given in (update, {n: v.numpy() for n, v in update.items()}, arrays(update), (model, new), (None, new)):
        report = hyperleak.audit(model, data, update=given, attacks="analytic", method=FedAvg(lr=0.1, steps=1))
        assert report.mismatch == ""
    with pytest.raises(TypeError, match=r"got a model; give \(before, after\)"):
        hyperleak.audit(model, data, update=network())
    with pytest.raises(ValueError, match="expected kind 'update' of weights before and after"):
        hyperleak.audit(model, data, update=(model, new), kind="gradient")


def test_a_gradient_is_taken_for_what_it_is():
    model, data = network(), batch()
    rate = 0.1
    gradient = CapturedUpdate({name: value / rate for name, value in change(model, data, lr=rate).items()})
    found = subject(model, described(gradient, "gradient", 1), data, method=FedAvg(lr=rate, steps=1, batch_size=None))
    assert not found.mismatched
    assert not found.view.rounded
    with pytest.raises(ValueError, match="expected kind 'update' or 'gradient'"):
        described(gradient, "grad", 1)


# ---- half precision --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_said_and_no_picture_is_confirmed_that_is_not_right(kind):
    model, data = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, CLASSES)), batch()
    old, new = dict(model.state_dict()), after(model, data)
    sent = CapturedUpdate({name: value.to(kind) for name, value in change(model, data).items()})
    pair = load_pair({n: v.to(kind) for n, v in old.items()}, {n: v.to(kind) for n, v in new.items()})
    for captured, words in ((sent, "of each number"), (pair, "of the weights, of their difference fewer")):
        found = subject(model, captured, method=FedAvg(lr=0.1, steps=1, batch_size=None))
        assert any(words in note for note in found.notes)
        for name in ("analytic", "cascade"):
            result = build(name)(found.view)
            assert result.verified is not False  # a miss may be rounding
            off = float((result.inputs - data.inputs).square().mean().sqrt())
            assert result.verified is not True or off < 1e-3
    whole = {n: v.float() for n, v in pair.before.items()}
    expected = whole["1.weight"] - new["1.weight"].to(kind).float()
    assert pair.update["1.weight"].equal(expected)  # the difference is not rounded to two bytes once more


# ---- means -----------------------------------------------------------------------------------------------------------
def test_the_mean_of_clients_is_attacked_as_such():
    model, data = network(), batch(4)
    parts = [change(model, Batch(data.inputs[i : i + 2], data.labels[i : i + 2])) for i in (0, 2)]
    mean = CapturedUpdate({name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]})
    one_step = FedAvg(lr=0.1, steps=1, batch_size=None)
    found = subject(model, described(mean, "update", 2), data, 2, method=one_step)
    assert found.error < 1e-4
    assert len(found.view.parts) == 2
    assert found.view.batch_size == 4
    assert "the mean of 2 clients, each of as many images" in found.notes
    alone = as_single_client(found.view)
    assert isinstance(alone, ServerView)
    assert alone.batch_size == 4
    result = build({"name": "ig", "iterations": 20})(found.view)
    assert len(result.inputs) == 4
    wrong = subject(model, described(mean, "update", 1), data, 2, method=one_step)
    assert wrong.mismatched
    with pytest.raises(ValueError, match=r"expected 6 true image\(s\)"):
        subject(model, described(mean, "update", 3), data, 2, method=one_step)


def test_clients_of_several_steps_are_searched_for_and_not_taken_for_one():
    model, data = network(), batch(2)
    parts = []
    for i in range(2):
        moved, own = network(), Batch(data.inputs[i : i + 1], data.labels[i : i + 1])
        for _ in range(3):
            moved.load_state_dict(after(moved, own))
        parts.append({name: value - moved.state_dict()[name] for name, value in model.state_dict().items()})
    mean = CapturedUpdate({name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]})
    found = subject(model, described(mean, "update", 2), data, 1, method=FedAvg(lr=0.1, steps=3, batch_size=None))
    assert found.error < 1e-4
    assert isinstance(as_single_client(found.view), str)
    assert "only the mean of 2 clients" in build("analytic")(found.view).reason


def test_tensors_in_a_dictionary_for_each_layer_are_joined_and_none_is_left_out(tmp_path):
    update = change(network(norm=True), batch(2))
    nested: dict[str, dict[str, object]] = {}
    for name, value in update.items():
        nested.setdefault(name.split(".")[0], {})[name.split(".")[1]] = value
    for held in (nested, {"net": nested}):
        torch.save(held, tmp_path / "u.pt")
        found = with_model_names(load_update(tmp_path / "u.pt"), network(norm=True))
        assert {**found.update, **found.buffers}.keys() == update.keys()
    torch.save({**update, "frozen": None}, tmp_path / "u.pt")
    assert load_update(tmp_path / "u.pt").notes == ("no tensors, so left out: frozen",)


def test_empty_files_and_text_are_called_so(tmp_path):
    for content, said in ((b"", "an empty file"), (b"epoch,loss\n1,0.5\n2,0.4\n", "text: numpy.savez")):
        (tmp_path / "u.pt").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            load_update(tmp_path / "u.pt")


@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_one_layer_before_and_after_are_a_pair(tmp_path, nested: bool) -> None:
    """And no layers that are called so."""
    first, last = ({"weight": torch.rand(2, 4), "bias": torch.rand(2)} for _ in range(2))
    torch.save(
        {"before": {"fc": first} if nested else first, "after": {"fc": last} if nested else last}, tmp_path / "p.pt"
    )
    update = load_update(tmp_path / "p.pt").update
    assert torch.equal(update["fc.weight" if nested else "weight"], first["weight"] - last["weight"])
