"""The tailored attack of the HyperFL paper: first the embedding by matching gradients, then the image by inversion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from attacks.base import Attack, NotApplicable, Reconstruction, attacks
from attacks.objectives import direction, squared
from attacks.peel import Opened, Peeled, open_view
from attacks.priors import total_variation
from fl.models.hypernetwork import EMBEDDING, TRUNK_WEIGHT, Hypernetwork
from fl.network import Network
from fl.seeds import stream
from fl.tensors import Tensors, compress, dense
from fl.types import ServerView

RANK = 8
"""Outer products kept of a dense upload of many steps."""
MARKS = (3 / 8, 5 / 8, 7 / 8)
"""Where a search divides its step size by ten (IG's schedule)."""


@attacks.register("bilevel")
@dataclass(frozen=True, kw_only=True)
class Bilevel(Attack):
    """The attack HyperFL's authors made for HyperFL (Guo et al., AAAI 2025, Eq. 9-10 and appendix D.1).

    The paper gives neither code nor constants. As read here:

    - lower level (Eq. 10): a dummy embedding v and a dummy output theta; the gradient of an inner loss between h(v)
      and theta with respect to the hypernetwork is matched to the observed one (L2, Adam), as DLG does with an image
      and a label;
    - upper level: v stays fixed and generates the extractor; the image is sought by model inversion, through a
      classifier that starts anywhere and is trained in turn with the image (UnSplit, Erdogan et al. 2022), with total
      variation. The update itself no longer enters.

    The paper holds the lower level to be hard, because theta has too many entries to be searched for. With the inner
    loss 1/2 |h(v) - theta|^2 it has a solution in closed form: the loss's gradient with respect to h(v) is the
    residual h(v) - theta itself, the head biases' update is that gradient, and the rest follows from products
    (`peel`). It stands here as published, to be compared with: on small networks the search comes within a tenth of
    the embedding, on the published one 3000 iterations were not enough (one image: still further off than its norm).

    Attributes:
        inner: the inner loss: "squared", or "logcosh" (the sum of log cosh of the residuals).
        lower_iterations: of the search for the embedding.
        lower_lr: its step size, for v and theta (Adam, divided by ten at 3/8, 5/8 and 7/8).
        lower_start: where theta starts: "output" at h(v) of the dummy v, "normal" at N(0, 1) as DLG's labels do,
            from where the search ended far from the embedding in every trial on a small network.
        iterations: of the search for the image.
        lr: step size of the image, in normalised units (signed Adam, divided by ten at 3/8, 5/8 and 7/8).
        head_lr: step size of the classifier (Adam).
        tv: weight of the total variation, in normalised units.
        restarts: of both levels; the smallest objective wins.
    """

    plain: ClassVar[str] = "guesses the secret code first and the picture after, as the paper of hyperfl did."

    inner: Literal["squared", "logcosh"] = "squared"
    lower_iterations: int = 3000
    lower_lr: float = 0.01
    lower_start: Literal["output", "normal"] = "output"
    iterations: int = 10_000
    lr: float = 0.1
    head_lr: float = 1e-3
    tv: float = 1e-6
    restarts: int = 1

    def __post_init__(self) -> None:
        for name in ("lower_iterations", "iterations", "restarts"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.tv < 0:
            raise ValueError(f"expected tv >= 0, got {self.tv}")

    @classmethod
    def example(cls) -> Bilevel:
        """A few iterations of each level."""
        return cls(lower_iterations=5, iterations=5)

    def one(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Embedding, extractor and images; the objective is that of the lower level, relative to its start."""
        if view.batch_size is None:
            return NotApplicable("the number of images is unknown")
        opened = open_view(view)
        if isinstance(opened, NotApplicable):
            return opened
        lower = _Lower.of(opened, self.inner)
        tries = [self._embedding(lower, stream(seed, "bilevel", "lower", r)) for r in range(self.restarts)]
        embedding, history = min(tries, key=lambda found: found[1][-1])
        v = embedding.double()
        found = Peeled(opened, opened.update.hidden(v), v, "search", float("nan"))
        images = [self._images(view, found, stream(seed, "bilevel", "upper", r)) for r in range(self.restarts)]
        inputs, _ = min(images, key=lambda image: image[1])
        return Reconstruction(
            inputs=inputs,
            labels=view.labels,
            objective=history[-1] / history[0],
            history=tuple(value / history[0] for value in history),
            private=found.private(),
            knowledge=("labels",) if view.labels is not None else (),
        )

    def _embedding(self, lower: _Lower, draw: torch.Generator) -> tuple[Tensor, tuple[float, ...]]:
        """The best embedding of one search, and the objective along it (its smallest value last)."""
        like = dense(lower.view.shared[TRUNK_WEIGHT])
        v = torch.randn(like.shape[1], generator=draw).to(like).requires_grad_()
        theta = lower.generate(v.detach())
        if self.lower_start == "normal":
            theta = {n: torch.randn(w.shape, generator=draw).to(w) for n, w in theta.items()}
        theta = {n: w.detach().requires_grad_() for n, w in theta.items()}
        optimizer = torch.optim.Adam([v, *theta.values()], lr=self.lower_lr)
        scheduler = _finer(optimizer, self.lower_iterations)
        best, least = v.detach().clone(), float("inf")
        history = []
        for iteration in range(self.lower_iterations + 1):
            optimizer.zero_grad()
            objective = lower.objective(v, theta)
            value = float(objective.detach())
            if value < least:
                best, least = v.detach().clone(), value
            if iteration % 50 == 0:
                history.append(value)
            if iteration < self.lower_iterations:
                objective.backward()
                optimizer.step()
                scheduler.step()
        return best, (*history, least)

    def _images(self, view: ServerView, found: Peeled, draw: torch.Generator) -> tuple[Tensor, float]:
        """Images by model inversion through the recovered extractor, and their objective."""
        task = view.client.task
        count = view.batch_size or 1
        mean, std = (torch.tensor(x, dtype=view.dtype, device=view.device) for x in (task.mean, task.std))
        low, high = (((edge - mean) / std).view(-1, 1, 1) for edge in (0.0, 1.0))
        x = torch.randn(count, *task.input_shape, generator=draw).to(mean).requires_grad_()
        head = {
            n: _drawn(p, draw).to(mean).requires_grad_() for n, p in task.parameters.items() if n.startswith(task.head)
        }
        labels = view.labels
        if labels is None:  # nothing tells them: a class is inverted, whichever it is
            labels = torch.randint(task.num_classes, (count,), generator=draw).to(view.device)
        buffers = {**task.buffers, **view.buffers}
        movers = [torch.optim.Adam([x], lr=self.lr), torch.optim.Adam(head.values(), lr=self.head_lr)]
        scheduler = _finer(movers[0], self.iterations)

        def objective() -> Tensor:
            pixels = x * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
            logits = Network(view.client.predictor, {**found.extractor, **head}, buffers)(pixels)
            return nn.functional.cross_entropy(logits, labels) + self.tv * total_variation(pixels, std)

        best, least = x.detach().clone(), float("inf")
        for _ in range(self.iterations):
            value = objective()
            if float(value.detach()) < least:
                best, least = x.detach().clone(), float(value.detach())
            (x.grad,) = torch.autograd.grad(value, [x])
            x.grad = x.grad.sign()
            movers[0].step()
            scheduler.step()
            with torch.no_grad():
                x.copy_(torch.maximum(torch.minimum(x, high), low))
            for p, g in zip(head.values(), torch.autograd.grad(objective(), list(head.values())), strict=True):
                p.grad = g
            movers[1].step()
        return (best * std.view(-1, 1, 1) + mean.view(-1, 1, 1)).clamp(0, 1), least


@dataclass(frozen=True)
class _Lower:
    """The lower level: what a guess of embedding and output would have sent, compared with what was sent.

    The gradient of the inner loss is outer products, and so is the observed one (a dense upload is cut down to as many
    as there were steps): none is ever multiplied out.
    """

    view: ServerView
    observed: Tensors
    inner: str

    @classmethod
    def of(cls, opened: Opened, inner: str) -> _Lower:
        """From a view whose decay is known."""
        rank = min(opened.steps or RANK, RANK)
        observed: Tensors = {}
        for name, value in opened.change.items():
            if name.startswith("hypernet.heads.") and isinstance(value, Tensor) and value.ndim == 2:
                value = compress(value, min(rank, *value.shape))
            observed[name] = value
        lr = opened.group.lr
        return cls(opened.view, {name: value * (1 / lr) for name, value in observed.items()}, inner)

    @cached_property
    def target(self) -> tuple[Tensors, Tensor]:
        """The observed gradient as the distance takes it."""
        return direction(self.observed)

    def generate(self, embedding: Tensor) -> dict[str, Tensor]:
        """h(v), by the network's names."""
        generator = self.view.method.parametrisation
        assert isinstance(generator, Hypernetwork)
        return generator.generate(self._params(embedding), self.view.client.task)

    def _params(self, embedding: Tensor) -> Tensors:
        return self.view.method.parametrisation.lift({**self.view.shared, EMBEDDING: embedding})

    def objective(self, embedding: Tensor, outputs: dict[str, Tensor]) -> Tensor:
        """Squared distance of the inner loss's gradient and the observed one, relative to the latter."""
        residuals = {n: made - outputs[n] for n, made in self.generate(embedding).items()}
        if self.inner == "logcosh":
            residuals = {n: r.tanh() for n, r in residuals.items()}
        view = self.view
        pull = view.method.parametrisation.pullback
        predicted = pull(self._params(embedding), residuals, view.client.task, list(self.observed))
        if view.threat.knows_defense:
            predicted = view.defense.surrogate(predicted, view.update)
        return squared(predicted, *self.target)


def _drawn(like: Tensor, draw: torch.Generator) -> Tensor:
    """A fresh start for a classifier's parameter: zero for biases, else N(0, 1 / fan-in)."""
    if like.ndim < 2:
        return torch.zeros(like.shape)
    return torch.randn(like.shape, generator=draw) / like[0].numel() ** 0.5


def _finer(optimizer: torch.optim.Optimizer, iterations: int) -> torch.optim.lr_scheduler.MultiStepLR:
    """Divides the step size by ten at 3/8, 5/8 and 7/8 of the search."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(iterations * mark) for mark in MARKS], 0.1)
