"""HyperFedZero's rounds as published: one sample, one chunk, one layer at a time, torch.optim, autograd.

Written from Zhou et al., Eq. 3-7 and Algorithm 1, and knows nothing of the package but the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Params = Mapping[str, Tensor]
Sample = Mapping[str, Tensor]


def embedder(params: Params, name: str, x: Tensor) -> Tensor:
    """f or noisy on one normalized image (C, H, W), in either layout."""
    p = {key.removeprefix(f"embedder.{name}."): v for key, v in params.items() if key.startswith(f"embedder.{name}.")}
    if "fc1.weight" in p:
        return p["fc.weight"] @ torch.relu(p["fc1.weight"] @ x.flatten() + p["fc1.bias"]) + p["fc.bias"]
    for conv in ("conv1", "conv2"):
        x = torch.relu(nn.functional.conv2d(x, p[f"{conv}.weight"], p[f"{conv}.bias"], stride=2, padding=1))
    return p["fc.weight"] @ nn.functional.adaptive_avg_pool2d(x, 4).flatten() + p["fc.bias"]


def softmax(scores: Tensor) -> Tensor:
    shifted = (scores - scores.max()).exp()
    return shifted / shifted.sum()


def embedding(params: Params, x: Tensor, z: Tensor | None) -> Tensor:
    """Eq. 3 for one normalized image."""
    scores = embedder(params, "extractor", x)
    if z is not None:
        scores = scores + z * torch.log1p(embedder(params, "noisy", x).exp())
    return softmax(scores)


def generated(params: Params, e: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """h(e), chunk by chunk, cut into one classifier's parameters."""
    depth = sum(key.startswith("hypernet.layers.") for key in params) // 2
    made = []
    for chunk in params["hypernet.chunks"]:
        hidden = torch.cat([e, chunk])
        for i in range(depth):
            hidden = params[f"hypernet.layers.{i}.weight"] @ hidden + params[f"hypernet.layers.{i}.bias"]
            hidden = torch.relu(hidden) if i < depth - 1 else hidden
        made.append(hidden)
    flat, result, at = torch.cat(made), {}, 0
    for name, shape in shapes.items():
        part = flat[at : at + shape.numel()].view(shape)
        result[name] = part + 1 if "norm" in name and name.endswith("weight") else part
        at += shape.numel()
    return result


def mlp(weights: Sequence[Sample], images: Sequence[Tensor]) -> list[Tensor]:
    """Logits of each normalized image by its own network: body.fc1, body.fc2, ..., head."""
    found = []
    for w, image in zip(weights, images, strict=True):
        x, i = image.flatten(), 1
        while f"body.fc{i}.weight" in w:
            x = torch.relu(w[f"body.fc{i}.weight"] @ x + w[f"body.fc{i}.bias"])
            i += 1
        found.append(w["head.weight"] @ x + w["head.bias"])
    return found


def tiny(weights: Sequence[Sample], images: Sequence[Tensor]) -> list[Tensor]:
    """Logits of the package's small convolutional network; its batch norm takes the statistics of all images."""
    maps = [
        nn.functional.conv2d(image[None], w["body.conv1.weight"], w["body.conv1.bias"], padding=1)[0]
        for w, image in zip(weights, images, strict=True)
    ]
    if "body.norm1.weight" in weights[0]:
        values = torch.stack(maps)
        mean, var = values.mean((0, 2, 3)), values.var((0, 2, 3), correction=0)
        for i, w in enumerate(weights):
            scaled = (maps[i] - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
            maps[i] = scaled * w["body.norm1.weight"][:, None, None] + w["body.norm1.bias"][:, None, None]
    found = []
    for w, values in zip(weights, maps, strict=True):
        x = nn.functional.max_pool2d(nn.functional.leaky_relu(values, 0.01)[None], 2).flatten()
        x = nn.functional.leaky_relu(w["body.fc1.weight"] @ x + w["body.fc1.bias"], 0.01)
        found.append(w["head.weight"] @ x + w["head.bias"])
    return found


def objective(
    params: Params,
    classifier: Callable[[Sequence[Sample], Sequence[Tensor]], list[Tensor]],
    shapes: Mapping[str, torch.Size],
    batch: tuple[Tensor, Tensor, Tensor],
    alpha: float,
    beta: float,
) -> Tensor:
    """Eq. 4 on a batch of normalized images, labels and noise z."""
    images, labels, noise = batch
    embeddings = [embedding(params, x, z) for x, z in zip(images, noise, strict=True)]
    logits = classifier([generated(params, e, shapes) for e in embeddings], list(images))
    losses = [-torch.log(softmax(each)[label]) for each, label in zip(logits, labels.tolist(), strict=True)]
    used = [sum(float(1) * e[k] for e in embeddings) for k in range(len(embeddings[0]))]
    mean = sum(used) / len(used)
    var = sum((u - mean) ** 2 for u in used) / (len(used) - 1)
    entries = [-e[k] * torch.log(e[k]) for e in embeddings for k in range(len(e))]
    return sum(losses) / len(losses) + alpha * var / mean + beta * sum(entries) / len(entries)


def client_round(
    params: Params,
    loss: Callable[[Params, tuple[Tensor, Tensor, Tensor]], Tensor],
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> dict[str, Tensor]:
    """Algorithm 1, lines 2 to 10: the parameters after a client's local iterations."""
    mine = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    steps = optimizer(list(mine.values()))
    for batch in batches:
        steps.zero_grad()
        loss(mine, batch).backward()
        steps.step()
    return {name: value.detach() for name, value in mine.items()}


def averaged(models: Sequence[Params], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Lines 6 and 7 of the server's part."""
    whole = sum(sizes)
    return {name: sum(n / whole * m[name] for m, n in zip(models, sizes, strict=True)) for name in models[0]}
