"""Updates under the names of Keras, Flax, Haiku and ONNX exports, in a torch model's names and layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hyperleak
from eval.audit.captured_files import as_state, load_pair
from eval.audit.tensor_names import with_model_names

SHAPE = (3, 8, 8)
MAPS = (6, 3, 3)
LAYERS = {
    "Conv2d": ("conv2d", "Conv"),
    "Linear": ("dense", "Dense"),
    "BatchNorm2d": ("batch_normalization", "BatchNorm"),
}
WORDS = {
    "keras": {"running_mean": "moving_mean", "running_var": "moving_variance", "bias": "beta", "weight": "gamma"},
    "flax": {"running_mean": "mean", "running_var": "var", "bias": "bias", "weight": "scale"},
}


class Network(nn.Module):
    """Two convolutions of one shape and batch norm, then two square matrices."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.last = channels_last
        self.one = nn.Conv2d(3, 6, 3, padding=1)
        self.two, self.three = nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.inner, self.next, self.out = nn.Linear(54, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.three(self.two(self.one(x))).relu()), 2)
        x = x.permute(0, 2, 3, 1) if self.last else x
        return self.out(self.next(self.inner(x.flatten(1)).relu()).relu())


def state(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(value.shape, generator=draw)
        for name, value in Network().state_dict().items()
        if value.is_floating_point()
    }


def theirs(tensors: dict[str, Tensor], framework: str, *, reorder: bool = True) -> dict[str, Tensor]:
    """The same tensors as the other framework has them."""
    model, counts, layers, found = Network(), dict[str, int](), dict[str, str](), {}
    for name, value in tensors.items():
        layer, _, last = name.rpartition(".")
        kind = type(model.get_submodule(layer)).__name__
        if layer not in layers:
            number = counts[kind] = counts.get(kind, -1) + 1
            keras, flax = LAYERS[kind]
            layers[layer] = f"{keras}_{number}" if number else keras
            layers[layer] = f"{flax}_{number}" if framework == "flax" else layers[layer]
        word = WORDS[framework][last]
        if kind != "BatchNorm2d":
            word = "kernel" if last == "weight" else "bias"
            if name == "inner.weight" and reorder:
                value = value.reshape(-1, *MAPS).permute(0, 2, 3, 1).flatten(1)
            value = value.T if value.ndim == 2 else value.permute(2, 3, 1, 0) if value.ndim == 4 else value
        part = "batch_stats" if "running" in last else "params"
        found[f"{part}/{layers[layer]}/{word}" if framework == "flax" else f"{layers[layer]}/{word}:0"] = value
    return found


@pytest.mark.parametrize("framework", ["keras", "flax"])
@pytest.mark.parametrize("order", [1, -1])
def test_names_of_another_framework_are_brought_over(framework: str, order: int) -> None:
    """Layers of one shape go by the numbers in their names, whatever the order of the file."""
    model, goal = Network(), state(0)
    given = dict(list(theirs(goal, framework).items())[::order])
    found = with_model_names(as_state(given, "update"), model, SHAPE)
    assert all(torch.equal((found.update | found.buffers)[name], value) for name, value in goal.items())
    (note, *_) = found.notes
    assert "kernel(s) turned from (in, out)" in note
    assert "square ones as well" in note
    assert "rows of inner.weight put from (height, width, channel)" in note


@pytest.mark.parametrize("before", ["model", "theirs", "mine"])
def test_weights_before_and_after_are_brought_over(before: str) -> None:
    model, first, last = Network(), state(0), state(1)
    model.load_state_dict(first, strict=False)
    start = {"model": None, "theirs": theirs(first, "keras"), "mine": first}[before]
    found = with_model_names(load_pair(start, theirs(last, "keras")), model, SHAPE)
    assert all(torch.equal(value, first[name] - last[name]) for name, value in found.update.items())
    assert len(found.update) == len(list(model.parameters()))


def test_arrays_as_keras_returns_them_are_brought_over() -> None:
    goal = state(0)
    found = with_model_names(as_state(list(theirs(goal, "keras").values()), "update"), Network(), SHAPE)
    assert all(torch.equal((found.update | found.buffers)[name], value) for name, value in goal.items())
    assert "taken in Keras's order" in found.notes[0]


def test_leaves_as_flax_returns_them_are_brought_over() -> None:
    goal = {name: value for name, value in state(0).items() if "running" not in name}
    given = theirs(goal, "flax")
    pairs = [list(given.values())[place : place + 2][::-1] for place in range(0, len(given), 2)]
    found = with_model_names(as_state([one for pair in pairs for one in pair], "update"), Network(), SHAPE)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


