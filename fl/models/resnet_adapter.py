"""HyperFL-LPM's ResNet: a frozen ResNet-18 with an adapter after each of its four stages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fl.models import models
from fl.models.building_blocks.adapters import AdapterNetwork, Affine, ConvAdapter, backbone_parameters
from fl.models.building_blocks.pretrained import IMAGENET, RANDOM, fill_parameters, fold_batch_norm, read_weights
from fl.ranges import Range, Width


@models.register("resnet18-adapter")
@dataclass(frozen=True, kw_only=True)
class ResNetAdapter(AdapterNetwork):
    """ResNet-18 (He et al., CVPR 2016) with the adapters of HyperFL-LPM (Guo et al., AAAI 2025, appendix D.1).

    A(x) = BN(x + conv1x1(BN(x))) after each stage; 352,000 adapter parameters. The backbone's batch norm has fixed
    statistics (`Affine`), as in evaluation mode, in which the authors train. Their code puts a frozen random layer of
    128 features before the classifier, which the paper does not mention: here the head takes the pooled features.

    Attributes:
        stages: how many of the stages layer1 to layer4 there are, in [1, 4]; published weights that end after layer3
            need 3.
        blocks: residual blocks per stage.
        width: channels of the first stage; each further one has twice as many.
    """

    statistics: ClassVar = {
        3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        1: ((0.449,), (0.226,)),  # the mean over ImageNet's channels
    }

    stages: Annotated[int, Range(1, 4)] = 4
    blocks: Annotated[int, Range(1, 100)] = 2
    width: Width = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.stages <= 4:
            raise ValueError(f"expected stages in [1, 4], got {self.stages}")
        if self.blocks < 1 or self.width < 1:
            raise ValueError(f"expected blocks and width >= 1, got {self.blocks} and {self.width}")

    @classmethod
    def example(cls) -> ResNetAdapter:
        """Return two narrow stages of one block."""
        return cls(stages=2, blocks=1, width=4, image_size=16, input_shape=(1, 8, 8))

    def backbone(self) -> OrderedDict[str, nn.Module]:
        """Return the layers of torchvision under its names, an adapter after each stage."""
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(3, self.width, 7, stride=2, padding=3, bias=False),
            bn1=Affine(self.width),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = self.width
        for stage in range(1, self.stages + 1):
            layers[f"layer{stage}"] = self._stage(channels, self.width * 2 ** (stage - 1), 1 if stage == 1 else 2)
            channels = self.width * 2 ** (stage - 1)
            if self.has_adapters:
                layers[f"adapter{stage}"] = ConvAdapter(channels)
        return layers | {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}

    def _stage(self, before: int, channels: int, stride: int) -> nn.Sequential:
        from torchvision.models.resnet import BasicBlock  # takes as long to import as torch itself

        shortcut = None
        if stride != 1:
            shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), Affine(channels))
        first = BasicBlock(before, channels, stride, shortcut, norm_layer=Affine)
        rest = [BasicBlock(channels, channels, norm_layer=Affine) for _ in range(self.blocks - 1)]
        return nn.Sequential(first, *rest)

    def fill(self, body: nn.Module, generator: torch.Generator) -> None:
        """A random start as torchvision draws it, or pre-trained weights without later stages and classifier."""
        parameters = backbone_parameters(body)
        if self.weights == RANDOM:
            _draw(parameters, generator)
            return
        found = fold_batch_norm(_imagenet() if self.weights == IMAGENET else read_weights(self.weights))
        unused = ("fc.", *(f"layer{stage}." for stage in range(self.stages + 1, 5)))
        fill_parameters(
            parameters, {n: v for n, v in found.items() if not n.startswith(unused)}, f"weights {self.weights!r}"
        )


def _draw(parameters: dict[str, Tensor], generator: torch.Generator) -> None:
    """He's normal start for convolutions, the identity for what stands in for batch norm."""
    for name, value in parameters.items():
        if value.ndim == 4:
            nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu", generator=generator)
        else:
            nn.init.constant_(value, 1.0 if name.endswith("weight") else 0.0)


def _imagenet() -> dict[str, Tensor]:
    from torchvision.models import ResNet18_Weights

    return dict(ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True))
