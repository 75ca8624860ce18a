"""pFedSim: an extractor for each client, averaged over clients whose classifiers resemble its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl.method import Download, ServerState, methods
from fl.methods.bases.personal_models import PersonalModels, as_download, last_model, weighted_model
from fl.methods.fedavg import FedAvg
from fl.parametrization import Parametrization
from fl.ranges import Count, CountFrom0
from fl.tensors import Tensors, dense
from fl.types import Task, Upload

SIMILARITY, MATRIX = "similarity", "matrix"
"""Payload of `ServerState.own`, and the one tensor in it (clients, clients), entries in [0, 1]."""
MAX_SIMILARITY = 0.9999
"""How similar a client is to itself, and two clients are at most: -log(1 - 1) would be infinite."""


@methods.register("pfedsim")
@dataclass(frozen=True, kw_only=True)
class PFedSim(PersonalModels):
    """Similarity-aware model aggregation (Tan et al., 2023, arXiv 2305.15706).

    After `warmup` rounds of FedAvg everybody goes on from the common network. From then on client i receives its own
    last classifier, and as extractor the mean of all clients' last ones, in which j counts in proportion to
    -log(1 - s_ij). The similarity s_ij is the cosine of the angle between the rows of their classifiers' weights, mean
    over the rows and at least 0, taken anew where both take part in a round; two that never did have 0, and a client
    has 0.9999 with itself. Clients send whole networks, classifiers included, as the server compares these, and predict
    by what they ended their last round with; fine-tuning before scoring starts from what they are sent.

    All of that, and the constants, is from the first author's code (FL-bench): half of its 100 rounds warm up, step
    size 0.01, 5 epochs of batches of 32. The text of the paper could not be checked. Our choices: running statistics go
    with the extractor; similarities above 0.9999 count as that.

    Attributes:
        warmup: rounds of FedAvg before, >= 0.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.

    Raises:
        ValueError: a number out of range, a parametrization; or, for a client, a network without a linear classifier.
    """

    plain: ClassVar[str] = (
        "as fedavg at first; then each client keeps its own last layer and gets a mean of the rest over clients whose "
        "last layers look like its own."
    )

    warmup: CountFrom0 = 50
    epochs: CountFrom0 | None = 5
    batch_size: Count | None = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 0:
            raise ValueError(f"expected warmup >= 0, got {self.warmup}")
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': pFedSim compares the clients' classifiers")

    @classmethod
    def example(cls) -> PFedSim:
        """Return two epochs of two steps, everything on, personal from the start."""
        return cls(warmup=0, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def client_model(self, task: Task) -> nn.Module:
        """Return the task's own network."""
        _classifier(task)
        return super().client_model(task)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, and nobody similar to anybody else."""
        server = super().init_server(params, task, clients, generator)
        device = dense(next(iter(server.shared.values()))).device
        alone = torch.eye(clients, dtype=torch.float64, device=device) * MAX_SIMILARITY
        return replace(server, own={SIMILARITY: {MATRIX: alone}})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the common network, then each client's own."""
        if server.round < self.warmup:
            return FedAvg.broadcast(self, server, client, task)
        return super().broadcast(server, client, task)

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the common network, then what the client ended its last round with."""
        if server.round < self.warmup or client >= server.clients:
            return self.broadcast(server, client, task)
        return as_download(server, last_model(server, client))

    def model(self, server: ServerState, client: int, task: Task) -> Tensors:
        """Return the client's classifier on the mean of the extractors."""
        row = dense(server.own[SIMILARITY][MATRIX])[client]
        shares = -torch.log(1 - row.clamp_max(MAX_SIMILARITY))
        models = [last_model(server, number) for number in range(server.clients)]
        mean = weighted_model(models, (shares / shares.sum()).tolist())
        return {name: models[client][name] if name.startswith(task.head) else value for name, value in mean.items()}

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Aggregate as FedAvg; later the models that arrived are kept and compared."""
        if server.round < self.warmup:
            return FedAvg.aggregate(self, server, uploads, task)
        after = super().aggregate(server, uploads, task)
        matrix, name = dense(server.own[SIMILARITY][MATRIX]).clone(), _classifier(task)
        arrived = [upload.client for upload in uploads]
        heads = {client: dense(last_model(after, client)[name]) for client in arrived}
        for position, i in enumerate(arrived):
            for j in arrived[position + 1 :]:
                matrix[i, j] = matrix[j, i] = classifier_similarity(heads[i], heads[j])
        return replace(after, own={**after.own, SIMILARITY: {MATRIX: matrix}})


def classifier_similarity(one: Tensor, other: Tensor) -> Tensor:
    """Return how similar two classifiers' weights (K, D) are: the mean cosine of their rows, at least 0."""
    return nn.functional.cosine_similarity(one, other, dim=1).mean().clamp_min(0)


def _classifier(task: Task) -> str:
    """Return the name of the classifier's matrix.

    Raises:
        ValueError: there is none.
    """
    found = [n for n, v in task.parameters.items() if task.head and n.startswith(task.head) and v.ndim == 2]
    if not found:
        raise ValueError(f"expected a network with a linear classifier called {task.head.rstrip('.')!r}, got none")
    return found[-1]
