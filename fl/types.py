"""The vocabulary of hyperleak: what a client trains, what a server sees, what an attacker guesses."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fl.inputs.form import InputForm, image_form
from fl.losses import Loss
from fl.losses.cross_entropy import CrossEntropy
from fl.runtime.double_precision import DoubleForm, double_form
from fl.runtime.interruption import ask_now
from fl.runtime.module_copies import deep_copy
from fl.seeds import stream
from fl.tensors import Payloads, Tensors

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
    """Labeled images.

    Attributes:
        inputs: (B, C, H, W) in [0, 1].
        labels: (B,) int64, or (B, K) probabilities.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def take(self, index: Tensor) -> Batch:
        """Return the images at `index` (b,), wherever that lies."""
        index = index.to(self.inputs.device)
        return Batch(self.inputs[index], self.labels[index])


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return what is part of `model` for everybody, neither trained nor sent: constants.

    Those are parameters with requires_grad=False, and buffers that are no part of its state (`persistent=False`).
    """
    fixed = {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}
    return {**fixed, **{name: value.detach() for name, value in model.named_buffers() if not _is_state(model, name)}}


def _is_state(model: nn.Module, name: str) -> bool:
    """Return whether the buffer `name` is part of the model's state, rather than a constant."""
    owner, _, buffer = name.rpartition(".")
    return buffer not in model.get_submodule(owner)._non_persistent_buffers_set


