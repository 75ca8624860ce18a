"""FedAMP: every client has a mean of its own on the server, in which models count the more the closer they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fl.method import Download, ServerState, Step, methods
from fl.methods.bases.personal_models import PersonalModels, as_download, last_model, weighted_model
from fl.ranges import Count, Positive, StepSize, Weight
from fl.tensors import Tensors, add_scaled, dense, squared_distance
from fl.types import Batch, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

DISTANCES, MATRIX = "apart", "matrix"
"""The payload of `ServerState.own` with the squared distances of all models (clients, clients), and its name there."""


@methods.register("fedamp")
@dataclass(frozen=True, kw_only=True)
class FedAMP(PersonalModels):
    """Federated attentive message passing (Huang et al., AAAI 2021, Algorithm 1).

    The server keeps each client's last model w_i and sends it u_i, the sum of xi_ij w_j with
    xi_ij = alpha A'(|w_i - w_j|^2) for the others, A(x) = 1 - exp(-x / sigma), and xi_ii = 1 - the sum of these. The
    client follows the gradient of F_i(w) + lam / (2 alpha) |w - u_i|^2, and sends where it ends, its new w_i, by which
    it predicts.

    The distance is that of the shared parameters; running statistics go with them. Our choices: local training starts
    at u_i, as the paper's minimization does not say where it starts (from w_i instead, in PFLlib); where the others
    would count for more than 1 together, as equal models easily do, they are scaled to 1, since the paper's analysis
    needs a mean; the model of a client that does not take part stays as it is; alpha is the same in all rounds. The
    paper's heuristic for deep networks, HeurFedAMP, with softmaxes of cosines, is not here. The paper's own constants
    could not be checked: those below are the defaults of PFLlib, whose pull is along the distance and not, as in the
    paper, its square. The server keeps a model for each client, and all distances between them.

    Attributes:
        alpha: step size of the message passing, > 0; it also weakens the pull.
        sigma: squared distance at which a model counts e times less, > 0.
        lam: strength of the pull to u_i, >= 0.
        lr: step size of local SGD.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "the server makes each client an average of its own, in which networks like its own count most, and a spring "
        "pulls the client to it."
    )

    alpha: Positive = 1.0
    sigma: Positive = 1.0
    lam: Weight = 1.0
    lr: StepSize = 0.005
    batch_size: Count | None = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("alpha", "sigma"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"expected {key} > 0, got {getattr(self, key)}")
        if not 0 <= self.lam < math.inf:
            raise ValueError(f"expected lam >= 0, got {self.lam}")

    @classmethod
    def example(cls) -> FedAMP:
        """Return two epochs of two steps, everything on."""
        return cls(alpha=0.6, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, and lam / alpha times the way back to u_i, where the round started."""
        loss = grad(params, batches[0])
        away = add_scaled({name: params[name] for name in loss}, step.start, -1.0)
        return add_scaled(loss, away, self.lam / self.alpha)

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Return True for one step, at which the client is at u_i."""
        return type(self).gradient is FedAMP.gradient and (steps == 1 or self.lam == 0)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state; all models are the same."""
        server = super().init_server(params, task, clients, generator)
        return replace(server, own={DISTANCES: {MATRIX: torch.zeros(clients, clients, dtype=torch.float64)}})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the state with the models that arrived, and with their distances from all others."""
        after, apart = super().aggregate(server, uploads, task), dense(server.own[DISTANCES][MATRIX]).clone()
        models = [last_model(after, number) for number in range(server.clients)]
        for i in {upload.client for upload in uploads}:
            for j, other in enumerate(models):
                far = sum(float(squared_distance(models[i][name], other[name])) for name in server.shared)
                apart[i, j] = apart[j, i] = far
        return replace(after, own={**after.own, DISTANCES: {MATRIX: apart}})

    def model(self, server: ServerState, client: int, task: Task) -> Tensors:
        """Return u_i: the client's last model, averaged with those of others by the attention they get."""
        apart = dense(server.own[DISTANCES][MATRIX])[client].tolist()
        others = [number for number in range(server.clients) if number != client]
        shares = [self.attention(apart[number]) for number in others]
        whole = max(sum(shares), 1.0)
        shares = [share / whole for share in shares]
        return weighted_model([last_model(server, number) for number in (client, *others)], [1 - sum(shares), *shares])

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """Return w_i, by which the client predicts."""
        if client >= server.clients:
            return self.broadcast(server, client, task)
        return as_download(server, last_model(server, client))

    def attention(self, apart: float) -> float:
        """Return alpha A'(apart), `apart` being a squared distance."""
        return self.alpha / self.sigma * math.exp(-apart / self.sigma)
