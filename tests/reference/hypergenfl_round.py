"""HyperGenFL's server as its equations read: torch's attention, a linear layer per layer, autograd, torch.optim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


class Attention(nn.Module):
    """Eq. 4 to 7: embeddings (clients, E) to shares (clients, layers)."""

    def __init__(self, params: State, layers: int, embedding: int, depth: int, heads: int, floor: float) -> None:
        super().__init__()
        self.attend = nn.ModuleList(nn.MultiheadAttention(embedding, heads, dtype=torch.float64) for _ in range(depth))
        self.decode = nn.ModuleList(nn.Linear(embedding, 1, dtype=torch.float64) for _ in range(layers))
        self.floor = floor
        with torch.no_grad():
            for i, block in enumerate(self.attend):
                block.in_proj_weight.copy_(params[f"attention.{i}.in.weight"])
                block.in_proj_bias.copy_(params[f"attention.{i}.in.bias"])
                block.out_proj.weight.copy_(params[f"attention.{i}.out.weight"])
                block.out_proj.bias.copy_(params[f"attention.{i}.out.bias"])
            for i, layer in enumerate(self.decode):
                layer.weight.copy_(params["decode.weight"][i : i + 1])
                layer.bias.copy_(params["decode.bias"][i : i + 1])

    def named(self) -> dict[str, Tensor]:
        """Parameters by the package's names."""
        found = {}
        for i, block in enumerate(self.attend):
            found |= {f"attention.{i}.in.weight": block.in_proj_weight, f"attention.{i}.in.bias": block.in_proj_bias}
            found |= {
                f"attention.{i}.out.weight": block.out_proj.weight,
                f"attention.{i}.out.bias": block.out_proj.bias,
            }
        found["decode.weight"] = torch.cat([layer.weight for layer in self.decode])
        found["decode.bias"] = torch.cat([layer.bias for layer in self.decode])
        return found

    def forward(self, embeddings: Tensor) -> Tensor:
        x = embeddings
        for block in self.attend:
            x = x + block(x, x, x, need_weights=False)[0]
        z = torch.softmax(x, dim=1)
        scores = torch.cat([torch.relu(layer(z)) + self.floor for layer in self.decode], dim=1)
        return scores / scores.sum(dim=0, keepdim=True)


def joined(shares: Tensor, layers: Sequence[Sequence[str]], models: Sequence[State]) -> dict[str, Tensor]:
    """Eq. 8: the mean of each layer with its own shares."""
    return {
        name: sum(shares[c, i] * model[name] for c, model in enumerate(models))  # type: ignore[misc]
        for i, names in enumerate(layers)
        for name in names
    }


def distance(kind: str, sent: State, trained: Sequence[State], layers: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """The gradient, at the model that was sent, of the distance to the trained ones."""
    if kind == "difference":
        return {n: sum(sent[n] - model[n] for model in trained) / len(trained) for names in layers for n in names}
    if kind == "as-printed":  # Eq. 15
        return {n: sum(model[n] - sent[n] for model in trained) / len(trained) for names in layers for n in names}
    leaves = {n: sent[n].clone().requires_grad_() for names in layers for n in names}
    total = torch.zeros((), dtype=torch.float64)
    for model in trained:
        for names in layers:
            apart = torch.cat([(leaves[n] - model[n]).flatten() for n in names])
            total = total + (apart.square() if kind == "mse" else apart.cosh().log()).mean() / len(trained)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def learn(
    hypernetwork: Attention,
    embeddings: Sequence[nn.Parameter],
    solver: torch.optim.Optimizer,
    sent: State,
    trained: Sequence[State],
    layers: Sequence[Sequence[str]],
    kind: str,
) -> None:
    """Eq. 10 and 11: a step along what the shares do to the aggregate of the trained models."""
    solver.zero_grad()
    aggregate = joined(hypernetwork(torch.stack(list(embeddings))), layers, trained)
    slope = distance(kind, sent, trained, layers)
    torch.autograd.backward([aggregate[n] for n in slope], [slope[n] for n in slope])
    solver.step()
