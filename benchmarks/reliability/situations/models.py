"""Models as people have them: from libraries and of one's own, with all kinds of inputs, outputs and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import Normalize

from benchmarks.leakage.own_models import over_steps, segmenter
from benchmarks.reliability.situations import architectures as own
from benchmarks.reliability.situations.networks import CLASSES, dense, drawn, lenet, normed, photos
from benchmarks.reliability.situations.row import Given, Python, Right, Situation
from fl.seeds import stream

NETWORKS = "Networks as people have them"
STYLES = "The same in the ways in which people write them"
TASKS = "Other inputs, outputs and losses"
SEARCH = {"name": "ig", "iterations": 300}
BRIEF = {"name": "ig", "iterations": 40}
MINUTES = 0.25
"""Of audits whose exact attack may take long."""
BOTH, BOUNDED = (SEARCH, "cascade"), {"minutes": MINUTES}
EXACT, CLOSER, HIDDEN = Right(kind="exact"), Right(kind="closer"), Right(kind="hidden")
Build = Callable[[], nn.Module]


def row(
    part: str,
    words: str,
    build: Build,
    right: Right,
    given: tuple[Any, Tensor] | None = None,
    shown: Mapping[str, str] | None = None,
    **settings: Any,
) -> Situation:
    """Return a situation of a model; the input is one photograph where nothing else is given."""

    def give(_: Path) -> Given:
        inputs, targets = _pictures() if given is None else given
        return Python(model=drawn(build), inputs=inputs, targets=targets, settings=settings, shown=shown or {})

    return Situation(words=words, part=part, give=give, right=right)


def _pictures(count: int = 1, size: int = 32) -> tuple[Tensor, Tensor]:
    images, labels = photos(size)
    return images[:count], labels[:count]


def networks() -> Iterator[Situation]:
    """Yield networks from libraries, and small ones of one's own."""
    yield from _chains()
    yield from _normalized_and_dropped()
    yield from _of_libraries()


def _network(words: str, build: Build, right: Right, attacks: Sequence[Any], **more: Any) -> Situation:
    return row(NETWORKS, words, build, right, attacks=[*attacks], **more)


def _chain(*layers: Callable[[], nn.Module], features: int) -> Build:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.Linear(features, CLASSES))


def _conv(before: int, after: int, size: int, stride: int = 1, padding: int = 0) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(before, after, size, stride, padding)


def _chains() -> Iterator[Situation]:
    """Yield layers one after the other, as courses and papers have them."""
    yield _network("MLP", dense, EXACT, ("analytic",))
    yield _network("LeNet of the literature, sigmoid, strided convolutions", lenet, EXACT, ("cascade",))
    pooled = _conv(3, 6, 5), nn.Tanh, lambda: nn.AvgPool2d(2), _conv(6, 16, 5), nn.Tanh, lambda: nn.AvgPool2d(2)
    yield _network(
        "LeNet-5, average pooling behind the activation", _chain(*pooled, features=400), CLOSER, BOTH, **BOUNDED
    )
    twice = _conv(3, 32, 3), nn.ReLU, _conv(32, 32, 3), nn.ReLU, lambda: nn.MaxPool2d(2)
    yield _network("two convolutions a pooling", _chain(*twice, features=32 * 196), CLOSER, BOTH, **BOUNDED)
    over = _conv(3, 32, 5, 1, 2), nn.ReLU, lambda: nn.MaxPool2d(3, 2)
    yield _network("overlapping max pooling", _chain(*over, features=32 * 225), CLOSER, BOTH, **BOUNDED)
    wide = _conv(3, 24, 5, 2, 2), nn.LeakyReLU, _conv(24, 48, 5, 2, 2), nn.LeakyReLU
    yield _network("64 pixels", _chain(*wide, features=48 * 256), CLOSER, BOTH, given=_pictures(size=64), **BOUNDED)
    few = _conv(3, 8, 3, 1, 1), nn.ReLU, _conv(8, 8, 3, 1, 1), nn.ReLU
    yield _network("few 3x3 filters", _chain(*few, features=8 * 1024), CLOSER, BOTH, **BOUNDED)
    for name, active in (("GELU", nn.GELU), ("SiLU", nn.SiLU), ("ELU", nn.ELU)):
        layers = _conv(3, 24, 5, 2, 2), active, _conv(24, 24, 5, 2, 2), active
        yield _network(f"CNN with {name}", _chain(*layers, features=24 * 64), CLOSER, BOTH, **BOUNDED)


