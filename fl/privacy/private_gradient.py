"""The gradient of a private method's step: every sample's clipped, their sum with noise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fl.client import Derivative, Gradient, autograd_derivative
from fl.privacy.dp_sgd import fastest
from fl.tensors import Tensors, dense
from fl.types import Batch

if TYPE_CHECKING:
    from fl.privacy.private_method import Private


@dataclass(frozen=True)
class PrivateGradient(Gradient):
    """`gradient(params, batch)` of a private method: every sample's clipped, then noise."""

    def __call__(self, params: Tensors, batch: Batch) -> Tensors:
        """By the names of the parameters that move; noise alone for an empty batch."""
        if self._method.at == "weights":
            return self.pull(params, self.of_weights(self.weights(params), batch, self.derivative))
        return self._private(Gradient(**self._fields()), params, batch)

    def of_weights(
        self, weights: dict[str, Tensor], batch: Batch, derivative: Derivative = autograd_derivative
    ) -> dict[str, Tensor]:
        """Noisy gradients with respect to the network's weights, for a defence that looks at these.

        Raises:
            ValueError: the method clips the gradient of its parameters.
        """
        if self._method.at != "weights":
            raise ValueError(f"{self._method.name}: expected no defence that changes single gradients")
        bare = _AtWeights(**{**self._fields(), "derivative": derivative})
        found = self._private(bare, dict(weights), batch)
        return {name: dense(value) for name, value in found.items()}

    def check_per_sample(self) -> None:
        """Refuse a defence that would clip once more.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self._method.name} clips every sample's gradient itself: leave such a defence out")

    @property
    def _method(self) -> Private:
        return cast("Private", self.client.method)  # whose `gradient` alone makes one of these

    def _private(self, plain: Gradient, params: Tensors, batch: Batch) -> Tensors:
        method = self._method
        way = fastest(plain, params, batch)
        return way(
            plain,
            params,
            batch,
            clip=method.clip,
            noise_multiplier=method.sigma,
            generator=method.noise(self.step.draws),
            denominator=method.denominator(),
            at=method.at,
        )

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Gradient)}


@dataclass(frozen=True)
class _AtWeights(Gradient):
    """The gradient of the network's weights as if they were the parameters."""

    def weights(self, params: Tensors) -> dict[str, Tensor]:
        """They themselves."""
        return {name: dense(value) for name, value in params.items()}

    def pull(self, params: Tensors, grads: dict[str, Tensor]) -> Tensors:
        """As they are."""
        return {**grads}
