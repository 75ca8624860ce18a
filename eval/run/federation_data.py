"""The data of an experiment, on the device: all images, who holds which, and whom the attacker watches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from eval.experiment.spec import FederationSpec, ObserveSpec, TaskSpec
from fl.aggregated_view import AggregationGroups
from fl.data import Dataset
from fl.data.augment import Augmentation
from fl.data.checked_loading import load_checked
from fl.data.partitions.checked_split import split_checked
from fl.data.partitions.partition import Partition
from fl.federation import ClientData
from fl.registry import UnknownNameError
from fl.seeds import stream
from fl.settings import SettingError
from fl.types import Batch, Task


@dataclass(frozen=True)
class Target:
    """One watched update.

    Attributes:
        client: number of the client; of a group the first.
        samples: which images of the data set it is computed from (n,) int64.
        data: these images.
        part: of the data set, that they are numbered in: "train" or "test".
        others: what is aggregated with it before the server sees anything (secure aggregation).
    """

    client: int
    samples: Tensor
    data: Batch
    part: str = "train"
    others: tuple[Target, ...] = ()

    @property
    def key(self) -> str:
        """The name of the target, the same in every run."""
        own = self.named(",".join(map(str, self.samples.tolist())))
        return "+".join([own, *(other.key for other in self.others)])

    def named(self, images: str) -> str:
        """Name images by client and number; a test image has a number that a training image may have, too."""
        return f"{self.client}:{images}" if self.part == "train" else f"{self.client}:{self.part}/{images}"

    @property
    def group(self) -> tuple[Target, ...]:
        """The update and those aggregated with it."""
        return (self, *self.others)


@dataclass(frozen=True, eq=False)
class FederationData:
    """Images, clients and the network they train.

    Attributes:
        task_spec: what is learned.
        augment: how images are changed before they are fed in training; None leaves them.
        dataset: all images, on the device.
        partition: who holds which.
        digest: of images, labels, names of classes and partition, in hexadecimal.
        device: where the images are.
        computed_on: kind of device that everything is computed on, `cpu` or `cuda`; empty is that of `device`.
    """

    task_spec: TaskSpec
    augment: Augmentation | None
    dataset: Dataset
    partition: Partition
    digest: str
    device: torch.device
    computed_on: str = ""

    @property
    def device_kind(self) -> str:
        """Kind of device that everything is computed on."""
        return self.computed_on or self.device.type

    def task(self, seed: int) -> Task:
        """Return the task with the network that `seed` starts from."""
        task = self.task_spec.model.build_task(num_classes=self.dataset.num_classes, seed=seed)
        return task.to(device=self.device)

    @cached_property
    def clients(self) -> list[ClientData]:
        """The images of every client."""
        pairs = zip(self.partition.train, self.partition.test, strict=True)
        return [ClientData(self.dataset.train.take(a), self.dataset.test.take(b), self.augment) for a, b in pairs]

    def reference(self, targets: Sequence[Target]) -> Batch | None:
        """Return training images that no watched client holds: what an attacker may have had before, or None."""
        free = torch.ones(len(self.dataset.train), dtype=torch.bool)
        for target in targets:
            for member in target.group:
                free[self.partition.train[member.client]] = False
        if not free.any():
            return None
        return Batch(self.dataset.train.inputs[free].cpu(), self.dataset.train.labels[free].cpu())

    def choose_targets(self, observe: ObserveSpec, division: AggregationGroups | None = None) -> tuple[Target, ...]:
        """Choose whom the attacker watches: of each group one update after the other, however many of it are named.

        Args:
            observe: the settings.
            division: which clients are aggregated before the server sees anything; None is each on its own.

        Raises:
            ValueError: there is no such client, class, number of images or group.
        """
        found: list[Target] = []
        for group in self._groups(observe, division):
            each = [self._updates_of_client(observe, client) for client in group]
            if len({len(own) for own in each}) > 1:
                counts = ", ".join(f"{len(own)} of client {client}" for own, client in zip(each, group, strict=True))
                reason = f"expected as many updates of every client of a group, got {counts}; set observe.images"
                raise SettingError(("observe",), reason)
            found += [replace(first, others=tuple(others)) for first, *others in zip(*each, strict=True)]
        return tuple(found)

    def _groups(self, observe: ObserveSpec, division: AggregationGroups | None) -> list[range]:
        """Return the watched clients with those aggregated with them, each group once."""
        for client in observe.clients:
            if client >= len(self.partition):
                reason = f"expected numbers below {len(self.partition)}, got {client}"
                raise SettingError(("observe", "clients"), reason)
        if division is None:
            return [range(client, client + 1) for client in observe.clients]
        try:
            return list(dict.fromkeys(division.of(client) for client in observe.clients))
        except ValueError as error:
            raise SettingError(("defense",), str(error)) from error

    def _updates_of_client(self, observe: ObserveSpec, client: int) -> list[Target]:
        """Return the updates of one client."""
        classes = torch.tensor(list(_classes(observe.classes, self.dataset.class_names)), dtype=torch.int64)
        whole: Batch = getattr(self.dataset, observe.split)
        own: Tensor = getattr(self.partition, observe.split)[client]
        if len(classes):
            own = own[torch.isin(whole.labels.cpu()[own], classes)]
        own = own[torch.randperm(len(own), generator=stream(observe.seed, "observe", client))]
        count = observe.images or len(own)
        if not len(own) or count > len(own):
            held = f"{len(own)} {'training' if observe.split == 'train' else 'test'} images of client {client}"
            raise SettingError(("observe", "images"), f"expected at most the {held}, got {count}")
        samples = own[:count].split(observe.batch_size or count)
        return [Target(client, chosen, whole.take(chosen), observe.split) for chosen in samples]


def resolve_device(name: str) -> torch.device:
    """Return the device called `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`.

    A GPU is told to compute convolutions in single precision. By default it cuts their factors to TF32's eleven bits,
    and an update that is off by 1e-3 hides what an exact inversion reads from it.

    Raises:
        ValueError: no such device here.
    """
    kind = name.partition(":")[0]
    if kind not in {"auto", "cpu", "cuda"}:
        raise ValueError(f"expected device auto, cpu or cuda, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, found none; use --device cpu")
    if kind == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu":
        torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def load(
    task: TaskSpec, federation: FederationSpec, device: torch.device, loaded: Dataset | None = None
) -> FederationData:
    """Read the data (unless given as `loaded`) and split it.

    Raises:
        ValueError: network or partition do not fit the data.
        FileNotFoundError: the data set is not there; says how to get it.
    """
    dataset = loaded or load_checked(task.dataset)
    wanted = tuple(task.model.input_shape)
    if not wanted:  # a network of the user's own, for whatever images there are
        wanted = dataset.input_shape
        task = replace(task, model=replace(task.model, input_shape=wanted))
    if wanted != dataset.input_shape:
        raise SettingError(
            ("task", "model"),
            f"expected input_shape {list(dataset.input_shape)} for data set {dataset.name!r}, got {list(wanted)}; "
            "change the model's input_shape, or the data set's size if it has one",
        )
    partition = split_checked(federation.partition, dataset)
    train, test = (Batch(part.inputs.to(device), part.labels.to(device)) for part in (dataset.train, dataset.test))
    moved = replace(dataset, train=train, test=test)
    augment = None if type(federation.augment) is Augmentation else federation.augment
    return FederationData(task, augment, moved, partition, dataset_digest(dataset, partition.digest), device)


def dataset_digest(dataset: Dataset, *more: str) -> str:
    """Return SHA-256 of all that is fed, with shapes and types: the same bytes may stand for other images.

    Args:
        dataset: images, labels and names of classes.
        more: what else is part of it.
    """
    digest = hashlib.sha256(json.dumps([*more, list(dataset.class_names)]).encode())
    for part in (dataset.train, dataset.test):
        for values in (part.inputs, part.labels):
            digest.update(json.dumps([str(values.dtype), list(values.shape)]).encode())
            digest.update(values.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def _classes(wanted: Sequence[int | str], names: Sequence[str]) -> Iterator[int]:
    for item in wanted:
        if isinstance(item, str):
            if item not in names:
                raise UnknownNameError("class in observe.classes", item, list(names))
            yield names.index(item)
        elif 0 <= item < len(names):
            yield item
        else:
            raise SettingError(("observe", "classes"), f"expected labels in [0, {len(names)}), got {item}")