@dataclass(frozen=True)
class Task:
    """A learning problem and the network every client starts from.

    Attributes:
        model: takes pixels in [0, 1] (B, C, H, W) and returns logits (B, K), or whatever the loss takes; its parameters
            are the initial ones. Those with requires_grad=False are frozen: part of the network, known to everybody,
            not trained, not sent.
        input_shape: (C, H, W).
        num_classes: K; of other losses the number of outputs along the first dimension after the batch's.
        head: prefix of the names of the classifier's parameters, e.g. `"head."`.
        mean: per-channel mean of the model's own normalization, (0,) * C without one.
        std: per-channel standard deviation of it, (1,) * C without one.
        loss: what clients minimize; by default cross entropy.
        output_shape: of what the model returns for one example; (K,) where none is given.
        inputs: what the (C, H, W) numbers of an example stand for; pictures where nothing is given.
    """

    model: nn.Module
    input_shape: tuple[int, int, int]
    num_classes: int
    head: str = "head."
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    loss: Loss = CrossEntropy()  # noqa: RUF009  (frozen, without settings)
    output_shape: torch.Size = torch.Size()  # noqa: RUF009
    inputs: InputForm = InputForm("image", ())  # noqa: RUF009

    def __post_init__(self) -> None:
        channels = self.input_shape[0]
        if (
            not self.inputs.parts or self.inputs.shape != self.input_shape
        ):  # of pictures, or of another network's inputs
            object.__setattr__(self, "inputs", image_form(self.input_shape))
        object.__setattr__(self, "output_shape", torch.Size(self.output_shape or (self.num_classes,)))
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

    def normalization(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return `mean` and `std` (C, 1, 1) each, where `like` lies and of its type.

        As networks, to single precision.
        """
        mean, std = (torch.tensor(x, dtype=torch.float32).to(like).view(-1, 1, 1) for x in (self.mean, self.std))
        return mean, std

    @cached_property
    def double_form(self) -> DoubleForm:
        """How the network runs in double precision, where it is not in it: tried once, on one or two images."""
        forms = (
            double_form(self.model, torch.rand(count, *self.input_shape, generator=stream(0, "double precision")))
            for count in (1, 2)  # batch normalization in training mode takes no single image of one position
        )
        return next((form for form in forms if form is not None), DoubleForm())

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Task:
        """Return this task with its model's floating-point tensors moved."""
        return replace(self, model=self.convert(self.model, device=device, dtype=dtype))

    def convert(
        self, model: nn.Module, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """Return a copy of a form of this task's model, its floating-point tensors moved.

        In double precision it runs though its forward fixes single precision (`fl.runtime.double_precision`). Where it
        can't, a call raises `PrecisionError`, which says why.

        Args:
            model: this task's, or a copy of it with other settings.
            device: where it is moved; None leaves it.
            dtype: of its floating-point tensors; None leaves them.
        """
        ask_now()  # of a large network each step takes seconds
        made = deep_copy(model).to(device=device, dtype=dtype)
        ask_now()
        in_double = any(value.dtype is torch.float64 for value in model.parameters())
        return made if dtype is not torch.float64 or in_double else self.double_form.apply(made)


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

    def covers(self, name: str) -> bool:
        """Return whether the parameter `name` is trained in this group."""
        return name.startswith(self.prefixes)


Optimizer = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
"""What a client may train by. All but the first divide every number of a gradient by a size of its own."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of local training in which some groups move and all else stands still.

    Attributes:
        groups: what moves, and how.
        optimizer: one of `OPTIMIZERS` ("adamw" is Adam whose decay stays out of the normalized step), as torch.optim
            has it with its default constants, fresh at the start of the phase.
        eps: what an adaptive optimizer adds to the size that it divides by, > 0; None is torch.optim's default.
        momentum: of SGD.
        nesterov: Nesterov's form of it.
        epochs: passes over the client's data; exactly one of `epochs` and `steps` is set.
        steps: optimizer steps, cycling through the data.
        batch_size: images per batch; None is all of them.
        sampler: "shuffle", "poisson" (each image independently, at rate batch_size / n) or "sequential".
        batches_per_step: batches one step looks at (two for Per-FedAvg).
        records_direction_as: a name: the phase's one step moves nothing, and its direction stands in `Step.recorded`
            under this name for the rest of the round (SCAFFOLD's gradient at the server's parameters). Running
            statistics stay, too.

    Raises:
        ValueError: if a setting is unknown or out of range.
    """

    groups: tuple[Group, ...]
    optimizer: str = "sgd"
    eps: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    sampler: str = "shuffle"
    batches_per_step: int = 1
    records_direction_as: str | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"expected exactly one of epochs and steps, got epochs={self.epochs}, steps={self.steps}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"expected optimizer {', '.join(map(repr, OPTIMIZERS))}, got {self.optimizer!r}")
        if self.eps is not None and not 0 < self.eps < math.inf:
            raise ValueError(f"expected eps > 0 or None, got {self.eps}")
        if self.sampler not in {"shuffle", "poisson", "sequential"}:
            raise ValueError(f"expected sampler 'shuffle', 'poisson' or 'sequential', got {self.sampler!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected momentum in [0, 1), got {self.momentum}")
        for key, least in {"epochs": 0, "steps": 1, "batch_size": 1, "batches_per_step": 1}.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"expected {key} >= {least}, got {value}")
        if self.records_direction_as is not None and self.steps != 1:
            raise ValueError(f"expected steps=1 in a phase that keeps its direction, got {self.steps}")

    def first_step_size(self, group: Group) -> float:
        """Return what the first step of SGD makes of a gradient of size 1.

        Momentum is zero before it, but Nesterov's form adds it at once.
        """
        return group.lr * (1 + self.momentum if self.nesterov else 1.0)

    def assign(self, names: Mapping[str, object]) -> dict[str, Group]:
        """Return the group of every name that moves in this phase."""
        owners = {name: next((g for g in self.groups if g.covers(name)), None) for name in names}
        return {name: group for name, group in owners.items() if group is not None}


@dataclass(frozen=True)
class Trace:
    """What a client really fed, kept with the truth and never shown to an attack.

    Attributes:
        order: indices into `inputs` and `labels`.
        inputs: every image fed, after augmentation and the defense's own changes (N, C, H, W).
        labels: theirs.
        indices: which images of the client's data set they come from (N,).
        draws: the method's own random numbers.
        own: the client's own pictures, those of `indices`, where the defense changed them; else None.
    """

    order: Order
    inputs: Tensor
    labels: Tensor
    indices: Tensor
    draws: Draws
    own: Tensor | None = None


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
        """Return how many numbers travel up."""
        parameters = sum(v.numel() for values in (self.update, *self.extra.values()) for v in values.values())
        return parameters + sum(v.numel() for v in self.buffers.values())


@dataclass(frozen=True)
class Truth:
    """What no attack may see: the images, and everything else a client fed and kept.

    Attributes:
        trace: what was fed, step by step.
        private: every tensor of `ServerView.private`, before training.
        extractor: the generated weights before training, if the method generates any.
    """

    trace: Trace
    private: Tensors
    extractor: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> Tensor:
        """The images (N, C, H, W)."""
        return self.trace.inputs

    @property
    def labels(self) -> Tensor:
        """The images' labels (N,)."""
        return self.trace.labels

    def candidate(self) -> Candidate:
        """Return the guess that is right in everything."""
        trace = self.trace
        return Candidate(trace.inputs, trace.labels, self.private, trace.order, trace.draws)


@dataclass(frozen=True)
class Step:
    """What a local step may look at beside its parameters and its batch.

    Attributes:
        task: the client's task.
        start: all parameters at the start of the round.
        received: further payloads from the server.
        memory: what the client keeps between rounds; never mutated.
        draws: the method's random numbers for this step.
        round: number of the round, from 0.
        recorded: directions of earlier phases of this round that moved nothing (`Phase.records_direction_as`).
        phase: of which it is a step; None outside of local training.
    """

    task: Task
    start: Tensors
    received: Payloads
    memory: Payloads
    draws: dict[str, Tensor]
    round: int
    recorded: Payloads = field(default_factory=dict)
    phase: Phase | None = None


_MOVED = {"Part": "fl.view", "ServerView": "fl.view", "ThreatModel": "fl.view"}


def __getattr__(name: str) -> Any:
    """Return what this module held before; warns of where it is now."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_MOVED[name]}.{name}; import that", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(_MOVED[name]), name)
