"""The gradient of a private method's step: every sample's clipped, their sum with noise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fl.client import LossGradient
from fl.gradient import Derivative, autograd_derivative
from fl.privacy.dp_sgd import Privatization, fastest_gradient
from fl.privacy.gaussian_noise import Noise
from fl.tensors import Tensors, dense
from fl.types import Batch


@dataclass(frozen=True, kw_only=True)
class PrivateGradient(LossGradient):
    """`gradient(params, batch)` of a private method: every sample's clipped, then noise.

    Attributes:
        privatization: how each is clipped, and what is added to their sum.
        noise: where the noise is drawn from; None leaves it out.
    """

    privatization: Privatization
    noise: Noise | None

    def __call__(self, params: Tensors, batch: Batch) -> Tensors:
        """Return the gradient by the names of the parameters that move; noise alone for an empty batch."""
        if self.privatization.clip_target == "weights":
            return self.pull(params, self.of_weights(self.weights(params), batch, self.derivative))
        return self._private(LossGradient(**self._fields()), params, batch)

    def of_weights(
        self, weights: dict[str, Tensor], batch: Batch, derivative: Derivative = autograd_derivative
    ) -> dict[str, Tensor]:
        """Return noisy gradients with respect to the network's weights, for a defense that looks at these.

        Raises:
            ValueError: the method clips the gradient of its parameters.
        """
        if self.privatization.clip_target != "weights":
            raise ValueError(f"{self.client.method.name}: expected no defense that changes single gradients")
        bare = _WeightGradient(**{**self._fields(), "derivative": derivative})
        found = self._private(bare, dict(weights), batch)
        return {name: dense(value) for name, value in found.items()}

    def check_per_sample(self) -> None:
        """Refuse a defense that would clip once more.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.client.method.name} clips every sample's gradient itself: leave such a defense out")

    def _private(self, plain: LossGradient, params: Tensors, batch: Batch) -> Tensors:
        return fastest_gradient(plain, params, batch)(plain, params, batch, self.privatization, self.noise)

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(LossGradient)}


@dataclass(frozen=True)
class _WeightGradient(LossGradient):
    """The gradient of the network's weights as if they were the parameters."""

    def weights(self, params: Tensors) -> dict[str, Tensor]:
        """Return the parameters themselves."""
        return {name: dense(value) for name, value in params.items()}

    def pull(self, params: Tensors, grads: dict[str, Tensor]) -> Tensors:
        """Return the gradients as they are."""
        return {**grads}
