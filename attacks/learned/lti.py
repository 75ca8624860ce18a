"""LTI: a network learns on public images to read pictures off updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from attacks.base import Attack, NotApplicable, Preset, Reconstruction, Result, attacks
from attacks.labels.recovery import single_label
from attacks.learned.inversion_network import InversionNetwork, SimulatedClient, TrainingSettings, client_key, train
from attacks.search_control import SearchControl, SearchMonitor
from fl.data import Dataset, Source
from fl.data.sources.embedded import Faces
from fl.ranges import Count, PositiveStep, Seed, Width
from fl.runtime.digests import digest
from fl.seeds import stream
from fl.simulation.nonfinite_updates import all_finite
from fl.tensors import dense
from fl.types import Batch
from fl.view import ServerView

MAX_CACHED_NETWORKS = 4
"""Networks kept for further calls."""
_Key = tuple[Attack, str, str]
"""Of a network: the attack's settings, the public images, and whatever the client is imitated by."""
_TRAINED: dict[_Key, InversionNetwork] = {}


@attacks.register("lti")
@dataclass(frozen=True, kw_only=True)
class LearningToInvert(Attack):
    """LTI, learning to invert (Wu et al., UAI 2023): three linear layers from an update to its images.

    The server imitates the client on public images x, through the view's own method, weights and defense, and trains
    a network f to minimize mean (f(update(x)) - x)^2, for the images of a batch in the order that fits best. So it
    adapts by itself to whatever the defense does, noise included, where a search needs a differentiable stand-in for
    it. One network serves all clients that were sent the same weights under the same settings; it does not depend on
    the seed of the call.

    Threat model: an honest server that also has images like the client's. These must not contain those that are
    attacked: name another data set, or the `part` of it that these are not of. A run refuses what holds one of them.

    It differs from the authors' code in what the network is given: an update is brought to length 1, each of its
    numbers standardized over imitated updates, so that no unit matters, and in the hash signs keep apart what is added
    up. Labels are the public images' own if there are as many classes as in the task, else drawn at random. What the
    client keeps to itself is drawn at random, too. As in every prediction, noise that a defense adds within training is
    left out, and images are fed in turn where their order is unknown. The label of one image is read off the
    classifier; those of several are not returned.

    Cost grows with the numbers of an update: for a hypernetwork, let `peel` open it first.

    Attributes:
        auxiliary: public images, by the name or the settings of a data set; the attack needs them.
        part: "test" or "train", which images of it; clients train on the images of "train", and are watched on one of
            the two (`observe.part`).
        iterations: of Adam; the step size falls to a tenth after three quarters of them.
        batch_size: imitated updates in each.
        width: units of the two hidden layers.
        hash_size: longest input of the network; longer updates are hashed to it.
        lr: step size.
        seed: of initialization, hash and lessons.
    """

    images_only: ClassVar[bool] = True
    plain: ClassVar[str] = "trains a network on public pictures that turns an update into the picture behind it."
    presets: ClassVar[dict[str, Preset]] = {
        "published": Preset(
            "the authors' code: LeNet of Zhu et al. on CIFAR-10, one image; 200 passes over 50,000 images",
            {"iterations": 39_200, "batch_size": 256, "width": 3000, "hash_size": 100_000, "lr": 1e-4},
        ),
    }

    former_names: ClassVar[Mapping[str, str]] = {"batch": "batch_size", "hashed": "hash_size"}

    auxiliary: Source | None = None
    part: Literal["train", "test"] = "test"
    iterations: Count = 3000
    batch_size: Count = 64
    width: Width = 512
    hash_size: Count = 4096
    lr: PositiveStep = 1e-3
    seed: Seed = 0

    def __post_init__(self) -> None:
        for name in ("iterations", "batch_size", "width", "hash_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"expected lr > 0 and finite, got {self.lr}")

    @classmethod
    def example(cls) -> LearningToInvert:
        """Return a few steps on small faces."""
        return cls(auxiliary=Faces(size=8), iterations=5, batch_size=4, width=8, hash_size=64)

    def view_batches(self, views: Sequence[ServerView]) -> list[Sequence[int]]:
        """Return all together, for what is trained for one reads the others, too."""
        return [range(len(views))] if views else []

    def run(self, views: Sequence[ServerView], seeds: Sequence[int]) -> list[Result]:
        """Attack several views; those of equal weights and settings share a network."""
        return self.run_controlled(views, seeds, SearchControl())

    def run_controlled(self, views: Sequence[ServerView], seeds: Sequence[int], control: SearchControl) -> list[Result]:
        """Attack several views within what `control` allows; a network trained in part serves these alone."""
        if self.auxiliary is None:
            missing = NotApplicable("it needs images like the client's: name a data set as its setting auxiliary")
            return [missing] * len(views)
        data = self.auxiliary.load()
        public = self._part(data)
        mark = digest(public.inputs, public.labels)
        if not len(public):
            return [NotApplicable(f"{data.name} has no images in its part {self.part!r}")] * len(views)
        single = [self.single_client_view(view) for view in views]
        refused = [view if isinstance(view, NotApplicable) else self.refuse(view, data) for view in single]
        keys = {
            i: (self, mark, client_key(view))
            for i, view in enumerate(single)
            if isinstance(view, ServerView) and refused[i] is None
        }
        monitor = SearchMonitor(control, len({*keys.values()} - {*_TRAINED}), self.iterations)
        networks: dict[_Key, InversionNetwork | NotApplicable] = {}
        results: list[Result] = []
        for i, view in enumerate(single):
            reason = refused[i]
            if isinstance(view, NotApplicable) or reason is not None:
                results.append(reason or NotApplicable(""))
                continue
            key = keys[i]
            if key not in networks:
                networks[key] = self._network(key, view, data, public, monitor)
            inverter = networks[key]
            results.append(inverter if isinstance(inverter, NotApplicable) else self._reconstruct(view, data, inverter))
        return results

    def auxiliary_images(self) -> Batch | None:
        """Return the public images."""
        return None if self.auxiliary is None else self._part(self.auxiliary.load())

    def _part(self, data: Dataset) -> Batch:
        return data.train if self.part == "train" else data.test

    def refuse(self, view: ServerView, data: Dataset) -> NotApplicable | None:
        """Return why this attack says nothing about `view`, or None."""
        if not view.update:
            return NotApplicable(f"{view.method.name} shares nothing: there is no update to read")
        if not view.batch_size:
            return NotApplicable("the number of images is unknown")
        if view.schedule is None:
            return NotApplicable(
                "the local schedule is unknown, so the client can't be imitated: take all steps for one by surrogate+ "
                "before the attack"
            )
        if not view.task.loss.is_cross_entropy:
            return NotApplicable(
                f"it trains on public images and their classes, and the loss is {view.task.loss.name}; try ig",
                limit=True,
            )
        if data.input_shape != tuple(view.task.input_shape):
            return NotApplicable(f"the client's images are {view.task.input_shape}, the public ones {data.input_shape}")
        if not all_finite(view.update):
            return NotApplicable("the update has numbers that are not finite")
        if not any(dense(value).any() for value in view.update.values()):
            return NotApplicable("the update is zero")
        return None

    def _network(
        self, key: _Key, view: ServerView, data: Dataset, public: Batch, monitor: SearchMonitor
    ) -> InversionNetwork | NotApplicable:
        """Return the network for a view: one that was trained before, or a new one."""
        if key in _TRAINED:
            return _TRAINED[key]
        if stopped := monitor.begin_batch():
            reason = f"no network was trained before {stopped}"
            return NotApplicable(reason, limit=True, cut_short=reason)
        if data.num_classes != view.task.num_classes:
            draw = stream(self.seed, "labels")
            labels = torch.randint(view.task.num_classes, public.labels.shape, generator=draw)
            public = Batch(public.inputs, labels)
        trained = self._train(SimulatedClient(view, public), monitor)
        if not trained.cut_short:
            _TRAINED[key] = trained
            while len(_TRAINED) > MAX_CACHED_NETWORKS:
                del _TRAINED[next(iter(_TRAINED))]
        return trained

    def _reconstruct(self, view: ServerView, data: Dataset, inverter: InversionNetwork) -> Reconstruction:
        """Return what a network makes of a view."""
        told, note = single_label(view) if view.batch_size == 1 else (None, "")
        used = {
            f"public images ({data.name}, {self.part})": True,
            "order": view.order is not None,
            "draws": view.draws is not None,
            "private_init": bool(view.private and view.private_init),
            "labels": told is not None and view.labels is not None,
        }
        return Reconstruction(
            inputs=inverter(view.update),
            labels=told,
            note="; ".join(filter(None, (note, inverter.cut_short))),
            cut_short=inverter.cut_short,
            objective=inverter.history[-1] if inverter.history else math.nan,
            history=inverter.history,
            knowledge=tuple(name for name, known in used.items() if known),
        )

    def _train(self, imitation: SimulatedClient, monitor: SearchMonitor) -> InversionNetwork:
        settings = TrainingSettings(
            iterations=self.iterations,
            batch_size=self.batch_size,
            width=self.width,
            hash_size=self.hash_size,
            lr=self.lr,
            seed=self.seed,
        )
        return train(imitation, settings, monitor)
