"""The networks of pFedHN and HyperGenFL: sizes, starts and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models import resnet18, resnet34, resnet50

from fl.models import build


def count(**settings: Any) -> int:
    name = settings.pop("name")
    return sum(v.numel() for v in build(name, **settings).parameters.values())


def test_simple_cnn_has_the_published_sizes() -> None:
    assert count(name="simple-cnn", num_classes=10) == 62_006
    assert count(name="simple-cnn", num_classes=10, channels=(16, 32)) == 121_182
    task = build("simple-cnn", num_classes=10, input_shape=(1, 28, 28))
    assert task.parameters["body.fc1.weight"].shape == (120, 256)


def test_simple_cnn_is_the_plain_network() -> None:
    task = build("simple-cnn", num_classes=10, channels=(16, 32), normalize=False)
    w = task.parameters
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x: Tensor = images
    for i in (1, 2):
        x = nn.functional.conv2d(x, w[f"body.conv{i}.weight"], w[f"body.conv{i}.bias"])
        x = nn.functional.max_pool2d(torch.relu(x), 2)
    x = x.flatten(1)
    for i in (1, 2):
        x = torch.relu(nn.functional.linear(x, w[f"body.fc{i}.weight"], w[f"body.fc{i}.bias"]))
    expected = nn.functional.linear(x, w["head.weight"], w["head.bias"])
    torch.testing.assert_close(task.model(images), expected, rtol=1e-5, atol=1e-6)


def test_resnet50_is_torchvisions() -> None:
    task = build("resnet50", num_classes=7, stem="imagenet", normalize=False, input_shape=(3, 64, 64))
    plain = resnet50(num_classes=7).eval()
    named = {name.removeprefix("body.").replace("head.", "fc."): v for name, v in task.model.state_dict().items()}
    assert named.keys() == plain.state_dict().keys()
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(task.model.eval()(images), functional_call(plain, named, images))
    assert sum(v.numel() for v in task.parameters.values()) == 23_508_032 + 2049 * 7
    for name in ("body.conv1.weight", "body.layer3.0.conv2.weight"):
        weight = task.parameters[name]
        fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)


@pytest.mark.parametrize(
    ("name", "plain", "numbers"), [("resnet18", resnet18, 11_168_832), ("resnet34", resnet34, 21_276_992)]
)
def test_smaller_resnets_are_torchvisions(name: str, plain: Callable[..., nn.Module], numbers: int) -> None:
    task = build(name, num_classes=7, normalize=False)
    like = plain(num_classes=7).eval()
    like.conv1, like.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    named = {n.removeprefix("body.").replace("head.", "fc."): v for n, v in task.model.state_dict().items()}
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(task.model.eval()(images), functional_call(like, named, images))
    assert sum(v.numel() for v in task.parameters.values()) == numbers + 513 * 7


@pytest.mark.parametrize(("norm", "groups"), [("group", 2), ("layer", 1)])
def test_resnet18_can_do_without_batch_norm(norm: str, groups: int) -> None:
    modules = list(build("resnet18", num_classes=7, norm=norm).model.modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)
    assert {module.num_groups for module in modules if isinstance(module, nn.GroupNorm)} == {groups}


def test_resnet50_for_small_images_keeps_their_size_at_first() -> None:
    task = build("resnet50", num_classes=10)
    assert sum(v.numel() for v in task.parameters.values()) == 23_500_352 + 20_490
    assert task.parameters["body.conv1.weight"].shape == (64, 3, 3, 3)
    assert not any(isinstance(m, nn.ReLU) and m.inplace for m in task.model.modules())
    seen: list[torch.Size] = []
    task.model.body.layer1.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    task.model(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert seen == [(2, 256, 32, 32)]
