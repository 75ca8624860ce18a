"""Secure aggregation: the server learns the mean over a group of clients and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from defenses import defenses
from fl.defense import Defense
from fl.method import Method
from fl.ranges import Range
from fl.types import Task


@defenses.register("secagg")
@dataclass(frozen=True, kw_only=True)
class SecAgg(Defense):
    """Bonawitz et al., CCS 2017: masks that cancel in the sum hide every single update from the server.

    What the protocol does to numbers is not modeled (it rounds them to a finite ring, and copes with clients that drop
    out): the server is given the exact mean over a group, weighted by the clients' numbers of images. Training is as
    without it. An attacker searches for the images, and the private tensors, of the whole group.

    Groups are fixed and never overlap (`fl.aggregated_view.AggregationGroups`): clients 0 to `group_size - 1` are the
    first, and those left over at the end join the last. In a chain it comes last: noise is each client's own, not that
    of the mean.

    Beside the mean the server knows who is in the group (`view.parts`): how many clients, the names and shapes of what
    each keeps, and, where the threat model says so, each one's schedule, number of images and so its weight; the
    labels, order and random numbers where it knows those; and the mean of the shared buffers (integers left out). A
    client that sends nothing any more, as its privacy budget is spent, leaves its whole group unwatched.

    Attributes:
        group_size: how many clients are in a group, at least; the watched one counts.

    Raises:
        ValueError: if a group has fewer than 2 clients.
    """

    former_names: ClassVar[Mapping[str, str]] = {"clients": "group_size"}
    plain: ClassVar[str] = "the server only learns the mean over a group of clients."

    group_size: Annotated[int, Range(2, 10**7)] = 4

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"expected group_size >= 2, got {self.group_size}")

    @classmethod
    def example(cls) -> SecAgg:
        """Return a mean over two clients."""
        return cls(group_size=2)

    def check(self, method: Method, task: Task) -> None:
        """Refuse a method whose server needs every client's update on its own."""
        if not method.aggregates_mean_only:
            raise ValueError(
                f"secagg: expected a server that needs the mean of updates alone, got {method.name!r}; a method of "
                "your own whose `aggregate` needs no more says so by `aggregates_mean_only` returning True"
            )
