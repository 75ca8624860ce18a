"""hFedF: a server hypernetwork fuses clients of different domains, so that the model serves a domain nobody had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl.method import Download, ServerState, methods
from fl.methods.bases.server_step import server_step
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.dropout import draw_masks, enable_mask_draws, has_dropout
from fl.models.hypernetworks.server_hypernetwork import (
    EMBEDDINGS,
    HYPERNETWORK,
    OPTIMIZER,
    ServerHypernetwork,
    embedding_of,
)
from fl.parametrization import Parametrization
from fl.ranges import Count, CountFrom0, Length, PositiveShare, StepSize, Weight, Width
from fl.seeds import stream
from fl.tensors import Tensors, add, add_scaled, dense, dot, norm, scale_tensors
from fl.types import Batch, Group, Optimizer, Phase, Task, Upload

KEYS, SEED = "keys", "seed"
"""A further payload of `ServerState.own`, and the name in it of what fresh embeddings come from."""
ALIGNMENT = "alignment"
"""What GradAlign's weights are called among the numbers of the server's step."""
Align = Literal["toward", "away", "off", "as-printed"]


@methods.register("hfedf")
@dataclass(frozen=True, kw_only=True)
class HFedF(FedAvg):
    """hFedF, model fusion by a hypernetwork for domain generalization (Bartholet et al., 2024, Algorithms 1-4).

    Client i receives theta_i = h(v_i; phi) and returns what local SGD changed. The server pulls `sent - trained` of
    each client back through h, weights the results by how far each agrees with their mean (GradAlign), takes a step of
    Adam and damps it (EMA). A server that looks on sees plain updates of each client's network.

    Constants are the paper's for PACS (Tables 8 and 10). Where it contradicts itself: Algorithm 1 pulls back
    `trained - sent` and subtracts, which climbs (align "as-printed"); Algorithm 3 has softmax(+cos), section 4.2
    softmax(-cos). Algorithm 4 puts the average in the place of phi, so the average before a step is phi itself, and
    EMA comes to `alpha` times the step.

    Not given in the paper, and so our choices: the round EMA begins after; that embeddings start from N(0, 1) and
    layers as `nn.Linear` does; that Adam moves embeddings as it moves phi; what a client that never took part receives
    (`unseen`). Cosines of embeddings are taken of the gradients of all embeddings together, of which a client's has one
    row, as Algorithm 1 writes them.

    Attributes:
        lr: step size of the clients (0.001 for all data sets).
        weight_decay: of the clients (0.001).
        epochs: local passes (2).
        batch_size: images per step (64).
        optimizer: of the clients; Algorithm 2 is plain SGD.
        embedding: size E of the embeddings; None is floor(1 + clients / 4).
        hidden: units of the hypernetwork's linear layers; LeakyReLU between them, the last as it is.
        embeddings: "learned"; "fixed" as they are drawn (Figure 8); "random": drawn anew after every step of the server
            (Table 7). That clients might then keep them as keys is an outlook in the paper (Appendix C.3); it would
            have to send them the hypernetwork, as `hyperfl` does.
        align: GradAlign: "toward" the mean gives those more weight that agree with it, "away" those that do not, "off"
            is the mean; "as-printed" has the weights of "toward" and the sign of Algorithm 1, which climbs.
        ema: alpha of EMA, in (0, 1]; 0.75 for Office-Home and VLCS, 1 is none.
        warmup: rounds before EMA begins.
        server_lr: step size of Adam.
        server_decay: its weight decay; 0.001 for VLCS.
        unseen: what a client that never took part receives: what the mean "embedding" of the others generates, or the
            mean "model" of what they receive.
    """

    plain: ClassVar[str] = (
        "as pfedhn, but the server weights clients by how far they agree and moves slowly, so that images unlike any "
        "client's are recognized, too."
    )

    lr: StepSize = 1e-3
    weight_decay: Weight = 1e-3
    epochs: CountFrom0 | None = 2
    batch_size: Count | None = 64
    optimizer: Optimizer = "sgd"
    embedding: Width | None = None
    hidden: Annotated[tuple[Width, ...], Length(1)] = (50, 50, 50, 50)
    embeddings: Literal["learned", "fixed", "random"] = "learned"
    align: Align = "toward"
    ema: PositiveShare = 0.95
    warmup: CountFrom0 = 10
    server_lr: StepSize = 1e-3
    server_decay: Weight = 1e-5
    unseen: Literal["embedding", "model"] = "embedding"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': the server's hypernetwork is the generator")
        if not 0 < self.ema <= 1:
            raise ValueError(f"expected ema in (0, 1], got {self.ema}")
        if self.warmup < 0:
            raise ValueError(f"expected warmup >= 0, got {self.warmup}")

    @classmethod
    def example(cls) -> HFedF:
        """Return a tiny hypernetwork, two epochs of two steps, everything on."""
        return cls(lr=0.1, epochs=2, batch_size=2, embedding=3, hidden=(5, 5), warmup=0)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def client_model(self, task: Task) -> nn.Module:
        """Return the network, with masks for its dropout to come."""
        return enable_mask_draws(super().client_model(task))

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return the masks of the network's dropout."""
        return draw_masks(task.model, batch.inputs, generator)

    def uses_plain_cross_entropy(self, task: Task, round: int) -> bool:
        """Return False with dropout, whose masks enter the loss."""
        return super().uses_plain_cross_entropy(task, round) and not has_dropout(task.model)

    # ---- server rule -------------------------------------------------------------------------------------------------
    def generated_names(self, task: Task) -> list[str]:
        """Return the names of the tensors that the hypernetwork generates: all that train."""
        return list(task.parameters)

    def generator(self, task: Task, clients: int) -> ServerHypernetwork:
        """Return the hypernetwork for so many clients."""
        shapes = {name: task.parameters[name].shape for name in self.generated_names(task)}
        size = 1 + clients // 4 if self.embedding is None else self.embedding
        return ServerHypernetwork(shapes=shapes, embedding=size, hidden=self.hidden, activation="leaky-relu")

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return a fresh hypernetwork and an embedding for each client.

        The network's own initial values are not used.
        """
        server = super().init_server({}, task, clients, generator)
        hypernetwork, like = self.generator(task, clients), next(iter(task.parameters.values()))
        start = torch.randn(clients, hypernetwork.embedding, generator=generator).to(like)
        seed = torch.randint(2**31, (), generator=generator)
        own: Tensors = {EMBEDDINGS: start, **hypernetwork.initial_parameters(generator, like)}
        return replace(server, own={HYPERNETWORK: own, OPTIMIZER: {}, KEYS: {SEED: seed}})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the network generated for the client."""
        own, made = server.own[HYPERNETWORK], self.generator(task, server.clients)
        if client < server.clients or self.unseen == "embedding":
            return Download(dict(made.generate(own, embedding_of(own, client))), server.buffers)
        return Download(_mean([dict(made.generate(own, v)) for v in dense(own[EMBEDDINGS])]), server.buffers)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Pull back, align, step, damp."""
        after = super().aggregate(server, uploads, task)  # nothing but buffers
        if not uploads:
            return after
        before, kept = server.own[HYPERNETWORK], server.own[OPTIMIZER]
        grads: Tensors = {}
        for part in self._client_gradients(server, uploads, task).values():
            grads |= fuse_gradients(part, self.align)
        group = Group(lr=self.server_lr, weight_decay=self.server_decay)
        moved, kept = server_step(Phase(groups=(group,), optimizer="adam", steps=1), before, grads, kept)
        if self.ema < 1 and server.round > self.warmup:
            moved = add_scaled(before, add_scaled(moved, before, -1.0), self.ema)
        if self.embeddings == "random":
            moved[EMBEDDINGS] = self._redraw_embeddings(server)
        return replace(after, own={**server.own, HYPERNETWORK: moved, OPTIMIZER: kept})

    def server_metrics(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> dict[str, list[float]]:
        """Return GradAlign's weights.

        "alignment" of the hypernetwork's layers, and of embeddings where they are learned.
        """
        pulled = self._client_gradients(server, uploads, task) if uploads else {}
        return {name: alignment(part, self.align).tolist() for name, part in pulled.items()}

    def _client_gradients(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> dict[str, list[Tensors]]:
        """Return each client's gradient, in the parts that GradAlign weights apart."""
        before, made = server.own[HYPERNETWORK], self.generator(task, server.clients)
        sign = -1.0 if self.align == "as-printed" else 1.0  # trained - sent, or sent - trained
        pulled = [
            made.pull_back_update(before, upload.client, scale_tensors(upload.update, sign)) for upload in uploads
        ]
        parts = {ALIGNMENT: [{k: v for k, v in one.items() if k != EMBEDDINGS} for one in pulled]}
        if self.embeddings == "learned":
            parts[f"{ALIGNMENT} of embeddings"] = [{EMBEDDINGS: one[EMBEDDINGS]} for one in pulled]
        return parts

    def _redraw_embeddings(self, server: ServerState) -> Tensor:
        like = dense(server.own[HYPERNETWORK][EMBEDDINGS])
        seed = int(dense(server.own[KEYS][SEED]))
        return torch.randn(like.shape, generator=stream(seed, EMBEDDINGS, server.round)).to(like)


def alignment(grads: Sequence[Tensors], align: Align) -> Tensor:
    """GradAlign (Algorithm 3): the weight of every client's gradient (S,), from its cosine with their plain mean.

    A gradient of zero agrees with nothing: its cosine is 0.
    """
    average = _mean(grads)
    smallest = torch.finfo(norm(average).dtype).tiny
    cosines = torch.stack([dot(g, average) / (norm(g) * norm(average)).clamp_min(smallest) for g in grads])
    return ({"toward": 1.0, "as-printed": 1.0, "away": -1.0, "off": 0.0}[align] * cosines).softmax(0)


def fuse_gradients(grads: Sequence[Tensors], align: Align) -> Tensors:
    """Return the clients' gradients as one (Algorithm 1, line 16)."""
    weights = alignment(grads, align)
    result = scale_tensors(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        result = add_scaled(result, grad, weight)
    return result


def _mean(sets: Sequence[Tensors]) -> Tensors:
    result = sets[0]
    for one in sets[1:]:
        result = {name: add(value, one[name]) for name, value in result.items()}
    return scale_tensors(result, 1 / len(sets))
