"""HyperFL-LPM's vision transformer: a frozen ViT-S/16 of timm with an adapter in each block."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fl.models import models
from fl.models.building_blocks.adapters import AdapterNetwork, Bottleneck, backbone_parameters
from fl.models.building_blocks.pretrained import IMAGENET, RANDOM, fill_parameters, read_weights
from fl.ranges import Range, Width

TIMM = "vit_small_patch16_384"


@models.register("vit-adapter")
@dataclass(frozen=True, kw_only=True)
class ViTAdapter(AdapterNetwork):
    """ViT-S/16 at 384 pixels (Dosovitskiy et al., ICLR 2021) with the adapters of HyperFL-LPM (Guo et al., AAAI 2025).

    Each block adds A(mlp(norm(x))) to x, with A(u) = u + LayerNorm(W_up relu(W_down u)) of 24 hidden units: 235,296
    adapter parameters. The head takes the class token after the last norm. The queries, keys and values keep their
    biases, which the authors' code loses on loading. The network is timm's (`pip install '.[lpm]'` in the folder of
    hyperleak).

    Attributes:
        patch: height and width of a patch.
        width: of a token.
        depth: blocks.
        heads: of the attention, a divisor of `width`.
        reduction: the adapters' hidden layer has `width // reduction` units.
    """

    statistics: ClassVar = {3: ((0.5,) * 3, (0.5,) * 3), 1: ((0.5,), (0.5,))}  # of timm's weights

    image_size: Width | None = 384
    patch: Width = 16
    width: Width = 384
    depth: Annotated[int, Range(1, 100)] = 12
    heads: Width = 6
    reduction: Width = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is None or self.image_size % self.patch:
            raise ValueError(f"expected image_size as a multiple of patch {self.patch}, got {self.image_size}")
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"expected heads that divide width {self.width}, got {self.heads}")

    @classmethod
    def example(cls) -> ViTAdapter:
        """Return two narrow blocks on four patches."""
        settings = {"image_size": 8, "patch": 4, "width": 8, "depth": 2, "heads": 2, "reduction": 2}
        return cls(input_shape=(1, 8, 8), **settings)  # type: ignore[arg-type]

    def backbone(self) -> OrderedDict[str, nn.Module]:
        """Return the transformer of timm without a classifier, an adapter behind the perceptron of each block.

        Raises:
            ModuleNotFoundError: timm is not installed.
        """
        network = _timm().models.vision_transformer.VisionTransformer(
            img_size=self.image_size,
            patch_size=self.patch,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            num_classes=0,
        )
        for block in network.blocks:
            block.attn.fused_attn = False  # the fused kernel has no second derivative, which attacks take
            if self.has_adapters:
                adapter = Bottleneck(self.width, self.reduction)
                block.mlp = nn.Sequential(OrderedDict([("mlp", block.mlp), ("adapter", adapter)]))
        return OrderedDict(vit=network)

    def fill(self, body: nn.Module, generator: torch.Generator) -> None:
        """A random start as timm draws it, or pre-trained weights without their classifier."""
        own = {_timms_name(name): value for name, value in backbone_parameters(body).items()}
        if self.weights == RANDOM:
            _draw(own, generator)
            return
        found = _imagenet() if self.weights == IMAGENET else read_weights(self.weights)
        used = {name: value for name, value in found.items() if not name.startswith("head.")}
        fill_parameters(own, used, f"weights {self.weights!r}")


def _timms_name(name: str) -> str:
    return name.removeprefix("vit.").replace(".mlp.mlp.", ".mlp.")


def _draw(parameters: dict[str, Tensor], generator: torch.Generator) -> None:
    """Truncated normal weights of deviation 0.02, biases 0, norms the identity, a class token near 0."""
    for name, value in parameters.items():
        if name == "cls_token":
            nn.init.normal_(value, std=1e-6, generator=generator)
        elif value.ndim > 1:
            nn.init.trunc_normal_(value, std=0.02, generator=generator)
        else:
            nn.init.constant_(value, 1.0 if name.endswith("weight") else 0.0)


def _imagenet() -> dict[str, Tensor]:
    return dict(_timm().create_model(TIMM, pretrained=True).state_dict())


def _timm() -> Any:
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        wanted = "expected timm, which the network vit-adapter is built from"
        message = f"{wanted}: pip install '.[lpm]' in the folder of hyperleak"
        raise ModuleNotFoundError(message, name="timm") from error
    return timm
