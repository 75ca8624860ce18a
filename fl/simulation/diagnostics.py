"""What the course of training shows beside accuracy: loss, and how models stand to each other and to their last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fl.models.hypernetworks import filter_hypernetwork, hyperfl_hypernetwork, server_hypernetwork
from fl.simulation.accuracy import Predictor
from fl.simulation.federation_state import FederationState
from fl.simulation.scores import all_images
from fl.tensors import dense
from fl.types import Batch

N_BINS = 10
"""Bins of equal width over [0, 1] in which `confidence_histogram` counts."""
_EMBEDDED = {
    hyperfl_hypernetwork.EMBEDDING,
    filter_hypernetwork.EMBEDDINGS.rstrip("."),
    server_hypernetwork.EMBEDDINGS,
}


@dataclass(frozen=True)
class TrainingDiagnostics:
    """A federation's models at one time, to see how far they move.

    Attributes:
        weights: `generated_weights` of every participant; empty where nobody asks for movement.
    """

    weights: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def snapshot(cls, run: FederationState) -> TrainingDiagnostics:
        """Return how the models stand before a round."""
        return cls(_weights(run) if "movement" in run.protocol.diagnostics else [])

    def compute(self, run: FederationState) -> dict[str, Any]:
        """Return what the protocol asks for of the federation as it stands, as plain data; None stands for no number.

        All is of the model by which a client predicts after the server's step (`FederationState.model`), over
        participants in order, and of weights as in `generated_weights`.

        Returns:
            "losses": cross entropy (nats, from 0) on each client's training images as they are, mean over images;
            "loss": mean over clients. "movement": Euclidean distance of each client's weights from those before the
            round; absent before the first. "similarity": cosine of any two clients' weights, in [-1, 1], row by row.
            "divergence": for every layer the Euclidean distance of two clients' weights, mean over pairs; None for
            single clients. "embeddings": the clients' (see `embedding`); absent where a method has none. "confidence":
            see `confidence_histogram`. "server": `Method.server_metrics` of the last round, of its clients in order;
            {} where a method has none, absent before the first.
        """
        asked, found = set(run.protocol.diagnostics), dict[str, Any]()
        if "loss" in asked:
            losses = [loss(run.model(number), run.data[number].train) for number in run.participants]
            found |= {
                "loss": _to_plain_number(sum(losses) / len(losses)),
                "losses": [_to_plain_number(value) for value in losses],
            }
        if asked & {"movement", "similarity", "divergence"}:
            now = _weights(run)
            if self.weights:
                found["movement"] = [_to_plain_number(distance(*pair)) for pair in zip(self.weights, now, strict=True)]
            if "similarity" in asked:
                found["similarity"] = [[_to_plain_number(value) for value in row] for row in similarity(now).tolist()]
            if "divergence" in asked:
                found["divergence"] = {name: _to_plain_number(value) for name, value in divergence(now).items()}
        if "embeddings" in asked:
            known = [value for number in run.participants if (value := embedding(run, number)) is not None]
            if known:
                found["embeddings"] = [[_to_plain_number(x) for x in value.tolist()] for value in known]
        if "confidence" in asked:
            found["confidence"] = confidence_histogram(run)
        if run.server_metrics is not None:
            found["server"] = {
                name: [_to_plain_number(value) for value in own] for name, own in run.server_metrics.items()
            }
        return found


def loss(model: Predictor, data: Batch) -> float:
    """Cross entropy in nats, mean over images; penalties that a method adds are not in it (HyperFL, Figure 4a)."""
    total, size = 0.0, 256
    for logits, labels in zip(model.logits(data.inputs, size), data.labels.split(size), strict=True):
        total += float(functional.cross_entropy(logits, labels, reduction="sum"))
    return total / len(data)


def generated_weights(model: Predictor) -> dict[str, Tensor]:
    """Return the weights that a client's own hypernetwork makes, or, without one, all that move in training."""
    made = getattr(model.client.method.parametrization, "generates", None)
    weights = model.weights()
    return {name: weights[name] for name in made(model.client.task)} if made else weights


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the Euclidean distance, over all weights together (HyperFL, Figure 4b)."""
    return float(torch.stack([(second[name] - value).norm() for name, value in first.items()]).norm())


def similarity(weights: Sequence[dict[str, Tensor]]) -> Tensor:
    """Return the cosines (N, N) of the weights of N clients (HyperFedNet, Figure 5); NaN where one's are all zero."""
    rows = torch.stack([torch.cat([value.flatten() for value in one.values()]).double() for one in weights])
    rows = rows / rows.norm(dim=1, keepdim=True)
    cosines = (rows @ rows.mT).clamp(-1, 1)
    return torch.where(torch.eye(len(rows)).bool() & cosines.isfinite(), 1.0, cosines)  # the rounding of its own row


