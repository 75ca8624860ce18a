"""The networks of the papers, by name: `build("hyperfl-grey", num_classes=10, seed=0)` gives a `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import nn

from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.layers import Classifier, Normalize, usual_statistics
from fl.ranges import Positive, Width
from fl.registry import FormerHooks, Registry
from fl.types import Task


class NetworkRegistry(Registry["Network"]):
    """Networks by name; `module:function` stands for one of the user's own (`fl.models.function`)."""

    def build(self, spec: str | Mapping[str, Any] | Network) -> Network:
        """Build as `Registry.build`; a name with a colon is a user's function, with the settings beside it."""
        settings = {"name": spec} if isinstance(spec, str) else spec
        if isinstance(settings, Mapping) and isinstance(name := settings.get("name"), str) and ":" in name:
            spec = {"function": name, **settings, "name": "function"}
        return super().build(spec)


models = NetworkRegistry("model", "fl.models")


@dataclass(frozen=True, kw_only=True)
class Network(FormerHooks):
    """Settings of a network; a subclass says what its extractor is.

    Attributes:
        input_shape: (C, H, W) of the images.
        normalize: whether the first layer normalizes the pixels.
        mean: per-channel mean; `()` takes the usual one (MNIST's for one channel, CIFAR-10's for three).
        std: per-channel standard deviation, likewise.
    """

    registry: ClassVar[Registry[Network]] = models
    former_hooks: ClassVar[Mapping[str, str]] = {"initialise": "initialize", "task": "build_task"}
    head_bias: ClassVar[bool] = True
    """Whether the head has a bias."""
    user_code: ClassVar[bool] = False
    """Whether it depends on code and files that its settings only name."""

    input_shape: tuple[Width, Width, Width]
    normalize: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[Positive, ...] = ()

    def body(self) -> nn.Sequential:
        """Return the extractor: (B, C, H, W) to features (B, F)."""
        raise ValueError(f"{type(self).__name__} does not say what its extractor is: define body()")

    def initialize(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the initial parameters; PyTorch's default scheme unless a subclass says otherwise.

        All parameters and buffers come without values, but for those of the layer that normalizes pixels.
        """
        initialize(model, generator)

    def build_task(self, *, num_classes: int, seed: int = 0) -> Task:
        """Return the network with its initial parameters, equal to `torch.manual_seed(seed)` followed by construction.

        Raises:
            ValueError: fewer than two classes, images too small for the extractor, or `initialize` leaves something
                without a value.
        """
        if num_classes < 2:
            raise ValueError(f"expected at least 2 classes, got {num_classes}")
        first = self._normalization()
        with torch.device("meta"):  # shapes only: nothing is drawn from the global generator
            model = Classifier(first, self.body(), self.input_shape, num_classes, bias=self.head_bias)
        model.to_empty(device="cpu")
        _mark_unset(model)
        if first is not None:
            first.reset_buffers()  # not left to `initialize`, which a subclass may override
        self.initialize(model, torch.Generator().manual_seed(seed))
        _check_set(model, getattr(self, "name", type(self).__name__))
        mean, std = first.values if first is not None else ((), ())
        return Task(model, self.input_shape, num_classes, "head.", mean, std)

    def fingerprint(self, *, num_classes: int, seed: int) -> str:
        """Return a hash of what else `build_task` depends on than settings and seed: here, nothing."""
        return ""

    def _normalization(self) -> Normalize | None:
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


def _mark_unset(model: nn.Module) -> None:
    """Mark everything in a model that has no values yet."""
    for value in (*model.parameters(), *model.buffers()):
        if value.dtype != torch.bool:
            value.detach().fill_(_unset_marker(value.dtype))


def _check_set(model: nn.Module, name: str) -> None:
    """Refuse a model in which something has no value: it would train on whatever lay in memory.

    Raises:
        ValueError: says what.
    """
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        mark = _unset_marker(value.dtype)
        unset = value.isnan() if isinstance(mark, float) else value == mark
        if value.dtype != torch.bool and bool(unset.any()):
            raise ValueError(
                f"network {name!r}: expected initialize to fill {key!r}, which has no value: `body` is built without "
                "memory, and what constructors compute is lost; a network that comes with its values (timm's, say) is "
                "given by a function that returns it, task.model: module:function"
            )


def _unset_marker(dtype: torch.dtype) -> float | int:
    """Return what stands for "no value": NaN, or the least integer."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


@overload
def build(spec: str | Mapping[str, Any] | Network) -> Network: ...


@overload
def build(spec: str | Mapping[str, Any] | Network, *, num_classes: int, seed: int = 0, **settings: Any) -> Task: ...


def build(
    spec: str | Mapping[str, Any] | Network, *, num_classes: int | None = None, seed: int = 0, **settings: Any
) -> Network | Task:
    """Return the network that `spec` describes; with `num_classes`, the task of it.

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
    return network if num_classes is None else network.build_task(num_classes=num_classes, seed=seed)
