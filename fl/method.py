"""A federated method: one description from which training, communication cost and attack surface follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl.gradient import Gradient
from fl.losses.returned_value import expect_number
from fl.network import Network
from fl.parametrization import Parametrization
from fl.privacy_statement import PrivacyStatement
from fl.registry import FormerHooks, Registry
from fl.runtime.module_copies import deep_copy
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
        """Return how many numbers travel down."""
        parameters = sum(v.numel() for values in (self.shared, *self.received.values()) for v in values.values())
        return parameters + sum(v.numel() for v in self.buffers.values())


@dataclass(frozen=True, kw_only=True)
class Method(FormerHooks):
    """The base of every federated method: parametrization x local rule x server rule.

    Attributes:
        parametrization: how parameters become network weights.
        train_mode: whether local training runs the model in train mode (batch statistics in batch norm).
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Method]] = methods
    former_names: ClassVar[Mapping[str, str]] = {"parametrisation": "parametrization"}
    former_hooks: ClassVar[Mapping[str, str]] = {
        "adapting": "adaptation_method",
        "beside": "personal_method",
        "detour": "deviation_reason",
        "initial": "initial_parameters",
        "per_sample": "has_per_sample_loss",
        "plain_gradient": "follows_loss_gradient",
        "plain_loss": "uses_plain_cross_entropy",
        "select": "begin_round",
        "server_numbers": "server_metrics",
        "silent": "exclusion_reason",
        "takes_means": "aggregates_mean_only",
        "takes_part": "max_participations",
        "told_labels": "disclosed_label_shares",
        "trains": "trains_predictor",
        "tuning": "fine_tuning_phases",
        "unreleased": "fine_tuning_method",
        "weight": "aggregation_weight",
    }
    plain: ClassVar[str] = ""
    """What it does, in words for a reader who knows none of the papers."""
    has_per_sample_loss: ClassVar[bool] = True
    """False where a loss couples the samples of a batch: then per-sample clipping means nothing."""

    deviation_reason: ClassVar[str] = ""
    """Where `follows_loss_gradient` is false: why, and what can be tried instead, for attacks that have to refuse."""

    initial_memory_is_known: ClassVar[bool] = False
    """True where what a client remembers starts as the server knows, such as zeros: no secret of its first round."""

    uses_labels: ClassVar[bool] = True
    """False where the loss looks at no label, so that an attack need not guess any."""

    parametrization: Parametrization = field(default_factory=Parametrization)
    train_mode: bool = True

    # ---- description -------------------------------------------------------------------------------------------------
    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the phases of local training in round `round`."""
        raise TypeError(f"{type(self).__name__} does not say how a client trains: define phases()")

    @property
    def first_round(self) -> int:
        """The first round in which clients train the network itself."""
        return 0

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return how a client fine-tunes what it received before it is scored: as in `first_round`, `epochs` passes."""
        return tuple(replace(phase, epochs=epochs, steps=None) for phase in self.phases(task, self.first_round))

    def fine_tuning_method(self) -> Method:
        """Return the method by which a client fine-tunes for itself: without what hides records from others."""
        return self

    def personal_method(self) -> Method | None:
        """Return the method of a personal model, which a client trains beside the one it sends; or None.

        The client predicts by that model. It starts as the initial one, sees the same batches and stays with the
        client, so that no defense but the network of one touches it, and a server's view knows nothing of it. The
        method finds the parameters that the server sent in `step.received["sent"]`. Clients that never
        take part have no such model.
        """
        return None

    def adaptation_method(self) -> Method | None:
        """Return the method by which a client adapts its model each time before it predicts, or None.

        It trains on the client's own images and is forgotten after predicting.
        """
        return None

    def scope(self, name: str, task: Task) -> Scope:
        """Return who holds a parameter or buffer: as the parametrization says, else it is shared."""
        return self.parametrization.scope(name) or Scope.SHARED

    def client_model(self, task: Task) -> nn.Module:
        """Return the network a client runs, built once per client."""
        return deep_copy(task.model)

    def privacy(self, sizes: Sequence[int], rounds: int, *, record_reader: str = "") -> PrivacyStatement | None:
        """Return what differential privacy clients have after a number of rounds; None claims nothing.

        Args:
            sizes: the clients' numbers of images.
            rounds: how many a client took part in, at most.
            record_reader: name of a defense that looks at single records, which may break the guarantee
                (`fl.defense.record_reader`); empty where there is none.
        """
        return None

    # ---- local rule --------------------------------------------------------------------------------------------------
    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return the initial parameters, shared and private."""
        return self.parametrization.initial_parameters(task, generator)

    def init_memory(self, params: Tensors, task: Task) -> Payloads:
        """Return what a client remembers before its first round."""
        return {}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the mean loss of a batch; penalties on parameters belong into `gradient`."""
        own = step.task.loss
        return expect_number(f"the loss {own.name}", own(network(batch.inputs), batch.labels))

    def uses_plain_cross_entropy(self, task: Task, round: int) -> bool:
        """Return whether what trains the predictor is mean cross entropy alone; attacks rest on it."""
        return type(self).loss is Method.loss and task.loss.is_cross_entropy

    @property
    def takes_any_loss(self) -> bool:
        """Whether clients minimize the task's loss, whichever that is; else the method has one of cross entropy."""
        return type(self).loss is Method.loss

    def minimizes_task_loss(self, task: Task, round: int) -> bool:
        """Return whether what trains the predictor is the mean of the task's loss alone; attacks rest on it."""
        return self.uses_plain_cross_entropy(task, round) if task.loss.is_cross_entropy else self.takes_any_loss

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Return whether each of a round's `steps` (None: unknown) goes along the gradient of `loss` alone."""
        return type(self).gradient is Method.gradient

    def first_round_follows_loss_gradient(self, steps: int | None) -> bool:
        """Return the same of a round before which a client remembers nothing; asked if `initial_memory_is_known`."""
        return self.follows_loss_gradient(steps)

    def trains_predictor(self, phase: Phase) -> bool:
        """Return whether a phase moves what the network predicts by: attacks count only such local steps."""
        return phase.records_direction_as is None

    def landmarks(self) -> tuple[str, ...]:
        """Return the parameters whose update is worth matching on its own, beside that of all together."""
        return ()

    def disclosed_label_shares(self, sent: Tensors, update: Tensors) -> Tensor | None:
        """Return the shares of labels (K,) that a client tells the server by its update; None where it does not.

        Args:
            sent: the shared parameters it started from.
            update: from all the images that the shares are of.
        """
        return None

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return what the network predicts (B, K), without the method's own random numbers."""
        return network(inputs)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the direction of a step: `grad(params, batch)` by default.

        Args:
            grad: of the loss, as the defense hands it over.
            params: the parameters that move, by name.
            batches: `Phase.batches_per_step` of them.
            step: what the step may look at beside these.
        """
        return grad(params, batches[0])

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draw the method's own random numbers for one step; without a generator, an attacker's guess."""
        return {}

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return further payloads to send and the new memory, after `steps` local steps that ended at `params`."""
        return {}, step.memory

    def aggregation_weight(self, images: int) -> float:
        """Return the weight in the server's mean of a client of `images` images, which the server sees."""
        return float(images)

    # ---- server rule -------------------------------------------------------------------------------------------------
    @property
    def aggregates_mean_only(self) -> bool:
        """Whether the server's rule needs no more than the clients' weighted mean, as secure aggregation asks."""
        return type(self).aggregate is Method.aggregate

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return the server's state before round 0.

        Args:
            params: the initial parameters, by name.
            task: of all clients.
            clients: how many may take part.
            generator: of whatever the server draws.
        """
        shared = {name: value for name, value in params.items() if self.scope(name, task) is Scope.SHARED}
        buffers = {name: value for name, value in task.buffers.items() if self.scope(name, task) is Scope.SHARED}
        return ServerState(shared, buffers, clients=clients)

    @property
    def max_participations(self) -> int | None:
        """The number of rounds in which a client takes part at most; None where there is no bound."""
        return None

    def exclusion_reason(self, server: ServerState, client: int) -> str:
        """Return why client number `client` takes part in no round any more, or an empty string."""
        return ""

    def begin_round(self, server: ServerState, clients: Sequence[int], task: Task) -> ServerState:
        """Return the server's state once it knows the clients of the round, before any of them trains."""
        return server

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return what client number `client` receives; numbers from `server.clients` on never take part."""
        return Download(server.shared, server.buffers)

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """Return what client number `client` predicts by: by default what it would receive for training.

        Shapes may be others than the network's, which `logits` then has to expect. None of this is part of a round.
        """
        return self.broadcast(server, client, task)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the server's state after a round: by default all moved by the weighted mean of updates and buffers."""
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

    def server_metrics(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> dict[str, list[float]]:
        """Return what is worth recording of the server's own step on `uploads`, by name, one number for each of them.

        It is asked with what `aggregate` was asked with, where a protocol measures "server"; nothing follows from it.
        Names are words for a reader. {} says that there is nothing.
        """
        return {}


def mean(uploads: Sequence[Upload], pick: Callable[[Upload], Value]) -> Value:
    """Return the mean of `pick(upload)` with the uploads' weights."""
    whole = sum(upload.weight for upload in uploads)
    return weighted_sum([pick(upload) for upload in uploads], [upload.weight / whole for upload in uploads])
