"""Ditto: FedAvg, and beside it each client trains a model of its own that is held near the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from fl.method import Step, methods
from fl.methods.fedavg import FedAvg
from fl.ranges import Count, CountFrom0, StepSize, Weight
from fl.tensors import Tensors, add_scaled
from fl.types import Batch, Scope, Task

if TYPE_CHECKING:
    from fl.gradient import Gradient


@methods.register("ditto")
@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """Ditto (Li et al., ICML 2021, Algorithm 1): a personal model v beside the w of FedAvg, by which a client predicts.

    What is sent is FedAvg's. v starts as the initial network and follows the gradient of F(v) + lam / 2 |v - w_t|^2,
    w_t being what the server sent, for as many steps and on the same batches as w, as in the authors' code. Constants
    are those of the authors' script for Fashion-MNIST, with lam = 1, which section 5 of the paper takes where clients
    can't choose it by validation; they choose from 0.1, 1 and 2, and under strong attacks from 0.05, 0.1 and 0.2.
    Clients count by their images, as in FedAvg.

    Attributes:
        lam: weight of the pull to the server's network.
        lr: step size of both models.
        epochs: local passes, instead of `steps`.
        steps: local steps; None where `epochs` is given.
        batch_size: images per step.
    """

    plain: ClassVar[str] = (
        "as fedavg, but each client also trains a network of its own, pulled towards the common one, and uses that."
    )

    lam: Weight = 1.0
    lr: StepSize = 0.05
    epochs: CountFrom0 | None = None
    steps: Count | None = 2
    batch_size: Count | None = 16

    def __post_init__(self) -> None:
        if self.epochs is not None:  # steps is only a default: naming epochs replaces it
            object.__setattr__(self, "steps", None)
        self.check_optimizer()
        if not self.lam >= 0:
            raise ValueError(f"expected lam >= 0, got {self.lam}")

    @classmethod
    def example(cls) -> Ditto:
        """Return two epochs of two steps, everything on."""
        return cls(lr=0.1, momentum=0.5, weight_decay=5e-4, max_norm=1.0, epochs=2, batch_size=2)

    def fine_tuning_method(self) -> FedAvg:
        """Return FedAvg: fine-tuning starts from the server's network."""
        return FedAvg(**{field.name: getattr(self, field.name) for field in fields(FedAvg)})

    def personal_method(self) -> Ditto:
        """Return the rule of the personal model."""
        return _Personal(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class _Personal(Ditto):
    """Ditto's personal model: nothing of it is shared."""

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: everything is private."""
        return Scope.PRIVATE

    def gradient(self, grad: Gradient, params: Tensors, batches: Sequence[Batch], step: Step) -> Tensors:
        """Return the gradient of the loss, and lam times the way back to what the server sent."""
        loss = grad(params, batches[0])
        sent = {name: value for name, value in step.received["sent"].items() if name in loss}
        away = add_scaled({name: params[name] for name in sent}, sent, -1.0)
        return {**loss, **add_scaled({name: loss[name] for name in sent}, away, self.lam)}
