"""pFedHN's server and clients as published: a module with an embedding layer, torch.optim on both sides."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Batches = Sequence[tuple[Tensor, Tensor]]


class Hyper(nn.Module):
    """An embedding layer, linear layers with ReLU between them, and one linear head for every generated tensor."""

    def __init__(self, params: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.embeddings = nn.Embedding(*params["embeddings"].shape, dtype=torch.float64)
        count = sum(name.startswith("mlp.") and name.endswith(".weight") for name in params)
        sizes = [params[f"mlp.{i}.weight"].shape for i in range(count)]
        self.mlp = nn.ModuleList(nn.Linear(fan_in, fan_out, dtype=torch.float64) for fan_out, fan_in in sizes)
        self.heads = nn.ModuleList(nn.Linear(sizes[-1][0], s.numel(), dtype=torch.float64) for s in shapes.values())
        with torch.no_grad():
            for name, parameter in self.named().items():
                parameter.copy_(params[name])

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by the package's names."""
        named = {"embeddings": self.embeddings.weight}
        for i, layer in enumerate(self.mlp):
            named |= {f"mlp.{i}.weight": layer.weight, f"mlp.{i}.bias": layer.bias}
        for name, head in zip(self.shapes, self.heads, strict=True):
            named |= {f"heads.{name}.weight": head.weight, f"heads.{name}.bias": head.bias}
        return named

    def forward(self, client: int) -> dict[str, Tensor]:
        x = self.embeddings(torch.tensor(client))
        for i, layer in enumerate(self.mlp):
            x = layer(torch.relu(x) if i else x)
        return {n: head(x).view(s) for (n, s), head in zip(self.shapes.items(), self.heads, strict=True)}


@dataclass(frozen=True)
class Local:
    """Constants of a client's training."""

    lr: float
    momentum: float
    weight_decay: float
    max_norm: float


def train(
    model: nn.Module, weights: Mapping[str, Tensor], head: Mapping[str, Tensor], batches: Batches, constants: Local
) -> dict[str, Tensor]:
    """All parameters after local SGD from generated weights and a head of the client's own, which is not clipped."""
    model = copy.deepcopy(model)
    model.load_state_dict({**weights, **head}, strict=False)
    solver = torch.optim.SGD(model.parameters(), constants.lr, constants.momentum, weight_decay=constants.weight_decay)
    for inputs, labels in batches:
        solver.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        clip_grad_norm_([p for name, p in model.named_parameters() if name in weights], constants.max_norm)
        solver.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def step(
    hyper: Hyper, solver: torch.optim.Optimizer, asked: Sequence[tuple[int, Mapping[str, Tensor]]], max_norm: float
) -> None:
    """One step of the server on the mean of what (client, update) ask for."""
    solver.zero_grad()
    total = [torch.zeros_like(p) for p in hyper.parameters()]
    for client, update in asked:
        weights = hyper(client)
        grads = torch.autograd.grad(list(weights.values()), list(hyper.parameters()), [update[n] for n in weights])
        total = [t + g / len(asked) for t, g in zip(total, grads, strict=True)]
    for p, g in zip(hyper.parameters(), total, strict=True):
        p.grad = g
    clip_grad_norm_(hyper.parameters(), max_norm)
    solver.step()
