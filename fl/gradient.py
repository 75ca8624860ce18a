"""The gradient of a client's loss, as methods and defenses are handed it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import grad as func_grad

from fl.network import Network
from fl.runtime.interruption import asked_backward
from fl.tensors import Tensors
from fl.types import Batch, Step

Derivative = Callable[[Callable[[dict[str, Tensor]], Tensor], dict[str, Tensor]], dict[str, Tensor]]
DEFENSE_DRAWS = "defense/"
"""Before the names of what a defense draws for a step."""


def draws_for_buffers(model: nn.Module, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the draws of a step, by the method or the defense, that are meant for buffers of `model`, by name."""
    if not draws:  # as for most methods, in every step
        return {}
    known = {name for name, _ in model.named_buffers()}
    drawn = {name.removeprefix(DEFENSE_DRAWS): value for name, value in draws.items()}
    return {name: value for name, value in drawn.items() if name in known}


def autograd_derivative(loss: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of `loss` at `values` by torch.autograd; differentiable again where gradients are enabled."""
    again = torch.is_grad_enabled()
    leaves = {k: v if again and v.requires_grad else v.detach().requires_grad_() for k, v in values.items()}
    with torch.enable_grad():
        value = loss(leaves)
    if leaves and not value.requires_grad:
        raise ValueError(
            "expected a loss that depends on the parameters, got one without a gradient: is it detached (.detach(), "
            ".item(), torch.no_grad()), or made of other tensors?"
        )
    with asked_backward(leaves.values()):
        grads = torch.autograd.grad(value, list(leaves.values()), create_graph=again, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def func_derivative(loss: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of `loss` at `values` by torch.func, which `vmap` can stack: much faster for many trials."""
    return func_grad(loss)(values)


class Gradient(ABC):
    """`gradient(params, batch)`: of the method's loss, with respect to the parameters that move in this phase.

    Attributes:
        step: what the step may look at.
        live: names of the parameters that move.
        model: the network, whose weights are handed to it.
        derivative: how gradients are taken.
    """

    step: Step
    live: tuple[str, ...]
    model: nn.Module
    derivative: Derivative

    @abstractmethod
    def __call__(self, params: Tensors, batch: Batch) -> Tensors:
        """Return gradients by the names of the parameters that move."""

    @abstractmethod
    def value(self, params: Tensors, batch: Batch) -> Tensor:
        """Return the loss itself, which no defense touches; running statistics stay as they are."""

    @abstractmethod
    def weights(self, params: Tensors) -> dict[str, Tensor]:
        """Return the network's weights that `params` stand for."""

    @abstractmethod
    def of_weights(
        self, weights: dict[str, Tensor], batch: Batch, derivative: Derivative = autograd_derivative
    ) -> dict[str, Tensor]:
        """Gradients of the loss with respect to those of the network's weights that the moving parameters need."""

    @abstractmethod
    def network(self, weights: dict[str, Tensor]) -> Network:
        """Return the network with these weights, and what was drawn for this step in the buffers it is meant for."""

    @abstractmethod
    def pull(self, params: Tensors, grads: dict[str, Tensor]) -> Tensors:
        """Return the gradients of the parameters that move from those of the network's weights."""
