"""Folders of trainers and checkpoints in several files are read for their model; others are refused with a way on."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.captured import batch, change, network

from eval.audit.captured_files import load_pair, load_update


def refused(path):
    with pytest.raises(ValueError, match="expected tensors by parameter name") as caught:
        load_update(path)
    return str(caught.value)


def sharded(folder, **places):
    """A checkpoint of two files and their list, which says that some tensors are elsewhere than they are."""
    folder.mkdir(exist_ok=True)
    state = change(network(), batch())
    names = list(state)
    parts = {f"model-0000{number + 1}-of-00002.safetensors": names[2 * number : 2 * number + 2] for number in (0, 1)}
    for part, own in parts.items():
        save_file({name: state[name] for name in own}, folder / part)
    listed = {name: part for part, own in parts.items() for name in own} | places
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return state


def test_the_model_of_a_trainers_folder_is_read(tmp_path):
    state = change(network(), batch())
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    save_file(state, tmp_path / "model.safetensors")
    found = load_update(tmp_path)
    assert found.update.keys() == state.keys()
    assert found.notes == (f"read out of the folder {tmp_path.name}: model.safetensors",)
    assert load_pair(tmp_path, tmp_path).update.keys() == state.keys()


def test_a_checkpoint_in_several_files_is_read_by_its_list_or_its_folder(tmp_path):
    state = sharded(tmp_path / "parts")
    for path in (tmp_path / "parts", tmp_path / "parts" / "model.safetensors.index.json"):
        found = load_update(path).update
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
    alone = load_update(tmp_path / "parts" / "model-00001-of-00002.safetensors")
    assert len(alone.update) == 2
    assert "is part 1 of 2 of a model by its name; of all of them give model.safetensors.index.json" in alone.notes[0]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("model-00003-of-00003.safetensors", "'model-00003-of-00003.safetensors' is not beside it"),
        ("../model-00001-of-00002.safetensors", "is not beside it"),
        ("model.safetensors.index.json", "is not beside it"),
        ("model-00002-of-00002.safetensors", "lacks a tensor that is listed"),
    ],
)
def test_a_list_of_parts_that_is_wrong_is_refused(tmp_path, place, said):
    sharded(tmp_path, **{"0.weight": place})
    assert said in refused(tmp_path)


def test_other_folders_and_programs_name_the_way_on(tmp_path):
    for number, (name, said) in enumerate(
        {".metadata": "dcp_to_torch_save", "saved_model.pb": "TensorFlow", "zero_to_fp32.py": "DeepSpeed"}.items()
    ):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / name).touch()
        assert said in refused(folder)
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    assert "got ONNX, a network for running it" in refused(tmp_path / "net.onnx")
    for inside, said in {
        "model.weights.h5": "a model of Keras",
        "net/code/__torch__.py": "TorchScript, which holds code",
        "net/archive_format": "a program of torch.export",
        "a.txt": "a zip archive of a.txt, b.txt: unpack it first",
    }.items():
        with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
            archive.writestr(inside, "")
            archive.writestr("net/data.pkl" if "code" in inside else "b.txt", "")
        assert said in refused(tmp_path / "net.pt")


def test_the_state_of_an_optimizer_is_no_update(tmp_path):
    model = network()
    rule = torch.optim.Adam(model.parameters())
    model(batch().inputs).sum().backward()
    rule.step()
    torch.save(rule.state_dict(), tmp_path / "optimizer.pt")
    assert "got the state of an optimizer, whose averages of gradients are no update" in refused(
        tmp_path / "optimizer.pt"
    )


def test_what_a_clients_training_returns_is_taken_out_of_the_list(tmp_path):
    state = list(change(network(), batch()).values())
    torch.save((state, 32, {"loss": 1.0}), tmp_path / "fit.pt")
    found = load_update(tmp_path / "fit.pt")
    assert found.nameless
    assert all(torch.equal(one, other) for one, other in zip(found.update.values(), state, strict=True))
    assert found.notes == ("taken out of a list of 3, as a client's training returns it; the rest is left out",)
    torch.save((state, state[0], 3), tmp_path / "fit.pt")
    assert "a list with a list at place 0" in refused(tmp_path / "fit.pt")


@pytest.mark.parametrize("by_row", [False, True])
def test_integers_with_their_scale_are_written_out(tmp_path, by_row):
    state, sent = change(network(), batch()), {}
    for name, value in state.items():
        largest = value.abs().flatten(1).amax(1) if by_row and value.ndim > 1 else value.abs().max()
        scale = largest / 127
        rows = scale.view(-1, *[1] * (value.ndim - 1)) if scale.ndim else scale
        sent |= {name: ((value / rows).round() + 3).to(torch.int16), f"{name}_scale": scale}
        sent[f"{name}.zero_point"] = torch.tensor(3)
    torch.save(sent, tmp_path / "u.pt")
    found = load_update(tmp_path / "u.pt")
    assert found.update.keys() == state.keys()
    for name, value in state.items():
        assert float((found.update[name] - value).abs().max()) <= float(value.abs().max()) / 253
    assert "integers, written out as (values - zero_point) * scale" in found.notes[0]
    del sent["0.weight_scale"]
    torch.save(sent, tmp_path / "u.pt")
    assert load_update(tmp_path / "u.pt").update["0.weight"].dtype == torch.int16  # said when it meets the model


def test_a_list_of_parts_that_was_cut_off_is_no_pickle(tmp_path):
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    whole = path.read_text()
    for cut in (1, 2, 40, len(whole) // 2):
        path.write_text(whole[:cut])
        for given in (path, tmp_path):
            said = refused(given)
            assert "can't be read as JSON" in said
            assert "If it was cut off, get it again" in said
    path.write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    assert "a list of a model's parts that names none under 'weight_map'" in refused(tmp_path)
    path.write_text("\ufeff" + whole)
    assert load_update(tmp_path).update


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00002-of-00002.safetensors", "u.npz", "u.json"]
)
def test_what_must_not_be_read_is_named(tmp_path, name, monkeypatch):
    sharded(tmp_path)
    np.savez(tmp_path / "u.npz", fc=np.ones(3))
    (tmp_path / "u.json").write_text("{}")
    opened = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    given = tmp_path / name if name.startswith("u.") else tmp_path
    assert f"got {name} that must not be read: Permission denied" in refused(given)
