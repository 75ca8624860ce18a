"""HyperFL-LPM's networks as formulas: a ResNet of basic blocks and a vision transformer, each with its adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]


def resized(x: Tensor, size: int) -> Tensor:
    """Three channels, bilinear, pixel centers at halves."""
    return functional.interpolate(x.repeat(1, 3 // x.shape[1], 1, 1), size=(size, size), mode="bilinear")


def _channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight[:, None, None] + bias[:, None, None]


def _block(w: Weights, at: str, x: Tensor, stride: int) -> Tensor:
    y = functional.conv2d(x, w[f"{at}.conv1.weight"], stride=stride, padding=1)
    y = functional.relu(_channels(y, w[f"{at}.bn1.weight"], w[f"{at}.bn1.bias"]))
    y = functional.conv2d(y, w[f"{at}.conv2.weight"], padding=1)
    y = _channels(y, w[f"{at}.bn2.weight"], w[f"{at}.bn2.bias"])
    if f"{at}.downsample.0.weight" in w:
        x = functional.conv2d(x, w[f"{at}.downsample.0.weight"], stride=stride)
        x = _channels(x, w[f"{at}.downsample.1.weight"], w[f"{at}.downsample.1.bias"])
    return functional.relu(x + y)


def _norm(w: Weights, at: str, x: Tensor) -> Tensor:
    """Batch norm in evaluation mode at its start: mean 0, variance 1."""
    return _channels(x / math.sqrt(1 + 1e-5), w[f"{at}.weight"], w[f"{at}.bias"])


def resnet(w: Weights, x: Tensor, *, stages: int, blocks: int, size: int) -> Tensor:
    """Logits of normalized images; adapters where `w` has any."""
    x = functional.conv2d(resized(x, size), w["body.conv1.weight"], stride=2, padding=3)
    x = functional.relu(_channels(x, w["body.bn1.weight"], w["body.bn1.bias"]))
    x = functional.max_pool2d(x, 3, stride=2, padding=1)
    for stage in range(1, stages + 1):
        for block in range(blocks):
            x = _block(w, f"body.layer{stage}.{block}", x, 2 if stage > 1 and block == 0 else 1)
        at = f"body.adapter{stage}"
        if f"{at}.conv.weight" in w:
            matrix = w[f"{at}.conv.weight"][:, :, 0, 0]
            inner = torch.einsum("oc,bchw->bohw", matrix, _norm(w, f"{at}.before", x))
            x = _norm(w, f"{at}.after", x + inner)
    return x.mean((2, 3)) @ w["head.weight"].T + w["head.bias"]


def _layer_norm(w: Weights, at: str, x: Tensor, eps: float) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{at}.weight"] + w[f"{at}.bias"]


def _linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]


def _attention(w: Weights, at: str, x: Tensor, heads: int) -> Tensor:
    size = x.shape[-1] // heads
    q, k, v = _linear(w, f"{at}.qkv", x).chunk(3, -1)
    mixed = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ k[..., part].mT / math.sqrt(size)
        mixed.append(scores.softmax(-1) @ v[..., part])
    return _linear(w, f"{at}.proj", torch.cat(mixed, -1))


def vit(w: Weights, x: Tensor, *, depth: int, heads: int, patch: int, size: int) -> Tensor:
    """Logits of normalized images; adapters where `w` has any."""
    at = "body.vit"
    x = functional.conv2d(resized(x, size), w[f"{at}.patch_embed.proj.weight"], stride=patch)
    x = (x + w[f"{at}.patch_embed.proj.bias"][:, None, None]).flatten(2).mT
    x = torch.cat([w[f"{at}.cls_token"].expand(len(x), -1, -1), x], 1) + w[f"{at}.pos_embed"]
    for i in range(depth):
        block = f"{at}.blocks.{i}"
        x = x + _attention(w, f"{block}.attn", _layer_norm(w, f"{block}.norm1", x, 1e-6), heads)
        adapter = f"{block}.mlp.adapter"
        mlp = f"{block}.mlp.mlp" if f"{adapter}.up.weight" in w else f"{block}.mlp"
        u = functional.gelu(_linear(w, f"{mlp}.fc1", _layer_norm(w, f"{block}.norm2", x, 1e-6)))
        u = _linear(w, f"{mlp}.fc2", u)
        if f"{adapter}.up.weight" in w:
            raised = _linear(w, f"{adapter}.up", functional.relu(_linear(w, f"{adapter}.down", u)))
            u = u + _layer_norm(w, f"{adapter}.norm", raised, 1e-5)
        x = x + u
    token = _layer_norm(w, f"{at}.norm", x, 1e-6)[:, 0]
    return _linear(w, "head", token)
