"""Gradients under Soteria and PRECODE, in plain torch: one unit, one image at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def soteria(model: nn.Module, head: str, images: Tensor, labels: Tensor, ratio: float) -> dict[str, Tensor]:
    """The mean gradient of the cross entropy, without the columns of the pruned units of what enters `head`.

    A unit's score is the sum over images of |d r / d x| / |r + 0.1|; the lowest ones go.
    """
    layer = model.get_submodule(head)
    scores = torch.zeros(layer.in_features, dtype=images.dtype)
    for image in images:
        x = image[None].clone().requires_grad_()
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        model(x)
        handle.remove()
        for unit in range(layer.in_features):
            (slope,) = torch.autograd.grad(seen[0][0, unit], x, retain_graph=True)
            scores[unit] += float(slope.square().sum().sqrt()) / abs(float(seen[0][0, unit].detach()) + 0.1)
    lowest = sorted(range(len(scores)), key=lambda unit: float(scores[unit]))[: int(ratio * len(scores))]
    loss = nn.functional.cross_entropy(model(images), labels)
    names = [name for name, _ in model.named_parameters()]
    grads = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    for unit in lowest:
        grads[f"{head}.weight"][:, unit] = 0
    return grads


def precode(
    body: nn.Module,
    head: nn.Linear,
    weights: dict[str, Tensor],
    noise: Tensor,
    images: Tensor,
    labels: Tensor,
    beta: float,
) -> Tensor:
    """The loss of a network with a variational bottleneck between `body` and `head`, image by image.

    Args:
        body: (B, C, H, W) to features (B, F).
        head: features to logits.
        weights: "encoder.weight" (2K, F), "encoder.bias", "decoder.weight" (F, K) and "decoder.bias".
        noise: (B, K).
        images: of the batch.
        labels: (B,).
        beta: weight of the divergence from N(0, 1), in bits.
    """
    total = torch.zeros((), dtype=images.dtype)
    for image, label, eps in zip(images, labels, noise, strict=True):
        statistics = weights["encoder.weight"] @ body(image[None])[0] + weights["encoder.bias"]
        latent = len(statistics) // 2
        mu, sigma = statistics[:latent], (1 + statistics[latent:].exp()).log()
        features = weights["decoder.weight"] @ (mu + eps * sigma) + weights["decoder.bias"]
        logits = head.weight @ features + head.bias
        total = total + logits.exp().sum().log() - logits[label]
        for m, s in zip(mu, sigma, strict=True):
            total = total + beta * 0.5 * (m**2 + s**2 - 1 - 2 * s.log()) / math.log(2)
    return total / len(images)
