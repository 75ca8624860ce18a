"""Splits whose clients differ in their classes: Dirichlet draws, shards of the sorted set, groups of few classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincinv
from torch import Tensor

from fl.data import Dataset
from fl.data.partitions.partition import Partition, Partitioner, partitions
from fl.ranges import Count, Range, Seed
from fl.seeds import derive_seed, stream

MAX_DRAWS = 100
Fractions = NDArray[np.float64]
"""Which part of each class each client holds (clients, K); no column sums to more than 1."""


@partitions.register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partitioner):
    """Class proportions drawn from a Dirichlet distribution: few classes per client for small alpha, IID for large.

    `over="clients"` shares out every class by a draw of its own (Yurochkin et al., 2019; the usual form, Flower's too):
    all images are dealt and clients differ in size. `over="classes"` draws every client's class proportions (Hsu et
    al., 2019) and gives all clients equally many images, as near as whole images allow; a client whose classes have
    run out takes more of its others, then what is left. Every client gets the same fraction of a class in training and
    test, so that both have the same class proportions.

    Attributes:
        alpha: concentration, in [1e-6, 1e6]: of each client (over clients), or of all classes together (over classes).
        clients: how many.
        over: "clients" or "classes".
        min_size: every client has at least so many training images, and a test image; draws without are repeated.
        seed: of the draws, and of the shuffle within each class.
    """

    alpha: Annotated[float, Range(1e-6, 1e6)] = 0.5
    clients: Count = 20
    over: Literal["clients", "classes"] = "clients"
    min_size: Count = 10
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not 1e-6 <= self.alpha <= 1e6:
            raise ValueError(f"expected alpha in [1e-6, 1e6], got {self.alpha}")
        for key in ("clients", "min_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            ValueError: no draw gave every client enough images.
        """
        for attempt in range(MAX_DRAWS):
            fractions = self._draw(_class_sizes(dataset), attempt)
            result = _deal_partition(dataset, fractions, self.seed)
            if min(map(len, result.train)) >= self.min_size and min(map(len, result.test)) >= 1:
                return result
        raise ValueError(
            f"expected {self.min_size} training images and a test image for each of {self.clients} clients, got none "
            f"such in {MAX_DRAWS} draws with alpha {self.alpha}: take a larger alpha, fewer clients or a smaller "
            "min_size"
        )

    def _draw(self, have: NDArray[np.int64], attempt: int) -> Fractions:
        generator = stream(self.seed, "dirichlet", attempt)
        if self.over == "clients":
            return dirichlet(np.full(self.clients, self.alpha), len(have), generator).T
        present = have > 0  # a class without images has no concentration
        proportions = np.zeros((self.clients, len(have)))
        shares = have[present] / have.sum()
        proportions[:, present] = dirichlet(self.alpha * shares, self.clients, generator)
        return _equal_sizes(proportions, have)


