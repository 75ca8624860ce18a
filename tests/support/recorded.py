"""Updates as they are recorded in a federation: a small network, and clients that train it."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from eval.audit.recorded_update import RecordedUpdate, TrainingFacts
from fl.seeds import stream

SHAPE = (1, 14, 14)
PLAIN = TrainingFacts(optimizer="sgd", lr=0.1, steps=1, examples=1)


def network() -> nn.Module:
    """A network of one convolution and two fully connected layers, in evaluation mode."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(100, 24), nn.ReLU(), nn.Linear(24, 10)),
        )


def dense_network() -> nn.Module:
    """A network whose first layer takes the image."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), nn.Linear(24, 10))


def examples(count: int) -> tuple[Tensor, Tensor]:
    draw = stream(0, "recorded")
    return torch.rand(count, *SHAPE, generator=draw), torch.randint(10, (count,), generator=draw)


def recorded(
    model: nn.Module, count: int = 1, facts: TrainingFacts = PLAIN, *, client: str = "7", noise: float = 0.0
) -> RecordedUpdate:
    """What a client sends that trains so on `count` examples; `noise` is added to every number of it."""
    inputs, labels = examples(count)
    trained = copy.deepcopy(model)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[facts.optimizer or "sgd"](trained.parameters(), lr=facts.lr or 0.1)
    for _ in range(facts.steps or facts.epochs or 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
    draw = stream(0, "noise")
    after = {name: value + noise * torch.randn(value.shape, generator=draw) for name, value in _state(trained).items()}
    origin = {"framework": "none", "round": "3", "client": client}
    return RecordedUpdate(before=_state(model), after=after, training=replace(facts, examples=count), origin=origin)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
