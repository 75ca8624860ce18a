"""FedSR: a representation that is drawn at random, short, and tells as little of the image as its label allows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.network import Network
from fl.ranges import Count, CountFrom0, ShareBelow1, StepSize, Weight
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Batch, Phase, Scope, Task

REFERENCE_PARAMETERS = ("centre", "width", "scale")
"""Parameters of the representation's reference distribution, which stay with the client."""


@methods.register("fedsr")
@dataclass(frozen=True, kw_only=True)
class FedSR(FedAvg):
    """FedSR, a simple representation for domain generalization (Nguyen et al., NeurIPS 2022).

    What enters the classifier, features (B, D), goes through a further linear layer that gives mu and sigma (softplus)
    of z ~ N(mu, sigma^2), one draw for each image and step; z is classified. To the cross entropy come `l2` times the
    mean length |z|, and `cmi` times the mean over images of KL(N(C mu, (C sigma)^2) || N(r_y, s_y^2)), a bound on what
    z tells of the image beyond its label y: center r_y and width s_y (softplus) of a class, and C, are learned. As in
    the authors' code these stay with the client, and begin at 0, softplus(1) and 1; all else is averaged. Predictions
    are the mean of the softmax over `samples` draws.

    Constants are those of the authors' command for PACS with ResNet-18, where D is 512 as here whatever the network
    gives. We read code, not paper: there |z| is not squared. Theirs averages clients alike and goes on with momentum
    from round to round, ours weights by images and begins afresh. Predictions here take the same draws for every image,
    so that scoring needs no random numbers of its own.

    Attributes:
        l2: weight of the mean length of z.
        cmi: weight of the divergence.
        samples: draws that a prediction is the mean of; 0 classifies mu.
        lr: step size of local SGD.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: local passes instead of steps.
        steps: local steps; None takes the authors' 5, unless `epochs` is given.
        batch_size: images per step.

    Raises:
        ValueError: a number out of range; or, for a client, a network whose classifier is no linear layer.
    """

    plain: ClassVar[str] = (
        "as fedavg, but what the network sees in a picture is blurred by random numbers and kept short, so that it "
        "holds little beyond the label."
    )
    has_per_sample_loss: ClassVar[bool] = (
        False  # the draws are those of a whole batch, which nobody takes apart to clip each
    )

    l2: Weight = 0.01
    cmi: Weight = 0.001
    samples: CountFrom0 = 20
    lr: StepSize = 0.01
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 5e-4
    epochs: CountFrom0 | None = None
    batch_size: Count | None = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("l2", "cmi", "samples"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> FedSR:
        """Return two epochs of two steps, everything on."""
        return cls(l2=0.1, cmi=0.05, samples=3, lr=0.1, momentum=0.5, max_norm=1.0, epochs=2, batch_size=2)

    # ---- description -------------------------------------------------------------------------------------------------
    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase in which everything moves."""
        steps = 5 if self.epochs is None and self.steps is None else self.steps
        return FedAvg.phases(replace(self, steps=steps), task, round)

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: the reference distribution is the client's own."""
        mine = name.startswith(task.head) and name.removeprefix(task.head) in REFERENCE_PARAMETERS
        return Scope.PRIVATE if mine else super().scope(name, task)

    def client_model(self, task: Task) -> nn.Module:
        """Return the task's network with a random representation before its classifier."""
        model = copy.deepcopy(task.model)
        parent, _, last = task.head.rstrip(".").rpartition(".")
        found = dict(model.named_modules()).get(task.head.rstrip("."))
        if not isinstance(found, nn.Linear):
            got = type(found).__name__ if task.head and found is not None else "nothing"
            raise ValueError(
                f"fedsr: expected a linear layer called {task.head.rstrip('.')!r} as classifier, got {got}"
            )
        setattr(model.get_submodule(parent), last, RandomHead(found, stream(0, "fedsr")))
        return model

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return the task's own parameters; those of the further layer drawn from `generator` as PyTorch does."""
        params = super().initial_parameters(task, generator)
        name, head = _random_head(task.model)
        layer = nn.utils.skip_init(nn.Linear, head.encode.in_features, head.encode.out_features)
        initialize(layer, generator)
        fresh = {f"{name}.encode.{key}": value.detach() for key, value in layer.named_parameters()}
        fresh |= {f"{name}.{key}": torch.ones_like(getattr(head, key)) for key in ("width", "scale")}
        return {key: fresh[key].to(dense(value)) if key in fresh else value for key, value in params.items()}

    # ---- local rule --------------------------------------------------------------------------------------------------
    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return standard normal numbers (B, D) for z; none, so that z = mu, is an attacker's guess."""
        if generator is None:
            return {}
        name, head = _random_head(task.model)
        noise = torch.randn(len(batch), head.classify.in_features, generator=generator)
        return {f"{name}.noise": noise.to(batch.inputs)}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the cross entropy and both penalties."""
        logits, mu, sigma = represent(network, batch.inputs)
        name, _ = _random_head(network.model)
        noise = step.draws.get(f"{name}.noise")
        z = mu if noise is None else mu + noise * sigma
        center, width, scale = (network.weights[f"{name}.{key}"] for key in REFERENCE_PARAMETERS)
        far = divergence(scale * mu, scale * sigma, center, functional.softplus(width), batch.labels)
        plain = functional.cross_entropy(logits, batch.labels)
        return plain + self.l2 * z.norm(dim=1).mean() + self.cmi * far.mean()

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities (B, K)."""
        plain, mu, sigma = represent(network, inputs)
        if not self.samples:
            return plain
        name, _ = _random_head(network.model)
        noise = torch.randn(self.samples, 1, mu.shape[1], generator=stream(0, "fedsr", "samples")).to(mu)
        z = mu + noise * sigma
        weight, bias = (network.weights.get(f"{name}.classify.{key}") for key in ("weight", "bias"))
        assert weight is not None
        return functional.linear(z, weight, bias).softmax(-1).mean(0).log()


class RandomHead(nn.Module):
    """Features (B, D) to logits (B, K) by way of z = mu + noise * sigma (B, D).

    The noise stands in the buffer `noise` while a batch is fed; without any, z = mu. The parameters in
    `REFERENCE_PARAMETERS` are 0 until the method's `initial_parameters` values come: a server, which sees no client's,
    has the same network.

    Args:
        classify: the classifier of z.
        generator: draws the layer that gives mu and sigma.
    """

    noise: Tensor

    def __init__(self, classify: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        features, classes, like = classify.in_features, classify.out_features, classify.weight
        self.encode = nn.utils.skip_init(nn.Linear, features, 2 * features)
        initialize(self.encode, generator)
        self.encode.to(like)
        self.classify = classify
        self.centre = nn.Parameter(like.new_zeros(classes, features))
        self.width = nn.Parameter(like.new_zeros(classes, features))
        self.scale = nn.Parameter(like.new_zeros(()))
        self.register_buffer("noise", torch.empty(0), persistent=False)  # no number: none travels with the buffers

    def forward(self, features: Tensor) -> Tensor:
        """Return logits.

        Raises:
            ValueError: the noise is of another batch.
        """
        mu, sigma = split_statistics(self.encode(features))
        if self.noise.numel():
            if self.noise.shape != mu.shape:
                raise ValueError(f"expected noise {tuple(mu.shape)}, one row an image, got {tuple(self.noise.shape)}")
            mu = mu + self.noise * sigma
        logits: Tensor = self.classify(mu)
        return logits


def split_statistics(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return mu and sigma (B, D) each, from what the further layer gives (B, 2 D)."""
    mu, raw = statistics.chunk(2, -1)
    return mu, functional.softplus(raw)


def represent(network: Network, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (B, K), mu and sigma (B, D) of images (B, C, H, W)."""
    seen: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        seen.append(made)

    handle = _random_head(network.model)[1].encode.register_forward_hook(note)
    try:
        logits = network(inputs)
    finally:
        handle.remove()
    return logits, *split_statistics(seen[0])


def divergence(mu: Tensor, sigma: Tensor, center: Tensor, width: Tensor, labels: Tensor) -> Tensor:
    """Return KL(N(mu, sigma^2) || N(center, width^2)) of each image from its class (B,).

    A mean where a label is of several.

    Args:
        mu: (B, D).
        sigma: (B, D), of any sign.
        center: (K, D).
        width: (K, D), > 0.
        labels: (B,) int64, or (B, K) probabilities.
    """
    if labels.is_floating_point():
        mu, sigma = mu[:, None], sigma[:, None]
    else:
        center, width = center[labels], width[labels]
    far = ((sigma.square() + (mu - center).square()) / width.square() - 1) / 2 + width.log() - sigma.abs().log()
    each = far.sum(-1)
    return (each * labels).sum(-1) if labels.is_floating_point() else each


def _random_head(model: nn.Module) -> tuple[str, RandomHead]:
    """Return the random representation, and what it is called."""
    found: Iterator[tuple[str, RandomHead]] = (
        (name, module) for name, module in model.named_modules() if isinstance(module, RandomHead)
    )
    return next(found)
