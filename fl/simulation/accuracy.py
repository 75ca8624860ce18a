"""How well a client predicts: by which model, after which adaptation, and the share of images it gets right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fl.client import Client
from fl.defense import UnknownDefense
from fl.method import Download
from fl.simulation.client_round import FIRST_ROUND, ClientState, RoundKey, prepare, train
from fl.tensors import Tensors, dense
from fl.types import Batch

if TYPE_CHECKING:
    from fl.data.augment import Augmentation


@dataclass(frozen=True)
class Predictor:
    """A network to predict with, in evaluation mode.

    Attributes:
        client: the rule.
        params: what its parametrization makes the network's weights of.
        buffers: all of the network's.
    """

    client: Client
    params: Tensors
    buffers: dict[str, torch.Tensor]

    def logits(self, inputs: torch.Tensor, size: int = 256) -> Iterator[torch.Tensor]:
        """Yield logits (n, K) of `inputs` (N, C, H, W), `size` images at a time."""
        network = self.client.in_evaluation_mode.network(self.params, self.buffers)
        with torch.no_grad():
            for part in inputs.split(size):
                yield self.client.method.logits(network, part)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the network that move in training, by name."""
        with torch.no_grad():
            return self.client.method.parametrization.network(self.params, self.client.task)


def accuracy(client: Client, params: Tensors, buffers: dict[str, torch.Tensor], data: Batch, size: int = 256) -> float:
    """Return the share of `data` classified right by the client's network in evaluation mode, in [0, 1]."""
    answers = Predictor(client, params, buffers).logits(data.inputs, size)
    right = sum(int((logits.argmax(-1) == y).sum()) for logits, y in zip(answers, data.labels.split(size), strict=True))
    return right / len(data)


def predictor(client: Client, state: ClientState, down: Download) -> Predictor:
    """Return a client's personal model, or what it is sent with what it keeps.

    Args:
        client: the rule.
        state: what the client keeps.
        down: the shared part of its model.
    """
    params, buffers = {**down.shared, **state.private}, {**down.buffers, **state.buffers}
    if state.personal:
        params = state.personal["parameters"]
        buffers = {name: dense(value) for name, value in state.personal.get("buffers", {}).items()}
    return Predictor(client, client.method.parametrization.lift(params), {**client.task.buffers, **buffers})


def predictor_accuracy(client: Client, state: ClientState, down: Download, images: Batch) -> float:
    """Return the share of `images` classified right by `predictor`."""
    model = predictor(client, state, down)
    return accuracy(client, model.params, model.buffers, images)


def adapt(
    client: Client,
    state: ClientState,
    down: Download,
    data: Batch,
    *,
    augment: Augmentation | None = None,
    key: RoundKey = FIRST_ROUND,
) -> tuple[ClientState, Download]:
    """Return what a client keeps and the shared part after `Method.adaptation_method`; as they are without one.

    Arguments are those of `fl.simulation.client_round.prepare`.
    """
    method = client.method.adaptation_method()
    if method is None:
        return state, down
    rule = Client(client.base, method, UnknownDefense(wrapped=client.defense))
    done = train(prepare(rule, state, down, data, augment=augment, key=key))
    return done.state, Download(done.result.trained(down.shared), done.result.buffers)
