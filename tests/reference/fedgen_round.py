"""FedGen's round written out: modules, `loss.backward()`, an optimizer of torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

NAMES = {"0": "hidden", "1": "norm", "3": "features"}
PARTS = {"running_mean": "mean", "running_var": "var"}


class Generator(nn.Module):
    """From one-hot labels and noise to features."""

    def __init__(self, noise: int, classes: int, hidden: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        ).double()

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        return self.layers(torch.cat([noise, nn.functional.one_hot(labels, self.classes)], 1))

    def named(self) -> dict[str, Tensor]:
        """What it holds, by the names of `fl.models.building_blocks.feature_generator`."""
        found = {}
        for name, value in self.layers.state_dict().items():
            layer, part = name.split(".")
            if part != "num_batches_tracked":
                found[f"{NAMES[layer]}.{PARTS.get(part, part)}"] = value
        return found

    def fill(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.named().items():
                value.copy_(values[name])


def local(
    model: nn.Module,
    generator: Generator | None,
    steps: Sequence[tuple[Tensor, Tensor, Mapping[str, Tensor]]],
    solver: torch.optim.Optimizer,
    alpha: float,
    beta: float,
    max_norm: float,
) -> None:
    """A client's steps, each on images, labels and random numbers; `model` has a `body` and a `head`."""
    for inputs, labels, draws in steps:
        solver.zero_grad()
        logits = model(inputs)
        loss = cross_entropy(logits, labels)
        if generator is not None:
            made = generator.eval()(draws["labels"], draws["noise"]).detach()
            loss = loss + alpha * cross_entropy(model.get_submodule("head")(made), draws["labels"])
            own = generator.eval()(labels, draws["own"])
            said = model.get_submodule("head")(own).softmax(1).detach()
            loss = loss + beta * (said * (said.log() - logits.log_softmax(1))).sum() / len(labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm)
        solver.step()


def learn(
    generator: Generator,
    solver: torch.optim.Optimizer,
    models: Sequence[nn.Module],
    labels: Sequence[Tensor],
    steps: Sequence[tuple[Tensor, Tensor]],
    diversity: float,
) -> None:
    """The server's steps, each on labels and noise; `labels` are those of each client's images."""
    heads = [copy.deepcopy(model.get_submodule("head")) for model in models]
    for y, z in steps:
        made, loss = generator.train()(y, z), torch.zeros((), dtype=torch.float64)
        for j, label in enumerate(y.tolist()):
            counts = [int((own == label).sum()) for own in labels]
            for head, count in zip(heads, counts, strict=True):
                loss = loss + count / sum(counts) * cross_entropy(head(made[j : j + 1]), y[j : j + 1]) / len(y)
        pairs = [
            (z[i] - z[j]).square().mean() * (made[i] - made[j]).abs().mean()
            for i in range(len(y))
            for j in range(len(y))
        ]
        loss = loss + diversity * torch.exp(-torch.stack(pairs).mean())
        solver.zero_grad()
        loss.backward()
        solver.step()
