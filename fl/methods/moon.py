"""MOON: what a client's network makes of an image shall be like the server's network, unlike the client's last one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.network import Network
from fl.ranges import Count, CountFrom0, Positive, ShareBelow1, Weight
from fl.tensors import Payloads, Tensors, dense
from fl.types import Batch, Task

PREVIOUS = "previous"
"""The memory of the parameters a client ended its last round with, those of the classifier left out."""


@methods.register("moon")
@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    """Model-contrastive federated learning (Li et al., CVPR 2021, Algorithm 1 and Eq. 3).

    To the cross entropy of an image comes mu times -log(e^(s / tau) / (e^(s / tau) + e^(t / tau))): s is the cosine of
    the angle between what enters the classifier now and what did at the start of the round, in the network the server
    sent; t is that with what did at the end of the client's last round. A client in its first round has no such network
    and trains as with FedAvg, as in the authors' code. They put a projection head before the classifier, which is part
    of the network here; the representation is whatever enters `task.head`.

    Constants are the paper's for CIFAR-10: step size 0.01, momentum 0.9, weight decay 1e-5, 10 epochs of batches of 64,
    tau = 0.5, mu = 5 (1 for CIFAR-100 and Tiny-ImageNet). In train mode all three networks take batch norm from the
    batch (the authors' code has the two at rest use running statistics). The last network is private in a view, though
    a server that kept the last upload, and what it had sent, knows the shared part of it.

    Attributes:
        mu: weight of the contrast, >= 0; 0 is FedAvg.
        temperature: tau, > 0.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.

    Raises:
        ValueError: a number out of range; or, for a client, a network without a classifier.
    """

    plain: ClassVar[str] = (
        "as fedavg, but what each client's network sees in a picture is drawn towards the network that the server sent "
        "and away from the client's own last one."
    )

    mu: Weight = 5.0
    temperature: Positive = 0.5
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 1e-5
    epochs: CountFrom0 | None = 10
    batch_size: Count | None = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu >= 0:
            raise ValueError(f"expected mu >= 0, got {self.mu}")
        if not self.temperature > 0:
            raise ValueError(f"expected temperature > 0, got {self.temperature}")

    @classmethod
    def example(cls) -> Moon:
        """Return two epochs of two steps, everything on."""
        return cls(mu=2.0, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def client_model(self, task: Task) -> nn.Module:
        """Return the task's own network."""
        _classifier(task.model, task.head)
        return super().client_model(task)

    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the cross entropy, and the contrast of three representations."""
        logits, now = represent(network, batch.inputs, step.task.head)
        loss = functional.cross_entropy(logits, batch.labels)
        if PREVIOUS not in step.memory:
            return loss
        s, t = (
            functional.cosine_similarity(now, self._represent_by(network, params, batch, step))
            for params in (step.start, {**step.start, **step.memory[PREVIOUS]})
        )
        return loss + self.mu * functional.softplus((t - s) / self.temperature).mean()

    def uses_plain_cross_entropy(self, task: Task, round: int) -> bool:
        """Return True in the first round, before which no client has a network, and where `mu` is 0."""
        return type(self).loss is Moon.loss and (round == 0 or self.mu == 0)

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return no further payload; the network as it is now, but for its classifier."""
        if self.mu == 0:
            return {}, {}
        kept: Tensors = {name: dense(value) for name, value in params.items() if not _is_within(name, step.task.head)}
        return {}, {PREVIOUS: kept}

    def _represent_by(self, network: Network, params: Tensors, batch: Batch, step: Step) -> Tensor:
        """Return the representation (B, D) by other parameters.

        Running statistics are copies, which are thrown away.
        """
        weights = self.parametrization.network(params, step.task)
        buffers = {name: value.clone() for name, value in network.buffers.items()}
        return represent(replace(network, weights=weights, buffers=buffers), batch.inputs, step.task.head)[1]


def represent(network: Network, inputs: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """Return logits (B, K), and what enters the classifier (B, D).

    Args:
        network: any with a classifier.
        inputs: images (B, C, H, W).
        head: prefix of the names of the classifier's parameters.
    """
    seen: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    handle = _classifier(network.model, head).register_forward_pre_hook(note)
    try:
        logits = network(inputs)
    finally:
        handle.remove()
    return logits, seen[0].flatten(1)


def _classifier(model: nn.Module, head: str) -> nn.Module:
    """Return the module whose parameters' names start with `head`, even inside a defense's wrapper."""
    found = next((module for name, module in model.named_modules() if head and _is_within(f"{name}.", head)), None)
    if found is None:
        raise ValueError(f"expected a network with a classifier, a module called {head.rstrip('.')!r}, got none")
    return found


def _is_within(name: str, head: str) -> bool:
    return f".{head}" in f".{name}"
