"""Rounds with differential privacy as anyone would write them: one backward pass per image, torch.optim.SGD."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from reference.hyperfl_round import HEAD, DenseHypernetwork
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

Steps = Sequence[tuple[Tensor, Tensor, Sequence[int]]]
"""Images, labels and the key of the noise of every step."""


@dataclass(frozen=True)
class Settings:
    """Constants of a round; `denominator` None divides by the batch size."""

    lr: float
    clip: float
    sigma: float
    denominator: float | None
    momentum: float = 0.5
    weight_decay: float = 5e-4
    head_lr: float = 0.1
    max_norm: float = 50.0


def noise(key: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Standard normal numbers from a Philox generator with this key, one tensor after the other."""
    draw = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
    flat = torch.from_numpy(draw.standard_normal(sum(shape.numel() for shape in shapes)))
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def noisy_sum(
    clipped: Sequence[Tensor], losses: Sequence[Tensor], settings: Settings, key: Sequence[int] | None
) -> list[Tensor]:
    """Every image's gradient with respect to `clipped`, cut to the clip together, summed, with noise, divided."""
    total = [torch.zeros_like(value) for value in clipped]
    for loss in losses:
        grads = torch.autograd.grad(loss, list(clipped), retain_graph=True)
        size = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        factor = min(1.0, settings.clip / (float(size) + 1e-6))
        total = [t + factor * g for t, g in zip(total, grads, strict=True)]
    if key is not None:
        draws = noise(key, [value.shape for value in clipped])
        total = [t + settings.sigma * settings.clip * z for t, z in zip(total, draws, strict=True)]
    divisor = settings.denominator or len(losses)
    return [t / divisor for t in total]


def each_loss(logits: Tensor, labels: Tensor) -> list[Tensor]:
    return list(nn.functional.cross_entropy(logits, labels, reduction="none"))


def sgd(moving: Sequence[nn.Parameter], lr: float, settings: Settings) -> torch.optim.SGD:
    return torch.optim.SGD(list(moving), lr, settings.momentum, weight_decay=settings.weight_decay)


def train(
    model: nn.Module, moving: Sequence[nn.Parameter], steps: Steps, lr: float, settings: Settings, *, plain: bool
) -> None:
    """SGD on `moving`, with noise or plain."""
    optimizer = sgd(moving, lr, settings)
    for inputs, labels, key in steps:
        losses = each_loss(model(inputs), labels)
        if plain:
            grads: Sequence[Tensor] = torch.autograd.grad(torch.stack(losses).mean(), list(moving))
        else:
            grads = noisy_sum(moving, losses, settings, key)
        for parameter, g in zip(moving, grads, strict=True):
            parameter.grad = g
        optimizer.step()


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def dp_fedavg(model: nn.Module, phases: Sequence[Steps], settings: Settings) -> dict[str, Tensor]:
    """DP-FedAvg in one client: everything moves."""
    model = copy.deepcopy(model)
    train(model, list(model.parameters()), phases[0], settings.lr, settings, plain=False)
    return named(model)


def centaur(model: nn.Module, phases: Sequence[Steps], settings: Settings, *, plain_head: bool) -> dict[str, Tensor]:
    """CENTAUR in one client: the classifier, then the extractor."""
    model = copy.deepcopy(model)
    head = [p for name, p in model.named_parameters() if name.startswith(HEAD)]
    body = [p for name, p in model.named_parameters() if not name.startswith(HEAD)]
    train(model, head, phases[0], settings.head_lr, settings, plain=plain_head)
    train(model, body, phases[1], settings.lr, settings, plain=False)
    return named(model)


