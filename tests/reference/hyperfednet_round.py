"""HyperFedNet's round as published: filters made one input channel at a time, autograd through all, torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

EMBEDDINGS = "embeddings."


@dataclass(frozen=True)
class Settings:
    """Constants of a round; `literal` is Algorithm 1 with lines 19 and 23 as they stand, `mu` FedProx's weight."""

    lr: float
    momentum: float
    weight_decay: float
    literal: bool = False
    mu: float = 0.0


def basic_filter(params: Mapping[str, Tensor], key: str, v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One basic filter from its embedding: a hidden vector for every input channel, mapped by the common last layer."""
    weight, bias, last, offset = (
        params[f"hypernet.{key}.{n}"] for n in ("in.weight", "in.bias", "out.weight", "out.bias")
    )
    out, inside, height, width = shape
    channels = []
    for i in range(inside):
        a = weight[i].mv(v) + bias[i]
        channels.append((last.mv(a) + offset).reshape(out, height, width))
    return torch.stack(channels, 1)


def generated(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every generated convolution, row of tiles by row of tiles."""
    made = {}
    for name, embeddings in params.items():
        if not name.startswith(EMBEDDINGS):
            continue
        key, weight = name.removeprefix(EMBEDDINGS).split(".", 1)
        shape = tuple(int(number) for number in key.split("x"))
        rows = [
            torch.cat([basic_filter(params, key, embeddings[a, b], shape) for b in range(embeddings.shape[1])], 1)
            for a in range(embeddings.shape[0])
        ]
        made[weight] = torch.cat(rows, 0)
    return made


def hyperfednet_round(
    model: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    settings: Settings,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters and buffers after one round from `params` and `buffers`, in train mode."""
    live = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    statistics = {name: value.clone() for name, value in buffers.items()}
    own = {name: p for name, p in live.items() if not name.startswith(("hypernet.", EMBEDDINGS))}
    theta = {name: nn.Parameter(w.detach()) for name, w in generated(live).items()} if settings.literal else {}
    start = {id(p): p.detach().clone() for p in (*live.values(), *theta.values())}
    moving = [*live.values(), *theta.values()]
    optimizer = torch.optim.SGD(
        moving, settings.lr, settings.momentum, weight_decay=settings.weight_decay, nesterov=settings.momentum > 0
    )
    for inputs, labels in batches:
        optimizer.zero_grad()
        made = generated(live)
        logits = functional_call(model.train(), {**(theta or made), **own, **statistics}, (inputs,))
        nn.functional.cross_entropy(logits, labels).backward()
        for name, w in theta.items():  # line 23: the gradient at w, through the hypernetwork as it is now
            made[name].backward(w.grad, retain_graph=True)
        for p in moving:
            assert p.grad is not None
            p.grad += settings.mu * (p.detach() - start[id(p)])
        optimizer.step()
    return {name: p.detach() for name, p in live.items()}, statistics
