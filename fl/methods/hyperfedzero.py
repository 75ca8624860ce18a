"""HyperFedZero: every image gets a classifier of its own, made by a shared hypernetwork from what the image is like."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.models.building_blocks.dropout import draw_masks, enable_mask_draws
from fl.models.hyperfedzero import JoinedNet, ZeroNet, draw_initial
from fl.network import Network
from fl.ranges import Count, CountFrom0, Length, Range, StepSize, Weight, Width
from fl.seeds import stream
from fl.tensors import Tensors, dense
from fl.types import Batch, Optimizer, Task

GENERATED_AT_ONCE = 2**25
"""Weights generated at once when images are scored: with a network for each, memory is what bounds a batch."""


@methods.register("hyperfedzero")
@dataclass(frozen=True, kw_only=True)
class HyperFedZero(FedAvg):
    """HyperFedZero (Zhou et al., 2025, "Deploying Models to Non-participating Clients ...", Algorithm 1, Eq. 3-7).

    An extractor f and a noise network give each image its distribution embedding e = softmax(f(x) + z softplus(noisy(
    x))), z ~ N(0, 1) for each image and entry; a chunked hypernetwork h turns e into the parameters of the task's
    network, one set per image, which classifies it. All of f, noisy and h is shared and averaged; nothing is private.
    The loss is cross entropy plus alpha var(sum of e over the batch) / mean(sum of e) plus beta mean(-e log e). At test
    time z = 0.

    Not given in the paper, so ours: the layouts of f and noisy, the size of the chunks' embeddings, the initialization
    (PyTorch's default), the variance's divisor (P - 1), that the last mean runs over all entries of e (the formula has
    no sum over them), that generated weights of normalization layers are their distance from 1, and the optimizer:
    plain SGD as in Algorithm 1 at the published step size is far from converged after the published 2,500 steps, so the
    default is Adam. Table 3's counts of parameters, which leave out f and noisy, come out with 32 numbers for every
    chunk beside 32 inputs of h; 16 of these are e, so we take 16.

    Attributes:
        lr: step size.
        epochs: local passes; None, as `steps` is given.
        steps: local steps (K); set to None when `epochs` is given.
        batch_size: images per step: 800 divided by the number of participants in the paper.
        optimizer: of the clients, fresh in every round.
        embedding: size of e (P).
        extractor: layout of f and noisy: "conv" or "mlp" (`fl.models.hyperfedzero.build_extractor`).
        hidden: units of h's hidden layers.
        chunk: parameters that h makes at a time; None takes what brings the sum of all parameters nearest to the plain
            network's, as the authors do by hand (576 for their ResNet on Tiny-ImageNet).
        chunk_embedding: size of a chunk's embedding.
        condition: "parameters" generates them from e (Opt. 2, the method); "input" joins e to the input of one shared
            network (Opt. 1, the ablation of Table 2), and has no hypernetwork.
        alpha: weight of the penalty on uneven use of e's entries.
        beta: weight of the penalty on the entropy of e.
    """

    plain: ClassVar[str] = (
        "a shared network makes a classifier of its own for every single picture, so that clients who never took part "
        "need no training; everything is sent."
    )
    has_per_sample_loss: ClassVar[bool] = False

    lr: StepSize = 0.001
    epochs: CountFrom0 | None = None
    steps: Count | None = 5
    batch_size: Count | None = 80
    optimizer: Optimizer = "adam"
    embedding: Annotated[int, Range(2, 2**16)] = 16
    extractor: Literal["conv", "mlp"] = "conv"
    hidden: Annotated[tuple[Width, ...], Length(1)] = (300, 300)
    chunk: Count | None = None
    chunk_embedding: Width = 16
    condition: Literal["parameters", "input"] = "parameters"
    alpha: Weight = 1.0
    beta: Weight = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding < 2:
            raise ValueError(f"expected embedding >= 2, got {self.embedding}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"expected hidden to name at least one layer, each >= 1, got {self.hidden}")
        for key in ("alpha", "beta"):
            if getattr(self, key) < 0:
                raise ValueError(f"expected {key} >= 0, got {getattr(self, key)}")

    @classmethod
    def example(cls) -> HyperFedZero:
        """Return tiny networks, trained by four steps of SGD."""
        sizes = {"embedding": 3, "hidden": (5,), "chunk": 64, "chunk_embedding": 2}
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, steps=4, batch_size=2, optimizer="sgd", **sizes)  # type: ignore[arg-type]

    def client_model(self, task: Task) -> nn.Module:
        """Return the networks, around those of the task."""
        some = next(iter(task.parameters.values()))
        model = self._network(task)
        draw_initial(model, stream(0, "hyperfedzero"))
        return enable_mask_draws(model.to(some))

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return parameters drawn from `generator`; of a shared classifier (Opt. 1), the task's own."""
        model = copy.deepcopy(task.model).cpu()  # numbers are drawn on the CPU, wherever they go
        draw_initial(next(m for m in model.modules() if isinstance(m, ZeroNet | JoinedNet)), generator)
        fresh = dict(model.named_parameters())
        params = super().initial_parameters(task, generator)
        return {n: fresh[n].detach().to(dense(v).device) if n in fresh else v for n, v in params.items()}

    def draw(self, batch: Batch, task: Task, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Return the noise z (B, P) and the masks of dropout; without a generator their means, 0 and 1."""
        shape = (len(batch), self.embedding)
        z = batch.inputs.new_zeros(shape)
        if generator is not None:
            z = torch.randn(shape, generator=generator).to(batch.inputs)
        return {"z": z, **draw_masks(task.model, batch.inputs, generator)}

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the cross entropy and both penalties (Eq. 4)."""
        draws = step.draws or self.draw(batch, step.task, None)
        logits, log_e = network(batch.inputs, draws["z"])
        e = log_e.exp()
        use = e.sum(0)
        balance = use.var() / use.mean()
        entropy = -(e * log_e).mean()
        return nn.functional.cross_entropy(logits, batch.labels) + self.alpha * balance + self.beta * entropy

    def logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return what each image's own classifier says of it (B, K), without noise."""
        some = sum(value.numel() for value in network.weights.values())  # as many as a classifier has, about
        return torch.cat([network(part) for part in inputs.split(max(1, GENERATED_AT_ONCE // some))])

    def _network(self, task: Task) -> ZeroNet | JoinedNet:
        if self.condition == "input":
            return JoinedNet(task, self.extractor, self.embedding)
        return ZeroNet(task, self.extractor, self.embedding, self.hidden, self.chunk, self.chunk_embedding)
