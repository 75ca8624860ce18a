"""Leave one domain out: clients hold some of the other domains, and one that never takes part holds the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl.data import Dataset, Groups
from fl.data.partitions.partition import Partition, Partitioner, partitions
from fl.ranges import Count, CountFrom0, Seed
from fl.registry import UnknownNameError
from fl.seeds import stream


@partitions.register("domains")
@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Partitioner):
    """hFedF's split (Bartholet et al., 2024, Algorithm 5) of a data set with groups: PACS, Office-Home, VLCS.

    Every source domain is cut into equal parts at random, the largest into one more where the numbers ask for it, and
    the parts are dealt in turn, so that each client gets `per_client` different domains. The test images of a domain
    follow its training images: what a client is tested on is the share the data set holds out of its sources
    (id-accuracy; 10 % in the paper). **The last client has all images of the domain left out: run it with
    `federation.held_out_clients=1`**, then it never takes part, and its score is the ood-accuracy.

    Attributes:
        leave_out: name of the domain left out.
        clients: how many take part; None takes one for each source domain, as the paper does.
        per_client: domains of each of them (d), from 1 to the number of source domains.
        shots: images of the domain left out that each of them gets beside, for training (the few-shot variant). No
            two get the same, and the last client loses them: whether the paper scores on them is not given.
        score: what those that take part are tested on: "sources", or "left-out", all test images of the domain left
            out. Their mean is then the ood-accuracy of methods that give a client that never took part nothing (the
            "Local-only" rows).
        seed: of the cuts.
    """

    leave_out: str
    clients: Count | None = None
    per_client: Count = 1
    shots: CountFrom0 = 0
    score: Literal["sources", "left-out"] = "sources"
    seed: Seed = 0

    def __post_init__(self) -> None:
        for key, value, least in (("clients", self.clients or 1, 1), ("shots", self.shots, 0)):
            if value < least:
                raise ValueError(f"expected {key} >= {least}, got {value}")

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            UnknownNameError: there is no such domain.
            ValueError: the data set has no domains, or they can't be shared out so.
        """
        groups = dataset.groups
        if groups is None:
            raise ValueError(f"expected a data set with domains (pacs, domain-folder, ...), got {dataset.name!r}")
        if self.leave_out not in groups.names:
            raise UnknownNameError("domain in leave_out", self.leave_out, list(groups.names))
        target = groups.names.index(self.leave_out)
        sources = [k for k in range(len(groups.names)) if k != target]
        sizes = torch.bincount(groups.train, minlength=len(groups.names)).tolist()
        owners = deal_domains([sizes[k] for k in sources], self.clients or len(sources), self.per_client)
        train, test = (self._deal_domain_parts(groups, sources, owners, part) for part in ("train", "test"))
        own, scored = ((part == target).nonzero().flatten() for part in (groups.train, groups.test))
        drawn, rest = self._deal_shots(own, len(train))
        if self.score == "left-out":
            test = [scored for _ in test]
        mixed = [torch.cat(pair).sort(stable=True).values for pair in zip(train, drawn, strict=True)]
        return Partition((*mixed, rest), (*test, scored))

    def _deal_domain_parts(
        self, groups: Groups, sources: Sequence[int], owners: Sequence[Sequence[int]], part: Literal["train", "test"]
    ) -> list[Tensor]:
        """Return the images of every client that takes part: a random part of each of its domains."""
        found: dict[int, list[Tensor]] = {client: [] for mine in owners for client in mine}
        of = groups.train if part == "train" else groups.test
        for domain, mine in zip(sources, owners, strict=True):
            pool = (of == domain).nonzero().flatten()
            pool = pool[torch.randperm(len(pool), generator=stream(self.seed, "domain", part, domain))]
            if len(pool) < len(mine):
                raise ValueError(
                    f"expected at least {len(mine)} {part} images of {groups.names[domain]!r}, got {len(pool)}"
                )
            for client, piece in zip(mine, pool.tensor_split(len(mine)), strict=True):
                found[client].append(piece)
        return [torch.cat(found[client]).sort(stable=True).values for client in sorted(found)]

    def _deal_shots(self, pool: Tensor, clients: int) -> tuple[list[Tensor], Tensor]:
        """Return the shots of every client, and the images of the domain left out that remain."""
        if (wanted := self.shots * clients) >= len(pool):
            raise ValueError(
                f"expected shots of at most {(len(pool) - 1) // clients} for {clients} clients, got {self.shots}"
            )
        shuffled = pool[torch.randperm(len(pool), generator=stream(self.seed, "shots"))]
        drawn = [shuffled[i * self.shots : (i + 1) * self.shots] for i in range(clients)]
        return drawn, shuffled[wanted:].sort(stable=True).values

    @classmethod
    def example(cls) -> LeaveOneOut:
        """Return a split that leaves sketches out."""
        return cls(leave_out="sketch")


def deal_domains(sizes: Sequence[int], clients: int, per_client: int) -> list[list[int]]:
    """Return which clients hold a part of each domain (Algorithm 5).

    Args:
        sizes: images of each domain.
        clients: how many (N).
        per_client: domains of each client (d).

    Returns:
        For each domain its clients, in order: N d / domains of them, one more for the largest where that is no whole
        number. Of equally large domains the first counts as larger.

    Raises:
        ValueError: a client would hold a domain twice, or a domain would go to nobody.
    """
    if not 1 <= per_client <= len(sizes):
        raise ValueError(f"expected per_client from 1 to {len(sizes)}, got {per_client}")
    if clients * per_client < len(sizes):
        raise ValueError(
            f"expected clients * per_client >= {len(sizes)} source domains, got {clients} * {per_client}: some domain "
            f"would go to nobody"
        )
    least, more = divmod(clients * per_client, len(sizes))
    largest = sorted(range(len(sizes)), key=lambda k: (-sizes[k], k))[:more]
    turns = [k for k in range(len(sizes)) for _ in range(least + (k in largest))]
    owners: list[list[int]] = [[] for _ in sizes]
    for turn, domain in enumerate(turns):  # d rounds over all clients, each taking the next part there is
        owners[domain].append(turn % clients)
    return owners