def _normalized_and_dropped() -> Iterator[Situation]:
    """Yield small networks with normalization or dropout."""
    grouped = _conv(3, 24, 5, 2, 2), lambda: nn.GroupNorm(4, 24), nn.ReLU, _conv(24, 24, 5, 2, 2), nn.ReLU
    yield _network("CNN with GroupNorm", _chain(*grouped, features=24 * 64), CLOSER, BOTH, **BOUNDED)
    yield _network("batch norm in evaluation mode", normed, CLOSER, BOTH, **BOUNDED)
    yield _network(
        "batch norm in training mode, two pictures",
        lambda: normed().train(),
        CLOSER,
        (SEARCH,),
        given=_pictures(2),
        batch_size=2,
    )
    yield _network("frozen batch norm in a network that trains", _frozen, CLOSER, ("cascade",))
    dropped = _conv(3, 24, 5, 2, 2), nn.ReLU, lambda: nn.Dropout(0.25)
    masked = Right(kind="refused", words=("masks are drawn from the global generator", "train_mode"))
    yield _network("dropout in training mode", _chain(*dropped, features=24 * 256), masked, BOTH)
    still = {"name": "fedavg", "train_mode": False, "steps": 1}
    yield _network(
        "dropout, which the client switches off", _chain(*dropped, features=24 * 256), CLOSER, BOTH, method=still
    )


def _of_libraries() -> Iterator[Situation]:
    """Yield networks of torchvision and timm, and a transformer of one's own."""

    def resnet() -> nn.Module:
        return torchvision.models.resnet18(num_classes=CLASSES)

    label = Right(kind="found", figure="label_overlap", why="true label; no picture in these seconds")
    solved = ("analytic", "cascade")
    yield _network("torchvision ResNet-18, evaluation mode", lambda: resnet().eval(), label, solved, **BOUNDED)
    trained = {"given": _pictures(2), "batch_size": 2}
    yield _network("torchvision ResNet-18, training mode, two pictures", resnet, label, (BRIEF,), **trained)
    large: dict[str, Any] = {"given": _pictures(size=224), **BOUNDED}
    yield _network("torchvision ResNet-18, 224 pixels", lambda: resnet().eval(), label, solved, **large)

    def mobile() -> nn.Module:
        return torchvision.models.mobilenet_v3_small(num_classes=CLASSES).eval()

    yield _network("MobileNetV3, evaluation mode", mobile, label, (*solved, BRIEF))
    vit: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 192,
        "depth": 2,
        "num_heads": 3,
        "num_classes": CLASSES,
    }
    yield _network("timm's ViT", lambda: timm.models.VisionTransformer(**vit), EXACT, ("april",))
    yield _network("a ViT of one's own, mean over tokens", own.ViT, EXACT, ("april",))

    yield _network("torchvision's ViT, its head drawn", _torchvision_vit, EXACT, ("april",))

    def squeezed() -> nn.Module:
        return torchvision.models.squeezenet1_1(num_classes=CLASSES).eval()

    head: dict[str, Any] = {"head": "classifier.1.", **BOUNDED}
    yield _network("SqueezeNet: its head is a convolution", squeezed, label, (BRIEF, "cascade"), **head)


