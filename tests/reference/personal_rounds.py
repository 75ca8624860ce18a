"""Rounds of personalized methods as anyone would write them: modules, `loss.backward()`, torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fl.types import Trace

Batches = Sequence[tuple[Tensor, Tensor]]


def fed(trace: Trace, phase: int, batch: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Images and labels of the batch number `batch` of each step of a phase."""
    steps = [step[batch] for step in trace.order[phase]]
    return [(trace.inputs[index], trace.labels[index]) for index in steps]


def loaded(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` with `weights` in place of its own."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def sgd(
    model: nn.Module,
    moves: Callable[[str], bool],
    batches: Batches,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    max_norm: float | None = None,
    pulled: tuple[float, Mapping[str, Tensor]] = (0.0, {}),
) -> None:
    """Train those parameters whose names `moves`; `pulled` adds weight / 2 times their squared distance to others."""
    chosen = {name: value for name, value in model.named_parameters() if moves(name)}
    optimizer = torch.optim.SGD(chosen.values(), lr, momentum, weight_decay=weight_decay)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        for name, anchor in pulled[1].items():
            loss = loss + pulled[0] / 2 * (chosen[name] - anchor).square().sum()
        loss.backward()
        if max_norm is not None:
            clip_grad_norm_(chosen.values(), max_norm)
        optimizer.step()


def average(models: Iterable[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """Mean of the models, each counting by its number of images."""
    models = list(models)
    whole = sum(counts)
    return {name: sum(n / whole * m[name] for n, m in zip(counts, models, strict=True)) for name in models[0]}  # type: ignore[misc]


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of the images classified right in evaluation mode."""
    model = copy.deepcopy(model).eval()
    return float((model(inputs).argmax(-1) == labels).double().mean())
