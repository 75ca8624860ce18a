"""FedJETs: a gate over what a fixed network sees sends each picture, and each client, to the experts for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.method import Download, ServerState, Step, methods
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.initialization import initialize
from fl.network import Network
from fl.parametrization import Parametrization
from fl.ranges import Count, Range, Weight
from fl.seeds import stream
from fl.tensors import Payloads, Tensors, dense
from fl.types import Batch, Phase, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

GATE, SCORES, MEAN = "gate", "scores", "mean"
"""The gate's parameters; what the clients' gates make of their images on average, and its name in what one sends."""

FIRST = "experts.0."
"""Prefix of the names of a network's first expert."""


@methods.register("fedjets")
@dataclass(frozen=True, kw_only=True)
class FedJETs(FedAvg):
    """FedJETs, just-in-time personalization by a mixture of experts (Dun et al., 2023).

    A network that stays as it is, the common expert, gives every image its features; a gate, one linear layer, makes of
    them a score for each of `experts` networks. A client receives and trains the gate and the `chosen` experts with the
    highest scores on its images; the server takes FedAvg's mean of the gate, and of each expert over the clients that
    had it. Predictions are those of the expert with the highest score for the image, out of all. The first clients, one
    for each expert, are its anchors: it is always among theirs, and `anchor` times the cross entropy of their gate with
    it comes to their loss.

    We read abstract and reviews, neither paper nor code. They say: 5 experts on CIFAR-10 and 10 on CIFAR-100, which
    start from fresh weights, 2 for a client; how predictions are made; anchors, one for each expert, with images of
    different classes and in every round, whose loss guides the gate. Ours are the gate's form; that experts' logits are
    mixed by the softmax of the chosen scores; that the server chooses, by the mean softmax of all scores on the
    client's images, which the client sends after training (before that, in turn); the form of the anchors' loss; and
    all constants of training. Which images anchors have, and that they are asked in every round, is left to
    the federation. The paper's common expert is pretrained; here it is the task's network at its initial weights, known
    to all, which is pretrained only if that is.

    Attributes:
        experts: how many networks.
        chosen: how many of them a client trains.
        anchor: weight of the anchors' loss; 0 leaves anchors out.
    """

    plain: ClassVar[str] = (
        "several networks specialize; a common gate sends each client to those that fit its pictures, and each picture "
        "to one of them."
    )

    experts: Annotated[int, Range(1, 1000)] = 5
    chosen: Count = 2
    anchor: Weight = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"expected chosen from 1 to {self.experts} experts, got {self.chosen}")
        if not self.anchor >= 0:
            raise ValueError(f"expected anchor >= 0, got {self.anchor}")
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': a generator would need experts of its own")

    @classmethod
    def example(cls) -> FedJETs:
        """Return three experts, two epochs of two steps, everything on."""
        return cls(experts=3, anchor=0.5, lr=0.1, momentum=0.5, max_norm=1.0, epochs=2, batch_size=2)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def client_model(self, task: Task) -> nn.Module:
        """Return the common expert, the gate and the chosen experts."""
        return GatedMixture(task, self.experts, self.chosen)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return FedAvg's phases, with a look at all images after it, which moves nothing."""
        (main,) = super().phases(task, round)
        still = tuple(replace(group, lr=0.0, weight_decay=0.0) for group in main.groups)
        return main, Phase(groups=still, steps=1, sampler="sequential", records_direction_as=SCORES)

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the local rule for `epochs` passes, without the look."""
        main, _ = self.phases(task, self.first_round)
        return (replace(main, epochs=epochs, steps=None),)

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the cross entropy, and that of an anchor's gate; in the look the mean softmax of all scores (M,)."""
        ids = network.buffers["ids"]
        answers, scores = network(batch.inputs, ids)
        if _is_scoring_phase(step):
            return scores.softmax(-1).mean(0)
        plain = functional.cross_entropy(mix_logits(answers, scores.index_select(1, ids)), batch.labels)
        guided = functional.cross_entropy(scores, ids[:1].expand(len(scores)))
        return plain + self.anchor * network.buffers["anchor"] * guided

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss; in the look what `loss` returns."""
        return {MEAN: grad.value(params, batches[0])} if _is_scoring_phase(step) else grad(params, batches[0])

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """The look is no step."""
        return type(self).gradient is FedJETs.gradient

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return the mean scores, for the server to choose by."""
        return ({SCORES: step.recorded[SCORES]} if SCORES in step.recorded else {}), {}

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return what the expert with the highest score says of each image (B, K), out of those in the network."""
        ids = network.buffers["ids"]
        if not _is_stacked(network):  # a client's own, right after training
            answers, scores = network(inputs, ids)
            scores = scores.index_select(1, ids)
        else:
            said = [_expert_network(network, k)(inputs, ids) for k in range(self.experts)]
            answers, scores = torch.stack([answers[:, 0] for answers, _ in said], 1), said[0][1]
        return answers[torch.arange(len(inputs), device=inputs.device), scores.argmax(-1)]

    # ---- server rule -------------------------------------------------------------------------------------------------
    def experts_of(self, server: ServerState, client: int) -> list[int]:
        """Return the experts of client number `client`.

        Its own as an anchor, then by its scores, equal ones in turn.
        """
        scores = dense(server.own[SCORES][SCORES])
        mine = scores[client].tolist() if client < len(scores) else [0.0] * self.experts

        def rank(k: int) -> tuple[bool, float, int]:
            return not (self._anchors(server, client) and k == client), -mine[k], (k - client) % self.experts

        return sorted(range(self.experts), key=rank)[: self.chosen]

    def _anchors(self, server: ServerState, client: int) -> bool:
        return self.anchor > 0 and client < min(self.experts, server.clients)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return a gate and experts whose layers are drawn as PyTorch does; no scores."""
        server = super().init_server(params, task, clients, generator)
        model = copy.deepcopy(task.model).cpu()  # numbers are drawn on the CPU, wherever they go
        mixture = next(module for module in model.modules() if isinstance(module, GatedMixture))
        like = next(iter(task.parameters.values()))
        initialize(mixture.gate, generator)
        own: Payloads = {GATE: {n: p.detach().to(like) for n, p in mixture.gate.named_parameters(prefix=GATE)}}
        for k in range(self.experts):
            initialize(mixture.experts[0], generator)
            own[_expert_payload(k)] = {
                n: v.detach().clone().to(like.device) for n, v in mixture.experts[0].state_dict().items()
            }
        own[SCORES] = {SCORES: torch.zeros(clients, self.experts, dtype=like.dtype)}
        return replace(server, shared={}, buffers={}, own=own)

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the gate, the client's experts, and which they are."""
        ids = self.experts_of(server, client)
        found: Tensors = {
            f"experts.{i}.{n}": v for i, k in enumerate(ids) for n, v in server.own[_expert_payload(k)].items()
        }
        buffers = {n: dense(v) for n, v in found.items() if n in task.buffers}
        buffers["ids"] = torch.tensor(ids).to(task.buffers["ids"].device)
        buffers["anchor"] = torch.full_like(task.buffers["anchor"], float(self._anchors(server, client)))
        return Download({**server.own[GATE], **{n: v for n, v in found.items() if n not in buffers}}, buffers)

    def serve(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the gate and all experts: of every tensor of the first one with another dimension, over the experts.

        The other places hold the first expert for everybody, instead of what the client chose: nothing reads them.
        """
        down = self.broadcast(server, client, task)
        every = [server.own[_expert_payload(k)] for k in range(self.experts)]
        stacks = {f"{FIRST}{n}": torch.stack([dense(one[n]) for one in every]) for n in every[0]}
        rest = {f"experts.{slot}.{n}": dense(v) for slot in range(1, self.chosen) for n, v in every[0].items()}
        served = stacks | rest
        shared: Tensors = {n: served.get(n, v) for n, v in down.shared.items()}
        return Download(shared, {n: served.get(n, v) for n, v in down.buffers.items()})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return FedAvg's mean of the gate and of each expert, and the scores that arrived."""
        own = dict(server.own)
        own[GATE] = super().aggregate(replace(server, shared=own[GATE]), uploads, task).shared
        chosen = {upload.client: self.experts_of(server, upload.client) for upload in uploads}
        for k in range(self.experts):
            mine = [_expert_upload(u, chosen[u.client].index(k)) for u in uploads if k in chosen[u.client]]
            if mine:
                parts: Tensors = {n: v for n, v in own[_expert_payload(k)].items() if n in mine[0].update}
                rest = {n: dense(v) for n, v in own[_expert_payload(k)].items() if n not in parts}
                after = super().aggregate(replace(server, shared=parts, buffers=rest), mine, task)
                own[_expert_payload(k)] = {**after.shared, **after.buffers}
        scores = dense(own[SCORES][SCORES]).clone()
        for upload in uploads:
            scores[upload.client] = dense(upload.extra[SCORES][MEAN]).to(scores)
        return replace(server, own={**own, SCORES: {SCORES: scores}}, round=server.round + 1)


class GatedMixture(nn.Module):
    """A gate over what a fixed network sees, and experts.

    The buffer `ids` (chosen,) says which experts they are, the first the client's own where the buffer `anchor` is 1.

    Args:
        task: whose network is the common expert, at its initial weights, and the layout of the experts.
        experts: how many there are in all (M).
        chosen: how many are here.

    Raises:
        ValueError: the task's network has no linear layer as its classifier.
    """

    ids: Tensor
    anchor: Tensor

    def __init__(self, task: Task, experts: int, chosen: int) -> None:
        super().__init__()
        self.common = CommonExpert(task)
        like = next(iter(task.parameters.values()))
        self.gate = nn.utils.skip_init(nn.Linear, self.common.features, experts, dtype=like.dtype)
        self.experts = nn.ModuleList([copy.deepcopy(task.model) for _ in range(chosen)])
        self.register_buffer("ids", torch.arange(chosen, device=like.device))
        self.register_buffer("anchor", like.new_zeros(()))
        initialize(self.gate, stream(0, "fedjets"))
        self.gate.to(like.device)  # numbers are drawn on the CPU, wherever they go

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (B, K) of pixels (B, C, H, W); with `ids` what each expert says (B, chosen, K), and scores (B, M)."""
        scores = self.gate(self.common(x))
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return mix_logits(answers, scores.index_select(1, self.ids)) if ids is None else (answers, scores)


class CommonExpert(nn.Module):
    """The common expert: the task's network without its classifier, frozen and always in evaluation mode."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.inner = copy.deepcopy(task.model).requires_grad_(False).eval()
        name = task.head.rstrip(".")
        found = dict(self.inner.named_modules()).get(name)
        if not name or not isinstance(found, nn.Linear):
            raise ValueError(f"fedjets: expected a linear layer called {name!r} as classifier, got none")
        self.features = found.in_features
        parent, _, last = name.rpartition(".")
        setattr(self.inner.get_submodule(parent), last, nn.Identity())
        for module in self.inner.modules():  # constants, too: known to all, not sent
            module._non_persistent_buffers_set.update(module._buffers)

    def train(self, mode: bool = True) -> CommonExpert:
        """Stay in evaluation mode, whatever `mode` asks: the common expert is not trained."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, D)."""
        made: Tensor = self.inner(x).flatten(1)
        return made


def mix_logits(answers: Tensor, scores: Tensor) -> Tensor:
    """Return logits (B, K) of experts' (B, chosen, K), weighted by the softmax of their scores (B, chosen)."""
    return (scores.softmax(-1)[..., None] * answers).sum(1)


def _expert_payload(expert: int) -> str:
    return f"expert.{expert}"


def _is_scoring_phase(step: Step) -> bool:
    return step.phase is not None and step.phase.records_direction_as is not None


def _is_stacked(network: Network) -> bool:
    """Return whether the first expert stands for all (`FedJETs.serve`)."""
    own = dict(network.model.named_parameters())
    return any(v.shape != own[n].shape for n, v in network.weights.items() if n.startswith(FIRST))


def _expert_network(network: Network, expert: int) -> Network:
    """Return the network with this expert as its first."""
    both = network.weights, network.buffers
    weights, buffers = ({n: v[expert] if n.startswith(FIRST) else v for n, v in t.items()} for t in both)
    return Network(network.model, weights, buffers)


def _expert_upload(upload: Upload, slot: int) -> Upload:
    """Return what a client sent of one of its experts, by the expert's own names."""
    prefix = f"experts.{slot}."
    both = upload.update, upload.buffers
    update, buffers = ({n.removeprefix(prefix): v for n, v in t.items() if n.startswith(prefix)} for t in both)
    return Upload(upload.client, upload.weight, update, buffers={n: dense(v) for n, v in buffers.items()})
