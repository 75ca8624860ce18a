"""HyperFL's round as published: a dense hypernetwork module, autograd through it, torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

HEAD = "head."


class DenseHypernetwork(nn.Module):
    """FC, ReLU, and one linear head for every generated tensor."""

    def __init__(self, params: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        hidden, embedding = params["hypernet.trunk.weight"].shape
        bias = any(name.startswith("hypernet.heads.") and name.endswith(".bias.bias") for name in params)
        self.shapes = dict(shapes)
        self.trunk = nn.Linear(embedding, hidden, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(hidden, s.numel(), bias, dtype=torch.float64) for s in shapes.values())
        with torch.no_grad():
            for name, parameter in self.named().items():
                parameter.copy_(params[name])

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by the names of `fl.models.hypernetworks.hyperfl_hypernetwork`."""
        named = {"hypernet.trunk.weight": self.trunk.weight, "hypernet.trunk.bias": self.trunk.bias}
        for name, head in zip(self.shapes, self.heads, strict=True):
            named[f"hypernet.heads.{name}.weight"] = head.weight
            if head.bias is not None:
                named[f"hypernet.heads.{name}.bias"] = head.bias
        return named

    def forward(self, v: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.trunk(v))
        return {k: head(hidden).view(s) for (k, s), head in zip(self.shapes.items(), self.heads, strict=True)}


@dataclass(frozen=True)
class Settings:
    """Constants of a round."""

    lr: float
    head_lr: float
    momentum: float
    weight_decay: float
    max_norm: float


def hyperfl_round(
    model: nn.Module,
    params: Mapping[str, Tensor],
    head_batches: Sequence[tuple[Tensor, Tensor]],
    batches: Sequence[tuple[Tensor, Tensor]],
    settings: Settings,
) -> dict[str, Tensor]:
    """All parameters after one round from `params`: the classifier first, then hypernetwork and embedding."""
    shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad and not n.startswith(HEAD)}
    hypernet = DenseHypernetwork(params, shapes)
    v = nn.Parameter(params["embedding"].clone())
    head = {k: nn.Parameter(w.clone()) for k, w in params.items() if k.startswith(HEAD)}

    def loss(extractor: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, {**extractor, **head}, (inputs,)), labels)

    def sgd(moving: list[nn.Parameter], lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(moving, lr, settings.momentum, weight_decay=settings.weight_decay)

    optimizer = sgd(list(head.values()), settings.head_lr)
    extractor = {name: w.detach() for name, w in hypernet(v).items()}
    for inputs, labels in head_batches:
        optimizer.zero_grad()
        loss(extractor, inputs, labels).backward()
        optimizer.step()

    optimizer = sgd([*hypernet.parameters(), v], settings.lr)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss(hypernet(v), inputs, labels).backward()
        clip_grad_norm_(hypernet.parameters(), settings.max_norm)
        clip_grad_norm_([v], settings.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in {**hypernet.named(), **head, "embedding": v}.items()}
