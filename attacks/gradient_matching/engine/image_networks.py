"""Small networks that know what pictures look like.

Make one by `python -m attacks.gradient_matching.engine.image_networks decoder --dataset cifar10 --out D`.

A decoder makes images from codes, an enhancer sharpens what a search has found. Both are trained on public images in a
few minutes on one core, and kept in one file of plain arrays.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fl.data
from attacks.gradient_matching.engine.search_space import UpsampledSpace
from fl.models.building_blocks.initialization import initialize
from fl.runtime.atomic_files import atomic_write
from fl.seeds import stream

Loss = Callable[[Tensor, torch.Generator], Tensor]
BATCH, LR = 64, 2e-3
CODE_NOISE = 0.1  # on codes in training: neighboring codes then make neighboring images, which a search needs
IMAGE_NOISE = 0.02  # on what the enhancer is given: what a search finds is not clean


def _conv(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, stride=stride, padding=1)


class ImageNetwork(nn.Module):
    """The base of both networks.

    Attributes:
        channels: of the images.
        factor: how many times larger an image is than its code; for an enhancer, than the blurred one it was made for.
    """

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        if factor not in (1, 2, 4):
            raise ValueError(f"expected factor 1, 2 or 4, got {factor}")
        self.channels, self.factor = channels, factor

    def shape_obstacle(self, shape: tuple[int, int, int]) -> str:
        """Return why images of `shape` (C, H, W) can't be made or taken, or nothing."""
        return "" if shape[0] == self.channels else f"it is for {self.channels} channels, the images have {shape[0]}"


