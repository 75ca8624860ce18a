"""Problems of one key, evaluated together as a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from attacks.gradient_matching.engine.problem import Evaluation, Variables
from attacks.gradient_matching.engine.traced_objective import (
    MIN_EVALUATIONS_TO_COMPILE,
    MIN_EVALUATIONS_TO_TRACE,
    STEADY_EVALUATIONS,
    trace,
)
from fl.client import Client
from fl.view import ServerView

log = logging.getLogger(__name__)


class BatchableProblem(Protocol):
    """A problem that can be one of a batch."""

    @property
    def view(self) -> ServerView:
        """The server's view."""

    @property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return its objective at one guess, with the tensors of `constants`; `vmapped` under `vmap`.

        Args:
            variables: the guess, by name.
            constants: tensors of the problem, perhaps of another in the batch.
            client: whose training is predicted.
            vmapped: whether this runs under `torch.vmap`.
        """


def stack_variables(rows: Iterable[Variables]) -> Variables:
    """Return the variables of several trials as those of a batch."""
    rows = list(rows)
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


class ProblemBatch:
    """Several problems of one key, evaluated together: row t of every variable belongs to problem t.

    What is the same tensor in all of them (a global model, a hypernetwork's 14 million weights) is kept once.

    Args:
        problems: at least one.
        compiled: make machine code of traced evaluations, where thousands are to come.
    """

    def __init__(self, problems: Sequence[BatchableProblem], *, compiled: bool = False) -> None:
        self.compiled = compiled
        self.problems = list(problems)
        self.client = problems[0].view.client
        flat = [pytree.tree_flatten(p.constants) for p in problems]
        self._tree = flat[0][1]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self._leaves = [column[0] for column in columns]
        self._varying = [
            i for i, c in enumerate(columns) if isinstance(c[0], Tensor) and any(x is not c[0] for x in c[1:])
        ]
        self._varying_rows = [torch.stack(columns[i]) for i in self._varying]
        self.traced: Evaluation | None = None
        self._vmap_fails = False
        self.steady_evaluations, self.trace_after = 0, STEADY_EVALUATIONS

    def evaluate(self, variables: Variables) -> tuple[Tensor, Variables]:
        """Return the objectives (T,) and their gradients by variable."""
        return (self.traced or self._evaluate_by_autograd)(variables)

    def expect_iterations(self, count: int, variables: Variables) -> None:
        """Trace the evaluation, which makes it faster, where as many as `count` at such variables are to come."""
        self.steady_evaluations += 1
        if self.steady_evaluations == self.trace_after and count >= MIN_EVALUATIONS_TO_TRACE:
            compiled = self.compiled and count >= MIN_EVALUATIONS_TO_COMPILE
            self.traced = trace(self._evaluate_by_autograd, variables, compiled=compiled)

    def select(self, rows: Tensor) -> None:
        """Go on with the problems `rows` (an index tensor) only."""
        self.problems = [self.problems[i] for i in rows.tolist()]
        self._varying_rows = [values[rows] for values in self._varying_rows]
        self.traced, self.steady_evaluations = None, 0
        self.trace_after *= 2  # where one trial ends after the other, tracing each time would cost more than it saves

    def _evaluate_by_autograd(self, variables: Variables) -> tuple[Tensor, Variables]:
        leaves = {k: v.detach().requires_grad_() for k, v in variables.items()}
        with torch.enable_grad():
            if len(self.problems) == 1:
                row = {k: v[0] for k, v in leaves.items()}
                values = self._value(row, [v[0] for v in self._varying_rows], vmapped=False)[None]
            else:
                values = self._values(leaves)
        grads = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        return values.detach(), dict(zip(leaves, grads, strict=True))

    def _values(self, leaves: Variables) -> Tensor:
        """Return the objectives (T,) at once, or one after the other for a network that `vmap` does not take.

        Functions whose gradient is written by hand, and some recurrent layers, know nothing of `vmap`.
        """
        if not self._vmap_fails:
            try:
                return vmap(lambda row, own: self._value(row, own, vmapped=True))(leaves, self._varying_rows)
            except RuntimeError as error:
                log.debug("evaluated one by one: %s", str(error).splitlines()[:1])
                self._vmap_fails = True
        rows = [{k: v[t] for k, v in leaves.items()} for t in range(len(self.problems))]
        return torch.stack(
            [self._value(row, [v[t] for v in self._varying_rows], vmapped=False) for t, row in enumerate(rows)]
        )

    def _value(self, row: Variables, own: list[Tensor], *, vmapped: bool) -> Tensor:
        """Return the objective of one row, whose tensors among those that vary are `own`."""
        leaves = list(self._leaves)
        for i, value in zip(self._varying, own, strict=True):
            leaves[i] = value
        constants = pytree.tree_unflatten(leaves, self._tree)
        return self.problems[0].value(row, constants, self.client, vmapped=vmapped)