def styles() -> Iterator[Situation]:
    """Yield wrappers, and ways of writing that change nothing of what a model computes."""

    def one(words: str, build: Build, right: Right = EXACT, attacks: Sequence[Any] = ("cascade",), **more: Any) -> Any:
        return row(STYLES, words, build, right, attacks=[*attacks], **more)

    quickstart = "functions in place of modules: Flower's quickstart"
    yield one(quickstart, own.Functional, CLOSER, (SEARCH, "cascade"), minutes=8 * MINUTES)
    yield one("one activation object used twice", own.Reused)
    yield one("normalization by arithmetic in forward", own.Scaled)
    usual = Normalize((0.5,) * 3, (0.5,) * 3)
    yield one("torchvision's Normalize in the model", lambda: nn.Sequential(usual, own.Reused()))
    half: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    yield one("normalization in the loader, put into the model by a hook", _hooked, **half)
    yield one("DataParallel", lambda: nn.DataParallel(own.Reused()))
    yield one("torch.compile", lambda: torch.compile(own.Reused()))  # type: ignore[arg-type, return-value]

    def with_norm(norm: Callable[[nn.Module], nn.Module]) -> Build:
        return lambda: nn.Sequential(nn.Flatten(), norm(nn.Linear(3072, 64)), nn.ReLU(), nn.Linear(64, CLASSES)).eval()

    both, utils = ("analytic", SEARCH), nn.utils
    yield one("torch.nn.utils.spectral_norm", with_norm(utils.spectral_norm), CLOSER, both)
    yield one("torch.nn.utils.weight_norm", with_norm(utils.weight_norm), CLOSER, both)
    yield one("spectral_norm as a parametrization", with_norm(utils.parametrizations.spectral_norm), CLOSER, both)
    yield one("weight_norm as a parametrization", with_norm(utils.parametrizations.weight_norm), CLOSER, both)

    script = Right(kind="refused", words=("got TorchScript", "the nn.Module that was scripted or traced"))
    yield one("TorchScript", lambda: torch.jit.script(own.Reused()), script)
    shifted = Right(kind="warned", words=("a number added to all pixels",), why="named, and true once it is fitted")
    yield one("each picture less its mean", lambda: own.Before(_less_mean), shifted, ("rconv",))
    yield one("pixels to the power of 2.2", lambda: own.Before(_gamma), EXACT, ("rconv",))
    fold = Right(kind="hidden")
    yield one("softmax over all pixels", lambda: own.Before(_softmax), fold, ("rconv", BRIEF))

    def frozen() -> nn.Module:
        model = own.Reused()
        model.first.requires_grad_(requires_grad=False)
        return model

    yield one("frozen layers: the first", frozen, CLOSER, (SEARCH, "cascade"), minutes=MINUTES)


def tasks() -> Iterator[Situation]:
    """Yield inputs, outputs and losses beyond a picture, its logits and cross entropy."""
    draw = stream(0, "situations")
    table = torch.rand(1, 30, generator=draw)
    ids = torch.randint(1000, (1, 24), generator=draw)
    yield from _tables(table)
    yield from _losses()
    yield from _outputs()
    yield from _inputs(table, ids)


def _task(
    words: str, build: Build, given: Any, right: Right = EXACT, attacks: Sequence[Any] = ("analytic",), **more: Any
) -> Situation:
    return row(TASKS, words, build, right, given, attacks=[*attacks], **more)


def _mlp(inputs: int, outputs: int) -> Build:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs))


def _tables(table: Tensor) -> Iterator[Situation]:
    """Yield rows of a table (1, 30) in [0, 1], scaled and with categories."""
    label = torch.tensor([1])
    rows = {"inputs": "rows"}
    yield _task("a table of 30 numbers", _mlp(30, 2), (table, label), shown=rows)
    wide = 5 * table - 2
    yield _task("a table scaled to (-2, 3)", _mlp(30, 2), (wide, label), shown=rows, input_range=(-2, 3))
    unsaid = Right(kind="refused", words=("input_range", "state what the attacker knows of their range"))
    yield _task("a table scaled to (-2, 3), its range not said", _mlp(30, 2), (wide, label), unsaid, shown=rows)
    kinds = torch.cat([wide[:, :5], F.one_hot(torch.tensor([2]), 4), F.one_hot(torch.tensor([5]), 7)], 1)
    columns: dict[str, Any] = {"input_range": (-2, 3), "categories": [(5, 9), (9, 16)]}
    searched = Right(kind="closer")
    yield _task(
        "a table with categories, no bias", _unbiased, (kinds, label), searched, (SEARCH,), shown=rows, **columns
    )


def _losses() -> Iterator[Situation]:
    """Yield losses beyond cross entropy of one class."""
    image, _ = _pictures()
    yield _task("quantization-aware training", _quantized, _pictures(), EXACT, ("analytic", "cascade"))
    yield _task("one logit", _mlp(3072, 1), (image, torch.tensor([1.0])), loss="bce")
    many = torch.tensor([[1.0, 0, 1, 0, 0]])
    yield _task("several labels a picture", _mlp(3072, 5), (image, many), loss="bce")
    yield _task("regression", _mlp(3072, 1), (image, torch.tensor([2.5])), loss="mse")
    small, _ = _pictures(size=16)
    masks = (4 * small.mean(1)).long().clamp(0, 3)
    yield _task(
        "segmentation, 16 pixels, masks not known",
        segmenter,
        (small, masks),
        HIDDEN,
        (SEARCH,),
        loss="segmentation",
    )
    box = torch.tensor([[0.0, 1, 0, 0, 0.2, 0.3, 0.6, 0.8]])
    detect: dict[str, Any] = {"loss": own.detection_loss, "output": own.class_and_box}
    yield _task("detection: class and box", own.Detector, (image, box), **detect)
    share = F.one_hot(torch.tensor([3]), CLASSES).float()
    yield _task("a loss of one's own: focal", _mlp(3072, CLASSES), (image, share), loss=own.focal_loss)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    shown = {"loss": "nn.CrossEntropyLoss(label_smoothing=0.1)"}
    yield _task("cross entropy with label smoothing", _mlp(3072, CLASSES), _pictures(), loss=smooth, shown=shown)


