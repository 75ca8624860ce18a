"""hFedF as published (Bartholet et al., 2024): modules, torch.optim and one long vector for every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as f

Tensors = Mapping[str, Tensor]


def table9(p: Mapping[str, Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
    """The client network on normalized pixels; `mask` (B, F) in the place of dropout."""

    def conv(name: str, x: Tensor, padding: int) -> Tensor:
        return f.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], padding=padding)

    x = torch.relu(f.max_pool2d(conv("body.conv1", x, 1), 2))
    x = torch.relu(f.max_pool2d(conv("body.conv3", conv("body.conv2", x, 0), 1), 2))
    for name in ("body.inception1", "body.inception2"):
        branches = [conv(f"{name}.conv{size}", x, size // 2) for size in (1, 3, 5)]
        x = torch.relu(torch.cat([*branches, f.max_pool2d(x, 3, 1, 1)], 1))
    x = f.adaptive_avg_pool2d(x, 3).flatten(1)
    x = x if mask is None else x * mask
    return f.linear(f.linear(x, p["body.fc1.weight"], p["body.fc1.bias"]), p["head.weight"], p["head.bias"])


class Table8(nn.Module):
    """Embeddings, three linear layers with LeakyReLU, one without, and one head for each tensor of the client."""

    def __init__(self, shapes: Mapping[str, torch.Size], clients: int, size: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.embeddings = nn.Parameter(torch.empty(clients, size))
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in zip((size, *hidden), hidden, strict=False))
        self.heads = nn.ModuleList(nn.Linear(hidden[-1], s.numel()) for s in shapes.values())

    def forward(self, client: int) -> dict[str, Tensor]:
        x = self.embeddings[client]
        for layer in self.mlp[:-1]:
            x = f.leaky_relu(layer(x), 0.01)
        x = self.mlp[-1](x)
        return {k: head(x).view(s) for (k, s), head in zip(self.shapes.items(), self.heads, strict=True)}

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by the names of `fl.models.hypernetworks.server_hypernetwork`."""
        names = {"embeddings": self.embeddings}
        for i, layer in enumerate(self.mlp):
            names |= {f"mlp.{i}.weight": layer.weight, f"mlp.{i}.bias": layer.bias}
        for name, head in zip(self.shapes, self.heads, strict=True):
            names |= {f"heads.{name}.weight": head.weight, f"heads.{name}.bias": head.bias}
        return names


@dataclass
class Server:
    """Algorithm 1 on the server's side, with the average of Algorithm 4 kept as a copy of its own."""

    hypernet: Table8
    sign: float
    ema: float
    warmup: int
    optimizer: torch.optim.Adam
    climbs: bool = False  # as Algorithm 1 is printed
    average: list[Tensor] = field(default_factory=list)

    def round(
        self, t: int, sent: Mapping[int, Mapping[str, Tensor]], trained: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        """One update from what clients were sent and what they made of it."""
        phi = [p for n, p in self.hypernet.named().items() if n != "embeddings"]
        groups = {"phi": phi, "v": [self.hypernet.embeddings]}
        pulled: dict[str, list[Tensor]] = {"phi": [], "v": []}
        for client in sent:
            made = self.hypernet(client)
            first, second = (trained, sent) if self.climbs else (sent, trained)
            product = sum((made[k] * (first[client][k] - second[client][k])).sum() for k in made)
            for key, group in groups.items():
                grads = torch.autograd.grad(product, group, retain_graph=True)
                pulled[key].append(torch.cat([g.flatten() for g in grads]))
        for key, group in groups.items():
            weights = grad_align(pulled[key], self.sign)
            whole = sum(w * g for w, g in zip(weights, pulled[key], strict=True))
            for p, piece in zip(group, whole.split([p.numel() for p in group]), strict=True):
                p.grad = piece.view_as(p)
        self.optimizer.step()
        everything = [*phi, self.hypernet.embeddings]
        if t == self.warmup:
            self.average = [p.detach().clone() for p in everything]
        if t > self.warmup:
            self.average = [
                self.ema * p.detach() + (1 - self.ema) * a for p, a in zip(everything, self.average, strict=True)
            ]
            with torch.no_grad():
                for p, a in zip(everything, self.average, strict=True):
                    p.copy_(a)


def grad_align(gradients: Sequence[Tensor], sign: float) -> list[Tensor]:
    """Algorithm 3, with `sign` before the cosine."""
    average = sum(gradients) / len(gradients)
    exponentials = [torch.exp(sign * (g @ average) / (g.norm() * average.norm())) for g in gradients]
    return [e / sum(exponentials) for e in exponentials]


def client_update(
    params: Mapping[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    *,
    lr: float,
    weight_decay: float,
) -> dict[str, Tensor]:
    """Algorithm 2: images, labels and mask of every step."""
    own = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    optimizer = torch.optim.SGD(own.values(), lr, weight_decay=weight_decay)
    for inputs, labels, mask in batches:
        optimizer.zero_grad()
        f.cross_entropy(table9(own, inputs, mask), labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in own.items()}
