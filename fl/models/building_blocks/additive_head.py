"""A classifier that is the sum of a common and a personal one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fl.parametrization import Parametrization, parametrizations
from fl.tensors import Tensors, dense
from fl.types import Scope, Task

COMMON, PERSONAL = "common.", "personal."
"""Before the names of the two classifiers' weights."""


@parametrizations.register("additive-head")
@dataclass(frozen=True, kw_only=True)
class AdditiveHead(Parametrization):
    """Weights w + theta_i of the classifier: w for all, theta_i the client's own (Bietti et al., ICML 2022, section 5).

    The common one starts as the task's classifier, the personal one at zero (not given in the paper).
    """

    def initial_parameters(self, task: Task, generator: torch.Generator) -> Tensors:
        """Return the task's parameters, the classifier's in two parts."""
        params: Tensors = {}
        for name, value in task.parameters.items():
            if name.startswith(task.head):
                params |= {COMMON + name: value, PERSONAL + name: torch.zeros_like(value)}
            else:
                params[name] = value
        return params

    def scope(self, name: str) -> Scope | None:
        """The personal part is private, the common one shared."""
        if name.startswith(PERSONAL):
            return Scope.PRIVATE
        return Scope.SHARED if name.startswith(COMMON) else None

    def network(self, params: Tensors, task: Task) -> dict[str, Tensor]:
        """Return both parts added."""
        return {
            name: dense(params[COMMON + name]) + dense(params[PERSONAL + name])
            if name.startswith(task.head)
            else dense(params[name])
            for name in task.parameters
        }

    def sources(self, task: Task, live: Collection[str]) -> list[str]:
        """Return the classifier's weights where either part moves."""
        return [n for n in task.parameters if n in live or COMMON + n in live or PERSONAL + n in live]

    def pull_back(self, params: Tensors, grads: dict[str, Tensor], task: Task, live: Collection[str]) -> Tensors:
        """Return the classifier's gradient for the common and the personal part alike: both are added with weight 1."""
        return {name: grads[name.removeprefix(COMMON).removeprefix(PERSONAL)] for name in live}