@partitions.register("shards")
@dataclass(frozen=True, kw_only=True)
class Shards(Partitioner):
    """The training set sorted by label and cut into equal shards, some for each client (McMahan et al., 2017).

    A client's test images are of its training classes: of each class the fraction that it holds in training.

    Attributes:
        clients: how many.
        shards_per_client: so many shards each; few shards are few classes.
        seed: of the draw.
    """

    clients: Count = 100
    shards_per_client: Count = 2
    seed: Seed = 0

    def __post_init__(self) -> None:
        for key in ("clients", "shards_per_client"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            ValueError: there are fewer training images than shards, or a client would have no test image.
        """
        count = self.clients * self.shards_per_client
        labels = dataset.train.labels
        if len(labels) < count:
            raise ValueError(f"expected at most {len(labels)} shards, one for each training image, got {count}")
        shards = labels.argsort(stable=True).tensor_split(count)
        chosen = torch.randperm(count, generator=stream(self.seed, "shards")).reshape(self.clients, -1).tolist()
        train = tuple(torch.cat([shards[s] for s in row]).sort(stable=True).values for row in chosen)
        have = _class_sizes(dataset)
        held = np.stack([np.bincount(labels[index].numpy(), minlength=len(have)) for index in train])
        test = deal_by_class(dataset.test.labels, held / np.maximum(have, 1), derive_seed(self.seed, "test"))
        if bare := [client for client, index in enumerate(test) if not len(index)]:
            raise ValueError(
                f"expected a test image for every client, got none for client {bare[0]}: take fewer clients or more "
                "test images"
            )
        return Partition(train, test)

    @classmethod
    def example(cls) -> Shards:
        """Return a split among four clients of two shards each."""
        return cls(clients=4)


@partitions.register("class-groups")
@dataclass(frozen=True, kw_only=True)
class ClassGroups(Partitioner):
    """Neighboring clients form groups with classes of their own (HyperFedNet, Chen et al., 2024, Figure 5).

    The first group has the first classes, and so on; a class is dealt to the clients of its group in equal parts, in
    training and test. Classes beyond those of the groups are left out.

    Attributes:
        clients: how many; the groups must divide them.
        groups: how many.
        classes: so many for each group; the paper takes 2 of 10 and 10 of 100.
        seed: of the shuffle within each class.
    """

    clients: Count = 20
    groups: Count = 5
    classes: Count = 2
    seed: Seed = 0

    def __post_init__(self) -> None:
        for key in ("clients", "groups", "classes"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} >= 1, got {getattr(self, key)}")
        if self.clients % self.groups:
            raise ValueError(f"expected clients in {self.groups} equal groups, got {self.clients}")

    def __call__(self, dataset: Dataset) -> Partition:
        """Return the partition of `dataset`.

        Raises:
            ValueError: there are fewer classes than the groups take, or a client would have no image.
        """
        if self.groups * self.classes > dataset.num_classes:
            raise ValueError(
                f"expected at least {self.groups * self.classes} classes, {self.classes} for each of {self.groups} "
                f"groups, got {dataset.num_classes}"
            )
        size = self.clients // self.groups
        fractions = np.zeros((self.clients, dataset.num_classes))
        for client in range(self.clients):
            first = client // size * self.classes
            fractions[client, first : first + self.classes] = 1 / size
        result = _deal_partition(dataset, fractions, self.seed)
        if not all(map(len, (*result.train, *result.test))):
            raise ValueError(
                f"expected a training and a test image for each of {self.clients} clients, got none for some: take "
                "fewer clients or more images"
            )
        return result


def dirichlet(concentration: Fractions, rows: int, generator: torch.Generator) -> Fractions:
    """Draws from a Dirichlet distribution (rows, K), even if its concentrations (K,) are so small that gammas vanish.

    A gamma of shape a is one of shape a + 1 times U^(1/a) (Marsaglia and Tsang, 2000), here in logarithms and by the
    inverse of the distribution function: two uniform numbers for each entry, whatever the concentration.
    """
    shape = (2, rows, len(concentration))
    first, second = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
    logs = np.log(gammaincinv(concentration + 1, np.maximum(first, 2.0**-54))) + np.log(1 - second) / concentration
    gammas: Fractions = np.exp(logs - logs.max(1, keepdims=True))
    result: Fractions = gammas / gammas.sum(1, keepdims=True)
    return result


def deal_by_class(labels: Tensor, fractions: Fractions, seed: int) -> tuple[Tensor, ...]:
    """Deal every image to at most one client: `fractions` (clients, K) of each class, rounded, in random order."""
    parts: list[list[Tensor]] = [[] for _ in fractions]
    bounds = np.vstack([np.zeros(fractions.shape[1]), fractions.cumsum(0)]).clip(0, 1)
    for k in range(fractions.shape[1]):
        pool = (labels == k).nonzero().flatten()
        pool = pool[torch.randperm(len(pool), generator=stream(seed, "class", k))]
        edges = np.rint(bounds[:, k] * len(pool)).astype(int).tolist()
        for part, begin, end in zip(parts, edges[:-1], edges[1:], strict=True):
            part.append(pool[begin:end])
    return tuple(torch.cat(part).sort(stable=True).values for part in parts)


def _deal_partition(dataset: Dataset, fractions: Fractions, seed: int) -> Partition:
    train, test = (
        deal_by_class(part.labels, fractions, derive_seed(seed, key))
        for key, part in (("train", dataset.train), ("test", dataset.test))
    )
    return Partition(train, test)


def _class_sizes(dataset: Dataset) -> NDArray[np.int64]:
    return np.bincount(dataset.train.labels.numpy(), minlength=dataset.num_classes)


def _equal_sizes(proportions: Fractions, have: NDArray[np.int64]) -> Fractions:
    """Fractions that give client after client the same number of images, in its own proportions while they last."""
    size = have.sum() / len(proportions)
    left = have.astype(np.float64)
    result = np.zeros_like(proportions)
    for row, own in zip(result, proportions, strict=True):
        for wish in (own, left.copy()):  # what is left of any class, once its own have run out
            _fill_row(row, wish, left, size)
    return result / np.maximum(have, 1)


def _fill_row(row: Fractions, wish: Fractions, left: Fractions, size: float) -> None:
    """Add to `row`, off `left`, in the proportions of `wish` until it sums to `size` or nothing wished for is left."""
    for _ in range(len(wish)):  # every pass but the last empties a class
        need, weight = size - row.sum(), np.where(left > 0, wish, 0)
        if need <= 1e-9 * size or weight.sum() <= 0:
            return
        taken = np.minimum(left, need * weight / weight.sum())
        row += taken
        left -= taken
