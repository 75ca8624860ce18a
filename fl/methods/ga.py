"""GA: the server gives those clients more weight whom its network serves worse than their own networks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fl.method import ServerState, Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, ShareBelow1, StepSize, Weight
from fl.tensors import Payloads, Tensors, dense
from fl.types import Batch, Phase, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient

LOSS = "loss"
"""What a client sends beside its update: its loss by the server's network, and by its own, one number each."""
RECEIVED, TRAINED = "received", "trained"
"""Which is which; of `ServerState.own[LOSS]`, what clients last sent."""
SHARES, SHARE = "shares", "share"
"""A further payload of `ServerState.own`, and the name in it of every client's weight."""


@methods.register("ga")
@dataclass(frozen=True, kw_only=True)
class GA(FedAvg):
    """Generalization adjustment (Zhang et al., CVPR 2023) of FedAvg's weights.

    A client's gap is the loss of the mean network on its images less that of its own before the mean was taken. All
    clients begin with the weight 1 / N. Beside its update a client sends two numbers, its loss by the network that it
    received and by the one that it ended with, and the server compares the first with the second of the client's round
    before. It adds `step_size` / N times gap / max |gap| to the weights, cuts them to [0, 1], makes their sum 1 and
    takes the mean by them: the mean of a round goes by the gaps of the round before, as in the authors' code. In a
    client's first round there is no gap.

    Constants are those of that code, FedAvg on PACS with ResNet-18. We read code, not paper. It takes losses, or, by
    its default, accuracies, of images held out, and with running statistics; here they are losses of the training
    images (a client has no others), in train mode by the statistics of these. There the last fifth of the rounds has a
    tenth of the step size, and the first step of the weights is longer by one part in 40. Where not all take part,
    which that code does not foresee, those left out keep their weight, and means go by the weights of those there.

    Attributes:
        step_size: how far weights move; 0 leaves the plain mean, clients counting alike.
        rounds: it falls to 0 over so many rounds (40 in the authors' code, which trains as many); None leaves it.
        lr: step size of local SGD.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "as fedavg, but each client also says how well the common network and its own do on its pictures, and counts "
        "the more, the worse the common one does."
    )

    step_size: StepSize = 0.2
    rounds: Count | None = None
    lr: StepSize = 1e-3
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 5e-4
    epochs: CountFrom0 | None = 5
    batch_size: Count | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_size >= 0:
            raise ValueError(f"expected step_size >= 0, got {self.step_size}")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"expected rounds >= 1 or None, got {self.rounds}")

    @classmethod
    def example(cls) -> GA:
        """Return two epochs of two steps, everything on."""
        return cls(step_size=0.5, rounds=9, lr=0.1, momentum=0.5, max_norm=1.0, epochs=2, batch_size=2)

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return FedAvg's phases, with a look at all images before and after, which moves nothing."""
        (main,) = super().phases(task, round)
        still = tuple(replace(group, lr=0.0, weight_decay=0.0) for group in main.groups)
        first, last = (
            Phase(groups=still, steps=1, sampler="sequential", records_direction_as=name)
            for name in (RECEIVED, TRAINED)
        )
        return first, main, last

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the local rule for `epochs` passes, without the looks."""
        _, main, _ = self.phases(task, self.first_round)
        return (replace(main, epochs=epochs, steps=None),)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss; in a look the loss itself."""
        if step.phase is None or step.phase.records_direction_as is None:
            return grad(params, batches[0])
        return {LOSS: grad.value(params, batches[0])}

    def follows_loss_gradient(self, steps: int | None) -> bool:
        """Looks are no steps."""
        return type(self).gradient is GA.gradient

    def finish(self, params: Tensors, step: Step, steps: int) -> tuple[Payloads, Payloads]:
        """Return both losses; nothing is remembered."""
        losses = {name: looked[LOSS] for name, looked in step.recorded.items()}
        return ({LOSS: losses} if losses else {}), {}  # there are none in fine-tuning, which nobody hears of

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state, and equal weights; no losses."""
        server = super().init_server(params, task, clients, generator)
        shares = torch.full((clients,), 1 / clients, dtype=torch.float64)
        return replace(server, own={SHARES: {SHARE: shares}, LOSS: {TRAINED: torch.full_like(shares, torch.inf)}})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return new weights from the gaps, and the mean by them; buffers likewise."""
        if not uploads:
            return super().aggregate(server, uploads, task)
        shares, before = dense(server.own[SHARES][SHARE]), dense(server.own[LOSS][TRAINED]).clone()
        there = torch.tensor([upload.client for upload in uploads])
        received, trained = (
            torch.tensor([float(dense(upload.extra[LOSS][name])) for upload in uploads], dtype=torch.float64)
            for name in (RECEIVED, TRAINED)
        )
        gaps = torch.where(before[there].isfinite(), received - before[there], 0.0)
        shares = self.adjust_weights(shares, there, gaps, server.round - 1)
        before[there] = trained
        weights = shares[there].tolist() if shares[there].any() else [1.0] * len(uploads)
        uploads = [replace(upload, weight=weight) for upload, weight in zip(uploads, weights, strict=True)]
        return replace(super().aggregate(server, uploads, task), own={SHARES: {SHARE: shares}, LOSS: {TRAINED: before}})

    def adjust_weights(self, shares: Tensor, there: Tensor, gaps: Tensor, round: int) -> Tensor:
        """Return every client's weight (N,) after `gaps` (S,) of round `round`, of the clients `there` (S,)."""
        largest = gaps.abs().max()
        left = 1.0 if self.rounds is None else max(0.0, 1 - round / self.rounds)
        if not self.step_size * left or not largest:
            return shares
        moved = shares.clone()
        moved[there] += self.step_size * left / len(shares) * gaps / largest
        moved = moved.clamp(0, 1)
        return moved / moved.sum()
