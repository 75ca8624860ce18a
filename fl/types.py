"""The vocabulary of hyperleak: what a client trains, what a server sees, what an attacker guesses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from fl.tensors import LowRank, Payloads, Tensors, dense
from fl.threat import ThreatModel as ThreatModel

if TYPE_CHECKING:
    from fl.client import Client
    from fl.defense import Defense
    from fl.method import Method

Order = tuple[tuple[tuple[Tensor, ...], ...], ...]
"""Which images a client fed: phase -> step -> batch, each an index tensor (b,) int64."""
Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""The batch sizes of an `Order`: what a server that knows the local schedule knows of it."""
Draws = tuple[tuple[dict[str, Tensor], ...], ...]
"""A method's own random numbers, phase -> step."""


class Scope(StrEnum):
    """Who holds a tensor."""

    SHARED = "shared"
    PRIVATE = "private"
    SERVER = "server"


@dataclass(frozen=True)
class Batch:
    """Labelled images.

    Attributes:
        inputs: (B, C, H, W) in [0, 1].
        labels: (B,) int64, or (B, K) probabilities.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def take(self, index: Tensor) -> Batch:
        """The images at `index` (b,), wherever that lies."""
        index = index.to(self.inputs.device)
        return Batch(self.inputs[index], self.labels[index])


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """What is part of `model` for everybody, neither trained nor sent: constants.

    Those are parameters with requires_grad=False, and buffers that are no part of its state (`persistent=False`).
    """
    fixed = {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}
    return {**fixed, **{name: value.detach() for name, value in model.named_buffers() if not _is_state(model, name)}}


def _is_state(model: nn.Module, name: str) -> bool:
    """Whether the buffer `name` is part of the model's state, rather than a constant."""
    owner, _, buffer = name.rpartition(".")
    return buffer not in model.get_submodule(owner)._non_persistent_buffers_set


