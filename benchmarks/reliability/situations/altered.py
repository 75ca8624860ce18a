"""Updates that something was done to on the way: scaled, averaged, thinned out, packed, or of a model under masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.reliability.situations import architectures as own
from benchmarks.reliability.situations import networks
from benchmarks.reliability.situations.row import OWN_MODEL, Command, Given, Python, Right, Situation
from benchmarks.reliability.situations.updates import HOW, PART, RATE, State, arrays, command, difference, sgd, trained
from fl.seeds import stream

SCALED = "times what the model makes of them"


def situations() -> Iterator[Situation]:
    """Yield all of them."""
    yield from _scaled()
    yield from _renamed()
    yield from _packed()
    yield from _thinned()
    yield from _pictures()
    yield from _kept()


def _plain(folder: Path, change: State, *words: str, model: str = "dense", count: int = 1, attack: str = "") -> Given:
    """Return the command that audits an update in an .npz file."""
    np.savez(folder / "update.npz", **arrays(change))
    size = () if count == 1 else ("--batch-size", str(count))
    return command(folder, "update.npz", *HOW, *size, *words, model=model, count=count, attacks=(attack or "analytic",))


def _of(count: int = 1, loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy) -> State:
    model = networks.dense()
    return difference(model, trained(model, count, loss=loss))


def _situation(words: str, give: Callable[[Path], Given], *told: str, kind: str = "exact") -> Situation:
    return Situation(words=words, part=PART, give=give, right=Right(kind=kind, words=told))  # type: ignore[arg-type]


def _scaled() -> Iterator[Situation]:
    """Yield updates of another scale than the training that was stated makes."""

    def average(folder: Path) -> Given:
        return _plain(folder, {name: 0.01 * value for name, value in _of().items()})

    yield _situation("an average of weights over time (0.99), one step", average, f"it is 0.01 {SCALED}")

    def summed(folder: Path) -> Given:
        loss = partial(nn.functional.cross_entropy, reduction="sum")
        return _plain(folder, _of(2, loss), count=2, attack="spear")

    yield _situation("the sum over two pictures in place of the mean", summed, f"it is 2 {SCALED}")

    def groups(folder: Path) -> Given:
        def slow_head(values: list[Tensor]) -> torch.optim.Optimizer:
            parts: list[dict[str, Any]] = [{"params": values[:-2]}, {"params": values[-2:], "lr": RATE / 10}]
            return torch.optim.SGD(parts, lr=RATE)

        model = networks.dense()
        return _plain(folder, difference(model, trained(model, optimizer=slow_head)))

    words = "each tensor is a multiple of what the model makes of them, by 0.1 to 1"
    yield _situation("a classifier of a tenth of the step size", groups, words)

    def distilled(folder: Path) -> Given:
        teacher = networks.photos()[0][:1].flatten(1)[:, : networks.CLASSES].softmax(1)
        divergence = partial(nn.functional.kl_div, reduction="batchmean")

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            told = divergence(outputs.log_softmax(1), teacher)
            return nn.functional.cross_entropy(outputs, targets) + told

        return _plain(folder, _of(1, loss))

    yield _situation("distillation from a teacher, which nobody says", distilled, "taken from the update")


def _renamed() -> Iterator[Situation]:
    """Yield files of other names than the model's, or than their content."""

    def misnamed(folder: Path) -> Given:
        given = _plain(folder, _of())
        with (folder / "update.npz").open("wb") as file:
            torch.save(_of(), file)
        return given

    yield _situation("a file of torch.save that is called .npz", misnamed)

    def slashes(folder: Path) -> Given:
        return _plain(folder, {name.replace(".", "/"): value for name, value in _of().items()})

    yield _situation("names with slashes for dots", slashes, "dots in place of other characters")

    def sharded(folder: Path) -> Given:
        return _plain(folder, {f"_fsdp_wrapped_module.{name}": value for name, value in _of().items()})

    yield _situation("FSDP: `_fsdp_wrapped_module.` before all names", sharded, "_fsdp_wrapped_module")