class TwoHeads(nn.Module):
    """A network whose logits are the sum of two classifiers'."""

    def __init__(self, model: nn.Module, personal: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inner = copy.deepcopy(model)
        self.personal = copy.deepcopy(model.get_submodule("head"))
        self.personal.load_state_dict(dict(personal))

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner.get_submodule("body")(self.inner.get_submodule("normalize")(x))
        return self.inner.get_submodule("head")(features) + self.personal(features)


def ppsgd(
    model: nn.Module,
    personal: Mapping[str, Tensor],
    phases: Sequence[Steps],
    settings: Settings,
    *,
    plain_head: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """PPSGD in one client: the common network and the personal classifier after training, together in every step."""
    whole = TwoHeads(model, personal)
    common, own = list(whole.inner.parameters()), list(whole.personal.parameters())
    optimizers = sgd(common, settings.lr, settings), sgd(own, settings.head_lr, settings)
    heads = [p for name, p in whole.inner.named_parameters() if name.startswith(HEAD)]
    for inputs, labels, key in phases[0]:
        losses = each_loss(whole(inputs), labels)
        for parameter, g in zip(common, noisy_sum(common, losses, settings, key), strict=True):
            parameter.grad = g
        if plain_head:
            grads: Sequence[Tensor | None] = torch.autograd.grad(torch.stack(losses).mean(), own)
        else:
            grads = [parameter.grad for parameter in heads]
        for parameter, g in zip(own, grads, strict=True):
            parameter.grad = None if g is None else g.clone()
        for optimizer in optimizers:
            optimizer.step()
    return named(whole.inner), named(whole.personal)


def dp_hyperfl(
    model: nn.Module,
    params: Mapping[str, Tensor],
    phases: Sequence[Steps],
    settings: Settings,
    *,
    on_extractor: bool,
) -> dict[str, Tensor]:
    """HyperFL in one client: the classifier, then hypernetwork and embedding, noise on either side of the former."""
    shapes = {name: p.shape for name, p in model.named_parameters() if not name.startswith(HEAD)}
    hypernet = DenseHypernetwork(params, shapes)
    v = nn.Parameter(params["embedding"].clone())
    head = {k: nn.Parameter(w.clone()) for k, w in params.items() if k.startswith(HEAD)}

    def losses(extractor: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
        return each_loss(functional_call(model, {**extractor, **head}, (inputs,)), labels)

    optimizer = sgd(list(head.values()), settings.head_lr, settings)
    fixed = {name: w.detach() for name, w in hypernet(v).items()}
    for inputs, labels, key in phases[0]:
        moving = list(head.values())
        for parameter, g in zip(moving, noisy_sum(moving, losses(fixed, inputs, labels), settings, key), strict=True):
            parameter.grad = g
        optimizer.step()

    moving = [*hypernet.named().values(), v]
    optimizer = sgd(moving, settings.lr, settings)
    for inputs, labels, key in phases[1]:
        optimizer.zero_grad()
        made = hypernet(v)
        if on_extractor:
            apart = {name: w.detach().requires_grad_() for name, w in made.items()}
            grads = noisy_sum(list(apart.values()), losses(apart, inputs, labels), settings, key)
            torch.autograd.backward(list(made.values()), grads)
        else:
            for parameter, g in zip(
                moving, noisy_sum(moving, losses(made, inputs, labels), settings, key), strict=True
            ):
                parameter.grad = g
        clip_grad_norm_(hypernet.parameters(), settings.max_norm)
        clip_grad_norm_([v], settings.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in {**hypernet.named(), **head, "embedding": v}.items()}


def client_level(
    before: Mapping[str, Tensor], after: Sequence[Mapping[str, Tensor]], clip: float, sigma: float, key: Sequence[int]
) -> dict[str, Tensor]:
    """The server's parameters after a round: every client's change cut to the clip, summed, with noise, divided."""
    total = {name: torch.zeros_like(value) for name, value in before.items()}
    for trained in after:
        change = {name: trained[name] - value for name, value in before.items()}
        size = torch.stack([c.square().sum() for c in change.values()]).sum().sqrt()
        factor = min(1.0, clip / (float(size) + 1e-6))
        total = {name: t + factor * change[name] for name, t in total.items()}
    draws = noise(key, [value.shape for value in before.values()])
    noisy = {n: t + sigma * clip * z for (n, t), z in zip(total.items(), draws, strict=True)}
    return {name: value + noisy[name] / len(after) for name, value in before.items()}


def batches(inputs: Tensor, labels: Tensor, order: Sequence[Tensor], keys: Sequence[Sequence[int]]) -> Steps:
    """What a client fed, step by step."""
    return [(inputs[index], labels[index], key) for index, key in zip(order, keys, strict=True)]
