"""Rounds of servers that have images of their own, written out: modules, `loss.backward()`, optimizers by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from reference.plain_training import train
from torch import Tensor, nn

from fl.federation import Federation
from fl.methods.fedavg import FedAvg
from fl.simulation.client_round import Round
from fl.tensors import dense

Values = dict[str, Tensor]
Model = tuple[nn.Module, float]
"""A client's network and its number of images."""


def state(run: Federation) -> Values:
    """Parameters and statistics that the server holds."""
    return {**{name: dense(value).clone() for name, value in run.server.shared.items()}, **run.server.buffers}


def loaded(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` in training mode with `values`, all it has."""
    model = copy.deepcopy(model).train()
    model.load_state_dict({name: value.clone() for name, value in values.items()})
    return model


def trained(run: Federation, sent: Values, rounds: Sequence[Round], method: FedAvg) -> list[Model]:
    """What the clients' own training comes to."""
    found = []
    for done in rounds:
        batches = [(done.trace.inputs[index], done.trace.labels[index]) for (index,) in done.trace.order[0]]
        kind = partial(torch.optim.SGD, lr=method.lr, momentum=method.momentum, weight_decay=method.weight_decay)
        model = train(loaded(run.client.base.model, sent), batches, kind, method.max_norm)
        found.append((model, float(len(run.data[done.upload.client].train))))
    return found


def averaged(models: Sequence[Model]) -> Values:
    """The mean by numbers of images; integer buffers count steps and stay 0."""
    whole = sum(weight for _, weight in models)
    states = [(model.state_dict(), weight / whole) for model, weight in models]
    return {
        name: sum((weight * found[name] for found, weight in states), torch.zeros_like(value))
        if value.is_floating_point()
        else torch.zeros_like(value)
        for name, value in states[0][0].items()
    }


class Adam:
    """Kingma and Ba, ICLR 2015, Algorithm 1."""

    def __init__(self, params: Sequence[Tensor], betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.params, self.betas, self.count = list(params), betas, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]

    def step(self, lr: float) -> None:
        self.count += 1
        for (m, v), param in zip(self.moments, self.params, strict=True):
            assert param.grad is not None
            for moment, beta, new in zip((m, v), self.betas, (param.grad, param.grad**2), strict=True):
                moment.mul_(beta).add_((1 - beta) * new)
            first, second = (x / (1 - beta**self.count) for x, beta in zip((m, v), self.betas, strict=True))
            with torch.no_grad():
                param -= lr * first / (second.sqrt() + 1e-8)


def feddf(
    models: Sequence[Model],
    template: nn.Module,
    images: Tensor,
    order: Sequence[Tensor],
    lr: float,
    max_norm: float | None,
) -> Values:
    """The mean, taught by the mean logits of `models` in the batches of `order`."""
    student = loaded(template, averaged(models))
    solver = Adam(list(student.parameters()))
    for step, index in enumerate(order):
        with torch.no_grad():
            target = sum(model.eval()(images[index]) for model, _ in models).div(len(models)).softmax(-1)
        said = student(images[index]).softmax(-1)
        student.zero_grad()
        (target * (target / said).log()).sum(-1).mean().backward()
        clip(student, max_norm)
        solver.step(lr * (1 + math.cos(math.pi * step / len(order))) / 2)
    return uncounted(student)


def uncounted(model: nn.Module) -> Values:
    """What the server goes on with: steps are not counted."""
    values = model.state_dict()
    return {n: value if value.is_floating_point() else torch.zeros_like(value) for n, value in values.items()}


def clip(model: nn.Module, max_norm: float | None) -> None:
    """All gradients together to length `max_norm`, as torch does."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    length = float(torch.cat([g.flatten() for g in grads]).norm())
    if max_norm is not None and length > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (length + 1e-6))


def fedbe(
    models: Sequence[Model],
    drawn: Sequence[Values],
    template: nn.Module,
    images: Tensor,
    order: Sequence[Tensor],
    lr: float,
    temperature: float,
    averages: range,
    size: int,
) -> Values:
    """The mean, taught by `models`, `drawn` and itself; the mean of its iterates after the steps `averages`, from 1."""
    student = loaded(template, averaged(models))
    teachers = [*(model for model, _ in models), *(loaded(template, v) for v in drawn), copy.deepcopy(student)]
    with torch.no_grad():
        target = sum(teacher.eval()(images).softmax(-1) for teacher in teachers).div(len(teachers))
    target = target.pow(1 / temperature)
    target = target / target.sum(-1, keepdim=True)
    momentum, iterates = [torch.zeros_like(p) for p in student.parameters()], list[list[Tensor]]()
    for step, index in enumerate(order, 1):
        student.zero_grad()
        said = student(images[index]).softmax(-1)
        (target[index] * (target[index] / said).log()).mean().backward()
        with torch.no_grad():
            for param, moving in zip(student.parameters(), momentum, strict=True):
                assert param.grad is not None
                moving.mul_(0.9).add_(param.grad + 1e-5 * param)
                param -= lr * moving
        if step in averages:
            iterates.append([p.detach().clone() for p in student.parameters()])
    if not iterates:
        return uncounted(student)
    with torch.no_grad():
        for param, *values in zip(student.parameters(), *iterates, strict=True):
            param.copy_(sum(values) / len(values))
    statistics(student, images, size)
    return uncounted(student)


def statistics(model: nn.Module, images: Tensor, size: int) -> None:
    """Statistics of batch norm as the plain mean over batches of `size` images."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in norms]
    hooks = [
        norm.register_forward_pre_hook(
            lambda _m, given, found=found: found.append((given[0].mean((0, 2, 3)), given[0].var((0, 2, 3))))
        )
        for norm, found in zip(norms, seen, strict=True)
    ]
    with torch.no_grad():
        for part in images.split(size):
            model.train()(part)
    for hook, norm, found in zip(hooks, norms, seen, strict=True):
        hook.remove()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(torch.stack([mean for mean, _ in found]).mean(0))
        norm.running_var.copy_(torch.stack([var for _, var in found]).mean(0))


def around(sent: Values, models: Sequence[Model], name: str, spread: float, noise: Tensor) -> Tensor:
    """FedBE's Gaussian, number by number, for the parameter `name`."""
    ways = [dict(model.named_parameters())[name].detach() - sent[name] for model, _ in models]
    lengths = [float(way.square().sum().sqrt()) for way in ways]
    found, count = sent[name].flatten().clone(), len(ways)
    for j in range(len(found)):
        units = [float(way.flatten()[j]) / length for way, length in zip(ways, lengths, strict=True)]
        mean = sum(units) / count
        variance = max(sum(unit**2 for unit in units) / count - mean**2, 1e-5)
        found[j] += sum(lengths) / count * (mean + spread * math.sqrt(variance) * float(noise.flatten()[j]))
    return found.view_as(sent[name])


def fedlaw(
    models: Sequence[Model],
    template: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    lr: float,
) -> tuple[Values, Tensor, float]:
    """What the server sends, and the lambda and gamma behind it."""
    counts = torch.tensor([weight for _, weight in models], dtype=torch.float64)
    x, y = (counts / counts.sum()).log().requires_grad_(), torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver, student = Adam([x, y], (0.5, 0.999)), loaded(template, averaged(models))

    def mixed() -> tuple[Tensor, Tensor]:
        return x.exp() / x.exp().sum(), y.exp()

    def fill() -> None:
        shares, gamma = mixed()
        with torch.no_grad():
            for name, param in student.named_parameters():
                ends = [dict(model.named_parameters())[name] for model, _ in models]
                param.copy_(sum(gamma * share * end for share, end in zip(shares, ends, strict=True)))

    for inputs, labels in batches:
        fill()
        student.zero_grad()
        nn.functional.cross_entropy(student(inputs), labels).backward()
        shares, gamma = mixed()
        slopes = torch.stack([_product(student, model) for model, _ in models])  # of each weight in the sum
        x.grad, y.grad = torch.autograd.grad((gamma * shares * slopes).sum(), [x, y])
        solver.step(lr)
    fill()
    shares, gamma = mixed()
    return uncounted(student), shares.detach(), float(gamma.detach())


def _product(student: nn.Module, model: nn.Module) -> Tensor:
    """Of the student's gradient with the parameters of a client's network."""
    pairs = zip(student.parameters(), model.parameters(), strict=True)
    return torch.stack([(mine.grad * own.detach()).sum() for mine, own in pairs if mine.grad is not None]).sum()
