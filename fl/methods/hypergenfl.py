"""HyperGenFL: the server learns, from the models that arrive, how much each client counts in each layer's mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fl.method import Download, ServerState, mean, methods
from fl.methods.bases.personal_models import final_model, floating_buffers
from fl.methods.bases.server_step import server_step
from fl.methods.fedavg import FedAvg
from fl.models.hypernetworks.attention_hypernetwork import AttentionHypernetwork
from fl.parametrization import Parametrization
from fl.ranges import Count, CountFrom0, Positive, Range, StepSize, Weight, Width
from fl.settings import SettingError
from fl.tensors import Payloads, Tensors, Value, dense, dot, sub
from fl.types import Group, Optimizer, Phase, Task, Upload

HYPERNETWORK, OPTIMIZER, INITIAL = "hypernetwork", "optimizer", "initial"
"""Payloads of `ServerState.own`; `model_payload` names further ones."""


def model_payload(client: int) -> str:
    """Return the payload of `ServerState.own` with the model that `client` trained last."""
    return f"model.{client}"


def embedding_name(client: int | str) -> str:
    """Return the name of the client's embedding (E,), beside the hypernetwork's own parameters."""
    return f"embeddings.{client}"


def layer_of(name: str) -> str:
    """Return the layer a parameter or buffer belongs to: the module that holds it."""
    return name.rpartition(".")[0] or name


@methods.register("hypergenfl")
@dataclass(frozen=True, kw_only=True)
class HyperGenFL(FedAvg):
    """HG-FL (Chen et al., CIKM 2025, Eq. 3-11, Algorithm 1): aggregation weights from a hypernetwork, without data.

    Clients train and send as in FedAvg. An attention hypernetwork on the server turns an embedding of each client that
    takes part into its share in the mean of every layer; hypernetwork and embeddings then step along what these shares
    do to the aggregate, whose gradient is taken to be theta_sent - theta_c, averaged over the clients. The paper's Eq.
    15 and Algorithm 1 have the opposite sign, which moves the aggregate away from what clients learned (distance
    "as-printed"); its Eq. 16 and 17 have this one.

    Figure 1 aggregates the models that just arrived; Algorithm 1 (lines 5 to 9), before training, the last models of
    the clients newly drawn, which the server then has to store. With every client in every round both are the same;
    our order, first the step and then the mean, follows from that.

    Our choices where the paper is silent: a layer is a module that holds parameters; batch-norm statistics are averaged
    with its weights, other buffers by numbers of images; AdamW with 0.01 and 1e-5 is read as both the clients' and the
    server's; embeddings and moments of clients that do not take part stay as they are; "mse" and "log-cosh" are means
    over a layer's numbers, taken at the model that was sent; random embeddings are N(0, 1). See
    `AttentionHypernetwork` for those inside it.

    From equal embeddings every client has the same share, and the gradient of the hypernetwork is zero up to rounding,
    which AdamW scales up: in the first round only the embeddings learn anything. A layer whose decoder is below zero
    for all clients has equal shares and no gradient, and stays so unless others move the attention. About half of
    the decoders start there, and with the published constants the rest followed within 20 rounds in our trials: what is
    left is the plain mean. (From random embeddings single clients survived instead and took most of a layer.) On the
    clients' side the same step size silences `simple-cnn`; "sgd" with momentum 0.9, as in MOON, does not.

    Attributes:
        lr: step size of the clients.
        weight_decay: of the clients.
        epochs: local passes; the paper has 1 for Tiny-ImageNet.
        batch_size: images per step.
        optimizer: of the clients.
        embedding: size E of the embeddings; "one-hot" ones have the number of clients instead.
        start: embeddings of ones or random numbers, which learn, or the client's number "one-hot", which does not.
        depth: attention layers.
        heads: of each; for one-hot embeddings the greatest divisor that it shares with their size.
        floor: lambda of Eq. 5.
        distance: between the aggregate and the clients' models, which the shares are to make small: "difference" is the
            paper's own, whose gradient is the difference itself, "as-printed" that with the sign of Eq. 15, which
            climbs; "mse" and "log-cosh" are those of its Table 9.
        aggregates: the models that "arrived" (Figure 1), or those "stored" of the clients newly drawn (Algorithm 1).
        server_lr: step size of hypernetwork and embeddings.
        server_decay: weight decay of theirs.
        server_optimizer: of theirs; Algorithm 1 writes plain steps, "sgd".
    """

    plain: ClassVar[str] = (
        "as fedavg, but the server learns how much each client counts in each layer of the average, from codes of the "
        "clients."
    )

    lr: StepSize = 0.01
    weight_decay: Weight = 1e-5
    epochs: CountFrom0 | None = 10
    batch_size: Count | None = 32
    optimizer: Optimizer = "adamw"
    embedding: Width = 128
    start: Literal["ones", "random", "one-hot"] = "ones"
    depth: Annotated[int, Range(1, 100)] = 1
    heads: Width = 4
    floor: Positive = 1e-3
    distance: Literal["difference", "as-printed", "mse", "log-cosh"] = "difference"
    aggregates: Literal["arrived", "stored"] = "arrived"
    server_lr: StepSize = 0.01
    server_decay: Weight = 1e-5
    server_optimizer: Literal["sgd", "adamw"] = "adamw"

    def __post_init__(self) -> None:
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': HyperGenFL averages the layers of a network")
        super().__post_init__()
        if self.start != "one-hot" and self.embedding % self.heads:
            fits = [n for n in range(1, self.embedding + 1) if self.embedding % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - self.heads))[:3])
            said = ", ".join(map(str, near))
            reason = f"expected a divisor of embedding={self.embedding}, such as {said}, got {self.heads}"
            raise SettingError((self.name, "heads"), reason)

    @classmethod
    def example(cls) -> HyperGenFL:
        """Return a tiny hypernetwork, two epochs of two steps."""
        return cls(lr=0.02, epochs=2, batch_size=2, embedding=4, heads=2, start="random")

    # ---- server rule -------------------------------------------------------------------------------------------------
    def hypernetwork(self, server: ServerState) -> AttentionHypernetwork:
        """Return the hypernetwork for the server's clients and layers."""
        one_hot = self.start == "one-hot"
        size = server.clients if one_hot else self.embedding
        heads = math.gcd(self.heads, size) if one_hot else self.heads
        count = len(layers(server))
        return AttentionHypernetwork(layers=count, embedding=size, depth=self.depth, heads=heads, floor=self.floor)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, a fresh hypernetwork and an embedding for each client."""
        server = super().init_server(params, task, clients, generator)
        hypernetwork, like = self.hypernetwork(server), dense(next(iter(server.shared.values())))
        own = hypernetwork.initial_parameters(generator, like)
        for client in range(clients):
            if self.start == "one-hot":
                values = torch.nn.functional.one_hot(torch.tensor(client), clients)
            elif self.start == "random":
                values = torch.randn(self.embedding, generator=generator)
            else:
                values = torch.ones(self.embedding)
            own[embedding_name(client)] = values.to(like)
        payloads: Payloads = {HYPERNETWORK: own, OPTIMIZER: {}}
        if self.aggregates == "stored":
            payloads[INITIAL] = {**server.shared, **floating_buffers(server.buffers)}
        return replace(server, own=payloads)

    def shares(self, server: ServerState, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return the share of each of `clients` in the mean of each layer (clients,), by layer; they sum to 1."""
        own = server.own[HYPERNETWORK]
        found = self.hypernetwork(server).weights(own, _stacked(own, clients))
        return dict(zip(layers(server), found.T, strict=True))

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Take one step of hypernetwork and embeddings; then the mean of what arrived, or the models put away."""
        if not uploads:
            return replace(server, round=server.round + 1)
        clients = [upload.client for upload in uploads]
        after = replace(server, own={**server.own, **self._train_hypernetwork(server, uploads)}, round=server.round + 1)
        if self.aggregates == "stored":
            sent = Download(server.shared, server.buffers)
            return replace(after, own=after.own | {model_payload(u.client): final_model(sent, u) for u in uploads})
        shares = self.shares(after, clients)
        shared = {n: sub(v, _mean(n, shares, uploads, lambda u: u.update)) for n, v in server.shared.items()}
        buffers = {
            n: v - dense(_mean(n, shares, uploads, lambda u: u.buffers))
            for n, v in floating_buffers(server.buffers).items()
        }
        return replace(after, shared=shared, buffers={**server.buffers, **buffers})

    def begin_round(self, server: ServerState, clients: Sequence[int], task: Task) -> ServerState:
        """Return, with aggregates="stored", the state with the model that `clients` start from (lines 5 to 9)."""
        if self.aggregates == "arrived":
            return server
        models = [server.own.get(model_payload(client), server.own[INITIAL]) for client in clients]
        shares = self.shares(server, clients)
        equal = next(iter(shares.values())).new_full((len(clients),), 1 / len(clients))

        def joined(name: str) -> Tensor:
            rows = torch.stack([dense(model[name]) for model in models])
            return torch.tensordot(shares.get(layer_of(name), equal), rows, dims=1)

        return replace(
            server,
            shared={name: joined(name) for name in server.shared},
            buffers={**server.buffers, **{name: joined(name) for name in floating_buffers(server.buffers)}},
        )

    def _train_hypernetwork(self, server: ServerState, uploads: Sequence[Upload]) -> Payloads:
        """Return hypernetwork, embeddings and optimizer after a step (Eq. 10 and 11)."""
        own, clients = server.own[HYPERNETWORK], [upload.client for upload in uploads]
        hypernetwork, columns = self.hypernetwork(server), []
        for names in layers(server).values():
            updates = [{name: dense(upload.update[name]) for name in names} for upload in uploads]
            slope = self._distance_gradient(updates)
            # The gradient of a share is the product of the client's model and the slope. What all have in common,
            # the model that was sent, is left out: the shares of a layer sum to 1.
            columns.append(torch.stack([-dot(update, slope) for update in updates]))
        network = {name: value for name, value in own.items() if not name.startswith(embedding_name(""))}
        grads, back = hypernetwork.pull_back(network, _stacked(own, clients), torch.stack(columns, 1))
        moving: Tensors = dict(grads)
        if self.start != "one-hot":
            moving |= {embedding_name(client): row for client, row in zip(clients, back, strict=True)}
        group = Group(lr=self.server_lr, weight_decay=self.server_decay)
        phase = Phase(groups=(group,), optimizer=self.server_optimizer, steps=1)
        moved, kept = server_step(phase, own, moving, server.own[OPTIMIZER])
        return {HYPERNETWORK: moved, OPTIMIZER: kept}

    def _distance_gradient(self, updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the gradient of the distance to the clients' models in one layer, at the model that was sent.

        Args:
            updates: sent - trained, client by client.
        """
        count = sum(value.numel() for value in updates[0].values())
        change: Callable[[Tensor], Tensor] = {
            "difference": lambda d: d,
            "as-printed": lambda d: -d,
            "mse": lambda d: 2 * d / count,
            "log-cosh": lambda d: d.tanh() / count,
        }[self.distance]
        return {n: torch.stack([change(update[n]) for update in updates]).mean(0) for n in updates[0]}


def layers(server: ServerState) -> dict[str, list[str]]:
    """Return the names of the parameters of each layer, in the network's order."""
    found: dict[str, list[str]] = {}
    for name in server.shared:
        found.setdefault(layer_of(name), []).append(name)
    return found


def _stacked(own: Tensors, clients: Sequence[int]) -> Tensor:
    return torch.stack([dense(own[embedding_name(client)]) for client in clients])


def _mean(
    name: str, shares: Mapping[str, Tensor], uploads: Sequence[Upload], part: Callable[[Upload], Mapping[str, Value]]
) -> Value:
    """Return the mean of `part(upload)[name]` by the shares of its layer, or by images where no layer has it."""
    if layer_of(name) not in shares:
        return mean(uploads, lambda upload: part(upload)[name])
    return torch.tensordot(shares[layer_of(name)], torch.stack([dense(part(u)[name]) for u in uploads]), dims=1)
