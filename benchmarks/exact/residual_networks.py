"""The networks of `benchmarks.exact.residual`: such as people train on small color images, each a plain module.

ResNets come from the registry (`fl.models`); the others as users write them, most from torchvision with the changes
that small images ask for. Every network takes pixels in [0, 1] and normalizes them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import fl.models
from fl.data.sources.npz_files import data_folder
from fl.models.building_blocks.layers import Normalize, usual_statistics
from fl.runtime.tensor_archives import read_arrays

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = usual_statistics(3)
Build = Callable[[], nn.Module]


# ---- architectures ---------------------------------------------------------------------------------------------------
class PreActivationBlock(nn.Module):
    """Batch norm and ReLU before each of two convolutions (He et al., ECCV 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(after), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, before, H, W) to (B, after, H / stride, W / stride)."""
        active = F.relu(self.bn1(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(F.relu(self.bn2(self.conv1(active)))) + skipped


class PreActivationResNet18(nn.Module):
    """ResNet-18 with its activations before the convolutions, for small images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        blocks, before = list[nn.Module](), 64
        for stage, after in enumerate((64, 128, 256, 512)):
            blocks += [PreActivationBlock(before, after, 2 if stage else 1), PreActivationBlock(after, after, 1)]
            before = after
        self.blocks, self.norm, self.fc = nn.Sequential(*blocks), nn.BatchNorm2d(before), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        return self.fc(F.relu(self.norm(self.blocks(self.conv1(x)))).mean((2, 3)))


class OptionABlock(nn.Module):
    """Two convolutions without biases, and a shortcut without parameters (option A of He et al., CVPR 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.stride, self.more = stride, (after - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, before, H, W) to (B, after, H / stride, W / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more)))


class CifarResNet(nn.Module):
    """The ResNets of 6 n + 2 layers for CIFAR-10, by the names that pre-trained weights have.

    Args:
        blocks: n, in each of three stages of 16, 32 and 64 channels.
    """

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2 = self._stage(16, 16, blocks), self._stage(16, 32, blocks)
        self.layer3, self.linear = self._stage(32, 64, blocks), nn.Linear(64, 10)

    @staticmethod
    def _stage(before: int, after: int, blocks: int) -> nn.Sequential:
        first = OptionABlock(before, after, 1 if before == after else 2)
        return nn.Sequential(first, *(OptionABlock(after, after, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 10)."""
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def vgg(name: str) -> nn.Module:
    """Torchvision's convolutions and max poolings, down to 1x1, and one linear layer."""
    whole = getattr(torchvision.models, name)()
    return nn.Sequential(whole.features, nn.Flatten(), nn.Linear(512, 10))


def densenet121() -> nn.Module:
    """Torchvision's DenseNet-121 with a 3x3 stem of stride 1 and no pooling after it."""
    model: Any = torchvision.models.densenet121(num_classes=10)
    model.features.conv0, model.features.pool0 = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def mobilenet() -> nn.Module:
    """Torchvision's MobileNet-v3 (small) with a stem of stride 1."""
    model: Any = torchvision.models.mobilenet_v3_small(num_classes=10)
    model.features[0][0].stride = (1, 1)
    return model


def convnext() -> nn.Module:
    """Torchvision's ConvNeXt-T as it is: its stem takes patches of 4x4."""
    return torchvision.models.convnext_tiny(num_classes=10)


# ---- weights ---------------------------------------------------------------------------------------------------------
def normalized(model: nn.Module, statistics: tuple[tuple[float, ...], tuple[float, ...]] = CIFAR) -> nn.Module:
    """Return the network behind a layer that normalizes pixels, in evaluation mode."""
    return nn.Sequential(Normalize(*statistics), model).eval()


def drawn(construct: Build, seed: int) -> nn.Module:
    """Return what `construct` makes where the global generator starts at `seed`; the generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        return construct()


def untrained(construct: Build, seed: int) -> nn.Module:
    """Return a network from the start that its constructor draws, behind CIFAR-10's normalization."""
    return normalized(drawn(construct, seed))


def registered(name: str, seed: int, classes: int = 10, **settings: Any) -> nn.Module:
    """Return a network of `fl.models` in evaluation mode."""
    return fl.models.build(name, num_classes=classes, seed=seed, **settings).model.eval()


def pretrained_resnet20() -> nn.Module:
    """Return the ResNet-20 whose weights lie in the data folder: 91.7 % of CIFAR-10's test images."""
    model = CifarResNet()
    arrays = read_arrays(data_folder() / "weights" / "cifar10_resnet20.npz")
    state = {name: torch.from_numpy(value) for name, value in arrays.items()}
    counts = {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    model.load_state_dict({**counts, **state})
    return normalized(model, IMAGENET)