def test_rows_stay_where_the_model_flattens_channels_last() -> None:
    goal = state(0)
    found = with_model_names(as_state(theirs(goal, "keras", reorder=False), "update"), Network(True), SHAPE)
    assert torch.equal(found.update["inner.weight"], goal["inner.weight"])
    assert "rows" not in found.notes[0]


def test_an_unknown_order_of_channels_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"'inner.weight' takes flattened channels.*permute\(3, 2, 0, 1\)"):
        with_model_names(as_state(theirs(state(0), "keras"), "update"), Network())


def test_kernels_that_lie_as_in_torch_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = dict(
        zip(
            ("params.Dense_0.kernel", "params.Dense_0.bias", "params.Dense_1.kernel", "params.Dense_1.bias"),
            goal.values(),
            strict=True,
        )
    )
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())
    assert "no kernel was turned" in found.notes[0]


def test_weights_of_an_onnx_export_are_turned_and_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = {"onnx::MatMul_12": goal["3.weight"].T, "onnx::MatMul_9": goal["2.weight"].T}
    given |= {"onnx::Conv_3": goal["0.weight"], **{name: goal[name] for name in goal if name.endswith("bias")}}
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("left/kernel", "right/kernel"), "nothing tells which is which"),
        (("dense/kernel", "lstm/lstm_cell/recurrent_kernel"), "weight_hh_l0"),
        (("dense/kernel",), "of which the model has 2 and the file 1"),
        (("dense/kernel", "dense_1/mystery"), "got 'dense_1/mystery'"),
        (("onnx::MatMul_1", "0.gain"), "got '0.gain'"),
    ],
)
def test_what_can_not_be_told_is_refused_with_a_recipe(names: tuple[str, ...], said: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with pytest.raises(ValueError, match=r"bring them over by hand: \{'0.weight': torch.as_tensor") as refused:
        with_model_names(as_state({name: torch.rand(8, 8) for name in names}, "update"), model)
    assert said in str(refused.value)


def test_a_picture_comes_out_of_an_update_of_keras() -> None:
    """In torch's order of channels, which the whole update bears out."""
    model, label = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Sigmoid(), nn.Linear(16, 4)), torch.tensor([3])
    picture = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(picture), label), list(model.parameters()))
    one, one_bias, two, two_bias = (0.1 * part for part in gradient)
    rows = one.reshape(-1, 3, 4, 4).permute(0, 2, 3, 1).flatten(1).T
    update = {"dense/kernel:0": rows, "dense/bias:0": one_bias, "dense_1/kernel:0": two.T, "dense_1/bias:0": two_bias}
    how = {"method": {"name": "fedavg", "lr": 0.1, "steps": 1}, "attacks": ["analytic"]}
    report = hyperleak.audit(model, picture, label, update=update, **how)
    assert report.best("psnr") > 60


def test_haiku_s_dictionaries_by_layer_are_brought_over() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = {
        layer: {"w": goal[f"{place}.weight"].T, "b": goal[f"{place}.bias"]}
        for place, layer in enumerate(("linear", "linear_1"))
    }
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


def test_kernels_of_depthwise_convolutions_are_brought_over() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, bias=False), nn.Conv2d(6, 4, 1, bias=False))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = {
        "depthwise_conv2d/depthwise_kernel:0": goal["0.weight"].reshape(3, 2, 3, 3).permute(2, 3, 0, 1),
        "conv2d/kernel:0": goal["1.weight"].permute(2, 3, 1, 0),
    }
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


def test_a_transposed_convolution_is_refused_with_why() -> None:
    given = {"conv2d_transpose/kernel": torch.rand(2, 2, 4, 8), "conv2d_transpose/bias": torch.rand(4)}
    with pytest.raises(ValueError, match="whether its kernel is mirrored differs between frameworks"):
        with_model_names(as_state(given, "update"), nn.ConvTranspose2d(8, 4, 2))