class Decoder(ImageNetwork):
    """Codes (B, code, H / factor, W / factor), about N(0, 1), to pixels (B, C, H, W) in (0, 1)."""

    def __init__(self, channels: int, factor: int, code: int = 8, width: int = 32) -> None:
        super().__init__(channels, factor)
        self.code_channels = code
        layers: list[nn.Module] = [_conv(code, width), nn.SiLU(), _conv(width, width), nn.SiLU()]
        for _ in range(int(math.log2(factor))):
            layers += [_conv(width, 4 * width), nn.PixelShuffle(2), nn.SiLU()]
        self.layers = nn.Sequential(*layers, _conv(width, width), nn.SiLU(), _conv(width, channels), nn.Sigmoid())

    def code_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape of the code of an image of `shape`."""
        return self.code_channels, shape[1] // self.factor, shape[2] // self.factor

    def shape_obstacle(self, shape: tuple[int, int, int]) -> str:
        """Return why images of `shape` can't be made, or nothing."""
        if any(side % self.factor for side in shape[1:]):
            return f"it makes images whose sides are multiples of {self.factor}, not {shape[1]} x {shape[2]}"
        return super().shape_obstacle(shape)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the images."""
        return self.layers(codes)


class Enhancer(ImageNetwork):
    """Blurred pixels (B, C, H, W) to sharper ones of the same shape: what is missing is added."""

    def __init__(self, channels: int, factor: int, width: int = 32) -> None:
        super().__init__(channels, factor)
        inner = [layer for _ in range(3) for layer in (_conv(width, width), nn.SiLU())]
        self.layers = nn.Sequential(_conv(channels, width), nn.SiLU(), *inner)
        self.last = _conv(width, channels)

    def forward(self, images: Tensor) -> Tensor:
        """Return the sharper images; nothing keeps them in [0, 1]."""
        return images + self.last(self.layers(images))


class _AutoEncoder(nn.Module):
    """A decoder behind an encoder whose codes a batch norm keeps at mean 0 and variance 1."""

    def __init__(self, decoder: Decoder, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(decoder.channels, width), nn.SiLU()]
        for _ in range(int(math.log2(decoder.factor))):
            layers += [_conv(width, width, stride=2), nn.SiLU()]
        self.encoder = nn.Sequential(
            *layers, _conv(width, decoder.code_channels), nn.BatchNorm2d(decoder.code_channels)
        )
        self.decoder = decoder

    def forward(self, images: Tensor, draw: torch.Generator) -> Tensor:
        """Return the images made again from noisy codes."""
        codes = self.encoder(images)
        return self.decoder(codes + CODE_NOISE * torch.randn(codes.shape, generator=draw))


KINDS: dict[str, type[ImageNetwork]] = {"decoder": Decoder, "enhancer": Enhancer}


def train(kind: str, images: Tensor, *, factor: int, steps: int = 1500, seed: int = 0) -> ImageNetwork:
    """Return a decoder or an enhancer trained on `images`.

    Args:
        kind: "decoder" or "enhancer".
        images: (N, C, H, W) in [0, 1], public ones; sides that are multiples of `factor`.
        factor: 1, 2 or 4.
        steps: of Adam, on 64 images each; the step size falls along a cosine.
        seed: of initialization, order and noise.

    Raises:
        ValueError: no such kind, no step, or images that the network can't make.
    """
    if kind not in KINDS or steps < 1:
        raise ValueError(f"expected {' or '.join(map(repr, KINDS))} and steps >= 1, got {kind!r} and steps={steps}")
    with torch.device("meta"):
        network = KINDS[kind](images.shape[1], factor)
        if obstacle := network.shape_obstacle(tuple(images.shape[1:])):  # type: ignore[arg-type]
            raise ValueError(f"expected images that fit a {kind}, got others: {obstacle}")
        whole: nn.Module = _AutoEncoder(network) if isinstance(network, Decoder) else network
    whole.to_empty(device="cpu")
    initialize(whole, stream(seed, kind, "start"))
    if isinstance(network, Enhancer):
        nn.init.zeros_(network.last.weight)  # at first, nothing is missing
    loss = _coding_loss(whole) if kind == "decoder" else _sharpening_loss(whole, factor, images)
    draw = stream(seed, kind, "batches")
    optimizer = torch.optim.Adam(whole.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = images[torch.randint(len(images), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        loss(batch, draw).backward()
        optimizer.step()
        schedule.step()
    return network.requires_grad_(False).eval()


def _coding_loss(whole: nn.Module) -> Loss:
    """Return how far images are from what their codes make."""
    return lambda images, draw: (whole(images, draw) - images).square().mean()


def _sharpening_loss(network: nn.Module, factor: int, images: Tensor) -> Loss:
    """Return how far images are from what the enhancer makes of the best that bicubic codes can show of them."""
    height, width = images.shape[-2:]
    space = UpsampledSpace(factor, (height, width))

    def loss(sharp: Tensor, draw: torch.Generator) -> Tensor:
        blurred = space.project(sharp).to(sharp) + IMAGE_NOISE * torch.randn(sharp.shape, generator=draw)
        return (network(blurred.clamp(0, 1)) - sharp).square().mean()

    return loss


def save(network: ImageNetwork, path: Path, source: str) -> None:
    """Write a network to one file of plain arrays, with a word on the images it was trained on.

    Args:
        network: decoder or enhancer.
        path: of the file.
        source: what it was trained on, in words.
    """
    kind = next(name for name, entry in KINDS.items() if isinstance(network, entry))
    head = {"kind": kind, "channels": network.channels, "factor": network.factor, "source": source}
    arrays = {name: value.numpy() for name, value in network.state_dict().items()}
    with atomic_write(path) as file:
        np.savez(file, head=np.array(json.dumps(head)), **arrays)


def load(path: str, kind: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """Return the network in a file; the same object while the file stays as it is.

    Raises:
        ValueError: there is no such file, or it holds something else; says how to make one.

    Args:
        path: of the file.
        kind: "decoder" or "enhancer".
        dtype: of the weights.
        device: of the weights.
    """
    recipe = f"python -m attacks.gradient_matching.engine.image_networks {kind} --dataset cifar10 --out {path}"
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"expected a trained {kind} at {path}, got no file; make one with: {recipe}")
    try:
        return _read(file, file.stat().st_mtime_ns, kind, dtype, torch.device(device))
    except (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"expected a trained {kind} in {path}, got {error}; make one with: {recipe}") from error


@cache
def _read(path: Path, changed: int, kind: str, dtype: torch.dtype, device: torch.device) -> ImageNetwork:
    with np.load(path, allow_pickle=False) as arrays:
        head = json.loads(str(arrays["head"]))
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "head"}
    if head["kind"] != kind:
        raise ValueError(f"a trained {head['kind']}")
    network = KINDS[kind](head["channels"], head["factor"])
    network.load_state_dict(state)
    return network.requires_grad_(False).eval().to(device=device, dtype=dtype)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Trains a network that an attack may use, on public images.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--dataset", required=True, help="public images; never those of the clients to be attacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--factor", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    images = fl.data.load(given.dataset).train.inputs
    network = train(given.kind, images, factor=given.factor, steps=given.steps, seed=given.seed)
    save(network, given.out, f"{given.dataset}, {given.steps} steps, seed {given.seed}")
    sys.stdout.write(f"wrote {given.out}\n")


if __name__ == "__main__":
    main()