@dataclass(frozen=True)
class Task:
    """A classification problem and the network every client starts from.

    Attributes:
        model: takes pixels in [0, 1] (B, C, H, W) and returns logits (B, K); its parameters are the initial ones.
            Those with requires_grad=False are frozen: part of the network, known to everybody, not trained, not sent.
        input_shape: (C, H, W).
        num_classes: K.
        head: prefix of the names of the classifier's parameters, e.g. `"head."`.
        mean: per-channel mean of the model's own normalisation, (0,) * C without one.
        std: per-channel standard deviation of it, (1,) * C without one.
    """

    model: nn.Module
    input_shape: tuple[int, int, int]
    num_classes: int
    head: str = "head."
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        channels = self.input_shape[0]
        object.__setattr__(self, "mean", tuple(self.mean) or (0.0,) * channels)
        object.__setattr__(self, "std", tuple(self.std) or (1.0,) * channels)
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(f"expected one mean and std for each of {channels} channels, got {self.mean}, {self.std}")

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that train, by name, detached: shapes for all, initial values for the server."""
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the model's state by name."""
        return {n: value.detach() for n, value in self.model.named_buffers() if _is_state(self.model, n)}

    def normalisation(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`mean` and `std` (C, 1, 1) each, where `like` lies and of its type; as networks, to single precision."""
        mean, std = (torch.tensor(x, dtype=torch.float32).to(like).view(-1, 1, 1) for x in (self.mean, self.std))
        return mean, std

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Task:
        """The same task with its model's floating-point tensors moved."""
        import copy

        return replace(self, model=copy.deepcopy(self.model).to(device=device, dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters trained alike.

    Attributes:
        prefixes: name prefixes; `("",)` is everything. The first group that matches a name takes it.
        lr: step size.
        weight_decay: L2 coefficient, added to the gradient after clipping (as torch.optim.SGD does).
        max_norm: clip the group's gradient to this norm (as `clip_grad_norm_`), or None.

    Raises:
        ValueError: if a number is out of range or not finite.
    """

    prefixes: tuple[str, ...] = ("",)
    lr: float
    weight_decay: float = 0.0
    max_norm: float | None = None

    def __post_init__(self) -> None:
        for key in ("lr", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"expected max_norm > 0 or None, got {self.max_norm}")

    def owns(self, name: str) -> bool:
        """Whether the parameter `name` is trained in this group."""
        return name.startswith(self.prefixes)


Optimizer = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
"""What a client may train by. All but the first divide every number of a gradient by a size of its own."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of local training in which some groups move and all else stands still.

    Attributes:
        groups: what moves, and how.
        optimizer: one of `OPTIMIZERS` ("adamw" is Adam whose decay stays out of the normalised step), as torch.optim
            has it with its default constants, fresh at the start of the phase.
        momentum: of SGD.
        nesterov: Nesterov's form of it.
        epochs: passes over the client's data; exactly one of `epochs` and `steps` is set.
        steps: optimiser steps, cycling through the data.
        batch_size: images per batch; None is all of them.
        sampler: "shuffle", "poisson" (each image independently, at rate batch_size / n) or "sequential".
        batches_per_step: batches one step looks at (two for Per-FedAvg).
        keeps: a name: the phase's one step moves nothing, and its direction stands in `Step.kept` under this name for
            the rest of the round (SCAFFOLD's gradient at the server's parameters). Running statistics stay, too.

    Raises:
        ValueError: if a setting is unknown or out of range.
    """

    groups: tuple[Group, ...]
    optimizer: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    sampler: str = "shuffle"
    batches_per_step: int = 1
    keeps: str | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"expected exactly one of epochs and steps, got epochs={self.epochs}, steps={self.steps}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"expected optimizer {', '.join(map(repr, OPTIMIZERS))}, got {self.optimizer!r}")
        if self.sampler not in {"shuffle", "poisson", "sequential"}:
            raise ValueError(f"expected sampler 'shuffle', 'poisson' or 'sequential', got {self.sampler!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected momentum in [0, 1), got {self.momentum}")
        for key, least in {"epochs": 0, "steps": 1, "batch_size": 1, "batches_per_step": 1}.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"expected {key} >= {least}, got {value}")
        if self.keeps is not None and self.steps != 1:
            raise ValueError(f"expected steps=1 in a phase that keeps its direction, got {self.steps}")

    def first_step(self, group: Group) -> float:
        """What the first step of SGD makes of a gradient of size 1.

        Momentum is zero before it, but Nesterov's form adds it at once.
        """
        return group.lr * (1 + self.momentum if self.nesterov else 1.0)

    def assign(self, names: Mapping[str, object]) -> dict[str, Group]:
        """The group of every name that moves in this phase."""
        owners = {name: next((g for g in self.groups if g.owns(name)), None) for name in names}
        return {name: group for name, group in owners.items() if group is not None}


@dataclass(frozen=True)
class Trace:
    """What a client really fed, kept with the truth and never shown to an attack.

    Attributes:
        order: indices into `inputs` and `labels`.
        inputs: every image fed, after augmentation and the defence's own changes (N, C, H, W).
        labels: theirs.
        indices: which images of the client's data set they come from (N,).
        draws: the method's own random numbers.
    """

    order: Order
    inputs: Tensor
    labels: Tensor
    indices: Tensor
    draws: Draws


@dataclass(frozen=True)
class Candidate:
    """An attacker's guess of everything it does not see.

    Attributes:
        inputs: (N, C, H, W) in [0, 1].
        labels: (N,) int64 or (N, K) probabilities.
        private: by name, as in `ServerView.private`.
        order: which image goes into which step; None takes the view's, or the images in turn.
        draws: the method's random numbers; None takes the view's, or the method's own guess.
    """

    inputs: Tensor
    labels: Tensor
    private: Tensors = field(default_factory=dict)
    order: Order | None = None
    draws: Draws | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the clients whose mean is all that a server sees (secure aggregation), as far as it knows of it.

    Attributes:
        weight: of its update in the mean; NaN where the number of images, which it tells, is withheld.
        private: shape of every tensor it keeps to itself and its update depends on.
        schedule: its batch sizes; None if unknown.
        batch_size: its number of images; None if unknown.
    """

    weight: float
    private: dict[str, torch.Size]
    schedule: Schedule | None
    batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """What an honest-but-curious server knows and sees of one client in one round: plain data and settings.

    Under secure aggregation it is that of a group of clients: `update` is their weighted mean, private tensors are
    called `part/i/name`, images, labels and draws of all clients stand one after the other, and a step of `schedule`
    and `order` is that of all clients together (see `fl.aggregated_view`).

    Attributes:
        method: the federated method, with its settings.
        defense: the client's defence, with its settings.
        task: the network's architecture; weights and buffers that are not shared are zero in it.
        threat: what is known beside the update.
        shared: what the server sent (parameters by name).
        update: `shared before - shared after`, by name; further payloads under `payload/name`.
        private: shape of every tensor the client keeps to itself and its update depends on.
        schedule: batch sizes, phase by phase and step by step; None if unknown.
        batch_size: number of images; None if unknown.
        labels: theirs, if known (N,).
        buffers: the model's shared buffers as the client had them before training.
        buffers_after: the same after training, where the threat model sees them.
        received: further payloads the server sent.
        order: image indices, if known.
        draws: the method's random numbers, if known.
        private_init: where private tensors started, if known.
        round: number of the round, from 0.
        scaled: whether the update is known only up to a positive factor (clipping, after a rewrite).
        rounded: whether the update is a difference of weights and rounded as they are; False for a gradient by itself.
        history: earlier views of the same client, oldest first.
        parts: the clients of a group, () for a single one.
    """

    method: Method
    defense: Defense
    task: Task
    threat: ThreatModel
    shared: Tensors
    update: Tensors
    private: dict[str, torch.Size] = field(default_factory=dict)
    schedule: Schedule | None = None
    batch_size: int | None = None
    labels: Tensor | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    buffers_after: dict[str, Tensor] | None = None
    received: Payloads = field(default_factory=dict)
    order: Order | None = None
    draws: Draws | None = None
    private_init: Tensors | None = None
    round: int = 0
    scaled: bool = False
    rounded: bool = True
    history: tuple[ServerView, ...] = ()
    parts: tuple[Part, ...] = ()

    @cached_property
    def client(self) -> Client:
        """The client's local rule as far as the server knows it, built once."""
        from fl.client import Client
        from fl.defense import Unknown

        known = self.defense if self.threat.knows_defense else Unknown(wrapped=self.defense)
        return Client(self.task, self.method, known)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the update; of the network where nothing is sent."""
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        """Where the update lies; where the network does if nothing is sent."""
        return self._any.device

    @property
    def _any(self) -> Tensor:
        """Some tensor of the update, which a client of its own (`local`) leaves empty."""
        value = next(iter((self.update or self.task.parameters).values()))
        return value.terms[0].left if isinstance(value, LowRank) and value.terms else dense(value)


@dataclass(frozen=True)
class Upload:
    """What one client sends back.

    Attributes:
        client: its number.
        weight: in the server's mean: its number of training images, or a public one that stands for it.
        update: `shared before - shared after`, by name.
        extra: further payloads.
        buffers: change of the shared buffers, before - after.
    """

    client: int
    weight: float
    update: Tensors
    extra: Payloads = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self) -> int:
        """How many numbers travel up."""
        parameters = sum(v.numel() for values in (self.update, *self.extra.values()) for v in values.values())
        return parameters + sum(v.numel() for v in self.buffers.values())
