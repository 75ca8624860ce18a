"""A network of the user's own in runs: `task.model: my_model:build`."""

from __future__ import annotations

import copy
import functools
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fl.models import Network, models
from fl.models.building_blocks.model_checks import count_logits, find_head
from fl.ranges import Width
from fl.runtime import user_code
from fl.runtime.digests import digest
from fl.settings import SettingError
from fl.types import Task

MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, which `repr` says of functions: other in every process."""


IMPORT_SEED = 0
"""What a module of the user's is imported with, in every process and for every seed of a run."""


@models.register("function")
@dataclass(frozen=True, kw_only=True)
class FunctionNetwork(Network):
    """The network that a function of one's own returns; `task.model: my_model:build` is short for it.

    The function is called without arguments, or with `num_classes` and `input_shape` (C, H, W) if it has parameters of
    these names. What it draws from torch's global generator follows from the seed of the run. It may return a model or
    (model, images, labels), as for audits (a run takes the model); a class, or a model itself, does as well.

    Attributes:
        function: `module:function`; the module lies beside the config, in the current folder, or is installed.
        input_shape: (C, H, W) of the images; `()` takes the data set's.
        head: prefix of the names of the classifier's parameters; empty is the last `nn.Linear`.
        normalize: whether a layer that normalizes the pixels is put before the network.
        mean: per-channel mean of that layer (`()` takes the usual one); without `normalize`, of what the network itself
            does to the pixels, which attacks by search want to know.
        std: per-channel standard deviation, likewise.

    Raises:
        ValueError: `function` is not of the form module:function, or `input_shape` is no shape.
    """

    user_code: ClassVar[bool] = True

    function: str
    input_shape: tuple[Width, ...] = ()  # type: ignore[assignment]  # of a data set that is not read yet
    head: str = ""
    normalize: bool = False

    def __post_init__(self) -> None:
        user_code.split_target(self.function)
        if len(self.input_shape) not in {0, 3}:
            raise ValueError(f"expected input_shape as (C, H, W) or (), got {self.input_shape}")

    @classmethod
    def example(cls) -> FunctionNetwork:
        """Return a linear classifier."""
        return cls(function=f"{__name__}:linear_classifier", input_shape=(1, 4, 4))

    def build_task(self, *, num_classes: int, seed: int = 0) -> Task:
        """Return the network as the function returns it after `torch.manual_seed(seed)`.

        Raises:
            ValueError: no such function, or what it returns is no classifier of such images into so many classes.
        """
        if num_classes < 2:
            raise ValueError(f"expected at least 2 classes, got {num_classes}")
        if not self.input_shape:
            raise ValueError(f"network {self.function!r}: expected input_shape, which a run takes from its data set")
        model = self._model(num_classes, seed)
        try:
            outputs = count_logits(model, torch.full((1, *self.input_shape), 0.5), None)
            if outputs != num_classes:
                raise ValueError(
                    f"expected {num_classes} outputs, one for each class of the data set, got {outputs}; let the "
                    "function take num_classes"
                )
            head = find_head(model, self.head or None, num_classes)
        except ValueError as error:
            raise SettingError(("task", "model"), f"{self.function}: {error}") from error
        first = self._normalization()
        channels, height, width = self.input_shape
        shape = (channels, height, width)
        if first is None:
            return Task(model, shape, num_classes, head, self.mean, self.std)
        whole = nn.Sequential(OrderedDict(normalize=first, network=model))
        return Task(whole, shape, num_classes, f"network.{head}", *first.values)

    def fingerprint(self, *, num_classes: int, seed: int) -> str:
        """Return a hash of the source and the initial weights.

        Raises:
            ValueError: as `build_task`; or the function returns other weights every time.
        """
        return _fingerprint(self, num_classes, seed)

    def _model(self, num_classes: int, seed: int) -> nn.Module:
        offers = {"num_classes": num_classes, "input_shape": tuple(self.input_shape)}
        try:
            return user_network(self.function, seed=seed, **offers).to(device="cpu")
        except ValueError as error:
            raise SettingError(("task", "model"), str(error)) from error


def user_network(target: str, *, seed: int | None = None, **offers: object) -> nn.Module:
    """Return the network of a function of the user's, a copy where `target` names a model.

    Raises:
        ValueError: there is no such function, or it returns something else; says what.
    """
    found = user_code.find_callable(target, seed=None if seed is None else IMPORT_SEED)
    if isinstance(found, nn.Module):
        return require_weights(copy.deepcopy(found), target)
    made = user_code.call_user_function(found, target, seed=seed, **offers)
    if isinstance(made, tuple) and len(made) == 3:
        made = made[0]
    if not isinstance(made, nn.Module):
        raise ValueError(f"expected {target} to return a model or (model, images, labels), got {type(made).__name__}")
    return require_weights(made, target)


def require_weights(model: nn.Module, target: str) -> nn.Module:
    """Return the model, if it has weights, and they have values.

    Raises:
        ValueError: it has none, or they have none.
    """
    weights = [*model.parameters()]
    if not weights:
        raise ValueError(f"expected {target} to return a model with parameters, got one without")
    if any(value.is_meta for value in (*weights, *model.buffers())):
        raise ValueError(
            f"expected {target} to return a model with weights, got one on the meta device, without values"
        )
    return model


@functools.cache
def _fingerprint(network: FunctionNetwork, num_classes: int, seed: int) -> str:
    first, second = (network.build_task(num_classes=num_classes, seed=seed).model for _ in range(2))
    weights = _named_weights(first)
    if digest(weights) != digest(_named_weights(second)):
        raise SettingError(
            ("task", "model"),
            f"expected {network.function} to return the same weights for the same seed, got others at the second call; "
            "draw them from torch's global generator, which is seeded before, or load them from a file",
        )
    modules = {user_code.split_target(network.function)[0], *(type(part).__module__ for part in first.modules())}
    files = {name: file.read_bytes() for name in sorted(modules) if (file := user_code.user_file(name)) is not None}
    return digest(files, MEMORY_ADDRESS.sub("", repr(first)), weights)


def _named_weights(model: nn.Module) -> dict[str, object]:
    """Return parameters, whether they train, and buffers, by name."""
    parameters = {name: (value.requires_grad, value.detach()) for name, value in model.named_parameters()}
    return {**parameters, **dict(model.named_buffers())}


def linear_classifier(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return one linear layer on the pixels: the smallest function that `task.model` takes."""
    layers = OrderedDict(flatten=nn.Flatten(), head=nn.Linear(torch.Size(input_shape).numel(), num_classes))
    return nn.Sequential(layers)
