"""Problems of one key, evaluated together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from attacks.gradient_matching.engine.problem import Evaluation, Variables
from attacks.gradient_matching.engine.traced_objective import LONG, STEADY, WORTH, record
from fl.client import Client
from fl.view import ServerView

log = logging.getLogger(__name__)


class Posed(Protocol):
    """A problem that can be one of a stack."""

    @property
    def view(self) -> ServerView:
        """The server's."""

    @property
    def constants(self) -> dict[str, Any]:
        """All its tensors, as one tree."""

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, stacked: bool) -> Tensor:
        """Its objective at one guess, with the tensors of `constants`; `stacked` under `vmap`."""


def stacked(rows: Iterable[Variables]) -> Variables:
    """The variables of several trials as those of a stack."""
    rows = list(rows)
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


class Stack:
    """Several problems of one key, evaluated together: row t of every variable belongs to problem t.

    What is the same tensor in all of them (a global model, a hypernetwork's 14 million weights) is kept once.

    Args:
        problems: at least one.
        compiled: make machine code of recorded evaluations, where thousands are ahead.
    """

    def __init__(self, problems: Sequence[Posed], *, compiled: bool = False) -> None:
        self.compiled = compiled
        self.problems = list(problems)
        self.client = problems[0].view.client
        flat = [pytree.tree_flatten(p.constants) for p in problems]
        self.tree = flat[0][1]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        self.leaves = [column[0] for column in columns]
        self.varying = [
            i for i, c in enumerate(columns) if isinstance(c[0], Tensor) and any(x is not c[0] for x in c[1:])
        ]
        self.stacked = [torch.stack(columns[i]) for i in self.varying]
        self._recorded: Evaluation | None = None
        self._apart = False
        self._steady, self._wait = 0, STEADY

    def evaluate(self, variables: Variables) -> tuple[Tensor, Variables]:
        """Objectives (T,) and their gradients by variable."""
        return (self._recorded or self._by_autograd)(variables)

    def ahead(self, count: int, variables: Variables) -> None:
        """Be told that as many as `count` evaluations at such variables are to come: makes many of them fast."""
        self._steady += 1
        if self._steady == self._wait and count >= WORTH:
            self._recorded = record(self._by_autograd, variables, compiled=self.compiled and count >= LONG)

    def _by_autograd(self, variables: Variables) -> tuple[Tensor, Variables]:
        leaves = {k: v.detach().requires_grad_() for k, v in variables.items()}
        with torch.enable_grad():
            if len(self.problems) == 1:
                row = {k: v[0] for k, v in leaves.items()}
                values = self._value(row, [s[0] for s in self.stacked], stacked=False)[None]
            else:
                values = self._together(leaves)
        grads = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        return values.detach(), dict(zip(leaves, grads, strict=True))

    def _together(self, leaves: Variables) -> Tensor:
        """The objectives (T,) at once, or one after the other for a network that can't be stacked.

        Functions whose gradient is written by hand, and some recurrent layers, know nothing of `vmap`.
        """
        if not self._apart:
            try:
                return vmap(lambda row, mine: self._value(row, mine, stacked=True))(leaves, self.stacked)
            except RuntimeError as error:
                log.debug("evaluated one by one: %s", str(error).splitlines()[:1])
                self._apart = True
        rows = [{k: v[t] for k, v in leaves.items()} for t in range(len(self.problems))]
        return torch.stack(
            [self._value(row, [s[t] for s in self.stacked], stacked=False) for t, row in enumerate(rows)]
        )

    def _value(self, row: Variables, mine: list[Tensor], *, stacked: bool) -> Tensor:
        leaves = list(self.leaves)
        for i, value in zip(self.varying, mine, strict=True):
            leaves[i] = value
        constants = pytree.tree_unflatten(leaves, self.tree)
        return self.problems[0].value(row, constants, self.client, stacked=stacked)

    def keep(self, rows: Tensor) -> None:
        """Go on with the problems `rows` (an index tensor) only."""
        self.problems = [self.problems[i] for i in rows.tolist()]
        self.stacked = [s[rows] for s in self.stacked]
        self._recorded, self._steady = None, 0
        self._wait *= 2  # where one trial ends after the other, recording each time would cost more than it saves