def _outputs() -> Iterator[Situation]:
    """Yield models that return more than logits."""
    yield _task("a dictionary with logits", lambda: own.Wrapped(lambda y, z: {"logits": y, "z": z}), _pictures())
    yield _task("a named tuple with logits", lambda: own.Wrapped(own.Several), _pictures())
    yield _task("a tuple, its first part", lambda: own.Wrapped(lambda y, z: (y, z)), _pictures(), output=0)
    which = Right(kind="refused", words=("say which",))
    yield _task("a tuple, nobody says which part", lambda: own.Wrapped(lambda y, z: (y, z)), _pictures(), which)


def _inputs(table: Tensor, ids: Tensor) -> Iterator[Situation]:
    """Yield two inputs, series and ids (1, 24)."""
    label, series = torch.tensor([1]), _waves()
    image, _ = _pictures()
    two = {"image": image, "row": table[:, :6]}
    yield _task("two inputs: a picture and a row", own.TwoInputs, (two, label), shown={"inputs": "{image, row}"})
    steps = {"inputs": "series"}
    yield _task("a series of 48 steps, Conv1d", over_steps, (series, label), CLOSER, (SEARCH, "cascade"), shown=steps)
    brief = series[:, :, ::4]
    yield _task(
        "a series of 12 steps, GRU", lambda: own.Recurrent(nn.GRU), (brief, label), CLOSER, (SEARCH,), shown=steps
    )
    yield _task(
        "a series of 12 steps, LSTM", lambda: own.Recurrent(nn.LSTM), (brief, label), CLOSER, (SEARCH,), shown=steps
    )
    read = Right(kind="found", figure="tokens_recall")
    yield _task("ids of tokens, a transformer", own.Text, (ids, label), read, ("tokens",), shown={"inputs": "ids"})
    yield _task("ids of words, an embedding bag", own.Bag, (ids, label), read, ("tokens",), shown={"inputs": "ids"})
    tied = "ids of tokens, a language model with tied weights"
    following: dict[str, Any] = {"loss": "segmentation", "shown": {"inputs": "ids"}}
    yield _task(tied, own.Language, (ids, ids.roll(-1, 1)), read, ("tokens",), **following)
    pairs, ratings = torch.tensor([[3, 5], [3, 17], [3, 70]]), torch.tensor([5.0, 3.0, 1.0])
    rated: dict[str, Any] = {"loss": "mse", "batch_size": 3, "shown": {"inputs": "pairs"}}
    yield _task("three ratings, a factorized matrix", own.Ratings, (pairs, ratings), read, ("tokens",), **rated)


def _hooked() -> nn.Module:
    """Return a network that does before all else what its loader did to pixels."""
    model = own.Reused()
    model.register_forward_pre_hook(lambda module, inputs: ((inputs[0] - 0.5) / 0.5,))
    return model


def _frozen() -> nn.Module:
    """Return a network in training mode whose normalization is in evaluation mode."""
    model = normed().train()
    model.get_submodule("1").eval()
    return model


def _less_mean(x: Tensor) -> Tensor:
    return x - x.mean((1, 2, 3), keepdim=True)


def _gamma(x: Tensor) -> Tensor:
    return x**2.2


def _softmax(x: Tensor) -> Tensor:
    return x.flatten(1).softmax(1).view_as(x)


def _torchvision_vit() -> nn.Module:
    """Return a small vision transformer, whose classifier torchvision begins at zero, as after a first round."""
    model = torchvision.models.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def _waves() -> Tensor:
    """Return a series of two channels and 48 steps in [0, 1]."""
    steps = torch.linspace(0, 1, 48)
    return torch.stack([0.5 + 0.4 * (7 * steps).sin(), 0.5 + 0.3 * (9 * steps).cos()])[None]


def _unbiased() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.Sigmoid(), nn.Linear(32, 2))


def _quantized() -> nn.Module:
    return nn.Sequential(nn.Flatten(), own.FakeQuantized(3072, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def situations() -> list[Situation]:
    """Return all of these parts."""
    return [*networks(), *styles(), *tasks()]