@pytest.mark.parametrize("order", [1, -1])
def test_layers_inside_others_go_by_the_numbers_of_all_parts(order: int) -> None:
    names = ("block/dense", "block/dense_1", "block_1/dense", "block_1/dense_1")
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in names))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = {f"{name}/kernel": value.T for name, value in zip(names, goal.values(), strict=True)}
    found = with_model_names(as_state(dict(list(given.items())[::order]), "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


@pytest.mark.parametrize("names", [("a_1_dense", "a_dense_1"), ("left1", "right2")])
def test_names_that_numbers_do_not_order_are_refused(names: tuple[str, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in names))
    with pytest.raises(ValueError, match="not told apart by numbers alone: nothing tells which is which"):
        with_model_names(as_state({f"{name}/kernel": torch.rand(4, 4) for name in names}, "update"), model)


def test_kernels_that_fit_in_order_only_as_they_lie_are_refused() -> None:
    """An autoencoder's, of which the first turned has the shape of the last."""
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False))
    given = {"dense/kernel": model[0].weight, "dense_1/kernel": model[1].weight}
    with pytest.raises(ValueError, match="nothing tells how they lie"):
        with_model_names(as_state(given, "update"), model)
    found = with_model_names(as_state({name: value.T for name, value in given.items()}, "update"), model)
    assert torch.equal(found.update["0.weight"], model[0].weight)


def test_layers_of_one_shape_are_told_apart_by_their_statistics() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False)
    )
    goal = {name: torch.rand(value.shape) for name, value in model.state_dict().items() if value.ndim}
    names = {"0": "dense", "1": "batch_normalization_1", "2": "layer_normalization", "3": "dense_1"}
    names["4"] = "batch_normalization"
    given = {}
    for name, value in goal.items():
        layer, _, last = name.partition(".")
        word = "kernel" if value.ndim == 2 else WORDS["keras"][last]
        given[f"{names[layer]}/{word}"] = value.T if value.ndim == 2 else value
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal((found.update | found.buffers)[name], value) for name, value in goal.items())


def test_numbered_tensors_are_what_their_layers_have() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(20, 8, bias=False), nn.BatchNorm1d(8, affine=False))
    table, kernel, mean, spread = (torch.rand(shape) for shape in ((20, 8), (20, 8), (8,), (8,)))
    given = {"embedding/vars/0": table, "dense/vars/0": kernel}
    given |= {"batch_normalization/vars/0": mean, "batch_normalization/vars/1": spread}
    found = with_model_names(as_state(given, "update"), model)
    assert torch.equal(found.update["0.weight"], table)
    assert torch.equal(found.update["1.weight"], kernel.T)
    assert torch.equal(found.buffers["2.running_mean"], mean)


def test_batch_normalization_without_scale_is_not_taken_for_one_with_it() -> None:
    """Its offset, mean and variance under numbers."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    given = {"dense/vars/0": torch.rand(4, 6), "dense/vars/1": torch.rand(6)}
    given |= {f"batch_normalization/vars/{place}": torch.rand(6) for place in range(3)}
    with pytest.raises(ValueError, match="got 'batch_normalization/vars/0'"):
        with_model_names(as_state(given, "update"), model)


@pytest.mark.parametrize("layer", ["conv_dw_1", "depthwise_block/depthwise_conv2d", "depthwise/conv2d"])
def test_depthwise_kernels_are_known_by_shape(layer: str) -> None:
    """Whatever their layers are called, and though the block is called so as well."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 6, 1, bias=False))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    given = {f"{layer}/kernel": goal["0.weight"].permute(2, 3, 0, 1)}
    given["depthwise/pointwise/kernel"] = goal["1.weight"].permute(2, 3, 1, 0)
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


def test_a_separable_convolution_is_refused_with_its_two_parts() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 6, 1, bias=False))
    given = {"separable_conv2d/depthwise_kernel": torch.rand(3, 3, 4, 1)}
    given["separable_conv2d/pointwise_kernel"] = torch.rand(1, 1, 4, 6)
    with pytest.raises(ValueError, match=r"two of torch, depthwise_kernel.permute\(2, 3, 0, 1\)"):
        with_model_names(as_state(given, "update"), model)


def test_leaves_of_flax_come_by_the_names_of_layers() -> None:
    """Batch normalization before convolutions, and the eleventh matrix before the third."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *(nn.Linear(8, 8) for _ in range(9)), nn.Linear(8, 3))
    goal = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    places = ["1", "0", "2", "11", *(str(place) for place in range(3, 11))]
    each = [goal[f"{place}.{last}"] for place in places for last in ("bias", "weight")]
    given = [value.T if value.ndim == 2 else value for value in each]
    found = with_model_names(as_state(given, "update"), model)
    assert all(torch.equal(found.update[name], value) for name, value in goal.items())


def test_arrays_of_a_transposed_convolution_are_not_taken_in_the_order_of_keras() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, bias=False), nn.Conv2d(3, 4, 3, bias=False))
    with pytest.raises(ValueError, match="arrays without names"):
        with_model_names(as_state([torch.rand(3, 3, 3, 3), torch.rand(3, 3, 3, 4)], "update"), model)
