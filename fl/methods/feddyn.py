"""FedDyn: a penalty that follows each client's gradients makes all clients agree where everybody's loss is least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fl.method import ServerState, Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import ClipNorm, CountFrom0, Positive, StepSize, Weight
from fl.tensors import Payloads, Tensors, add_scaled, dense, sub, weighted_sum, zeros
from fl.types import Batch, Scope, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

GRADIENT_MEMORY = "slope"
"""The payload of gradients, one number for every shared parameter: a client's own, and h at the server."""


@methods.register("feddyn")
@dataclass(frozen=True, kw_only=True)
class FedDyn(FedAvg):
    """Dynamic regularization (Acar et al., ICLR 2021, Algorithm 1).

    A client minimizes L_k(w) - <g_k, w> + alpha / 2 |w - w_t|^2. At the minimum w_k the gradient of L_k is g_k less
    alpha (w_k - w_t): its next g_k. The server adds up the same, h = h - alpha / m sum of (w_k - w_t) over the round's
    clients, m being the number of all, and sends the plain mean of the w_k, less h / alpha. Only the parameters travel.
    All g_k and h start at zero. A server that kept every upload knows g_k; a view of one round has it as private.

    Constants are those of the authors' code for CIFAR-10: 5 epochs of batches of 50 at step size 0.1, weight decay
    1e-3, gradients clipped at 10, alpha = 0.01. The code divides alpha by a client's share of the images; as in
    Algorithm 1 all have the same here, and count alike. Clipping acts on the whole direction, penalty included; decay
    acts after it. Private parameters have no penalty, and batch-norm statistics take FedAvg's mean.

    Attributes:
        alpha: weight of the penalty, > 0.
        lr: step size of local SGD.
        weight_decay: of local SGD.
        max_norm: clip each step's direction to this norm, or None.
        epochs: local passes; None when `steps` is given.
    """

    plain: ClassVar[str] = (
        "as fedavg, but a spring and a steady push, learned from earlier rounds, keep clients from going their own way."
    )

    initial_memory_is_known: ClassVar[bool] = True
    deviation_reason: ClassVar[str] = (
        "each step has g_k, which the client learned in earlier rounds, taken off, and is pulled back to the start; "
        "in its first round g_k is zero: audit that as one of fedprox with mu: alpha (of fedavg, if it is one step); "
        "where you have g_k, add lr * g_k for each step to the update first"
    )

    alpha: Positive = 0.01
    lr: StepSize = 0.1
    weight_decay: Weight = 1e-3
    max_norm: ClipNorm | None = 10.0
    epochs: CountFrom0 | None = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise ValueError(f"expected alpha > 0, got {self.alpha}")

    @classmethod
    def example(cls) -> FedDyn:
        """Return two epochs of two steps, everything on."""
        return cls(alpha=0.2, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def init_memory(self, params: Tensors, task: Task) -> Payloads:
        """Return g_k = 0."""
        return {GRADIENT_MEMORY: zeros(params, [name for name in params if self.scope(name, task) is Scope.SHARED])}

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, less g_k, and alpha times the way back to the start of the round."""
        loss, own = grad(params, batches[0]), step.memory[GRADIENT_MEMORY]
        mine = {name: value for name, value in loss.items() if name in own}
        drift = add_scaled({name: params[name] for name in mine}, step.start, -1.0)
        return {**loss, **add_scaled(add_scaled(mine, own, -1.0), drift, self.alpha)}

    def first_round_follows_loss_gradient(self, steps: int | None) -> bool:
        """Return True for one step, as g_k is zero and nothing has drifted."""
        return type(self).gradient is FedDyn.gradient and steps == 1

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return no further payload, and g_k less alpha times how far the parameters moved, to be kept."""
        own = step.memory[GRADIENT_MEMORY]
        way = add_scaled({name: params[name] for name in own}, step.start, -1.0)
        return {}, {GRADIENT_MEMORY: add_scaled(own, way, -self.alpha)}

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, and h = 0."""
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={GRADIENT_MEMORY: zeros(server.shared, server.shared)})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the state with h updated by the round, and with the mean of the models that arrived shifted by h."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        alike = [1 / len(uploads)] * len(uploads)
        moves = {name: weighted_sum([upload.update[name] for upload in uploads], alike) for name in server.shared}
        h = add_scaled(server.own[GRADIENT_MEMORY], moves, self.alpha * len(uploads) / server.clients)
        shared: Tensors = {
            name: dense(sub(value, moves[name])) - dense(h[name]) / self.alpha for name, value in server.shared.items()
        }
        return replace(after, shared=shared, own={GRADIENT_MEMORY: h})
