"""FedFomo: clients are sent models of others, try them on images of their own, and mix those that do better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor

from fl.local.sampling import SubsetPhase
from fl.method import Download, ServerState, Step, methods
from fl.methods.bases.personal_models import PersonalModels, last_model
from fl.ranges import CountFrom0, Range, Share, StepSize, Weight
from fl.seeds import stream
from fl.tensors import Payloads, Tensors, add_scaled, dense, norm, sub, weighted_sum
from fl.types import Batch, Group, Phase, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

WEIGHTS, MODELS = "weights", "models"
"""The payload of a client's weights, and the one tensor in it: (1 + others,), its own model's first."""
LAST_START = "before"
"""The payload of the shared parameters from which a client trained last; its further ones are models of others."""
AFFINITY, ARRIVED, SEED = "affinity", "arrived", "seed"
"""Payloads of `ServerState.own`: the matrix P (clients, clients); who sent last round (clients,); for drawing (1,)."""
MATRIX, CLIENTS, NUMBER = "matrix", "clients", "number"
"""The tensors in them."""


@dataclass(frozen=True, kw_only=True)
class _MixPhase(Phase):
    """The one step that takes a client from its last model to the mixture."""


@methods.register("fedfomo")
@dataclass(frozen=True, kw_only=True)
class FedFomo(PersonalModels):
    """First-order model optimization (Zhang et al., ICLR 2021).

    From the second round on the server sends client i its last model, the one from which it had trained it, theta, and
    up to `downloads` last models of others that sent one in the round before. Each model theta_n among these, its own
    included, gets the weight w_n = (L(theta) - L(theta_n)) / |theta_n - theta|, L being the loss on images held out.
    Those above zero, divided by their sum, make the mixture from which the client trains now, theta + the sum of
    w_n (theta_n - theta). It sends the trained model, and all w_n, which the server adds to row i of a matrix P. The
    others are drawn epsilon-greedily: each with probability epsilon at random, else the next best in P.

    **Clients see each other's models**, and what they say of them are losses on private images, which no defense
    touches before they are weights. In numbers, one model and 1 + `downloads` weights travel up, 2 + `downloads` models
    down; a client could keep its own two, which the server knows, or can work out, anyway.

    Constants are those of the authors' command for CIFAR-10 with 5 models: step size 0.1, 5 epochs of batches of 50,
    weight decay 1e-4, epsilon 0.3 less 0.05 each round, 4 others, a fifth of the images held out; theta is from their
    code, too. Not as there: the step size does not shrink by 1 % a round; the distance is Euclidean (that code has sums
    of absolute values by default); P adds up w_n as they are. The paper's text was not at hand. Our choices: every
    fifth image of a client is held out; the losses are those of one batch of all of them; running statistics are the
    client's own.

    Attributes:
        downloads: how many models of others a client is sent at most.
        epsilon: share of them drawn at random in the first round, in [0, 1].
        decay: by how much that falls each round.
        every: one of so many images is held out; a client with fewer trains and weighs on all it has.
        lr: step size of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "clients get other clients' networks, check on pictures of their own which of them do well, and go on from a "
        "mixture of those."
    )
    has_per_sample_loss: ClassVar[bool] = False
    """Its weights look at all images held out, so clipping each image's gradient would promise nothing."""

    downloads: CountFrom0 = 4
    epsilon: Share = 0.3
    decay: Share = 0.05
    every: Annotated[int, Range(2, 10**7)] = 5
    lr: StepSize = 0.1
    weight_decay: Weight = 1e-4
    epochs: CountFrom0 | None = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("epsilon", "decay"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"expected {key} in [0, 1], got {getattr(self, key)}")
        for key, least in {"downloads": 0, "every": 2}.items():
            if getattr(self, key) < least:
                raise ValueError(f"expected {key} >= {least}, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> FedFomo:
        """Return two epochs of two steps on two images, two held out, everything on."""
        plain = cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=1)
        return replace(plain, downloads=2, every=2)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Training on what is not held out; from the second round on a look at what is, and the mixture, before it."""
        (phase,) = super().phases(task, round)
        given = {field.name: getattr(phase, field.name) for field in fields(phase)}
        training = SubsetPhase(**given, every=self.every, held_out=False)
        if not round:
            return (training,)
        whole = (Group(lr=1.0),)
        look = SubsetPhase(
            groups=whole, steps=1, sampler="sequential", records_direction_as=WEIGHTS, every=self.every, held_out=True
        )
        return look, _MixPhase(groups=whole, steps=1, batch_size=1, sampler="sequential"), training

    # ---- local rule --------------------------------------------------------------------------------------------------
    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss; in the first phases the weights, and the way back from the mixture."""
        if step.phase is not None and step.phase.records_direction_as == WEIGHTS:
            return {MODELS: mixture_weights(grad, params, batches[0], step)}
        if isinstance(step.phase, _MixPhase):
            mixed = mixture(step.received[LAST_START], candidate_models(step), dense(step.recorded[WEIGHTS][MODELS]))
            return add_scaled(params, {**params, **mixed}, -1.0)
        return super().gradient(grad, params, batches, step)

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return the weights, where there are any."""
        return {key: value for key, value in step.recorded.items() if key == WEIGHTS}, step.memory

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, an empty P, nobody who has sent anything, and a number to draw from."""
        server = super().init_server(params, task, clients, generator)
        seed = torch.randint(2**62, (1,), generator=generator)
        own: Payloads = {
            AFFINITY: {MATRIX: torch.zeros(clients, clients, dtype=torch.float64)},
            ARRIVED: {CLIENTS: torch.zeros(clients, dtype=torch.bool)},
            SEED: {NUMBER: seed},
        }
        return replace(server, own=own)

    def model(self, server: ServerState, client: int, task: Task) -> Tensors:
        """Return the client's own."""
        return last_model(server, client)

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the client's own model, and some of others."""
        download = super().broadcast(server, client, task)
        if client >= server.clients or not server.round:
            return download
        others = [last_model(server, other) for other in self.sampled_peers(server, client)]
        received = {f"other.{k}": {n: model[n] for n in server.shared} for k, model in enumerate(others)}
        return replace(download, received={LAST_START: _last_start(server, client), **received})

    def sampled_peers(self, server: ServerState, client: int) -> list[int]:
        """Return the numbers of the clients whose models the client is sent."""
        arrived = dense(server.own[ARRIVED][CLIENTS])
        pool = [number for number in arrived.nonzero().flatten().tolist() if number != client]
        generator = stream(int(dense(server.own[SEED][NUMBER])), "others", client, server.round)
        mixed_up = [pool[i] for i in torch.randperm(len(pool), generator=generator).tolist()]
        row = dense(server.own[AFFINITY][MATRIX])[client].tolist()
        ranked = sorted(mixed_up, key=lambda number: -row[number])  # those alike in the order of the draw
        chosen: list[int] = []
        for luck in torch.rand(min(self.downloads, len(pool)), generator=generator).tolist():
            line = mixed_up if luck < self.epsilon - self.decay * server.round else ranked
            chosen.append(next(number for number in line if number not in chosen))
        return chosen

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the state with the models that arrived, and with the clients' new weights added to P."""
        after = super().aggregate(server, uploads, task)
        arrived = torch.zeros(server.clients, dtype=torch.bool)
        matrix = dense(server.own[AFFINITY][MATRIX]).clone()
        own: Payloads = {AFFINITY: {MATRIX: matrix}, ARRIVED: {CLIENTS: arrived}}
        for upload in uploads:
            client = upload.client
            arrived[client] = True
            if WEIGHTS in upload.extra:
                found, everyone = dense(upload.extra[WEIGHTS][MODELS]), [client, *self.sampled_peers(server, client)]
                matrix[client, everyone] += found.to(matrix)
                models = [last_model(server, number) for number in everyone]
                own[_start_payload(client)] = mixture(_last_start(server, client), models, found)
        return replace(after, own=after.own | own)


