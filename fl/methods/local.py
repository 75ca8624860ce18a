"""Local training only: nothing is shared, so nothing leaks and nothing is gained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.types import Scope, Task


@methods.register("local")
@dataclass(frozen=True, kw_only=True)
class Local(FedAvg):
    """Every client trains alone (the "Local-only" rows of HyperFL, Table 1)."""

    plain: ClassVar[str] = "every client trains alone and sends nothing."

    def scope(self, name: str, task: Task) -> Scope:
        """Say who holds it: everything is private."""
        return Scope.PRIVATE
