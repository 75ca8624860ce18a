"""hFedF with embeddings that say what images a client has: the mean latent vector that a shared autoencoder gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl.method import Download, ServerState, Step, methods
from fl.methods.hfedf import HFedF
from fl.models.building_blocks.dropout import has_dropout
from fl.models.building_blocks.initialization import initialize
from fl.models.hfedf_autoencoder import Autoencoder
from fl.models.hypernetworks.server_hypernetwork import EMBEDDINGS, HYPERNETWORK, embedding_of
from fl.ranges import Count, CountFrom0, Seed, StepSize, Width
from fl.tensors import Tensors, dense, sub
from fl.types import Batch, Group, Phase, Task, Upload

if TYPE_CHECKING:
    from fl.network import Network

PREFIX, LATENT = "autoencoder.", "latent"
"""Of the autoencoder's parameters, and the name of what a client's mean latent vector is sent as."""


@methods.register("hfedf-latent")
@dataclass(frozen=True, kw_only=True)
class HFedFLatent(HFedF):
    """hFedF with fixed embeddings from an autoencoder (Bartholet et al., 2024, Appendix C.2 and Table 6).

    Clients first train a shared autoencoder, which the server averages; then each sends the mean of its images' latent
    vectors, which is its embedding from then on. So beside its update a client gives away a statistic of its raw images
    under an encoder that the server knows.

    The server sends the embedding v that it holds, the client puts the mean latent vector in its place, and what comes
    back is `v - mean`: a tensor `latent` of the update, sent in every round, so that clients may join late. Training
    and attacks need no rule of their own for it: one step of size 1 on 1/2 |v - E(x)|^2, averaged over images, ends at
    the mean.

    Not given in the paper, and so our choices: how the autoencoder is trained (`autoencoder_*`) and that it is
    averaged; it is trained on batches of 100 of all the client's images, where the paper takes 100 images. The paper
    averages over validation images, which never enter a round here: it is the images that the client trains on, all of
    them or the first so many.

    All that a client receives comes back, moved or not: network and latent vector unchanged in the autoencoder's
    rounds, the autoencoder unchanged in the others. `numbers_up` and `numbers_down` count that; a system built for this
    method alone would leave it out (at 3x32x32 the autoencoder's 13,492 numbers a round).

    Attributes:
        embedding: size E of the latent vectors and embeddings; 1 in the paper's main results, more in its Figure 8.
        embeddings: "fixed": nothing but the clients' latent vectors moves them.
        latent_images: how many images the mean is over; None is all.
        autoencoder_rounds: rounds in which clients train the autoencoder and nothing else.
        autoencoder_steps: local steps of Adam in each of them.
        autoencoder_batch: images per step.
        autoencoder_lr: step size.
        autoencoder_seed: of its initial parameters.
    """

    plain: ClassVar[str] = (
        "as hfedf, but each client also sends the average of short codes of its pictures, by which the server tells "
        "clients apart."
    )

    embedding: Width | None = 1
    latent_images: Count | None = None
    autoencoder_rounds: CountFrom0 = 1
    autoencoder_steps: CountFrom0 = 50
    autoencoder_batch: Count = 100
    autoencoder_lr: StepSize = 1e-3
    autoencoder_seed: Seed = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "embeddings", "fixed")
        super().__post_init__()
        if self.embedding is None:
            raise ValueError("expected embedding as a number: clients don't know how many of them there are")
        if self.autoencoder_rounds < 0:
            raise ValueError(f"expected autoencoder_rounds >= 0, got {self.autoencoder_rounds}")

    @classmethod
    def example(cls) -> HFedFLatent:
        """Return a tiny hypernetwork and three latent numbers."""
        small = {"embedding": 3, "hidden": (5, 5), "autoencoder_steps": 2, "autoencoder_batch": 2}
        return cls(lr=0.1, epochs=2, batch_size=2, warmup=0, **small)  # type: ignore[arg-type]

    # ---- description -------------------------------------------------------------------------------------------------
    def client_model(self, task: Task) -> nn.Module:
        """Return the network, with the autoencoder and the latent vector beside it, which do not affect predictions."""
        model, some = super().client_model(task), next(iter(task.parameters.values()))
        size = self.embedding or 1
        with torch.device("meta"):
            autoencoder = Autoencoder(task.input_shape, size)
        autoencoder.to_empty(device="cpu")
        initialize(autoencoder, torch.Generator().manual_seed(self.autoencoder_seed))
        model.autoencoder = autoencoder.to(some)
        model.latent = nn.Parameter(some.new_zeros(size))
        return model

    def generated_names(self, task: Task) -> list[str]:
        """Return the network's own tensors."""
        return [name for name in task.parameters if not name.startswith(PREFIX) and name != LATENT]

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return the autoencoder alone in the first rounds; then the latent vector, and the network."""
        if round < self.autoencoder_rounds:
            group = Group(prefixes=(PREFIX,), lr=self.autoencoder_lr)
            size, steps = self.autoencoder_batch, self.autoencoder_steps
            return (Phase(groups=(group,), optimizer="adam", steps=steps, batch_size=size),)
        latent = Phase(
            groups=(Group(prefixes=(LATENT,), lr=1.0),), steps=1, batch_size=self.latent_images, sampler="sequential"
        )
        return (latent, *self._training_phases(task, round))

    @property
    def first_round(self) -> int:
        """The one after the autoencoder's."""
        return self.autoencoder_rounds

    def fine_tuning_phases(self, task: Task, epochs: int) -> tuple[Phase, ...]:
        """Return the network alone."""
        return tuple(
            replace(phase, epochs=epochs, steps=None) for phase in self._training_phases(task, self.first_round)
        )

    def _training_phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        (phase,) = super().phases(task, round)
        (group,) = phase.groups
        return (replace(phase, groups=(replace(group, prefixes=tuple(self.generated_names(task))),)),)

    # ---- local rule --------------------------------------------------------------------------------------------------
    def loss(self, network: Network, batch: Batch, step: Step) -> Tensor:
        """Return the autoencoder's mean squared error; after its rounds, that of the network and of the latent vector.

        What moves in a phase is in one of the terms only.
        """
        latents, again = functional_call(
            network.model.get_submodule(PREFIX[:-1]), _autoencoder(network.weights), (batch.inputs,), strict=True
        )
        if step.round < self.autoencoder_rounds:
            return nn.functional.mse_loss(again, batch.inputs)
        apart = (network.weights[LATENT] - latents).square().sum(1).mean() / 2
        return super().loss(network, batch, step) + apart

    def uses_plain_cross_entropy(self, task: Task, round: int) -> bool:
        """Once the autoencoder is trained: the other term moves nothing that the network predicts by."""
        return type(self).loss is HFedFLatent.loss and round >= self.first_round and not has_dropout(task.model)

    # ---- server rule -------------------------------------------------------------------------------------------------
    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return hFedF's state and the autoencoder; embeddings are drawn, too, until their clients have sent one."""
        server = super().init_server(params, task, clients, generator)
        return replace(server, shared={name: value for name, value in params.items() if name.startswith(PREFIX)})

    def broadcast(self, server: ServerState, client: int, task: Task) -> Download:
        """Return the network generated for the client, the autoencoder, and the client's embedding."""
        down = super().broadcast(server, client, task)
        held = embedding_of(server.own[HYPERNETWORK], client)
        return replace(down, shared={**down.shared, **server.shared, LATENT: held})

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the autoencoder's mean in its rounds; then hFedF's step, and the embeddings that came."""
        if server.round < self.autoencoder_rounds:
            return super(HFedF, self).aggregate(server, uploads, task)  # the hypernetwork stays as it is
        after = super().aggregate(server, uploads, task)
        every = dense(server.own[HYPERNETWORK][EMBEDDINGS]).clone()
        for upload in uploads:
            every[upload.client] = dense(sub(every[upload.client], upload.update[LATENT]))
        return replace(after, own={**after.own, HYPERNETWORK: {**after.own[HYPERNETWORK], EMBEDDINGS: every}})

    def server_metrics(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> dict[str, list[float]]:
        """Return the figures of hFedF, once the hypernetwork moves."""
        return {} if server.round < self.autoencoder_rounds else super().server_metrics(server, uploads, task)


def _autoencoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): value for name, value in weights.items() if name.startswith(PREFIX)}
