"""Frozen networks with adapters: their formulas, their weights, what of them trains."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from reference import adapter_networks
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models import resnet18

from fl.models import build, models
from fl.models.building_blocks.adapters import Bottleneck, ConvAdapter, backbone_parameters
from fl.models.building_blocks.layers import Classifier
from fl.models.building_blocks.pretrained import fill_parameters, fold_batch_norm, read_weights
from fl.models.resnet_adapter import ResNetAdapter
from fl.models.vit_adapter import ViTAdapter
from fl.seeds import stream
from fl.types import Task

TRUNK = "weights/resnet18_imagenet_to_layer3_bnfolded_fp16.npz"
needs_trunk = pytest.mark.skipif(
    not Path(os.environ.get("HYPERLEAK_DATA", ""), TRUNK).is_file(), reason="HYPERLEAK_DATA has no weights of a trunk"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "resnet18-adapter": {"stages": 2, "blocks": 1, "size": 16},
    "vit-adapter": {"depth": 2, "heads": 2, "patch": 4, "size": 8},
}
BOTH = pytest.mark.parametrize("name", list(SETTINGS))


def tiny(name: str, **settings: Any) -> Task:
    network = replace(dict(models.examples())[name], **settings)
    return network.build_task(num_classes=3, seed=0).to(dtype=torch.float64)


def images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=stream(0, "images"), dtype=torch.float64)


@pytest.mark.parametrize("train", ["adapters", "fixed-adapters", "head", "all"])
@pytest.mark.parametrize("channels", [1, 3])
@BOTH
def test_networks_equal_their_formulas(name: str, channels: int, train: str) -> None:
    task = tiny(name, input_shape=(channels, 8, 8), train=train)
    draw = stream(0, "weights")
    weights = {n: torch.randn(p.shape, generator=draw).double() * 0.3 for n, p in task.model.named_parameters()}
    x = images(2, channels, 8, 8)
    mean, std = task.normalization(x)
    formula = getattr(adapter_networks, name[:3].replace("res", "resnet"))
    expected = formula(weights, (x - mean) / std, **SETTINGS[name])
    actual = functional_call(task.model.eval(), weights, (x,))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@BOTH
def test_settings_say_what_trains(name: str) -> None:
    trained = {}
    for train in ("adapters", "fixed-adapters", "head", "all"):
        model = tiny(name, train=train).model
        trained[train] = {n for n, p in model.named_parameters() if p.requires_grad}
        adapters = [m for m in model.modules() if isinstance(m, Bottleneck | ConvAdapter)]
        assert len(adapters) == (2 if "adapters" in train else 0)
    assert trained["head"] == trained["fixed-adapters"] == {"head.weight", "head.bias"}
    assert {n for n in trained["adapters"] if "adapter" not in n} == trained["head"]
    assert trained["all"] == {n for n, _ in tiny(name, train="all").model.named_parameters()}


@pytest.mark.parametrize(
    ("network", "count", "extra"),
    [
        (ResNetAdapter(), 352_000, 1e-5),
        (ResNetAdapter(stages=3), 87_808, 1e-5),
        (ViTAdapter(), 235_296, 1e-5),
    ],
)
def test_adapters_have_the_published_size(network: Any, count: int, extra: float) -> None:
    with torch.device("meta"):
        model = Classifier(None, network.body(), network.input_shape, 10)
    generated = [p.numel() for n, p in model.named_parameters() if p.requires_grad and not n.startswith("head.")]
    assert sum(generated) == count
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.weight.requires_grad]
    assert all(norm.eps == extra for norm in norms)


def test_the_transformer_is_timms() -> None:
    network = ViTAdapter(train="head", depth=1, image_size=32, width=24, heads=3)
    task = network.build_task(num_classes=3, seed=0)
    other = timm.models.vision_transformer.VisionTransformer(
        img_size=32, embed_dim=24, depth=1, num_heads=3, num_classes=0
    )
    body = task.model.get_submodule("body")
    other.load_state_dict({n.removeprefix("vit."): p for n, p in backbone_parameters(body).items()})
    x = torch.rand(2, 3, 32, 32, generator=stream(0, "images"))
    torch.testing.assert_close(task.model.body(x), other(x))
    with torch.device("meta"):
        published = dict(timm.create_model("vit_small_patch16_384", num_classes=0).named_parameters())
        mine = dict(ViTAdapter(train="head").body().named_parameters())
    assert {n.removeprefix("vit."): p.shape for n, p in mine.items()} == {n: p.shape for n, p in published.items()}


def _torchvision() -> nn.Module:
    with torch.device("meta"):  # nothing is drawn from the global generator
        model = resnet18()
    model.to_empty(device="cpu")
    draw = stream(0, "torchvision")
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                value.uniform_(0.5, 2, generator=draw)
            elif value.is_floating_point():
                value.normal_(1.0 if "bn" in name or "downsample.1" in name else 0.0, 0.05, generator=draw)
    return model.eval()


def test_a_state_of_torchvision_gives_torchvisions_features(tmp_path: Path) -> None:
    model = _torchvision()
    torch.save(model.state_dict(), tmp_path / "resnet.pth")
    task = build("resnet18-adapter", num_classes=3, train="head", weights=str(tmp_path / "resnet.pth"), normalize=False)
    x = torch.rand(1, 3, 64, 64, generator=stream(0, "images"))
    model.fc = nn.Identity()
    torch.testing.assert_close(task.model.body(x), model(x), rtol=1e-4, atol=1e-4)


@needs_trunk
def test_the_trunk_in_the_data_folder_is_torchvisions_up_to_layer3() -> None:
    task = build("resnet18-adapter", num_classes=3, train="head", weights=TRUNK, stages=3, normalize=False)
    model, state = _torchvision(), {}
    for key, value in read_weights(TRUNK).items():
        layer, kind = key.rsplit(".", 1)
        down = "downsample" in layer
        norm = layer.replace("downsample.0", "downsample.1") if down else f"{layer[:-5]}bn{layer[-1]}"
        state |= {key: value} if kind == "weight" else {f"{norm}.bias": value, f"{norm}.weight": torch.ones_like(value)}
        if kind == "bias":
            state |= {f"{norm}.running_mean": 0 * value, f"{norm}.running_var": 0 * value + 1 - 1e-5}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    model.layer4 = model.fc = nn.Identity()
    x = torch.rand(2, 3, 64, 64, generator=stream(0, "images"))
    torch.testing.assert_close(task.model.body(x), model(x), rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in task.model.body.parameters())


def test_weights_are_loaded_strictly(tmp_path: Path) -> None:
    network = replace(dict(models.examples())["resnet18-adapter"], weights=str(tmp_path / "mine.npz"))

    def saved(state: dict[str, Tensor]) -> None:
        np.savez(tmp_path / "mine.npz", **{n: v.numpy() for n, v in state.items()})

    with pytest.raises(FileNotFoundError, match=r"no weights .*mine\.npz"):
        network.build_task(num_classes=3)
    source = replace(network, weights="random").build_task(num_classes=3, seed=5).model.get_submodule("body")
    state = {n: p.detach() for n, p in backbone_parameters(source).items()}
    saved({**state, "fc.weight": torch.zeros(3), "layer3.0.conv1.weight": torch.zeros(1)})  # of what comes later
    loaded = network.build_task(num_classes=3, seed=0).model.get_submodule("body")
    for name, value in backbone_parameters(loaded).items():
        assert torch.equal(value, state[name])
    saved({n: v for n, v in state.items() if n != "conv1.weight"})
    with pytest.raises(ValueError, match=r"got no 'conv1\.weight'"):
        network.build_task(num_classes=3)
    saved({**state, "conv9.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"got 'conv9\.weight', which the network has not"):
        network.build_task(num_classes=3)
    saved({**state, "conv1.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"expected 'conv1\.weight' of shape \(4, 3, 7, 7\)"):
        network.build_task(num_classes=3)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"expected weights in a file"):
        read_weights(str(tmp_path / "mine.txt"))


def test_both_forms_of_folding_agree() -> None:
    draw = stream(0, "fold")
    weight, mean, variance, gamma, beta = (torch.rand(4, generator=draw) + 0.5 for _ in range(5))
    convolution = weight.view(4, 1, 1, 1)
    state = {"conv1.weight": convolution, "bn1.weight": gamma, "bn1.bias": beta}
    statistics = {"bn1.running_mean": mean, "bn1.running_var": variance, "bn1.num_batches_tracked": torch.tensor(3)}
    one = fold_batch_norm({**state, **statistics})
    scale = gamma / (variance + 1e-5).sqrt()
    other = fold_batch_norm({"conv1.weight": convolution * scale.view(-1, 1, 1, 1), "conv1.bias": beta - mean * scale})
    assert one.keys() == other.keys() == state.keys()
    for found in (one, other):
        product = found["conv1.weight"].flatten() * found["bn1.weight"]
        torch.testing.assert_close(product, weight * scale)
        torch.testing.assert_close(found["bn1.bias"], beta - mean * scale)


def test_a_random_backbone_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    network = dict(models.examples())["resnet18-adapter"]
    replace(network, train="all").build_task(num_classes=3)
    assert not caplog.records
    network.build_task(num_classes=3)
    assert "random, not pre-trained" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image_size": 0}, "image_size: expected a whole number >= 1 or null, got 0"),
        ({"stages": 5}, r"stages: expected a whole number in \[1, 4\], got 5"),
        ({"blocks": 0}, r"blocks: expected a whole number in \[1, 100\], got 0"),
        ({"input_shape": (2, 8, 8)}, "expected images of 1 or 3 channels"),
        ({"name": "vit-adapter", "image_size": 10}, "expected image_size as a multiple of patch 16, got 10"),
        ({"name": "vit-adapter", "heads": 5}, "expected heads that divide width 384, got 5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        models.build({"name": "resnet18-adapter", **settings})
    with pytest.raises(ValueError, match=r"expected reduction in \[1, 4\], got 5"):
        Bottleneck(4, reduction=5)
    with pytest.raises(ValueError, match="which the network has not"):
        fill_parameters({}, {"a": torch.zeros(1)}, "x")


def test_without_timm_the_transformer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[lpm\]' in the folder of hyperleak"):
        ViTAdapter.example().build_task(num_classes=3)
