"""FedGen: the server trains a generator of what enters the classifier, and clients train on what it makes, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl.method import Download, ServerState, Step, methods
from fl.methods.bases.server_step import server_step
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.feature_generator import STATISTICS, FeatureGenerator
from fl.parametrization import Parametrization
from fl.ranges import Count, CountFrom0, Range, StepSize, Weight, Width
from fl.seeds import stream
from fl.tensors import Payloads, Tensors, Value, dense, sub
from fl.types import Batch, Group, Phase, Task, Upload

if TYPE_CHECKING:
    from fl.network import Network

GENERATOR, OPTIMIZER, KEYS, SEED = "generator", "optimizer", "keys", "seed"
"""Payloads of `ServerState.own` (clients receive the first); and the name in the last of a seed."""
SHARES = "label_shares"
"""Name of what clients send as the shares of their images that each label has (K,)."""
COUNTING_GROUP = Group(prefixes=(SHARES,), lr=1.0)
"""What moves while a client finds them."""
DECAY_PER_ROUND = 0.98
"""Factor on the weights of the generator's terms, and on its step size, from round to round."""


@methods.register("fedgen")
@dataclass(frozen=True, kw_only=True)
class FedGen(FedAvg):
    """Data-free knowledge distillation (Zhu et al., ICML 2021), as the authors' code has it by default.

    A generator G turns a label and noise into what might enter the classifier h for an image of that label. The server
    trains it on the classifiers that arrive: on the cross entropy of h_i(G(z, y)) with y, weighted by client i's share
    of the round's images of label y, plus `diversity` * exp(-mean over pairs of |z - z'|^2 |G - G'|), both distances
    being means over numbers. From the second round on clients receive G beside the network, and to the loss of a batch
    comes `alpha` times the cross entropy of h(G(z, y')) with random labels y', and `beta` * KL(softmax h(G(z, y)) ||
    softmax f(x)) with the batch's own labels y, where the first is a constant; both weights fall by 2 % a round.

    **Clients also send how many images of each label they have.** A tensor `label_shares` does it: one step of size 1
    on 1/2 |v - y|^2, a mean over all of a client's images, ends at the shares of its labels, so that training and
    predictions need no rule of their own for it; the server sends the last round's mean of them.

    Constants are those of the code for MNIST: alpha = beta = 10, 32 noises, 256 hidden units (for its CIFAR setting 64
    and 512), Adam at 3e-4 with weight decay 0.01 for 50 steps of batches of 32 in each round, its step size falling by
    2 % a round; clients take 20 steps of batches of 32 at 0.01. Noise is N(0, I), which the code's comment says; it
    draws from U(0, 1). It counts labels in the batches that were fed, here in all of a client's images; y' come from
    all classes, on the server from those that some client of the round has (more than one image, in the code). Its
    clients' optimizer and step sizes that fall by 1 % a round are not there: this is FedAvg's SGD. Teachers are the
    classifiers alone. It could not be checked against the paper's text which of these terms the paper has; without
    `beta` the clients' loss is cross entropy on images and on features.

    Attributes:
        lr: step size of local SGD.
        epochs: local passes instead of steps.
        steps: local steps; None takes the code's 20, unless `epochs` is given.
        batch_size: images per local step.
        alpha: weight of generated features at first.
        beta: weight of the distance to what the generator says at first.
        generated: features that a client makes for each step.
        noise: size of z.
        hidden: units of the generator.
        diversity: weight of the term that keeps features apart.
        server_steps: of the generator in each round.
        server_lr: their size at first.
        server_decay: weight decay of the generator.
        server_batch: features per step of the generator, at least 2.

    Raises:
        ValueError: a number out of range; or, for a client, a network whose classifier is no linear layer.
    """

    plain: ClassVar[str] = (
        "as fedavg, but the server makes up what the inside of a network looks like for each label, from the networks "
        "that arrive, and clients learn from that, too; they also send how many pictures of each label they have."
    )
    has_per_sample_loss: ClassVar[bool] = False

    epochs: CountFrom0 | None = None
    batch_size: Count | None = 32
    alpha: Weight = 10.0
    beta: Weight = 10.0
    generated: Count = 32
    noise: Width = 32
    hidden: Width = 256
    diversity: Weight = 1.0
    server_steps: CountFrom0 = 50
    server_lr: StepSize = 3e-4
    server_decay: Weight = 1e-2
    server_batch: Annotated[int, Range(2, 10**7)] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.parametrization) is not Parametrization:
            raise ValueError("expected parametrization 'direct': FedGen's server runs the clients' classifiers")
        for key in ("alpha", "beta", "diversity", "server_steps"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")
        for key, least in {"generated": 1, "noise": 1, "hidden": 1, "server_batch": 2}.items():
            if not getattr(self, key) >= least:
                raise ValueError(f"expected {key} >= {least}, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> FedGen:
        """Return two epochs of two steps, everything on."""
        server = {"generated": 3, "noise": 2, "hidden": 4, "server_steps": 3, "server_lr": 0.01, "server_batch": 4}
        local = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
        return cls(**local, alpha=1.0, beta=0.5, **server)  # type: ignore[arg-type]

    # ---- description -------------------------------------------------------------------------------------------------
    def generator(self, task: Task) -> FeatureGenerator:
        """Return the generator for this task.

        Raises:
            ValueError: the network's classifier is no linear layer.
        """
        weight = task.parameters.get(f"{task.head}weight")
        if weight is None or weight.ndim != 2:
            raise ValueError(
                f"expected a network with a linear layer {task.head!r} as its classifier, got another or none"
            )
        size = {"noise": self.noise, "hidden": self.hidden}
        return FeatureGenerator(classes=task.num_classes, features=weight.shape[1], **size)

    def client_model(self, task: Task) -> nn.Module:
        """Return the network, and beside it, without a part in what it predicts, the shares of labels."""
        self.generator(task)
        model, some = super().client_model(task), next(iter(task.parameters.values()))
        model.register_parameter(SHARES, nn.Parameter(some.new_zeros(task.num_classes)))
        return model

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the shares of labels, then the network."""
        return Phase(groups=(COUNTING_GROUP,), steps=1, sampler="sequential"), self._training_phases(task, round)

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the network alone."""
        return (replace(self._training_phases(task, self.first_round), epochs=epochs, steps=None),)

    def _training_phases(self, task: Task, round: int) -> Phase:
        steps = 20 if self.epochs is None and self.steps is None else self.steps
        (phase,) = FedAvg.phases(replace(self, steps=steps), task, round)
        (group,) = phase.groups
        return replace(phase, groups=(replace(group, prefixes=tuple(n for n in task.parameters if n != SHARES)),))

    def uses_plain_cross_entropy(self, task: Task, round: int) -> bool:
        """Return True in the first round, which has no generator, and where the generator's terms have no weight."""
        return type(self).loss is FedGen.loss and (round == 0 or self.alpha == self.beta == 0)

    def trains_predictor(self, phase: Phase) -> bool:
        """Return False for counting, which moves nothing that the network reads."""
        return super().trains_predictor(phase) and phase.groups != (COUNTING_GROUP,)

    def disclosed_label_shares(self, sent: Tensors, update: Tensors) -> Tensor | None:
        """Return what the counting ended with."""
        return dense(sent[SHARES]) - dense(update[SHARES]) if SHARES in update else None

    # ---- local rule --------------------------------------------------------------------------------------------------
    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return noise for the batch's own labels (B, Z), further labels (G,) and noise for these (G, Z)."""
        shapes = {"own": (len(batch), self.noise), "noise": (self.generated, self.noise)}
        if generator is None:
            found = {name: batch.inputs.new_zeros(shape) for name, shape in shapes.items()}
            labels = torch.arange(self.generated) % task.num_classes
        else:
            found = {name: torch.randn(shape, generator=generator).to(batch.inputs) for name, shape in shapes.items()}
            labels = torch.randint(task.num_classes, (self.generated,), generator=generator)
        return {**found, "labels": labels.to(batch.inputs.device)}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the distance to the shares of labels.

        Then cross entropy, that of generated features, and distillation.
        """
        own = _probabilities(batch.labels, step.task.num_classes, batch.inputs)
        if step.phase is not None and step.phase.groups == (COUNTING_GROUP,):
            return (network.weights[SHARES] - own).square().sum(1).mean() / 2
        logits = network(batch.inputs)
        loss = functional.cross_entropy(logits, batch.labels)
        if GENERATOR not in step.received:
            return loss
        made = self.generator(step.task)
        params = {name: dense(value) for name, value in step.received[GENERATOR].items()}
        draws, fade = step.draws or self.draw(batch, step.task, None), DECAY_PER_ROUND**step.round
        weight, bias = (network.weights.get(f"{step.task.head}{part}") for part in ("weight", "bias"))
        assert weight is not None
        others = _probabilities(draws["labels"], step.task.num_classes, batch.inputs)
        further = functional.linear(made.make(params, others, draws["noise"]), weight, bias)
        said = functional.linear(made.make(params, own, draws["own"]), weight, bias).softmax(-1).detach()
        distance = functional.kl_div(logits.log_softmax(-1), said, reduction="batchmean")
        return loss + fade * (self.alpha * functional.cross_entropy(further, others) + self.beta * distance)

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, a fresh generator and a seed."""
        server = super().init_server(params, task, clients, generator)
        fresh = self.generator(task).initial_parameters(generator, next(iter(task.parameters.values())))
        seed = torch.randint(2**31, (), generator=generator)
        return replace(server, own={GENERATOR: fresh, OPTIMIZER: {}, KEYS: {SEED: seed}})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the network, and the generator once it is trained."""
        received: Payloads = {GENERATOR: server.own[GENERATOR]} if server.round else {}
        return Download(server.shared, server.buffers, received)

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return FedAvg's mean, and steps of the generator on the classifiers that arrived."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        draw = stream(int(dense(server.own[KEYS][SEED])), "generator", server.round)
        params, kept = dict(server.own[GENERATOR]), server.own[OPTIMIZER]
        group = Group(lr=self.server_lr * DECAY_PER_ROUND**server.round, weight_decay=self.server_decay)
        phase = Phase(groups=(group,), optimizer="adam", steps=1)
        trust, present = _label_weights(server, uploads)
        for _ in range(self.server_steps):
            labels = torch.multinomial(present, self.server_batch, replacement=True, generator=draw)
            noise = torch.randn(self.server_batch, self.noise, generator=draw).to(trust)
            params |= {name: dense(params[name]).clone() for name in STATISTICS}  # they change in place
            moving = {n: dense(v).detach().requires_grad_() for n, v in params.items() if n not in STATISTICS}
            with torch.enable_grad():
                value = self._generator_loss(
                    server, uploads, task, {**params, **moving}, labels.to(trust.device), noise, trust
                )
            grads = dict(zip(moving, torch.autograd.grad(value, list(moving.values())), strict=True))
            params, kept = server_step(phase, params, {**grads}, kept)
        return replace(after, own={**server.own, GENERATOR: params, OPTIMIZER: kept})

    def _generator_loss(
        self,
        server: ServerState,
        uploads: Sequence[Upload],
        task: Task,
        params: Mapping[str, Value],
        labels: Tensor,
        noise: Tensor,
        trust: Tensor,
    ) -> Tensor:
        """Return what the generator's step descends: the clients' cross entropy, and how alike its features are."""
        given = {name: dense(value) for name, value in params.items()}
        wanted = _probabilities(labels, task.num_classes, noise)
        features = self.generator(task).make(given, wanted, noise, training=True)
        names = [name for name in (f"{task.head}weight", f"{task.head}bias") if name in server.shared]
        loss = features.new_zeros(())
        for upload, shares in zip(uploads, trust, strict=True):
            head = [dense(sub(server.shared[name], upload.update[name])) for name in names]
            each = functional.cross_entropy(functional.linear(features, *head), labels, reduction="none")
            loss = loss + (shares[labels] * each).mean()
        apart = (noise[:, None] - noise).square().mean(-1) * (features[:, None] - features).abs().mean(-1)
        return loss + self.diversity * (-apart.mean()).exp()


def _probabilities(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return labels (B,) or (B, K) as (B, K), of the type of `like`."""
    if labels.is_floating_point():
        return labels
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(like)


def _label_weights(server: ServerState, uploads: Sequence[Upload]) -> tuple[Tensor, Tensor]:
    """Return each client's share of the images of each label (clients, K), and 1 where there are any, else 0 (K,).

    A defense may have put noise into what clients sent: what is below zero counts for nothing, and where nothing is
    left of a label, clients count alike.
    """
    sent = dense(server.shared[SHARES])
    counts = torch.stack([upload.weight * (sent - dense(upload.update[SHARES])) for upload in uploads]).clamp_min(0)
    whole, least = counts.sum(0), torch.finfo(counts.dtype).eps * sum(upload.weight for upload in uploads)
    there = whole > least
    alike = torch.full_like(counts, 1 / len(uploads))
    trust = torch.where(there, counts / whole.clamp_min(least), alike)
    return trust, (there if there.any() else ~there).float().cpu()
