"""Who is attacked in `benchmarks.exact.residual`: networks, pictures, and what a client sends of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.exact.residual_networks import (
    CifarResNet,
    PreActivationResNet18,
    convnext,
    densenet121,
    mobilenet,
    pretrained_resnet20,
    registered,
    untrained,
    vgg,
)
from benchmarks.exact.residual_training import trained_resnet18
from benchmarks.hyperfl.peel import uploaded
from defenses import defenses
from fl.capture import CapturedUpdateSettings, ClientSettings, from_batch, from_update
from fl.client import Client
from fl.data.sources.npz_files import find_file, read_batch
from fl.defense import Defense
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.methods.hyperfl_lpm import HyperFLLPM
from fl.models.building_blocks.layers import Normalize
from fl.models.building_blocks.model_checks import find_head
from fl.models.hypernetworks.hyperfl_hypernetwork import Hypernetwork
from fl.seeds import stream
from fl.types import Batch, Task
from fl.view import ServerView, ThreatModel

Sent = Literal["gradient", "float16", "bfloat16", "weights", "mean"]
Construct = Callable[[int], nn.Module]
"""A network in evaluation mode, from a seed."""
ADAPTED = "weights/resnet18_imagenet_to_layer3_bnfolded_fp16.npz"
"""Weights of a published ResNet-18 up to its third stage, in the data folder."""
HIDDEN = 16
"""Hidden units of the hypernetworks: those of ResNet-18 take 700 MB; with the 128 of the authors it would be 6 GB."""
NOISE = "noise"
"""In place of a file of pictures: made-up ones, of whole numbers."""


@dataclass(frozen=True)
class Goal:
    """What a row should show.

    Attributes:
        exact: share of pictures that are exact to 8 bits.
        close: share above 40 dB.
        seconds: in the median.
        labels: whether all labels should be right.
        median: whether the median should be above 40 dB.
    """

    exact: float | None = None
    close: float | None = None
    seconds: float | None = None
    labels: bool = False
    median: bool = False


@dataclass(frozen=True)
class Case:
    """A row of the table: victims of one kind. Victim i meets the network of seed i and pictures of its own.

    Attributes:
        name: of the row on the command line and in the results.
        title: what the page calls it.
        network: from a seed.
        batch: pictures of a victim; of all clients together where `sent` is "mean".
        count: victims.
        sent: "gradient" as float32, rounded to "float16" or "bfloat16"; "weights" before minus after in float32; or
            the "mean" of such differences over as many clients as there are pictures, by secure aggregation.
        step: size of the step, where weights are sent.
        training: further settings of the client's `FedAvg` there.
        hypernetwork: class of the method where a shared hypernetwork makes the network, and embedding and classifier
            are private; None is `FedAvg`.
        knows_optimizer: whether the attack is told how the client trains, and the size of its step.
        rewriter: what goes before the attack in its name, as `first-step` does for several steps; empty is nothing.
        train_mode: whether batch norm takes the batch's own statistics.
        pictures: file in the data folder.
        first: number of the first picture.
        classes: of the network.
        side: of the pictures, in pixels.
        goal: None where there is none but to know.
    """

    name: str
    title: str
    network: Construct
    batch: int = 1
    count: int = 50
    sent: Sent = "gradient"
    step: float = 1.0
    training: Mapping[str, Any] = field(default_factory=dict)
    hypernetwork: type[HyperFL] | None = None
    knows_optimizer: bool = True
    rewriter: str = ""
    train_mode: bool = False
    pictures: str = "cifar10_test.npz"
    first: int = 2000
    classes: int = 10
    side: int = 32
    goal: Goal | None = None

    def __post_init__(self) -> None:
        if self.train_mode and self.sent != "gradient":
            raise ValueError(f"expected gradients in training mode, got {self.sent!r}")
        if self.sent != "weights" and (self.training or self.hypernetwork or not self.knows_optimizer):
            raise ValueError(f"expected weights where training is of one's own or unknown, got {self.sent!r}")

    @property
    def setting(self) -> str:
        """What a client sends, in words."""
        words = {
            "gradient": "gradient, float32",
            "float16": "gradient, float16",
            "bfloat16": "gradient, bfloat16",
            "weights": ", ".join([f"weights before minus after, step {self.step:g}", *self._training_words()]),
            "mean": f"mean over {self.batch} clients, step {self.step:g}",
        }[self.sent]
        return f"{words}, training mode" if self.train_mode else words

    def _training_words(self) -> list[str]:
        words = [f"{name.replace('_', ' ')} {value:g}" for name, value in self.training.items()]
        if self.hypernetwork is not None:
            words += [
                f"{HIDDEN} hidden units, heads that start at the network's own values, classifier private, at rest"
            ]
        return words if self.knows_optimizer else [*words, "the optimizer and its step unknown"]

    def method(self) -> FedAvg | HyperFL:
        """Return how the client trains; the classifier is at rest where a hypernetwork makes the rest."""
        settings = {"steps": 1, "batch_size": None, **self.training}
        if self.hypernetwork is not None:
            makes = Hypernetwork(hidden=HIDDEN, init="network")
            return self.hypernetwork(lr=self.step, head_epochs=0, parametrization=makes, **settings)
        return FedAvg(lr=self.step, train_mode=self.train_mode, **settings)

    def attack(self, tested: str) -> str:
        """Name the attack that the row is for."""
        return f"{self.rewriter}+{tested}" if self.rewriter else tested


@dataclass(frozen=True)
class Victim:
    """One client, or a group.

    Attributes:
        view: what the server saw.
        images: the truth.
        model: as the client got it.
        gradient: in the order of the model's parameters; None where weights are sent.
    """

    view: ServerView
    images: Batch
    model: nn.Module
    gradient: list[Tensor] | None


adapted_resnet18 = partial(registered, "resnet18-adapter", stages=3, weights=ADAPTED, image_size=64)
resnet18, resnet34, resnet50 = (partial(registered, f"resnet{depth}") for depth in (18, 34, 50))
imagenet_resnet18 = partial(registered, "resnet18", classes=1000, stem="imagenet")


def _plain(construct: Callable[[], nn.Module]) -> Construct:
    return partial(untrained, construct)


def _fixed(construct: Callable[[], nn.Module]) -> Construct:
    """Return the same network for all seeds."""
    return lambda _: construct()


CASES = (
    Case("resnet18-1", "ResNet-18", resnet18, goal=Goal(exact=1.0, seconds=10)),
    Case("resnet18-2", "ResNet-18", resnet18, 2, 25, goal=Goal(exact=0.95, seconds=20)),
    Case("resnet18-4", "ResNet-18", resnet18, 4, 25, goal=Goal(exact=0.9, seconds=40)),
    Case("resnet18-8", "ResNet-18", resnet18, 8, 25, goal=Goal(exact=0.8, seconds=90)),
    Case("resnet18-16", "ResNet-18", resnet18, 16, 25, goal=Goal(close=0.5, labels=True)),
    Case("resnet50-1", "ResNet-50", resnet50, goal=Goal(close=0.9)),
    Case("vgg16-1", "VGG-16", _plain(partial(vgg, "vgg16")), goal=Goal(close=0.9)),
    Case("vgg16-bn-1", "VGG-16, batch norm", _plain(partial(vgg, "vgg16_bn")), goal=Goal(close=0.9)),
    Case("densenet121-1", "DenseNet-121", _plain(densenet121), goal=Goal(close=0.9)),
    *(
        Case(
            f"resnet18-imagenet-{side}",
            f"ResNet-18, ImageNet's stem, {side} pixels",
            imagenet_resnet18,
            count=count,
            pictures=pictures,
            first=first,
            classes=1000,
            side=side,
            goal=Goal(median=True),
        )
        for side, pictures, first, count in ((64, "imagenet1000_64.npz", 500, 50), (224, "imagenet48_224.npz", 8, 40))
    ),
    *(
        Case(
            f"resnet18-train-{batch}",
            "ResNet-18",
            resnet18,
            batch,
            50 if batch == 1 else 25,
            train_mode=True,
            goal=Goal(close=0.5),
        )
        for batch in (1, 2, 3, 4)
    ),
    Case("resnet18-step.1", "ResNet-18", resnet18, sent="weights", step=0.1, goal=Goal(exact=0.9)),
    Case("resnet18-step.01", "ResNet-18", resnet18, sent="weights", step=0.01, goal=Goal(exact=0.7)),
    Case(
        "resnet18-momentum",
        "ResNet-18",
        resnet18,
        sent="weights",
        step=0.1,
        training={"momentum": 0.9, "weight_decay": 5e-4},
    ),
    Case("resnet18-untold", "ResNet-18", resnet18, sent="weights", step=0.1, knows_optimizer=False),
    Case(
        "resnet18-steps-2",
        "ResNet-18, by `first-step+backsolve`",
        resnet18,
        sent="weights",
        step=0.01,
        training={"steps": 2},
        rewriter="first-step",
    ),
    *(
        Case(
            f"resnet18-hyperfl{'' if batch == 1 else f'-{batch}'}",
            "ResNet-18 made by HyperFL's hypernetwork, by `peel+backsolve`",
            resnet18,
            batch,
            10,
            sent="weights",
            step=0.02,
            hypernetwork=HyperFL,
            rewriter="peel",
        )
        for batch in (1, 2)
    ),
    Case(
        "hyperfl-lpm",
        "HyperFL-LPM's adapters in a pre-trained ResNet-18 up to its third stage, by `peel+backsolve`",
        adapted_resnet18,
        count=5,
        sent="weights",
        step=0.01,
        hypernetwork=HyperFLLPM,
        rewriter="peel",
    ),
    Case("resnet18-epoch1", "ResNet-18 after 1 epoch", _fixed(partial(trained_resnet18, 1))),
    Case("resnet18-epoch10", "ResNet-18 after 10 epochs", _fixed(partial(trained_resnet18, 10))),
    Case("resnet20-pretrained", "ResNet-20, pre-trained", _fixed(pretrained_resnet20)),
    Case("resnet18-step1", "ResNet-18", resnet18, sent="weights", step=1.0),
    Case("resnet18-float16", "ResNet-18", resnet18, sent="float16"),
    Case("resnet18-bfloat16", "ResNet-18", resnet18, sent="bfloat16"),
    Case("resnet18-mean-2", "ResNet-18", resnet18, 2, 25, sent="mean"),
    Case("resnet18-mean-4", "ResNet-18", resnet18, 4, 25, sent="mean"),
    Case("resnet18-group-1", "ResNet-18, group norm", partial(resnet18, norm="group")),
    Case("resnet18-group-2", "ResNet-18, group norm", partial(resnet18, norm="group"), 2, 25),
    Case("resnet18-group-4", "ResNet-18, group norm", partial(resnet18, norm="group"), 4, 25),
    Case("resnet18-layer-1", "ResNet-18, layer norm", partial(resnet18, norm="layer")),
    Case("resnet18-layer-2", "ResNet-18, layer norm", partial(resnet18, norm="layer"), 2, 25),
    Case("resnet34-1", "ResNet-34", resnet34),
    Case("preactivation-1", "ResNet-18, pre-activation", _plain(PreActivationResNet18)),
    Case("resnet20-1", "ResNet-20", _plain(CifarResNet)),
    Case("vgg11-1", "VGG-11", _plain(partial(vgg, "vgg11"))),
    Case("vgg11-bn-1", "VGG-11, batch norm", _plain(partial(vgg, "vgg11_bn"))),
    Case("mobilenet-1", "MobileNet-v3, small", _plain(mobilenet)),
    Case("convnext-1", "ConvNeXt-T", _plain(convnext)),
)
_made_up: dict[str, Any] = {"pictures": NOISE, "side": 8, "first": 0, "goal": Goal(exact=1.0, seconds=1)}
_resnet8 = _plain(partial(CifarResNet, 1))
SMOKE = (
    Case(
        "smoke-1",
        "one linear layer",
        _plain(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10))),
        count=2,
        **_made_up,
    ),
    Case("smoke-2", "ResNet-8", _resnet8, 2, 1, sent="weights", step=0.1, **_made_up),
    Case("smoke-3", "ResNet-8", _resnet8, 2, 1, train_mode=True, **_made_up),
    Case("smoke-4", "ResNet-8", _resnet8, 2, 1, sent="mean", **_made_up),
    Case(
        "smoke-6",
        "ResNet-8, momentum",
        _resnet8,
        count=1,
        sent="weights",
        step=0.1,
        training={"momentum": 0.9},
        knows_optimizer=False,
        **_made_up,
    ),
    Case("smoke-5", "ResNet-8", _resnet8, count=1, sent="float16", **_made_up),
)
"""Networks that take no time, on made-up pictures of 8 x 8 pixels."""


def pictures_of(case: Case, number: int) -> Batch:
    """Return the pictures of a victim."""
    first = case.first + case.batch * number
    return _read(case.pictures, case.side).take(torch.arange(first, first + case.batch))


@cache
def _read(name: str, side: int) -> Batch:
    if name == NOISE:
        drawn = torch.randint(256, (64, 3, side, side), generator=stream(0, "pictures"))
        return Batch(drawn.float() / 255, torch.arange(64) % 10)
    return read_batch(find_file(name))[0]


def observe(case: Case, number: int) -> Victim:
    """Return what a server sees of victim `number`, and the truth."""
    images, model = pictures_of(case, number), case.network(number).train(case.train_mode)
    method = case.method()
    if case.sent == "mean":
        return Victim(_aggregated(case, model, method, images), images, model, None)
    if case.sent == "weights":
        return observe_defended(case, number, None)
    mean, std = _statistics(model)
    client = copy.deepcopy(model)  # training moves its buffers
    gradient = gradients(client, images)
    named = dict(zip((name for name, _ in model.named_parameters()), gradient, strict=True))
    if case.sent != "gradient":
        named = {name: value.to(getattr(torch, case.sent)).float() for name, value in named.items()}
    known = CapturedUpdateSettings(
        method=method,
        defense=None if case.sent == "gradient" else defenses.build({"name": "quantize", "format": case.sent}),
        mean=mean,
        std=std,
        batch_size=case.batch,
        buffers_after=_buffers(client),
        kind="gradient",
    )
    shape = (3, case.side, case.side)
    view = from_update(model, named, input_shape=shape, num_classes=case.classes, options=known)
    return Victim(view, images, model, gradient)


def observe_defended(case: Case, number: int, defense: Defense | None) -> Victim:
    """Return what a server sees of victim `number`, which sends a difference of weights, behind a defense if any."""
    images, model = pictures_of(case, number), case.network(number).train(case.train_mode)
    mean, std = _statistics(model)
    threat = ThreatModel(knows_optimizer=case.knows_optimizer)
    options = ClientSettings(method=case.method(), defense=defense, threat=threat, mean=mean, std=std)
    view, _ = from_batch(model, images.inputs, images.labels, num_classes=case.classes, seed=number, options=options)
    view = uploaded(view) if case.hypernetwork else view
    return Victim(view if case.knows_optimizer else replace(view, scale_unknown=True), images, model, None)


def _statistics(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation by which a network normalizes pixels."""
    return next(module.values for module in model.modules() if isinstance(module, Normalize))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a network's state."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


def gradients(model: nn.Module, images: Batch) -> list[Tensor]:
    """Of the mean cross entropy, in the order of the model's parameters."""
    loss = nn.functional.cross_entropy(model(images.inputs), images.labels)
    return [gradient.detach() for gradient in torch.autograd.grad(loss, list(model.parameters()))]


def _aggregated(case: Case, model: nn.Module, method: Method, images: Batch) -> ServerView:
    """Return a server's view of the mean over clients of one picture each."""
    head = find_head(model, None, case.classes)
    task = Task(model, (3, case.side, case.side), case.classes, head, *_statistics(model))
    group = defenses.build({"name": "secagg", "group_size": case.batch})
    own = [images.take(torch.tensor([i])) for i in range(case.batch)]
    clients = [ClientData(data, data) for data in own]
    return Federation(Client(task, method, group), clients, seed=0).observe(0)[0]
