"""What a server sees of a client's round, and what it is taken to know beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import get_ident
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fl.client import Client
from fl.defense import Defense, UnknownDefense
from fl.method import Method
from fl.ranges import CountFrom0
from fl.settings import declared
from fl.tensors import LowRank, Payloads, Tensors, dense
from fl.types import Draws, Order, Schedule, Task


@declared("threat")
@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """What an honest-but-curious server knows beside the update itself.

    Attributes:
        knows_labels: the labels of the images.
        knows_batch_size: how many images there are.
        knows_schedule: number and size of the local steps.
        knows_order: which image was in which step.
        knows_randomness: the method's own random numbers.
        knows_defense: the defense and its settings (an adaptive attacker).
        knows_optimizer: what clients train by. Where it is not known, views name plain SGD, and no result counts as
            verified unless the whole update bears out that it was.
        knows_private_init: the values private tensors started from before the first round.
        sees_buffers: shared buffers such as batch-norm statistics.
        history_rounds: how many earlier rounds of the same client it kept.

    Raises:
        ValueError: what it knows is neither True nor False, or a number of rounds that is none.
    """

    former_names: ClassVar[Mapping[str, str]] = {"knows_draws": "knows_randomness", "rounds": "history_rounds"}

    knows_labels: bool = False
    knows_batch_size: bool = True
    knows_schedule: bool = True
    knows_order: bool = False
    knows_randomness: bool = False
    knows_defense: bool = True
    knows_optimizer: bool = True
    knows_private_init: bool = False
    sees_buffers: bool = True
    history_rounds: CountFrom0 = 0

    @property
    def knows_sizes(self) -> bool:
        """Whether an update's tensors can be taken to have the sizes to each other that one rule gave them."""
        return self.knows_defense and self.knows_optimizer


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


_CLIENTS: WeakValueDictionary[tuple[int, ...], Client] = WeakValueDictionary()
"""By thread, and by the identities of task, method and defense, which a client keeps as long as it lives."""


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """What an honest-but-curious server knows and sees of one client in one round: plain data and settings.

    Under secure aggregation it is that of a group of clients: `update` is their weighted mean, private tensors are
    called `part/i/name`, images, labels and draws of all clients stand one after the other, and a step of `schedule`
    and `order` is that of all clients together (see `fl.aggregated_view`).

    Attributes:
        method: the federated method, with its settings.
        defense: the client's defense, with its settings.
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
        scale_unknown: whether the update is known only up to a positive factor (clipping, after a rewrite).
        rounded: whether the update is a difference of weights and rounded as they are; False for a gradient by itself.
        sent_as: in what coarse form the update's numbers were sent, where that is known and its numbers do not show it.
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
    scale_unknown: bool = False
    rounded: bool = True
    sent_as: str = ""
    history: tuple[ServerView, ...] = ()
    parts: tuple[Part, ...] = ()

    @cached_property
    def client(self) -> Client:
        """The client's local rule as far as the server knows it, built once for all views with the same settings."""
        parts = (self.task, self.method, self.defense, self.threat.knows_defense)
        key = (get_ident(), *map(id, parts))  # torch puts weights into a network while it runs: one for each thread
        client = _CLIENTS.get(key)
        if client is None:
            known = self.defense if self.threat.knows_defense else UnknownDefense(wrapped=self.defense)
            client = _CLIENTS[key] = Client(self.task, self.method, known)
        return client

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
