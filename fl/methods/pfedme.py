"""pFedMe: a client's network moves towards its own best one nearby, by which it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fl.method import ServerState, Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, Positive, PositiveStep, StepSize
from fl.tensors import Tensors, add_scaled, scale_tensors
from fl.types import Batch, Task, Upload

if TYPE_CHECKING:
    from fl.gradient import Gradient


@methods.register("pfedme")
@dataclass(frozen=True, kw_only=True)
class PFedMe(FedAvg):
    """Personalized federated learning with Moreau envelopes (Dinh et al., NeurIPS 2020, Algorithm 1).

    In every local step theta(w) = argmin f(theta; batch) + lam / 2 |theta - w|^2 is approached by `inner_steps` steps
    of gradient descent from w, and w moves by lr * lam * (w - theta). The server takes (1 - beta) w + beta times the
    clients' mean. Clients predict by theta(w), found anew on one batch of their training images. Constants are those
    of the authors' commands for MNIST with a neural network: 20 steps on batches of 20, K = 5. Algorithm 1 leaves open
    where the search for theta starts; their code goes on from the last theta of the round and adds a decay of 0.001 to
    it, neither of which is done here, and, as here, weights the mean by images.

    Attributes:
        lam: strength of the pull of theta to w, the paper's lambda.
        inner_steps: steps of the search for theta, the paper's K.
        inner_lr: their step size.
        beta: share of the clients' mean in the server's new model; 1 is the mean, and above 1 goes beyond it.
        lr: step size of w, the paper's eta, which lam multiplies.
        epochs: local passes, instead of `steps`.
        steps: local steps, the paper's R; None where `epochs` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "each client keeps close to the common network one of its own that fits its pictures, and pulls the common one "
        "towards it."
    )

    lam: Positive = 15.0
    inner_steps: Count = 5
    inner_lr: PositiveStep = 0.09
    beta: Positive = 1.0
    lr: StepSize = 0.005
    epochs: CountFrom0 | None = None
    steps: Count | None = 20
    batch_size: Count | None = 20

    def __post_init__(self) -> None:
        if self.epochs is not None:  # steps is only a default: naming epochs replaces it
            object.__setattr__(self, "steps", None)
        self.check_optimizer()
        for key in ("lam", "inner_lr", "beta"):
            if not getattr(self, key) > 0:
                raise ValueError(f"expected {key} > 0, got {getattr(self, key)}")
        if self.inner_steps < 1:
            raise ValueError(f"expected inner_steps >= 1, got {self.inner_steps}")

    @classmethod
    def example(cls) -> PFedMe:
        """Return two epochs of two steps, everything on."""
        inner = cls(lam=2.0, inner_steps=3, inner_lr=0.1, beta=0.7, lr=0.1, epochs=2, batch_size=2)
        return replace(inner, momentum=0.5, weight_decay=5e-4, max_norm=1.0)

    def adaptation_method(self) -> PFedMe:
        """Return a method of one step from w to theta: lam * (w - theta) is the gradient and 1 / lam the step size."""
        whole = replace(self, lr=1 / self.lam, epochs=None, steps=1)
        return replace(whole, optimizer="sgd", eps=None, momentum=0.0, weight_decay=0.0, max_norm=None)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return lam * (w - theta), the gradient of the Moreau envelope."""
        theta = params
        for _ in range(self.inner_steps):
            loss = grad(theta, batches[0])
            here = {name: theta[name] for name in loss}
            slope = add_scaled(loss, add_scaled(here, params, -1.0), self.lam)
            theta = {**theta, **add_scaled(here, slope, -self.inner_lr)}
        return scale_tensors(add_scaled({name: params[name] for name in loss}, theta, -1.0), self.lam)

    @property
    def aggregates_mean_only(self) -> bool:
        """The server looks at the mean alone."""
        return type(self).aggregate is PFedMe.aggregate

    def aggregate(self, server: ServerState, uploads: Sequence[Upload], task: Task) -> ServerState:
        """Return the old model and the clients' mean, mixed; buffers as in FedAvg."""
        after = super().aggregate(server, uploads, task)
        if self.beta == 1:
            return after
        change = add_scaled(after.shared, server.shared, -1.0)
        return replace(after, shared=add_scaled(server.shared, change, self.beta))
