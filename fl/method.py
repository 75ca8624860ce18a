"""A federated method: one description from which training, communication cost and attack surface follow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl.gradient import Gradient
from fl.network import Network
from fl.parametrization import Parametrization
from fl.privacy_statement import PrivacyStatement
from fl.registry import Registry
from fl.tensors import Payloads, Tensors, Value, dense, sub, weighted_sum
from fl.types import Batch, Phase, Scope, Step, Task, Upload

__all__ = ["Download", "Method", "ServerState", "Step", "mean", "methods"]


methods: Registry[Method] = Registry("method", "fl.methods")


@dataclass(frozen=True)
class ServerState:
    """What the server holds between rounds.

    Attributes:
        shared: parameters it sends to every client, or from which it makes what it sends.
        buffers: the model's shared buffers.
        own: what never leaves the server, by payload.
        clients: how many clients may take part; those with higher numbers never do.
        round: number of the next round.
    """

    shared: Tensors
    buffers: dict[str, Tensor] = field(default_factory=dict)
    own: Payloads = field(default_factory=dict)
    clients: int = 1
    round: int = 0


@dataclass(frozen=True)
class Download:
    """What the server sends to one client."""

    shared: Tensors
    buffers: dict[str, Tensor] = field(default_factory=dict)
    received: Payloads = field(default_factory=dict)

    def numbers(self) -> int:
        """How many numbers travel down."""
        parameters = sum(v.numel() for values in (self.shared, *self.received.values()) for v in values.values())
        return parameters + sum(v.numel() for v in self.buffers.values())


@dataclass(frozen=True, kw_only=True)
class Method:
    """The base of every federated method: parametrization x local rule x server rule.

    Attributes:
        parametrization: how parameters become network weights.
        train_mode: whether local training runs the model in train mode (batch statistics in batch norm).
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Method]] = methods
    former_names: ClassVar[Mapping[str, str]] = {"parametrisation": "parametrization"}
    plain: ClassVar[str] = ""
    """What it does, in words for a reader who knows none of the papers."""
    per_sample: ClassVar[bool] = True
    """False where a loss couples the samples of a batch: then per-sample clipping means nothing."""

    detour: ClassVar[str] = ""
    """Where `plain_gradient` says no: why, and what can be tried instead, for attacks that have to refuse."""

    uses_labels: ClassVar[bool] = True
    """False where the loss looks at no label, so that an attack need not guess any."""

    parametrization: Parametrization = field(default_factory=Parametrization)
    train_mode: bool = True

    # ---- description -------------------------------------------------------------------------------------------------
    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Local training in round `round`."""
        raise TypeError(f"{type(self).__name__} does not say how a client trains: define phases()")

    @property
    def first_round(self) -> int:
        """The first round in which clients train the network itself."""
        return 0

    def tuning(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """How a client adapts what it received before it is scored: by default as in `first_round`, `epochs` passes."""
        return tuple(replace(phase, epochs=epochs, steps=None) for phase in self.phases(task, self.first_round))

    def unreleased(self) -> Method:
        """The method as a client trains what it keeps to itself: what hides records from others is left out."""
        return self

    def beside(self) -> Method | None:
        """The rule by which a client trains a whole model of its own beside what it sends, and predicts by it, or None.

        That model starts as the initial one, sees the same batches and stays with the client, so that no defense but
        the network of one touches it, and a server's view knows nothing of it. The rule finds the parameters that the
        server sent in `step.received["sent"]`. Clients that never take part have no such model.
        """
        return None

    def adapting(self) -> Method | None:
        """The rule by which a client adapts what it has each time before it predicts by it, or None.

        It trains on the client's own images and is forgotten after predicting.
        """
        return None

    def scope(self, name: str, task: Task) -> Scope:
        """Who holds a parameter or buffer: the parametrization's word, else shared."""
        return self.parametrization.scope(name) or Scope.SHARED

    def client_model(self, task: Task) -> nn.Module:
        """The network a client runs, built once per client."""
        return copy.deepcopy(task.model)

    def privacy(self, sizes: Sequence[int], rounds: int, *, record_reader: str = "") -> PrivacyStatement | None:
        """What differential privacy clients have after a number of rounds; None claims nothing.

        Args:
            sizes: the clients' numbers of images.
            rounds: how many a client took part in, at most.
            record_reader: name of a defense that looks at single records, which may break the guarantee
                (`fl.defense.record_reader`); empty where there is none.
        """
        return None

    # ---- local rule --------------------------------------------------------------------------------------------------
    def initial(self, task: Task, generator: torch.Generator) -> Tensors:
        """Initial shared and private parameters."""
        return self.parametrization.initial(task, generator)

    def init_memory(self, params: Tensors, task: Task) -> Payloads:
        """What a client remembers before its first round."""
        return {}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Mean loss of a batch; penalties on parameters belong into `gradient`."""
        return nn.functional.cross_entropy(network(batch.inputs), batch.labels)

    def plain_loss(self, task: Task, round: int) -> bool:
        """Whether `loss`, for what the network predicts by, is mean cross entropy and no more; attacks rest on it."""
        return type(self).loss is Method.loss

    def plain_gradient(self, steps: int | None) -> bool:
        """Whether each of a round's `steps` (None: unknown) goes along the gradient of `loss`, and nothing else."""
        return type(self).gradient is Method.gradient

    def trains(self, phase: Phase) -> bool:
        """Whether steps of a phase move what the network predicts by: attacks count only these as local steps."""
        return phase.keeps is None

    def landmarks(self) -> tuple[str, ...]:
        """Parameters whose update is worth matching on its own, beside that of all parameters together."""
        return ()

    def told_labels(self, sent: Tensors, update: Tensors) -> Tensor | None:
        """The shares of labels (K,) that a client tells the server by its update; None where it does not.

        Args:
            sent: the shared parameters it started from.
            update: from all the images that the shares are of.
        """
        return None

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """What the network predicts (B, K), without the method's own random numbers."""
        return network(inputs)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """The direction of a step: `grad(params, batch)` by default."""
        return grad(params, batches[0])

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """The method's own random numbers for one step; without a generator an attacker's guess of them."""
        return {}

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Further payloads to send and the new memory, after `steps` local steps that ended at `params`."""
        return {}, step.memory

    def weight(self, images: int) -> float:
        """What the upload of a client of `images` images counts in the server's mean, and so what it says of them."""
        return float(images)

    # ---- server rule -------------------------------------------------------------------------------------------------
    @property
    def takes_means(self) -> bool:
        """Whether the server's rule looks at no more than the clients' weighted mean, as secure aggregation asks."""
        return type(self).aggregate is Method.aggregate

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """The server's state before round 0, from the initial parameters and the number of clients."""
        shared = {name: value for name, value in params.items() if self.scope(name, task) is Scope.SHARED}
        buffers = {name: value for name, value in task.buffers.items() if self.scope(name, task) is Scope.SHARED}
        return ServerState(shared, buffers, clients=clients)

    @property
    def takes_part(self) -> int | None:
        """In how many rounds a client takes part at most; None where there is no bound."""
        return None

    def silent(self, server: ServerState, client: int) -> str:
        """Why client number `client` takes part in no round any more, neither training nor sending; or nothing."""
        return ""

    def select(self, server: ServerState, clients: Sequence[int], task: Task) -> ServerState:
        """The server's state once it knows which clients take part in the round, before any of them trains."""
        return server

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """What client number `client` receives; from `server.clients` on, one that never takes part."""
        return Download(server.shared, server.buffers)

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """What client number `client` predicts by: what it would receive for training, unless a method says otherwise.

        Shapes may be others than the network's, which `logits` then has to expect. None of this is part of a round.
        """
        return self.broadcast(server, client, task)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """The server's state after a round: the weighted mean of updates and buffers by default."""
        if not uploads:
            return replace(server, round=server.round + 1)
        shared = {
            name: sub(value, mean(uploads, lambda upload, name=name: upload.update[name]))  # type: ignore[misc]
            for name, value in server.shared.items()
        }
        buffers = {
            name: value - dense(mean(uploads, lambda upload, name=name: upload.buffers[name]))  # type: ignore[misc]
            for name, value in server.buffers.items()
            if value.is_floating_point()
        }
        buffers = {**server.buffers, **buffers}  # integer buffers count steps: they are never averaged
        return replace(server, shared=shared, buffers=buffers, round=server.round + 1)

    def server_numbers(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> dict[str, list[float]]:
        """What is worth recording of the server's own step on `uploads`, by name, one number for each of them.

        It is asked with what `aggregate` was asked with, where a protocol measures "server"; nothing follows from it.
        Names are words for a reader. {} says that there is nothing.
        """
        return {}


def mean(uploads: Sequence[Upload], pick: Callable[[Upload], Value]) -> Value:
    """Mean of `pick(upload)` with the uploads' weights."""
    whole = sum(upload.weight for upload in uploads)
    return weighted_sum([pick(upload) for upload in uploads], [upload.weight / whole for upload in uploads])
