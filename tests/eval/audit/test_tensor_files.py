"""Files of tensors are told apart by what is in them; what is not read names the way to what is."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.captured import SHAPE, batch, change, network
from torch.nn.utils import parametrizations, prune

import hyperleak
from eval.audit.captured_files import as_state, load_pair, load_update
from eval.audit.recorded_update import RecordedUpdate
from eval.audit.tensor_names import with_model_names
from fl.capture import from_update


def refused(path):
    with pytest.raises(ValueError, match="expected tensors by parameter name") as caught:
        load_update(path)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "pt", "old", "safetensors"])
@pytest.mark.parametrize("ending", [".npz", ".pt", ".safetensors", ".dat", ""])
def test_the_bytes_of_a_file_say_what_it_is(tmp_path, kind, ending):
    update, path = change(network(), batch()), tmp_path / f"update{ending}"
    with path.open("wb") as file:
        if kind == "npz":
            np.savez(file, **{name: value.numpy() for name, value in update.items()})
        elif kind == "safetensors":
            save_file(update, tmp_path / "plain")
            file.write((tmp_path / "plain").read_bytes())
        else:
            torch.save(update, file, _use_new_zipfile_serialization=kind == "pt")
    found = load_update(path).update
    assert found.keys() == update.keys()
    assert all(torch.equal(found[name], value) for name, value in update.items())


def test_a_file_of_another_kind_is_named_with_the_way_on(tmp_path):
    path = tmp_path / "update.json"
    for held in ({"fc.weight": [[1.0]]}, [[0.5, 1.0]], {}):
        path.write_text(json.dumps(held, indent=2))
        said = refused(path)
        assert "got JSON: numpy.savez(" in said
        assert "open('update.json')" in said
        assert "pickle" not in said
    for first, word in (
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08", "gzip: unpack"),
        (b"GGUF", "GGUF"),
        (b"BZh9", "bzip2"),
    ):
        path.write_bytes(first + bytes(40))
        assert f"got {word}" in refused(path)
    (tmp_path / "adapter").mkdir()
    assert refused(tmp_path / "adapter").endswith("got a folder; give a file")
    (tmp_path / "adapter" / "after.safetensors").touch()
    assert refused(tmp_path / "adapter").endswith("got a folder; give a file in it: after.safetensors")


def test_tensors_without_numbers_are_refused_by_name(tmp_path):
    model, update = network(), change(network(), batch())
    bare = {name: value.to("meta") for name, value in update.items()}
    torch.save(bare, tmp_path / "u.pt")
    said = "under '0.weight' on the device meta, which has a shape and no numbers"
    assert said in refused(tmp_path / "u.pt")
    for call in (
        lambda: as_state(bare, "update"),
        lambda: load_pair(bare, bare),
        lambda: load_pair(None, tmp_path / "u.pt"),
        lambda: hyperleak.audit(model, update=bare, input_shape=SHAPE),
    ):
        with pytest.raises(ValueError, match="device meta, which has a shape and no"):
            call()
    with pytest.raises(ValueError, match=r"'0.weight' as numbers, got a tensor on the device meta"):
        from_update(model, bare, input_shape=SHAPE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantized_tensors_are_written_out(tmp_path):
    update = change(network(), batch())
    torch.save({name: value.to_sparse() for name, value in update.items()}, tmp_path / "u.pt")
    found = load_update(tmp_path / "u.pt")
    assert found.notes == ("sparse tensors were written out as plain numbers",)
    assert all(torch.equal(found.update[name], value) for name, value in update.items())
    scaled = {n: torch.quantize_per_tensor(v, float(v.abs().max()) / 127, 0, torch.qint8) for n, v in update.items()}
    torch.save({"state_dict": scaled}, tmp_path / "u.pt")
    found = load_update(tmp_path / "u.pt")
    assert found.notes[0] == "quantized tensors were written out as plain numbers"
    assert all(torch.equal(found.update[name], value.dequantize()) for name, value in scaled.items())
    large = torch.sparse_coo_tensor([[0], [0]], [1.0], (2**20, 2**20), check_invariants=True)
    torch.save({"0.weight": large}, tmp_path / "u.pt")
    assert "takes 4096.0 GiB as plain numbers" in refused(tmp_path / "u.pt")


def test_a_file_that_holds_itself_ends():
    held = {}
    held["inner"] = held
    with pytest.raises(ValueError, match="expected"):
        as_state(held, "update")


def test_bytes_without_their_scale_are_refused_with_the_formula():
    coarse = {name: (value * 100).to(torch.int8) for name, value in change(network(), batch()).items()}
    with pytest.raises(ValueError, match=r"torch.int8; integers stand for .* take \(values - zero_p"):
        from_update(network(), coarse, input_shape=SHAPE)


def test_names_have_other_characters_for_dots_or_more_of_wrappers():
    model, update = network(), change(network(), batch())
    for sign in "/:_":
        given = {name.replace(".", sign): value for name, value in update.items()}
        found = with_model_names(as_state(given, "update"), model)
        assert found.update.keys() == update.keys()
        assert f"names have dots in place of other characters: '0{sign}weight' is '0.weight'" in found.notes
    alike = torch.nn.ModuleDict({"a_b": torch.nn.Linear(1, 1), "a": torch.nn.ModuleDict({"b": torch.nn.Linear(1, 1)})})
    odd = {name.replace(".", "/"): value for name, value in alike.state_dict().items()}
    with pytest.raises(ValueError, match="give them without names"):  # two are alike: none is taken
        with_model_names(as_state(odd, "update"), alike)
    given = {f"_fsdp_wrapped_module.{name}": value for name, value in update.items()}
    assert with_model_names(as_state(given, "update"), model).update.keys() == update.keys()
    with pytest.raises(ValueError, match=r"got '_fsdp_wrapped_module._flat_param'.*FULL_STATE_DICT"):
        with_model_names(as_state({"_fsdp_wrapped_module._flat_param": torch.ones(5)}, "update"), model)


@pytest.mark.parametrize("length", [128, 384])
def test_a_header_of_any_length_is_one_of_safetensors(tmp_path, length):
    for width in range(1, 400):
        save_file({"w" * width: torch.ones(2)}, tmp_path / "u.safetensors")
        if int.from_bytes((tmp_path / "u.safetensors").read_bytes()[:8], "little") == length:
            break
    else:
        raise AssertionError(length)
    assert (tmp_path / "u.safetensors").read_bytes()[0] == 0x80  # as of a pickle
    assert load_update(tmp_path / "u.safetensors").update.keys() == {"w" * width}


def test_parts_of_tensors_are_refused_with_the_formula(tmp_path):
    update = change(network(), batch())
    places = {name: {"indices": value.flatten().nonzero(), "values": value.flatten()} for name, value in update.items()}
    scaled = {name: {"int_repr": value, "scale": 0.1, "zero_point": 3} for name, value in update.items()}
    for given, words in ((places, "t\\[indices\\] = values"), (scaled, r"\(values - zero_point\) \* scale")):
        torch.save(given, tmp_path / "u.pt")
        with pytest.raises(ValueError, match=f"got a dict under '0.weight': .*{words}"):
            load_update(tmp_path / "u.pt")
        flat = {f"{name}.{part}": torch.as_tensor(x) for name, parts in given.items() for part, x in parts.items()}
        with pytest.raises(ValueError, match=f"expected '0.weight' as the model has it, got .*{words}"):
            with_model_names(as_state(flat, "update"), network())


def test_adapters_of_several_names_and_kinds():
    class Adapted(torch.nn.Module):
        def __init__(self, names):
            super().__init__()
            self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2, bias=False) for name in names})
            self.lora_magnitude_vector = torch.nn.ModuleDict(
                {name: torch.nn.LayerNorm(2, bias=False) for name in names}
            )

    model = torch.nn.ModuleDict({"fc": Adapted(["default"])})
    given = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_magnitude_vector": torch.ones(2)}  # as PEFT writes DoRA
    found = with_model_names(as_state(given, "update"), model)
    assert set(found.update) == {"fc.lora_A.default.weight", "fc.lora_magnitude_vector.default.weight"}
    model = torch.nn.ModuleDict({"fc": Adapted(["first", "second"])})
    with pytest.raises(ValueError, match=r"the model has several \('first', 'second'\), got 'fc.lora_A.weight'"):
        with_model_names(as_state(given, "update"), model)


def test_parameters_that_are_no_real_numbers_are_passed_over_where_frozen_and_refused_where_not():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bits = torch.nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
            self.rest = network()
            self.turn = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, x):
            return self.rest(x) * self.turn.abs()

    model, data = Odd(), batch()
    update = {f"rest.{name}": value for name, value in change(network(), data).items()}
    with pytest.raises(ValueError, match=r"trained parameters of real numbers, got 'turn' in torch.complex64"):
        hyperleak.audit(model, update=update, input_shape=SHAPE, attacks=["analytic"])
    model.turn.requires_grad_(False)
    assert from_update(model, update, input_shape=SHAPE).update.keys() == update.keys()


def test_a_pruned_weight_goes_by_its_name_without_the_mask():
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    given = {name.replace("_orig", ""): torch.ones_like(value) for name, value in model.named_parameters()}
    found = with_model_names(as_state(given, "update"), model)
    assert found.update.keys() == {name for name, _ in model.named_parameters()}
    assert "0.weight: taken as the change of what the model multiplies with its mask" in found.notes
    with pytest.raises(ValueError, match=r"'0.weight_orig' as the pruned model has it, got '0.weight', which"):
        with_model_names(load_pair(None, given), model)
    with pytest.raises(ValueError, match=r"save model.state_dict\(\) before torch.nn.utils.prune.remove"):
        with_model_names(load_pair(given, given), model)


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_what_a_model_computes_is_refused_with_the_names_that_it_is_computed_from(normalize):
    model, update = network(), change(network(), batch())
    normalize(model[0])
    with pytest.raises(ValueError, match=r"computes '0.weight' from \(0\..*0\..*\), got their result"):
        with_model_names(as_state(update, "update"), model)


FORMS = [np.longdouble, ">f4", ">f8", ">f2", "<f8"]


@pytest.mark.parametrize("kind", FORMS)
def test_arrays_of_other_byte_orders_and_lengths_are_read(tmp_path, kind):
    update = {name: value.numpy().astype(kind) for name, value in change(network(), batch()).items()}
    np.savez(tmp_path / "u.npz", **update)
    np.save(tmp_path / "u.npy", np.concatenate([value.ravel() for value in update.values()]))
    recorded = RecordedUpdate(before=update, after=update)
    for found in (load_update(tmp_path / "u.npz").update, as_state(update, "update").update, recorded.before):
        for name, value in update.items():
            assert np.array_equal(found[name].double().numpy(), value.astype(np.float64))
    (vector,) = load_update(tmp_path / "u.npy").update.values()
    assert vector.shape == (sum(value.size for value in update.values()),)
    turned = as_state({"fc": np.arange(4.0)[::-1]}, "update").update["fc"]
    assert turned.tolist() == [3, 2, 1, 0]


def test_arrays_of_no_numbers_are_refused_or_left_out_by_name(tmp_path):
    numbers = np.ones(3, np.float32)
    np.savez(tmp_path / "u.npz", weight=numbers, framework=np.array("flower"), layers=np.array(["a", "b"]))
    assert load_update(tmp_path / "u.npz").notes == ("no tensors, so left out: framework, layers",)
    np.savez(tmp_path / "u.npz", weight=numbers.view("V4"))
    assert "got under 'weight' something else: expected numbers, got an array of |V4, as NumPy writes" in refused(
        tmp_path / "u.npz"
    )
    with pytest.raises(ValueError, match="got under 'day' something else: expected numbers, got an array of datetime"):
        as_state({"day": np.array(["2026-01-01"], "M8[D]")}, "update")
    with pytest.raises(ValueError, match="under 'weight' of float4_e2m1fn_x2, which packs numbers"):
        as_state({"weight": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "update")


def test_an_archive_of_an_unknown_version_is_called_damaged(tmp_path):
    path = tmp_path / "update.npz"
    np.savez(path, a=np.zeros((2, 3)))
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + 6] = 64
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"zip file version 6\.4"):
        load_update(path)