def divergence(weights: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return the Euclidean distance of two clients' weights by layer, mean over pairs (hFedF, Figure 5b).

    NaN for one client.
    """
    layers: dict[str, list[str]] = {}
    for name in weights[0]:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return {
        layer: float(
            torch.pdist(torch.stack([torch.cat([one[name].flatten() for name in names]) for one in weights])).mean()
        )
        for layer, names in layers.items()
    }


def embedding(run: FederationState, number: int) -> Tensor | None:
    """Return what stands for a client before a hypernetwork (E,), wherever it is kept.

    None where there is no such thing.

    Found by its name: private tensors `embedding` or `embeddings...` of the client, or the server's.
    """
    private = run.clients[number].private
    own = [dense(value).flatten() for name, value in private.items() if name.split(".")[0] in _EMBEDDED]
    if own:
        return torch.cat(own)
    kept = run.server.own.get(f"{server_hypernetwork.HYPERNETWORK}.{number}", {})  # a hypernetwork for each client
    if (single := kept.get(hyperfl_hypernetwork.EMBEDDING)) is not None:
        return dense(single)
    if (single := run.server.own.get(server_hypernetwork.EMBEDDINGS, {}).get(str(number))) is not None:
        return dense(single)
    for payload in run.server.own.values():
        if (single := payload.get(f"{server_hypernetwork.EMBEDDINGS}.{number}")) is not None:
            return dense(single)
        if (every := payload.get(server_hypernetwork.EMBEDDINGS)) is not None:
            return dense(every)[number]
    return None


def confidence_histogram(run: FederationState) -> dict[str, dict[str, list[int]]]:
    """Return how often the predicted class had which probability, of right and of wrong answers (hFedF, Figure 6b).

    Returns:
        "own": of participants on their test images, "unseen": of clients that never take part on all of theirs, each
        with the number of images in `N_BINS` classes of probability under "right" and "wrong"; outputs that are no
        numbers count as not sure at all.
    """
    found = {"own": _counts((run.model(number), run.data[number].test) for number in run.participants)}
    if run.held_out_clients and run.download(run.held_out_clients[0]).numbers():
        found["unseen"] = _counts(
            (run.model(number, adapted=False), all_images(run, number)) for number in run.held_out_clients
        )
    return found


def _counts(models: Iterable[tuple[Predictor, Batch]]) -> dict[str, list[int]]:
    counts, size = torch.zeros(2, N_BINS, dtype=torch.int64), 256
    for model, data in models:
        for logits, labels in zip(model.logits(data.inputs, size), data.labels.split(size), strict=True):
            sure, chosen = logits.softmax(-1).max(-1)
            place = (sure.nan_to_num() * N_BINS).long().clamp(max=N_BINS - 1) + N_BINS * (chosen != labels)
            counts += place.cpu().bincount(minlength=2 * N_BINS).view(2, N_BINS)
    return {"right": counts[0].tolist(), "wrong": counts[1].tolist()}


def _weights(run: FederationState) -> list[dict[str, Tensor]]:
    return [generated_weights(run.model(number)) for number in run.participants]


def _to_plain_number(value: float) -> float | None:
    return value if isfinite(value) else None