def _packed() -> Iterator[Situation]:
    """Yield files in other forms than dense tensors of float32."""

    def small(kind: torch.dtype, folder: Path) -> Given:
        torch.save({name: value.to(kind) for name, value in _of().items()}, folder / "update.pt")
        return command(folder, "update.pt", *HOW)

    yield _situation("rounded to float8", partial(small, torch.float8_e4m3fn), "float8_e4m3fn", kind="closer")

    def after(folder: Path) -> Given:
        coarse = {name: value.bfloat16() for name, value in trained(networks.dense()).items()}
        safetensors.torch.save_file(coarse, folder / "returned.safetensors")
        return command(folder, "--after", "returned.safetensors", *HOW)

    yield _situation("weights that came back in bfloat16", after, "digits of the weights", kind="closer")

    def sparse(folder: Path) -> Given:
        torch.save({name: value.to_sparse() for name, value in _of().items()}, folder / "update.pt")
        return command(folder, "update.pt", *HOW)

    yield _situation("torch's sparse tensors", sparse, "sparse tensors were written out")

    def mixed(folder: Path) -> Given:
        held = {name: value.bfloat16() if name.startswith("3.") else value for name, value in _of().items()}
        torch.save(held, folder / "update.pt")
        return command(folder, "update.pt", *HOW)

    yield _situation("the classifier in bfloat16, all else in float32", mixed, "in some of its tensors")

    def random(folder: Path) -> Given:
        draw, sent = stream(0, "rounding"), {}
        for name, value in _of().items():
            step = value.abs().max() / 127
            sent[name] = (value / step + torch.rand(value.shape, generator=draw)).floor() * step
        return _plain(folder, sent)

    yield _situation("8 bits a number, rounded at random", random, "8 bits a number", kind="closer")


def _thinned() -> Iterator[Situation]:
    """Yield updates with missing numbers."""

    def largest(value: Tensor) -> Tensor:
        return value * (value.abs() >= value.abs().flatten().quantile(0.8))

    def zeros(folder: Path) -> Given:
        return _plain(folder, {name: largest(value) for name, value in _of().items()})

    yield _situation("a fifth of the numbers sent, which nobody says", zeros, "sparsified", "prune", kind="warned")

    def places(folder: Path) -> Given:
        kept = {name: largest(value).flatten() for name, value in _of().items()}
        held = {name: {"indices": v.nonzero().flatten(), "values": v[v != 0]} for name, v in kept.items()}
        torch.save(held, folder / "update.pt")
        return command(folder, "update.pt", *HOW)

    yield _situation("the largest numbers as places and values", places, "t[indices] = values", kind="refused")

    def masked(folder: Path) -> Given:
        model = networks.pruned()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        images, labels = (part[:1] for part in networks.photos())
        rule = sgd([*model.parameters()])
        nn.functional.cross_entropy(model(images), labels).backward()
        rule.step()
        sent = {name: before[name] - value.detach() for name, value in model.state_dict().items()}
        return _plain(folder, sent, model="pruned")

    yield _situation("a pruned model, masks in its state", masked, "buffer(s) of the file")


def _pictures() -> Iterator[Situation]:
    """Yield true pictures in other forms than an .npz file of bytes."""

    def folders(folder: Path) -> Given:
        images, labels = (part[:1] for part in networks.photos())
        np.savez(folder / "update.npz", **arrays(_of()))
        place = folder / "pictures" / str(int(labels[0]))
        place.mkdir(parents=True)
        pixels = (255 * images[0]).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(place / "cat.png")
        words = ["audit", "update", "update.npz", *HOW, "--model", OWN_MODEL, "--images", "pictures"]
        return Command(model=f"{networks.__name__}:dense", words=[*words, "--attack", "analytic"], folder=folder)

    yield _situation("true pictures in a folder for each label", folders)

    def floats(folder: Path) -> Given:
        given = _plain(folder, _of())
        images, labels = (part[:1].numpy() for part in networks.photos())
        np.savez(folder / "true.npz", images=images, labels=labels)
        return given

    yield _situation("true pictures as numbers in [0, 1]", floats)


def _kept() -> Iterator[Situation]:
    """Yield an update with momentum that an earlier round left in the client's optimizer."""

    def ids(folder: Path) -> Given:
        model = networks.drawn(own.Bag)
        rule = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        rounds = torch.tensor([[[7, 7, 7, 90, 90, 90]], [[12, 12, 345, 345, 678, 678]]])
        for words, label in zip(rounds, (2, 1), strict=True):
            before = copy.deepcopy(model)
            rule.zero_grad()
            nn.functional.cross_entropy(model(words), torch.tensor([label])).backward()
            rule.step()
        settings: dict[str, Any] = {
            "update": difference(before, dict(model.state_dict())),
            "input_shape": rounds[1],
            "method": {"name": "fedavg", "lr": RATE, "steps": 1},
            "attacks": ["tokens"],
        }
        return Python(model=before, settings=settings, shown={"update": "update", "input_shape": "ids"})

    right = Right(kind="warned", words=("not confirmed", "momentum kept from earlier rounds"))
    yield Situation(words="ids, and momentum kept from the round before", part=PART, give=ids, right=right)
