"""pFedHN: a hypernetwork on the server generates every client's network from an embedding of that client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch

from fl.method import Download, ServerState, methods
from fl.methods.bases.server_step import server_step
from fl.methods.fedavg import FedAvg
from fl.models.hypernetworks.server_hypernetwork import (
    EMBEDDINGS,
    HYPERNETWORK,
    OPTIMIZER,
    ServerHypernetwork,
    embedding_of,
)
from fl.parametrization import Parametrization
from fl.ranges import ClipNorm, Count, CountFrom0, Length, ShareBelow1, StepSize, Weight, Width
from fl.tensors import Tensors, add_scaled, scale_tensors
from fl.types import Group, Phase, Scope, Task, Upload


@methods.register("pfedhn")
@dataclass(frozen=True, kw_only=True)
class PFedHN(FedAvg):
    """pFedHN and, with a private head, pFedHN-PC (Shamsian et al., ICML 2021, Algorithm 1 and section 3.3).

    Client i receives theta_i = h(v_i; phi) and returns d = theta_i - theta_i after local SGD; the server steps phi and
    the embeddings along (d theta_i / d phi)^T d by SGD of its own, with the authors' constants. Neither hypernetwork
    nor embeddings ever leave it. The authors draw one client a step: `rate` = 1 / clients in a federation. Momentum and
    decay also move the embeddings of clients that are not drawn, as in their code, and the gradient is clipped whole.

    Our choices where the paper is silent: several clients a round make one step of the server, on the mean of what
    their updates ask for, each client counting the same. 20 clients in a round are thus one step and not 20; a step for
    each in turn, all from the network generated before, made training oscillate. The images of 50 steps are passes over
    the client's data, where the authors reshuffle before every batch; the momentum of a private head starts afresh
    each round, where theirs goes on; all private heads start from the same values. A client that never takes part
    receives what the mean embedding of the others generates: the paper fits a new embedding by the new client's own
    updates, which would be taking part.

    Attributes:
        lr: step size of the clients.
        momentum: of the clients.
        weight_decay: of the clients.
        max_norm: clips each local gradient; a private head is never clipped.
        epochs: local passes instead of steps.
        steps: local steps; None takes the authors' 50, unless `epochs` is given.
        batch_size: images per step.
        head: "private" leaves the classifier with the client (pFedHN-PC).
        embedding: size E of the embeddings, drawn from N(0, 1); None is the authors' int(1 + clients / 4).
        hidden: units of the hypernetwork's linear layers; ReLU between them, heads on the last as it is.
        server_lr: step size of the server; None takes the authors' 0.01, and 0.05 with a private head.
        server_momentum: of the server.
        server_decay: weight decay of the server.
        server_max_norm: clips the gradient of hypernetwork and embeddings together.
    """

    plain: ClassVar[str] = (
        "the server keeps a second network that makes each client's network from a code of that client; clients train "
        "what they get and send how it changed."
    )

    lr: StepSize = 5e-3
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 5e-5
    max_norm: ClipNorm | None = 50.0
    epochs: CountFrom0 | None = None
    batch_size: Count | None = 64
    head: Literal["shared", "private"] = "shared"
    embedding: Width | None = None
    hidden: Annotated[tuple[Width, ...], Length(1)] = (100, 100, 100, 100)
    server_lr: StepSize | None = None
    server_momentum: ShareBelow1 = 0.9
    server_decay: Weight = 1e-3
    server_max_norm: ClipNorm | None = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': the server's hypernetwork is the generator")

    @classmethod
    def example(cls) -> PFedHN:
        """Return a tiny hypernetwork, two epochs of two steps."""
        return cls(lr=0.1, epochs=2, batch_size=2, embedding=3, hidden=(5, 5))

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: everything travels but a private head."""
        return Scope.PRIVATE if self.head == "private" and name.startswith(task.head) else Scope.SHARED

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase in which everything moves, a private head unclipped."""
        steps = 50 if self.epochs is None and self.steps is None else self.steps
        (phase,) = FedAvg.phases(replace(self, steps=steps), task, round)
        if self.head == "shared":
            return (phase,)
        own = Group(prefixes=(task.head,), lr=self.lr, weight_decay=self.weight_decay)
        return (replace(phase, groups=(own, *phase.groups)),)

    def generator(self, task: Task, clients: int) -> ServerHypernetwork:
        """Return the hypernetwork for so many clients."""
        shapes = {n: v.shape for n, v in task.parameters.items() if self.scope(n, task) is Scope.SHARED}
        size = int(1 + clients / 4) if self.embedding is None else self.embedding
        return ServerHypernetwork(shapes=shapes, embedding=size, hidden=self.hidden)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return a fresh hypernetwork and one embedding for each client.

        The network's own initial values are not used.
        """
        server = super().init_server({}, task, clients, generator)
        hypernetwork, like = self.generator(task, clients), next(iter(task.parameters.values()))
        drawn = torch.randn(clients, hypernetwork.embedding, generator=generator).to(like)
        own: Tensors = {EMBEDDINGS: drawn, **hypernetwork.initial_parameters(generator, like)}
        return replace(server, own={HYPERNETWORK: own, OPTIMIZER: {}})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the network generated for the client."""
        own = server.own[HYPERNETWORK]
        made = self.generator(task, server.clients).generate(own, embedding_of(own, client))
        return Download(dict(made), server.buffers)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the updates pulled back through the hypernetwork, and one step of the server on their mean."""
        after = super().aggregate(server, uploads, task)  # nothing but buffers
        if not uploads:
            return after
        made, own = self.generator(task, server.clients), server.own
        total = made.pull_back_update(own[HYPERNETWORK], uploads[0].client, uploads[0].update)
        for upload in uploads[1:]:
            total = add_scaled(total, made.pull_back_update(own[HYPERNETWORK], upload.client, upload.update))
        grads = scale_tensors(total, 1 / len(uploads))
        moved, kept = server_step(self._server_phase(), own[HYPERNETWORK], grads, own[OPTIMIZER])
        return replace(after, own={HYPERNETWORK: moved, OPTIMIZER: kept})

    def _server_phase(self) -> Phase:
        lr = {"shared": 0.01, "private": 0.05}[self.head] if self.server_lr is None else self.server_lr
        group = Group(lr=lr, weight_decay=self.server_decay, max_norm=self.server_max_norm)
        return Phase(groups=(group,), momentum=self.server_momentum, steps=1)
