"""PRECODE: a layer of random numbers between extractor and classifier."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from defenses import defenses
from fl.client import client_loss_gradient
from fl.defense import Defense
from fl.gradient import Gradient
from fl.method import Method, Step
from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.layers import Classifier
from fl.network import Network
from fl.ranges import Weight, Width
from fl.seeds import stream
from fl.tensors import Tensors
from fl.types import Batch, Task

BOTTLENECK = "bottleneck"
"""Of the module that is put into the network."""
UNTRUSTED_WEIGHT = 1e-6
"""An attacker's trust in a tensor that it leaves out: not 0, since ratios are taken of it."""


class Sample(nn.Module):
    """z = mu + noise * sigma, of statistics (B, 2K) whose halves are mu and what softplus makes sigma of.

    The noise (B, K) stands in the buffer `noise` while a batch is fed; without any, z = mu.
    """

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.empty(0), persistent=False)  # no number: none travels with the buffers

    def forward(self, statistics: Tensor) -> Tensor:
        """Return z (B, K).

        Raises:
            ValueError: the noise is of another batch.
        """
        mu, raw = statistics.chunk(2, -1)
        if not self.noise.numel():
            return mu
        if self.noise.shape != mu.shape:
            raise ValueError(f"expected noise {tuple(mu.shape)}, one row an image, got {tuple(self.noise.shape)}")
        return mu + self.noise * functional.softplus(raw)


