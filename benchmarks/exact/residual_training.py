"""A ResNet-18 trained for one and for ten epochs, once: `python -m benchmarks.exact.residual_training`.

On CIFAR-10's training images of the data folder (15,000 here): SGD with momentum .9 and weight decay 5e-4, batches of
128, a step size that falls from .05 to 0 along half a cosine, images shifted and mirrored; forward and backward in
bfloat16, weights in float32. Half an hour on one core. It goes on where it was stopped, and `--seconds` stops it. The
weights are kept outside the repository, in the folder that HYPERLEAK_BENCHMARK_CACHE names or in the user's cache.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fl.data
import fl.models
from fl.data.augment import CropFlip
from fl.runtime.atomic_files import atomic_write
from fl.runtime.tensor_archives import read_state
from fl.seeds import stream
from fl.types import Batch

KEPT = (1, 10)
"""Epochs after which the weights are kept."""
BATCH, STEP_SIZE, MOMENTUM, DECAY = 128, 0.05, 0.9, 5e-4
SAVED_EVERY = 20
"""Steps after which what has been trained is saved."""
CACHE_VARIABLE = "HYPERLEAK_BENCHMARK_CACHE"
log = logging.getLogger(__name__)


class NotTrainedError(FileNotFoundError):
    """The weights are not there yet; the message says how to get them."""


def cache() -> Path:
    """Return the folder of the weights."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "hyperleak" / "benchmarks"


def trained_resnet18(epochs: int) -> nn.Module:
    """Return the network after so many epochs, in evaluation mode.

    Raises:
        NotTrainedError: it was not trained so far.
    """
    path = cache() / f"resnet18-{epochs}.pt"
    if not path.exists():
        raise NotTrainedError(f"no {path}: run `python -m benchmarks.exact.residual_training` first")
    model = fl.models.build("resnet18", num_classes=10, seed=0).model
    model.load_state_dict(read_state(path))
    return model.eval()


def train(images: Batch, folder: Path, seconds: float = math.inf, epochs: int = max(KEPT)) -> int:
    """Train on from what `folder` has, and return how many steps have been made.

    Args:
        images: to train on.
        folder: of the weights.
        seconds: after which to stop.
        epochs: in all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = fl.models.build("resnet18", num_classes=10, seed=0).model.train().to(memory_format=torch.channels_last)
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    path, done, until = folder / "resnet18-training.pt", 0, time.monotonic() + seconds
    if path.exists():
        state = read_state(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    each = len(images) // BATCH
    while done < epochs * each and time.monotonic() < until:
        optimizer.param_groups[0]["lr"] = STEP_SIZE * (1 + math.cos(math.pi * done / (epochs * each))) / 2
        loss = _step(model, optimizer, _batch(images, *divmod(done, each)))
        done += 1
        if done % SAVED_EVERY == 0 or done % each == 0:
            _save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": done})
            log.info("epoch %d, step %d of %d: loss %.3f", done // each, done % each, each, loss)
        if done % each == 0 and done // each in KEPT:
            _save(folder / f"resnet18-{done // each}.pt", model.state_dict())
    return done


def _batch(images: Batch, epoch: int, step: int) -> Batch:
    """Return the images of a step, as they are shifted and mirrored in it."""
    order = torch.randperm(len(images), generator=stream(0, "train", epoch))
    return CropFlip()(images.take(order[step * BATCH : (step + 1) * BATCH]), stream(0, "augment", epoch, step))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Batch) -> float:
    """Take one step of the optimizer; return the loss before it."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(images.inputs.contiguous(memory_format=torch.channels_last))
    loss = nn.functional.cross_entropy(logits.float(), images.labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def _save(path: Path, state: object) -> None:
    with atomic_write(path) as file:
        torch.save(state, file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which to stop; the same call goes on")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    data = fl.data.load("cifar10")
    train(data.train, cache(), chosen.seconds)
    for epochs in KEPT:
        if (cache() / f"resnet18-{epochs}.pt").exists():
            log.info("after %d epochs: %.1f %% of 1,000 test images", epochs, 100 * _accuracy(epochs, data.test))


def _accuracy(epochs: int, images: Batch, count: int = 1000) -> float:
    """Return the share of test images that the kept network classifies right."""
    model, right = trained_resnet18(epochs), 0
    with torch.no_grad():
        for index in torch.arange(count).split(100):
            some = images.take(index)
            right += int((model(some.inputs).argmax(1) == some.labels).sum())
    return right / count


if __name__ == "__main__":
    main()
