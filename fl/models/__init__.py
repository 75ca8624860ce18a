"""The networks of the papers, by name: `build("hyperfl-grey", num_classes=10, seed=0)` gives a `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import nn

from fl.models.building_blocks.initialization import initialise
from fl.models.building_blocks.layers import Classifier, Normalize, usual_statistics
from fl.ranges import Positive, Width
from fl.registry import Registry
from fl.types import Task

models: Registry[Network] = Registry("model", "fl.models")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Settings of a network; a subclass says what its extractor is.

    Attributes:
        input_shape: (C, H, W) of the images.
        normalize: whether the first layer normalises the pixels.
        mean: per-channel mean; `()` takes the usual one (MNIST's for one channel, CIFAR-10's for three).
        std: per-channel standard deviation, likewise.
    """

    registry: ClassVar[Registry[Network]] = models
    head_bias: ClassVar[bool] = True
    """Whether the head has a bias."""

    input_shape: tuple[Width, Width, Width]
    normalize: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[Positive, ...] = ()

    def body(self) -> nn.Sequential:
        """The extractor: (B, C, H, W) to features (B, F)."""
        raise NotImplementedError

    def initialise(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the initial parameters; PyTorch's default scheme unless a subclass says otherwise."""
        initialise(model, generator)

    def task(self, *, num_classes: int, seed: int = 0) -> Task:
        """The network with its initial parameters, equal to `torch.manual_seed(seed)` followed by construction.

        Raises:
            ValueError: fewer than two classes, or images too small for the extractor.
        """
        if num_classes < 2:
            raise ValueError(f"expected at least 2 classes, got {num_classes}")
        first = self._normalisation()
        with torch.device("meta"):  # shapes only: nothing is drawn from the global generator
            model = Classifier(first, self.body(), self.input_shape, num_classes, bias=self.head_bias)
        model.to_empty(device="cpu")
        self.initialise(model, torch.Generator().manual_seed(seed))
        mean, std = first.values if first is not None else ((), ())
        return Task(model, self.input_shape, num_classes, "head.", mean, std)

    def _normalisation(self) -> Normalize | None:
        if not self.normalize:
            return None
        if self.mean and self.std:
            mean, std = self.mean, self.std
        elif self.mean or self.std:
            raise ValueError(f"expected both mean and std or neither, got mean={self.mean}, std={self.std}")
        else:
            mean, std = usual_statistics(self.input_shape[0])
        if len(mean) != self.input_shape[0] or len(std) != self.input_shape[0]:
            raise ValueError(f"expected a mean and std for each of {self.input_shape[0]} channels, got {mean}, {std}")
        return Normalize(mean, std)


@overload
def build(spec: str | Mapping[str, Any] | Network) -> Network: ...


@overload
def build(spec: str | Mapping[str, Any] | Network, *, num_classes: int, seed: int = 0, **settings: Any) -> Task: ...


def build(
    spec: str | Mapping[str, Any] | Network, *, num_classes: int | None = None, seed: int = 0, **settings: Any
) -> Network | Task:
    """The network that `spec` describes; with `num_classes`, the task of it.

    Args:
        spec: a name, or `{"name": name, setting: value, ...}`.
        num_classes: of the task.
        seed: what the task's network is initialized from.
        **settings: of the network, beside a name.

    Raises:
        UnknownNameError: unknown network or setting; says what is close.
    """
    if isinstance(spec, str):
        spec = {"name": spec}
    network = models.build({**spec, **settings} if isinstance(spec, Mapping) else spec)
    return network if num_classes is None else network.task(num_classes=num_classes, seed=seed)