def candidate_models(step: Step) -> list[Tensors]:
    """Return the client's own last model, and those of others: shared parameters, by name."""
    others = [model for key, model in step.received.items() if key != LAST_START]
    return [{name: step.start[name] for name in step.received[LAST_START]}, *others]


def mixture_weights(grad: Gradient, params: Tensors, batch: Batch, step: Step) -> Tensor:
    """Return how much better than the model before each model does for its distance (1 + others,)."""
    before = step.received[LAST_START]
    least = grad.value({**params, **before}, batch)
    gains = [least - grad.value({**params, **model}, batch) for model in candidate_models(step)]
    lengths = [norm(add_scaled(before, model, -1.0)) for model in candidate_models(step)]
    return torch.stack([gain / length for gain, length in zip(gains, lengths, strict=True)])


def mixture(before: Tensors, models: Sequence[Tensors], found: Tensor) -> Tensors:
    """Return the models by those of their weights (models,) that are above zero; the model before where none is."""
    positive = found.relu()
    whole = positive.sum()
    shares = list(positive / torch.where(whole > 0, whole, torch.ones_like(whole)))
    steps = [add_scaled(before, model, -1.0) for model in models]
    return {n: sub(value, weighted_sum([away[n] for away in steps], shares)) for n, value in before.items()}


def _last_start(server: ServerState, client: int) -> Tensors:
    """Return the shared parameters from which the client trained last; the initial ones at first."""
    return server.own.get(_start_payload(client), server.shared)


def _start_payload(client: int) -> str:
    """Return the payload of `ServerState.own` that holds them."""
    return f"{LAST_START}.{client}"
