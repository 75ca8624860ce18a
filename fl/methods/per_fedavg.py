"""Per-FedAvg: the server's network is trained to be a good start, one step away from each client's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, Positive, StepSize, Weight
from fl.tensors import Tensors, add_scaled
from fl.types import Batch, Phase, Task

if TYPE_CHECKING:
    from fl.gradient import Gradient


@methods.register("per-fedavg")
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """Personalized FedAvg by meta-learning (Fallah et al., NeurIPS 2020, Algorithm 1).

    Local steps follow the gradient of f(w - alpha grad f(w)): with v the gradient at w - alpha grad f(w), each on a
    batch of its own, "fo" takes v (first order); "hf" (Hessian-free) takes v - alpha d, where
    d = (grad f(w + delta v) - grad f(w - delta v)) / (2 delta), on a third batch, stands for the Hessian times v.
    Clients predict after one step of size alpha on one batch of their training images. tau = 10 local steps,
    alpha = 0.01, beta = 0.001 and batches of 40 are meant to be those of the paper's section 5, and were not compared
    with its text; delta is ours. Clients count by their images, as in FedAvg. An epoch leaves out batches that make no
    full step.

    Attributes:
        alpha: step size of the adaptation.
        variant: "fo" or "hf".
        delta: of the difference in "hf".
        lr: step size of local SGD, the paper's beta.
        epochs: local passes, instead of `steps`.
        steps: local steps, the paper's tau, of two batches ("fo") or three; None where `epochs` is given.
        batch_size: images per batch.
    """

    plain: ClassVar[str] = (
        "clients train the common network to become good for each of them after one step of training on its own "
        "pictures."
    )

    alpha: Weight = 0.01
    variant: Literal["fo", "hf"] = "fo"
    delta: Positive = 1e-3
    lr: StepSize = 1e-3
    epochs: CountFrom0 | None = None
    steps: Count | None = 10
    batch_size: Count | None = 40

    def __post_init__(self) -> None:
        if self.epochs is not None:  # steps is only a default: naming epochs replaces it
            object.__setattr__(self, "steps", None)
        self.check_optimizer()
        if not self.alpha >= 0:
            raise ValueError(f"expected alpha >= 0, got {self.alpha}")
        if not self.delta > 0:
            raise ValueError(f"expected delta > 0, got {self.delta}")
        if self.variant not in {"fo", "hf"}:
            raise ValueError(f"expected variant 'fo' or 'hf', got {self.variant!r}")

    @classmethod
    def example(cls) -> PerFedAvg:
        """Return two steps of two batches, everything on."""
        return cls(alpha=0.1, lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def adaptation_method(self) -> FedAvg:
        """Return the rule: one step of plain SGD."""
        return replace(self.fine_tuning_method(), steps=1, epochs=None)

    def fine_tuning_method(self) -> FedAvg:
        """Return plain SGD of step size alpha: fine-tuning is more of the adaptation."""
        kept = {field.name: getattr(self, field.name) for field in fields(FedAvg)}
        plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "max_norm": None}
        return FedAvg(**{**kept, **plain, "lr": self.alpha})

    def phases(self, task: Task, round: int) -> tuple[Phase, ...]:
        """Return one phase, two or three batches a step."""
        (phase,) = super().phases(task, round)
        return (replace(phase, batches_per_step=3 if self.variant == "hf" else 2),)

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss after the adaptation, to first order or with a difference for the Hessian."""

        def near(away: Tensors, size: float) -> Tensors:
            return {**params, **add_scaled({name: params[name] for name in away}, away, size)}

        meta = grad(near(grad(params, batches[0]), -self.alpha), batches[1])
        if self.variant == "fo":
            return meta
        ahead, behind = (grad(near(meta, size), batches[2]) for size in (self.delta, -self.delta))
        return add_scaled(meta, add_scaled(ahead, behind, -1.0), -self.alpha / (2 * self.delta))