class Bottleneck(nn.Module):
    """Features (B, F) to others of their shape: `encoder` (F to 2K), a sample of K numbers, `decoder` (K to F)."""

    def __init__(self, features: int, latent: int, generator: torch.Generator) -> None:
        super().__init__()
        with torch.device("meta"):  # shapes only: nothing is drawn from the global generator
            self.encoder, self.decoder = nn.Linear(features, 2 * latent), nn.Linear(latent, features)
        self.sample = Sample()
        for layer in (self.encoder.to_empty(device="cpu"), self.decoder.to_empty(device="cpu")):
            initialize(layer, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the decoder makes of the sample."""
        decoded: Tensor = self.decoder(self.sample(self.encoder(x)))
        return decoded


@defenses.register("precode")
@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """A variational bottleneck before the classifier (PRECODE, Scheliga et al., WACV 2022, section 3).

    Features h become mu, sigma = encoder(h), z = mu + eps * sigma with eps ~ N(0, 1) drawn anew for every image and
    step, and decoder(z) goes to the classifier; the loss gains beta * KL(N(mu, sigma^2) || N(0, 1)), in bits and per
    image. As in the authors' code sigma is a softplus, encoder and decoder are linear layers with biases, and they
    stand right before the last linear layer. Their weights are trained and shared like the extractor's, whose module
    they join; every client starts from the same ones, drawn as PyTorch does. Predictions at test time take z = mu (the
    authors sample there, too).

    An attacker who knows it leaves out the gradients of the bottleneck and of what follows, which eps enters directly
    (Scheliga et al., 2022, "Combining variational modeling with partial gradient perturbation"), and searches for eps
    together with the images, as for any private tensor of the client (as their "Dropout is not all you need", 2022,
    does for masks). On three Fashion-MNIST images and the LeNet of Zhu et al. that gave 16 dB (25 with `private_lr`
    0.1), leaving out alone 8, searching alone 5; an attacker who does not know it compares everything at eps = 0 and
    got 4, and 27 where there is no defense.

    Attributes:
        latent: K, size of z.
        beta: weight of the divergence.

    Raises:
        ValueError: a setting out of range, or a network whose classifier has no place before it: the last linear layer
            must be part of an `nn.Sequential`, or the network one of this package's classifiers.
    """

    plain: ClassVar[str] = "a layer inside the network adds random numbers that only the client knows."

    latent: Width = 256
    beta: Weight = 1e-3

    def __post_init__(self) -> None:
        if self.latent < 1:
            raise ValueError(f"expected latent >= 1, got {self.latent}")
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"expected beta >= 0, got {self.beta}")

    @classmethod
    def example(cls) -> Precode:
        """Return a few numbers, and a divergence that shows."""
        return cls(latent=6, beta=0.1)

    def check(self, method: Method, task: Task) -> None:
        """Refuse a network whose last linear layer is no classifier.

        Raises:
            ValueError: says what it returns.
        """
        if (found := _classifier(task.model)[1].out_features) != task.num_classes:
            raise ValueError(f"precode: expected {task.num_classes} outputs of the last linear layer, got {found}")

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the network with the bottleneck in it; all other names stay."""
        model = copy.deepcopy(model)
        name, last = _classifier(model)
        made = Bottleneck(last.in_features, self.latent, stream(0, "precode")).to(last.weight)
        parent, _, key = name.rpartition(".")
        holder = model.get_submodule(parent)
        if isinstance(holder, nn.Sequential):
            _insert_module(holder, key, made)
        elif isinstance(model, Classifier) and isinstance(model.body, nn.Sequential) and last is model.head:
            model.body.add_module(BOTTLENECK, made)
        else:
            raise ValueError(
                f"precode: expected the last linear layer, {name!r}, in an nn.Sequential, got {type(holder).__name__}"
            )
        return model

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draw eps (B, K) for the bottleneck."""
        if generator is None:
            return {}
        noise = torch.randn(len(batch), self.latent, generator=generator)
        return {f"{name}.noise": noise.to(batch.inputs) for name in _sample_layers(task.model)}

    def gradient(self, grad: Gradient, params: Tensors, batch: Batch, generator: torch.Generator | None) -> Tensors:
        """Return the gradient of the loss with its divergence."""
        own = client_loss_gradient(grad)
        return replace(own, loss=partial(self._loss, own.client.method))(params, batch)

    def tensor_trust(self, observed: Tensors) -> dict[str, float]:
        """Return next to nothing for tensors from the bottleneck on, in the order of the network."""
        names = list(observed)
        first = next((i for i, name in enumerate(names) if f"{BOTTLENECK}.encoder." in name), len(names))
        return {name: 1.0 if i < first else UNTRUSTED_WEIGHT for i, name in enumerate(names)}

    def _loss(self, method: Method, network: Network, batch: Batch, step: Step) -> Tensor:
        watched = _DivergenceRecorder(network.model, network.weights, network.buffers)
        value = method.loss(watched, batch, step)
        if not watched.divergences:  # a loss that does not look at the network (FedGen's, of labels alone)
            return value
        return value + self.beta * torch.stack(watched.divergences).mean()


@dataclass(frozen=True)
class _DivergenceRecorder(Network):
    """A network that notes the divergence of its bottleneck in every call."""

    divergences: list[Tensor] = field(default_factory=list)

    def __call__(self, *inputs: Tensor) -> Tensor:
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.divergences.append(divergence(args[0]))

        (name,) = _sample_layers(self.model)
        handle = self.model.get_submodule(name).register_forward_pre_hook(note)
        try:
            return super().__call__(*inputs)
        finally:
            handle.remove()


def divergence(statistics: Tensor) -> Tensor:
    """Return the mean over images of KL(N(mu, sigma^2) || N(0, 1)), in bits, from statistics (B, 2K)."""
    mu, raw = statistics.chunk(2, -1)
    sigma = functional.softplus(raw)
    return (mu.square() + sigma.square() - 1 - 2 * sigma.log()).sum(-1).mean() / (2 * math.log(2))


def _classifier(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer with weights of its own."""
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and isinstance(m.weight, Tensor)]
    if not linear:
        raise ValueError("precode: expected a network with a linear layer as its classifier, got none")
    return linear[-1]


def _sample_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Sample)]


def _insert_module(layers: nn.Sequential, before: str, module: nn.Module) -> None:
    """Put a module among others without renaming any."""
    children = OrderedDict[str, nn.Module]()
    for key, child in layers.named_children():
        if key == before:
            children[BOTTLENECK] = module
        children[key] = child
    for key in list(layers._modules):
        del layers._modules[key]
    for key, child in children.items():
        layers.add_module(key, child)
