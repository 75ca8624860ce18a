"""SCAFFOLD: every step is corrected by how the client's gradient differs from everybody's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fl.method import Download, ServerState, Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import PositiveStep
from fl.tensors import Payloads, Tensors, add, add_scaled, mul, scale_tensors, sub, weighted_sum, zeros
from fl.types import Batch, Phase, Scope, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

CONTROL = "control"
"""The payload of control variates, one number for every shared parameter: c from the server, the change of c_i back."""
AT_START = "at start"
"""The direction at the server's parameters, on all images (option I)."""


@methods.register("scaffold")
@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1).

    A step goes along g - c_i + c, where the client's c_i and the server's c estimate the gradients of the client's and
    of everybody's loss; both start at zero. The client sends the changes of its parameters and of c_i, twice as much as
    with FedAvg, and receives c beside the parameters. As in the paper clients count alike in both means, whatever their
    numbers of images (FedAvg's weights hold for batch-norm statistics alone). A server that kept every upload knows
    c_i, their sum; a view of one round has it as private.

    The paper's global step size is 1; local ones are tuned, so that `lr` is FedAvg's here, and batches are a fifth of a
    client's images. It has no momentum: with it, option II divides by what K steps along one direction come to, which
    is K without it. Decay and clipping act after the correction, and with option II are part of what c_i estimates.
    Private parameters have no control variate.

    Attributes:
        option: how a client renews c_i: "I" is its gradient at the server's parameters, on all of its images (one more
            pass); "II" is the mean direction of its steps, without the correction.
        server_lr: global step size.
    """

    plain: ClassVar[str] = (
        "as fedavg, but each client corrects its steps by how its own direction has differed from everybody's, and "
        "sends that direction, too."
    )

    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)  # what c_i learns from is the way that plain steps lead

    initial_memory_is_known: ClassVar[bool] = True
    deviation_reason: ClassVar[str] = (
        "each step has c - c_i added, the control variates; where you have these, subtract lr * (c - c_i) for each "
        "step from the update, and audit what is left as one of fedavg; in the first round of all they are zero"
    )

    option: Literal["I", "II"] = "II"
    server_lr: PositiveStep = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in {"I", "II"}:
            raise ValueError(f"expected option 'I' or 'II', got {self.option!r}")
        for key in ("lr", "server_lr"):
            if not getattr(self, key) > 0:
                raise ValueError(f"expected {key} > 0, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> Scaffold:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2, server_lr=0.9)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return FedAvg's phases; with option I after a look at all images that moves nothing."""
        (main,) = super().phases(task, round)
        if self.option == "II":
            return (main,)
        still = tuple(replace(group, lr=0.0, weight_decay=0.0) for group in main.groups)
        return Phase(groups=still, steps=1, sampler="sequential", records_direction_as=AT_START), main

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the local rule for `epochs` passes, without the look at all images: no new c_i is kept."""
        *_, main = self.phases(task, self.first_round)
        return (replace(main, epochs=epochs, steps=None),)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def init_memory(self, params: Tensors, task: Task) -> Payloads:
        """Return c_i = 0."""
        return {CONTROL: zeros(params, [name for name in params if self.scope(name, task) is Scope.SHARED])}

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, and c - c_i."""
        shift = add_scaled(step.memory[CONTROL], step.received[CONTROL], -1.0)
        loss = grad(params, batches[0])
        return {name: add(value, shift[name], -1.0) if name in shift else value for name, value in loss.items()}

    def first_round_follows_loss_gradient(self, steps: int | None) -> bool:
        """Return True, as all control variates are zero."""
        return type(self).gradient is Scaffold.gradient

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return the change of c_i, and c_i after it: directions hold c - c_i, so the change is a direction less c."""
        own = step.memory[CONTROL]
        if AT_START in step.recorded:
            way = {name: step.recorded[AT_START][name] for name in own}
        elif steps:
            way = scale_tensors(
                add_scaled({name: step.start[name] for name in own}, params, -1.0), 1 / self._path_length(steps)
            )
        else:  # no step, nothing learned
            return {CONTROL: zeros(own, own)}, step.memory
        change = add_scaled(way, step.received[CONTROL], -1.0)
        return {CONTROL: change}, {CONTROL: add_scaled(own, change)}

    def _path_length(self, steps: int) -> float:
        """Return how far `steps` steps along a direction of length 1 lead."""
        return self.lr * sum((1 - self.momentum**k) / (1 - self.momentum) for k in range(1, steps + 1))

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, and c = 0."""
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={CONTROL: zeros(server.shared, server.shared)})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the parameters and c."""
        return Download(server.shared, server.buffers, {CONTROL: server.own[CONTROL]})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return plain means of both changes; that of c over all clients, those left out of the round included."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        alike, part = [1 / len(uploads)] * len(uploads), [1 / server.clients] * len(uploads)
        shared = {
            name: sub(value, mul(weighted_sum([upload.update[name] for upload in uploads], alike), self.server_lr))
            for name, value in server.shared.items()
        }
        control = {
            name: add(value, weighted_sum([upload.extra[CONTROL][name] for upload in uploads], part))
            for name, value in server.own[CONTROL].items()
        }
        return replace(after, shared=shared, own={CONTROL: control})
