"""Tensors beside their scales are written out as what they stand for, and images are asked beyond their rounding."""

import pytest
import torch
from safetensors.torch import save_file
from support.captured import SHAPE, batch, change, network

import hyperleak
from eval.audit.captured_files import as_state, load_pair, load_update
from eval.audit.tensor_names import with_model_names
from fl.methods.fedavg import FedAvg

STEP = FedAvg(lr=0.1, steps=1, batch_size=None)


def audited(update, count=2):
    return hyperleak.audit(
        network(), batch(count), update=update, batch_size=count, attacks=["analytic"], method=STEP, input_shape=SHAPE
    )


def coarse(form, kind, dims):
    """Every tensor of an update beside its scale, which is of all its numbers or of those that go by `dims`."""
    most = 127 if kind is torch.int8 else 448
    found = {}
    for name, value in change(network(), batch(2)).items():
        size = value.abs().amax(dims, keepdim=True) if value.ndim > 1 and dims else value.abs().max()
        scale = size.clamp(min=1e-30) / most
        whole = (value / scale).round() if kind is torch.int8 else value / scale
        found |= {name: whole.to(kind), form.format(name): scale}
    return found


FORMS = ["{}_scale", "{}.scale", "{}_scale_inv"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dims", [(), (1,), (0,)])
def test_numbers_of_one_byte_are_multiplied_with_their_scale(tmp_path, form, kind, dims):
    update, sent = change(network(), batch(2)), coarse(form, kind, dims)
    save_file(sent, tmp_path / "u.safetensors")
    torch.save({"state_dict": sent}, tmp_path / "u.pt")
    for given in (sent, tmp_path / "u.safetensors", tmp_path / "u.pt"):
        report = audited(given)
        assert report.mismatch == ""
        assert any("written out as (values - zero_point) * scale" in note for note in report.notes)
    found = with_model_names(load_update(tmp_path / "u.pt"), network())
    assert found.sent_as == f"{str(kind).removeprefix('torch.')} with a scale"
    for name, value in update.items():
        assert bool(((found.update[name] - value).abs() <= found.rounding[name]).all())
        assert bool((found.rounding[name] <= 0.1 * value.abs().max()).all())


def test_a_scale_may_be_a_number_of_python_or_one_for_all():
    sent = coarse("{}_scale", torch.int8, ())
    numbers = {name: float(value) if name.endswith("_scale") else value for name, value in sent.items()}
    update, largest = change(network(), batch(2)), 0.0
    largest = max(float(value.abs().max()) for value in update.values())
    shared = {name: (value * (127 / largest)).round().to(torch.int8) for name, value in update.items()}
    for given in (numbers, {"update": numbers}, {**shared, "scale": largest / 127}):
        assert audited(given).mismatch == ""
    parts = [{"0.weight": torch.ones(2), "scale": 2.0}, {"scale": torch.ones(1), "bias": torch.ones(3)}]
    assert as_state(parts[0], "update").update.keys() == {"0.weight"}  # of a loss, say
    assert as_state(parts[1], "update").update.keys() == {"scale", "bias"}  # a layer's own


def test_blocks_share_a_scale():
    value = torch.ones(192, 300, dtype=torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7).view(2, 3)
    found = as_state({"w": value, "w_scale_inv": scale}, "update").update["w"]
    assert found.shape == value.shape
    assert found[127, 127] == 1
    assert found[128, 128] == 5
    assert found[191, 299] == 6
    whole = as_state({"w": torch.ones(192, 256, dtype=torch.float8_e4m3fn), "w_scale": scale[:, :2]}, "update")
    assert whole.update["w"][[0, 127, 128], [0, 128, 128]].tolist() == [1, 2, 5]  # 96 would do for 192, not for 256
    told = r"nothing that tells for which numbers of 'w', \(300, 2\), 'w_scale', \(3, 1\), stands"
    with pytest.raises(ValueError, match=told):  # blocks of 100 or 128
        as_state({"w": torch.ones(300, 2, dtype=torch.int8), "w_scale": torch.ones(3, 1)}, "update")


def test_a_scale_of_all_tensors_is_not_that_of_counts():
    counted = {"n.num_batches_tracked": torch.tensor(3), "w": torch.ones(2, dtype=torch.int8), "scale": 0.5}
    found = as_state(counted, "update").update
    assert found["n.num_batches_tracked"] == 3
    assert found["w"].tolist() == [0.5, 0.5]


def test_a_zero_point_is_a_whole_number_that_the_integers_can_have():
    update, sent = change(network(), batch(2)), {}
    for name, value in update.items():
        step = (value.max() - value.min()) / 255
        zero = (-value.min() / step).round()
        sent |= {name: ((value / step).round() + zero).clamp(0, 255).to(torch.uint8), f"{name}_scale": step}
        sent[f"{name}_zero_point"] = zero
    assert audited(sent).mismatch == ""
    plain = {name: int(value) if name.endswith("zero_point") else value for name, value in sent.items()}
    assert audited(plain).mismatch == ""
    for kind, zero in (
        (torch.uint8, -0.37),
        (torch.uint8, 256.0),
        (torch.int8, torch.tensor(200)),
        (torch.float8_e5m2, 1),
        (torch.int8, float("nan")),
    ):
        given = {"w": torch.ones(4).to(kind), "w_scale": torch.tensor(0.1), "w_offset": zero}
        with pytest.raises(ValueError, match=r"'w_offset' that is no zero point of 'w'.* values \* scale \+ offset"):
            as_state(given, "update")


def test_no_scale_is_lost():
    model, update = network(), change(network(), batch())
    for name in ("0.weight_scale_2", "0.weight.absmax", "0.weight_mask", "0.weight_input_scale"):
        given = {**update, name: torch.ones(3)}
        with pytest.raises(ValueError, match=f"expected '0.weight' in plain numbers, got '{name}' beside it"):
            with_model_names(as_state(given, "update"), model)
    assert "left out" in with_model_names(as_state({**update, "0.weight_ema": torch.ones(3)}, "update"), model).notes[0]
    with pytest.raises(ValueError, match=r"got 0.5 under '0.weight_scale', which may be a factor of '0.weight'"):
        as_state({**update, "0.weight_scale": 0.5}, "update")
    own = {"w": torch.ones(3).to(torch.float8_e5m2), "w_scale": torch.ones(3).to(torch.float8_e5m2)}
    assert as_state(own, "update").update.keys() == own.keys()  # a parameter beside it, as coarse


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_quantized_tensors_keep_what_their_rounding_may_be():
    update = change(network(), batch(2))
    sent = {
        name: torch.quantize_per_channel(
            value, value.flatten(1).abs().amax(1) / 127, torch.zeros(len(value)), 0, torch.qint8
        )
        if value.ndim > 1
        else torch.quantize_per_tensor(value, float(value.abs().max()) / 127, 0, torch.qint8)
        for name, value in update.items()
    }
    assert audited(sent).mismatch == ""
    found = as_state(sent, "update")
    assert all(torch.allclose(found.update[name], value.dequantize()) for name, value in sent.items())
    assert found.rounding.keys() == update.keys()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [False, True])
def test_right_images_fit_an_update_in_few_bits(bits, rows):
    sent = {}
    for name, value in change(network(), batch(3)).items():
        size = value.abs().flatten(1).amax(1).view(-1, *[1] * (value.ndim - 1)) if rows and value.ndim > 1 else None
        step = (value.abs().max() if size is None else size) / (2 ** (bits - 1) - 1)
        sent[name] = (value / step).round() * step
    assert audited(sent, 3).mismatch == ""
    wrong = {**sent, "3.weight": sent["3.weight"].flip(0)}
    assert audited(wrong, 3).mismatch or bits == 4


def test_weights_with_scales_are_taken_before_and_after():
    model = network()
    sent = coarse("{}_scale", torch.int8, ())
    start = {name: 3 * value.float() if name.endswith("scale") else value for name, value in sent.items()}
    found = load_pair(start, sent)
    assert found.rounding.keys() == set(model.state_dict())
    assert found.sent_as == "int8 with a scale"
    for name, value in found.rounding.items():
        assert torch.allclose(value, torch.full_like(value, 4 * float(sent[f"{name}_scale"])))
