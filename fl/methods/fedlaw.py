"""FedLAW: the server learns, on labeled images of its own, how much each client counts and how far weights shrink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fl.data.sources.embedded import Faces
from fl.method import ServerState, methods
from fl.methods.bases.public_data import PublicDataServer, client_result
from fl.network import Network
from fl.ranges import Count, CountFrom0, ShareBelow1, StepSize, Weight
from fl.tensors import Tensors, dense
from fl.types import Group, Phase, Task, Upload


@methods.register("fedlaw")
@dataclass(frozen=True, kw_only=True)
class FedLAW(PublicDataServer):
    """Learnable aggregation weights (Li et al., ICML 2023), as the authors' code has them by default.

    The server sends gamma * sum_i lambda_i w_i of the networks w_i that arrived, where lambda = softmax(x) and gamma =
    exp(y). In every round x and y start at FedAvg's weights and 0, and follow the cross entropy of that network on
    labeled images of the server by Adam with betas (0.5, 0.999). gamma < 1 shrinks the whole network, as weight decay
    would. What travels is FedAvg's.

    Constants are those of the code: local SGD at step size 0.08, which its script lowers by 1 % a round (here it
    stays), with momentum 0.9 and weight decay 5e-4, one epoch of batches of 128; on the server 20 epochs of batches of
    128 at 0.01, which is 0.005 for other data sets than CIFAR-10. There the server holds 2 % of the test images,
    equally many of each class, and scores on the others: with CIFAR-10, `part: test`, `images: 200` and a `test_limit`
    of 9800 for the task do that, the classes being as they come. Batch-norm statistics are FedAvg's mean to begin with,
    and follow what the network sees while its weights are learned; in the code the server's are never averaged. Its
    other forms (squares in place of exponentials, first lambda and then gamma) are not there.

    Attributes:
        lr: step size of local SGD.
        momentum: of local SGD.
        weight_decay: of local SGD.
        epochs: local passes; None when `steps` is given.
        batch_size: images per local step.
        server_epochs: passes over the server's images in each round.
        server_lr: step size of Adam; 0 is FedAvg, but for batch-norm statistics.
        server_batch: images per step of the server.

    Raises:
        ValueError: a number out of range; or, for a federation, images of classes that the task does not have.
    """

    plain: ClassVar[str] = (
        "as fedavg, but the server tries out, on labeled pictures of its own, how much each client should count and "
        "how small the numbers of the network should be."
    )

    lr: StepSize = 0.08
    momentum: ShareBelow1 = 0.9
    weight_decay: Weight = 5e-4
    batch_size: Count | None = 128
    server_epochs: CountFrom0 = 20
    server_lr: StepSize = 0.01
    server_batch: Count = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server_phase()

    @classmethod
    def example(cls) -> FedLAW:
        """Return two epochs of two steps, three steps of the server on small faces."""
        server = {"public": Faces(size=8), "images": 6, "server_epochs": 1, "server_lr": 0.1, "server_batch": 2}
        local = {"lr": 0.1, "momentum": 0.5, "weight_decay": 5e-4, "max_norm": 1.0, "epochs": 2, "batch_size": 2}
        return cls(**local, **server)  # type: ignore[arg-type]

    def server_phase(self) -> Phase:
        """Return the phase in which the server learns its weights."""
        groups = (Group(lr=self.server_lr),)
        return Phase(groups=groups, optimizer="adam", epochs=self.server_epochs, batch_size=self.server_batch)

    def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
        """Return FedAvg's state and a seed, once the server's labels are known to be the task's."""
        server, labels = super().init_server(params, task, clients, generator), self.public_images(task).labels
        if int(labels.max()) >= task.num_classes:
            raise ValueError(
                f"public: expected labels below {task.num_classes}, the task's classes, got {int(labels.max())}; name "
                f"images of the task's own classes"
            )
        return server

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the mean with weights that are learned; buffers as in FedAvg, and then as they are seen."""
        after = super().aggregate(server, uploads, task)
        if not uploads:
            return after
        images, models = self.public_images(task), [client_result(server, upload)[0] for upload in uploads]
        rows = {name: torch.stack([dense(model[name]) for model in models]) for name in server.shared}
        buffers = {name: value.clone() for name, value in after.buffers.items()}
        counts = images.inputs.new_tensor([upload.weight for upload in uploads])
        weights = torch.cat([(counts / counts.sum()).log(), counts.new_zeros(1)]).requires_grad_()
        solver = torch.optim.Adam([weights], lr=self.server_lr, betas=(0.5, 0.999))
        for index in self.batches(server, self.server_phase(), len(images)):
            batch = images.take(index)
            solver.zero_grad()
            network = Network(
                task.model, combine_networks(weights, rows), buffers
            )  # running statistics change in place
            functional.cross_entropy(network(batch.inputs), batch.labels).backward()
            solver.step()
        found = {n: buffers[n] if value.is_floating_point() else value for n, value in after.buffers.items()}
        return replace(after, shared={**combine_networks(weights.detach(), rows)}, buffers=found)


def combine_networks(weights: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the network that weights (clients + 1,) make of the clients' ones, the last being the logarithm of gamma.

    Args:
        weights: before softmax and exponential.
        rows: the clients' parameters (clients, ...), by name.
    """
    shares = weights[:-1].softmax(0) * weights[-1].exp()
    return {name: torch.tensordot(shares, row, dims=1) for name, row in rows.items()}
