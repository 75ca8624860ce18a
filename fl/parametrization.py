"""How the numbers a client trains become the weights of its network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vjp

from fl.registry import FormerHooks, Registry
from fl.tensors import Tensors, dense
from fl.types import Scope, Task

parametrizations: Registry[Parametrization] = Registry("parametrization", "fl.models")


@parametrizations.register("direct")
@dataclass(frozen=True, kw_only=True)
class Parametrization(FormerHooks):
    """Parameters are the network's own weights: the base of every generator, and the identity.

    A method takes one as a setting, so a generator composes with any local rule (HFN with FedProx, say).
    """

    name: ClassVar[str]
    registry: ClassVar[Registry[Parametrization]] = parametrizations
    former_hooks: ClassVar[Mapping[str, str]] = {"initial": "initial_parameters", "pullback": "pull_back"}
    structured: ClassVar[bool] = False
    """Whether gradients come as sums of outer products, which only SGD leaves what they are."""

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return the initial parameters; the network's own come from `task.model`."""
        return dict(task.parameters)

    def scope(self, name: str) -> Scope | None:
        """Return who holds the parameter `name`, or None to leave that to the method."""
        return None

    def lift(self, params: Tensors) -> Tensors:
        """Return parameters in the form local training keeps them in."""
        return params

    def network(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return the weights of the network, by the names of `task.model`."""
        return {name: dense(params[name]) for name in task.parameters}

    def sources(self, task: Task, live: Collection[str]) -> list[str]:
        """Return the names of the network's weights whose gradients the parameters `live` need."""
        return [name for name in task.parameters if name in live]

    def pull_back(self, params: Tensors, grads: dict[str, Tensor], task: Task, live: Collection[str]) -> Tensors:
        """Return the gradients of the parameters `live` from those of the network's weights."""
        return {name: grads[name] for name in live}

    def diagnostics(self, params: Tensors) -> dict[str, float]:
        """Return figures worth watching in training, of one client's parameters; always the same names."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Generated(Parametrization):
    """A generator of some of the network's weights, pulled back by autograd.

    A subclass says what it generates from which parameters; one with more structure overrides `pull_back`.
    """

    def generates(self, task: Task) -> list[str]:
        """Return the names of the generated weights: by default all but the classifier's."""
        return [name for name in task.parameters if not name.startswith(task.head)]

    def generate(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return the generated weights."""
        raise TypeError(f"{type(self).__name__} does not say how it generates weights")

    def network(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return generated weights, and the network's own where there are."""
        made = self.generate(params, task)
        return {name: made[name] if name in made else dense(params[name]) for name in task.parameters}

    def sources(self, task: Task, live: Collection[str]) -> list[str]:
        """Return the live weights of the network, and every generated one if the generator moves."""
        made = set(self.generates(task))
        moves = any(name not in task.parameters for name in live)
        return [name for name in task.parameters if (name in made and moves) or (name not in made and name in live)]

    def pull_back(self, params: Tensors, grads: dict[str, Tensor], task: Task, live: Collection[str]) -> Tensors:
        """Return the vector-Jacobian product of `generate`."""
        own = {name: dense(params[name]) for name in live if name not in task.parameters}
        result: Tensors = {name: grads[name] for name in live if name in task.parameters}
        if own:
            made = self.generates(task)
            pull = vjp(lambda moved: self.generate({**params, **moved}, task), own)[1]
            result.update(pull({name: grads[name] for name in made})[0])
        return result
